"""Models of transformers in one line: mapped, owned or streamed, with the same results."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

import onelayer
import onelayer.torch
import onelayer.transformers
from onelayer.transformers import from_pretrained

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 128,
}
T5 = {"d_model": 256, "d_ff": 512, "num_layers": 4, "num_heads": 4, "d_kv": 64, "vocab_size": 500}
BART = {
    "d_model": 256,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 500,
    "max_position_embeddings": 64,
}
MADE: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "gemma, tied": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**SMALL, head_dim=64)),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**{key: value for key, value in SMALL.items() if key != "num_key_value_heads"})
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
}
TOKENS = torch.arange(5, 13)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama with settings of generation."""
    return saved("llama", tmp_path)


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(1)
    model = MADE[name]().to(dtype)
    model.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.update(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
        model.generation_config.save_pretrained(folder)
    return folder


def plain(folder: Path, **options: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder, **options)


def least(folder: Path, **options: Any) -> int:
    """The smallest memory, as refusals name it."""
    memory = 1
    while True:
        try:
            from_pretrained(folder, memory=memory, **options)
            return memory
        except onelayer.BudgetError as error:
            assert error.required > memory
            memory = error.required


def results(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        decoder = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
        found = [model(input_ids=TOKENS, **decoder).logits]
        return [*found, model.generate(TOKENS)] if model.can_generate() else found


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("mode", ["mapped", "owned", "stream"])
def test_results_are_those_of_transformers(name: str, mode: Any, tmp_path: Path) -> None:
    saved(name, tmp_path)
    options = {"memory": least(tmp_path)} if mode == "stream" else {}
    model = from_pretrained(tmp_path, mode=mode, **options)
    reference = plain(tmp_path)
    assert type(model) is type(reference) and not model.training
    for _ in range(2):
        assert_same(results(model), results(reference))
    assert model.name_or_path == str(tmp_path)
    if mode == "stream":
        assert model.onelayer_stream.plan.streamed


@pytest.mark.parametrize("mode", ["mapped", "owned", "stream"])
@pytest.mark.parametrize(
    "cls", [transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM, transformers.AutoModel]
)
def test_auto_and_concrete_classes(cls: Any, mode: Any, folder: Path) -> None:
    memory = least(folder) if mode == "stream" else None
    model = from_pretrained(folder, cls=cls, mode=mode, memory=memory)
    reference = cls.from_pretrained(folder)
    assert type(model) is type(reference)
    with torch.no_grad():
        assert torch.equal(model(TOKENS)[0], reference(TOKENS)[0])


@pytest.mark.parametrize("mode", ["mapped", "owned", "stream"])
@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16, "bfloat16", torch.float32])
def test_types(dtype: Any, mode: Any, folder: Path) -> None:
    memory = 32 << 20 if mode == "stream" else None
    model = from_pretrained(folder, mode=mode, memory=memory, dtype=dtype)
    reference = plain(folder, dtype=dtype)
    assert model.dtype == reference.dtype == model.config.dtype
    assert_same(results(model), results(reference))


def test_the_mode_follows_from_memory(folder: Path) -> None:
    assert not hasattr(from_pretrained(folder), "onelayer_stream")
    assert from_pretrained(folder, memory="64MiB").onelayer_stream.plan.memory == 64 << 20


def test_keywords_reach_the_configuration_and_the_model(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    generation = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    for options in ({"mode": "owned"}, {"memory": "64MiB"}, {"mode": "mapped"}):
        model = from_pretrained(folder, output_hidden_states=True, attn_implementation="eager", **options)
        assert model.config.output_hidden_states and model.config._attn_implementation == "eager"
        given = from_pretrained(folder, config=config, generation_config=generation, **options)
        assert given.generate(TOKENS).shape[1] == TOKENS.shape[1] + 3
    assert config.dtype == torch.float32 and from_pretrained(folder, mode="owned", output_loading_info=True)[1]


def test_names_of_the_hub(folder: Path, tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    snapshot = cached / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for file in folder.glob("*.*"):
        file.rename(snapshot / file.name)
    for options in ({}, {"mode": "owned"}, {"memory": "64MiB"}, {"revision": "main", "memory": "64MiB"}):
        model = from_pretrained("org/name", cache_dir=tmp_path / "hub", **options)
        assert_same(results(model), results(plain(snapshot)))
    with pytest.raises(FileNotFoundError, match="org/other"):
        from_pretrained("org/other", cache_dir=tmp_path / "hub")


def test_owned_weights_outlive_their_file(folder: Path) -> None:
    expected = results(plain(folder))
    with onelayer.measure() as measured:
        model = from_pretrained(folder, mode="owned")
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert measured.kept_growth is not None and measured.kept_growth >= 0.8 * size
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(100)
    assert_same(results(model), expected)


def test_dropping_a_streamed_model_frees_it(folder: Path) -> None:
    threads = threading.active_count()
    model = from_pretrained(folder, memory=least(folder))
    results(model)
    held = [weakref.ref(parameter) for parameter in model.parameters() if parameter.device.type != "meta"]
    handle = model.onelayer_stream
    assert held
    gc.collect()
    gc.disable()
    try:
        del model
        assert not any(reference() is not None for reference in held)
    finally:
        gc.enable()
    assert threading.active_count() == threads
    with pytest.raises(RuntimeError, match="gone"):
        handle.__enter__()
    assert "Stream" in repr(handle)


def test_a_handle_closes_and_opens_again(folder: Path) -> None:
    model = from_pretrained(folder, memory=least(folder))
    expected = results(plain(folder))
    with model.onelayer_stream as handle:
        assert_same(results(model), expected)
        assert handle.report.forwards > 0 and handle is model.onelayer_stream
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    with handle:
        assert_same(results(model), expected)
    handle.close()
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(handle)


def test_moves(folder: Path) -> None:
    model = from_pretrained(folder, memory=least(folder))
    assert model.to("cpu") is model and model.to("cpu", dtype=torch.float32) is model
    for move in (
        lambda: model.to("cuda"),
        lambda: model.to(0),
        lambda: model.to(torch.float16),
        model.half,
        model.cuda,
    ):
        with pytest.raises(RuntimeError, match="from_pretrained"):
            move()
    assert_same(results(model), results(plain(folder)))
    model.to("meta")
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_a_script_that_ends_without_closing(folder: Path) -> None:
    script = (
        "import sys, torch, onelayer.transformers\n"
        "model = onelayer.transformers.from_pretrained(sys.argv[1], memory='64MiB', keep='none')\n"
        "with torch.no_grad(): print(model(torch.arange(5, 13)[None]).logits.shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "torch.Size([1, 8, 500])\n"), done.stderr


def test_a_pipeline_of_transformers(folder: Path) -> None:
    model = from_pretrained(folder, memory=least(folder))
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=letters(folder))
    expected = transformers.pipeline("text-generation", model=plain(folder), tokenizer=letters(folder))
    assert pipeline("a b", return_full_text=False) == expected("a b", return_full_text=False)


def letters(folder: Path) -> Any:
    import tokenizers

    words = {"[UNK]": 0} | {chr(97 + index): index + 1 for index in range(26)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[UNK]")


def test_refusals_say_what_to_do(folder: Path, tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("needs memory=", {"mode": "stream"}),
        ("leave it out", {"mode": "owned", "memory": "1GiB"}),
        ("leave it out", {"mode": "mapped", "keep": "none"}),
        ("expected 'mapped', 'owned', 'stream'", {"mode": "lazy"}),
        ("mode='mapped'", {"memory": "1GiB", "quantization_config": {"load_in_8bit": True}}),
        ("runs on one device", {"memory": "1GiB", "device_map": {"model": "cpu", "lm_head": "disk"}}),
        ("expected 'auto' or a type", {"memory": "1GiB", "dtype": "bf17"}),
        ("output_loading_info", {"memory": "1GiB", "output_loading_info": True}),
    ]
    for message, options in cases:
        with pytest.raises(ValueError, match=message):
            from_pretrained(folder, **options)
    with pytest.raises(onelayer.BudgetError, match="too small"):
        from_pretrained(folder, memory="1MiB")
    with pytest.raises(TypeError, match="Auto class"):
        from_pretrained(folder, memory="1GiB", cls=torch.nn.Linear)
    with pytest.raises(ValueError, match="not a folder"):
        from_pretrained(folder / "model.safetensors", memory="1GiB")
    with pytest.raises(FileNotFoundError):
        from_pretrained(folder / "nothing", memory="1GiB")
    halves = tmp_path / "halves"
    plain(folder, dtype=torch.bfloat16).save_pretrained(halves)
    with pytest.raises(ValueError, match="wants it as float32"):
        from_pretrained(halves, memory="1GiB", dtype=torch.float32)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="PeftModel"):
        from_pretrained(folder, memory="1GiB")


def test_weights_that_stay_in_single_precision(tmp_path: Path) -> None:
    saved("t5", tmp_path / "half", torch.float16)
    with pytest.raises(ValueError, match=r"wo\.weight.*save_pretrained"):
        from_pretrained(tmp_path / "half", memory="1GiB")
    # As the message says.
    whole = plain(tmp_path / "half")
    assert whole.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    whole.save_pretrained(tmp_path / "mixed")
    model = from_pretrained(tmp_path / "mixed", memory=least(tmp_path / "mixed"))
    assert_same(results(model), results(plain(tmp_path / "mixed")))


def test_a_configuration_with_another_type_than_the_files(tmp_path: Path) -> None:
    saved("llama", tmp_path, torch.bfloat16)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("bfloat16", "float32"))
    model = from_pretrained(tmp_path, memory="64MiB")
    assert model.dtype == torch.bfloat16
    assert_same(results(model), results(plain(tmp_path, dtype=torch.bfloat16)))


def test_state_dicts_fill_modules(folder: Path) -> None:
    weights = onelayer.open(folder).state_dict()
    reference = plain(folder)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder)).eval()
    model.load_state_dict(weights)
    assert_same(results(model)[:1], results(reference)[:1])
    empty = onelayer.torch.empty(model.config)
    with pytest.raises(RuntimeError, match=r"weights\.read\(\)"):
        empty.load_state_dict(weights, assign=True)
    empty.load_state_dict(weights.read(), assign=True)
    assert_same(results(empty)[:1], results(reference)[:1])
    copied, pickled = copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))
    for each in (copied, pickled):
        found = transformers.LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=each)
        assert_same(results(found)[:1], results(reference)[:1])
    safetensors.torch.save_file(copied.read(), folder / "copy.safetensors")
