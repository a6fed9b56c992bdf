"""PyTorch and GGUF files of the tools that write them: torch, transformers, diffusers, Lightning, gguf-py.

What we read is what the tool reads itself, bit for bit; what we convert, it reads again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

import onelayer

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=8)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=8)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SMALL, pad_token_id=0)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4)
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=128,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2)
    ),
}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*as_bytes)


def read(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Every tensor, streamed a layer at a time."""
    found = {}
    with onelayer.open(path, **options).stream(window=1) as layers:
        for layer in layers:
            with layer:
                found.update({name: torch.from_dlpack(layer[name]).clone() for name in layer})
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("zipped", [True, False])
def test_models_of_transformers_as_bin(name: str, zipped: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = ARCHITECTURES[name]().to(torch.bfloat16).eval()
    wanted = model.state_dict()
    folder = tmp_path / name
    model.config.save_pretrained(folder)
    torch.save(wanted, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    found = read(folder)
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not same(found[key], wanted[key])] == []

    onelayer.convert(folder, tmp_path / "layers")
    again = type(model).from_pretrained(tmp_path / "layers").eval().state_dict()
    assert [key for key in wanted if not same(again[key], wanted[key])] == []


def test_a_sharded_bin_with_an_index(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"]()
    wanted = model.state_dict()
    names, weight_map = list(wanted), {}
    for number in (1, 2):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        part = {name: wanted[name] for name in names[number - 1 :: 2]}
        torch.save(part, tmp_path / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in wanted.values())}, "weight_map": weight_map}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = read(tmp_path)
    assert found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)


def test_models_of_torch_modules_with_every_layout(tmp_path: Path) -> None:
    base = torch.randn(64, 96)
    wanted = {
        "tied": base,
        "tie": base,
        "rows": base[8:24],
        "columns": base[:, 8:24],
        "transposed": base.t(),
        "channels_last": torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
    }
    path = tmp_path / "layouts.pt"
    torch.save(wanted, path)
    found = read(path)
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not same(found[key], wanted[key].detach())] == []


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_forwards_of_models_in_bin_files(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = ARCHITECTURES[name]().eval()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    tokens = torch.arange(10)[None]
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens} if name == "t5" else {"input_ids": tokens}
    with torch.no_grad():
        wanted = model(**inputs).logits
        for options in ({}, {"keep": []}, {"keep": [], "window": 1}):
            streamed = onelayer.torch.empty(type(model), model.config).eval()
            with onelayer.torch.stream_forward(streamed, tmp_path, memory="100MiB", **options):
                assert torch.equal(streamed(**inputs).logits, wanted), options


def test_mapped_tensors_are_row_major(tmp_path: Path) -> None:
    weight = torch.randn(40, 30).t()
    torch.save({"weight": weight}, tmp_path / "weight.pt")
    mapped = onelayer.open(tmp_path / "weight.pt").state_dict(mode="mapped")
    assert torch.equal(mapped["weight"][...], weight)


def test_a_pipeline_of_diffusers_as_bin(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(32, 32),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    pipeline = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())
    pipeline.save_pretrained(tmp_path, safe_serialization=False)
    assert (tmp_path / "unet" / "diffusion_pytorch_model.bin").exists()
    found = read(tmp_path)
    wanted = unet.state_dict()
    assert found.keys() == {f"unet/{key}" for key in wanted}
    assert all(same(found[f"unet/{key}"], wanted[key]) for key in wanted)


def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 4, "names": ["a", "b"]})
            self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.body(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    module = Module()
    data = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, data)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    found, wanted = read(path), module.state_dict()
    assert found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    assert any("optimizer_states" in note for note in onelayer.open(path).notes)
    moments = read(path, prefix="optimizer_states")
    assert any(name.endswith("exp_avg") for name in moments)


def test_files_of_gguf_py(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    random = numpy.random.default_rng(5)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    values = {"token_embd.weight": random.standard_normal((64, 256)).astype(numpy.float32)}
    for number in range(2):
        values[f"blk.{number}.ffn_up.weight"] = random.standard_normal((32, 256)).astype(numpy.float32)
    kinds = [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0]
    wanted = {}
    for kind, (name, value) in zip(kinds, values.items(), strict=True):
        data = gguf.quants.quantize(value, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        wanted[name] = torch.from_numpy(gguf.quants.dequantize(data, kind)).to(torch.bfloat16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with onelayer.open(path).stream(dtype="bf16", window="all") as layers:
        found = {name: torch.from_dlpack(tensor).clone() for layer in layers for name, tensor in layer.items()}
    for name in values:
        expected = wanted[name] if name != "token_embd.weight" else torch.from_numpy(values[name]).half()
        assert same(found[name], expected), name
    # Blocks as they are stored.
    with onelayer.open(path).stream(window="all") as layers:
        raw = {name: tensor for layer in layers for name, tensor in layer.items()}
        assert raw["blk.0.ffn_up.weight"].nbytes == 32 * 256 // 32 * 34


def test_a_model_runs_from_a_gguf_file(tmp_path: Path) -> None:
    """By the names of transformers, with the rows of q and k put back, in blocks that become floats on the way."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(3)
    heads, kv_heads = SMALL["num_attention_heads"], SMALL["num_key_value_heads"]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SMALL["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SMALL["num_hidden_layers"])
    for name, tensor in model.state_dict().items():
        kind = gguf.GGMLQuantizationType.Q8_0 if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        values = gguf.quants.quantize(tensor.numpy(), kind)
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(values, kind)))
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                rows = values.reshape(count, 2, values.shape[0] // count // 2, -1)
                values = rows.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    checkpoint = onelayer.open(path, names="hf")
    assert set(checkpoint.keys()) == set(model.state_dict())
    tokens = torch.randint(0, SMALL["vocab_size"], (1, 9))
    empty = onelayer.torch.empty(transformers.LlamaForCausalLM, model.config)
    with torch.no_grad(), onelayer.torch.stream_forward(empty, checkpoint, memory="1GiB", dtype="float32"):
        assert torch.equal(empty(tokens).logits, model(tokens).logits)
    onelayer.convert(checkpoint, tmp_path / "layers", dtype="f32")
    model.config.save_pretrained(tmp_path / "layers")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "layers").eval()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="names="):
        onelayer.open(path, names="torch")
