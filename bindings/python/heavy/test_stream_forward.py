"""Forwards with weights that come just in time: equal to plain ones, inside their memory, for real architectures."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import onelayer
import onelayer.torch
from onelayer.torch import stream_forward
from onelayer.torch._parts import streamed_parts

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 128,
}
RING = "6MiB"
LAYER = 3 << 20
"""More than a layer of these models takes."""


def llama(**changes: Any) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**{**SMALL, "architectures": ["LlamaForCausalLM"], **changes})


def saved(config: Any, folder: Path, **options: Any) -> Any:
    """A model with random weights, saved."""
    torch.manual_seed(1)
    model = getattr(transformers, config.architectures[0])._from_config(config).eval()
    model.save_pretrained(folder, **options)
    return model


def least(folder: Path, model: nn.Module, **options: Any) -> int:
    """The smallest memory, as the refusal names it."""
    with pytest.raises(onelayer.BudgetError) as caught:
        stream_forward(model, folder, memory=1, budget=RING, **options)
    return caught.value.required


TOKENS = torch.arange(5, 13)[None]
DECODERS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "gemma": lambda: transformers.GemmaConfig(**SMALL, head_dim=64, architectures=["GemmaForCausalLM"]),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, architectures=["Qwen2ForCausalLM"]),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=256, n_layer=5, n_head=4, vocab_size=500, architectures=["GPT2LMHeadModel"]
    ),
    "phi": lambda: transformers.PhiConfig(**{**SMALL, "num_key_value_heads": 4}, architectures=["PhiForCausalLM"]),
}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("way", ["smallest", "some kept", "fits"])
def test_logits_are_those_of_the_whole_model(name: str, way: str, tmp_path: Path) -> None:
    config = DECODERS[name]()
    plain = saved(config, tmp_path)
    model = onelayer.torch.empty(config)
    needed = least(tmp_path, model)
    memory = {"smallest": needed, "some kept": needed + LAYER, "fits": 1 << 30}[way]
    with torch.no_grad(), stream_forward(model, tmp_path, memory=memory, budget=RING) as handle:
        assert handle.plan.needed <= memory
        assert bool(handle.plan.streamed) == (way != "fits")
        for _ in range(3):
            assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
        assert (handle.report.forwards, handle.report.restarts) == (3, 0)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_generation_gives_the_same_tokens(tmp_path: Path) -> None:
    plain = saved(llama(), tmp_path)
    model = onelayer.torch.empty(llama())
    model.generation_config = plain.generation_config
    with torch.inference_mode(), stream_forward(model, tmp_path, memory=least(tmp_path, model), budget=RING) as handle:
        options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(TOKENS, **options), plain.generate(TOKENS, **options))
        assert handle.report.forwards == 10
        assert "forwards" in str(handle.report)


def test_a_decoder_goes_on_without_its_encoder(tmp_path: Path) -> None:
    config = transformers.T5Config(
        d_model=256,
        d_ff=512,
        num_layers=4,
        num_heads=4,
        d_kv=64,
        vocab_size=500,
        architectures=["T5ForConditionalGeneration"],
    )
    plain = saved(config, tmp_path)
    model = onelayer.torch.empty(config)
    model.generation_config = plain.generation_config
    with torch.no_grad(), stream_forward(model, tmp_path, memory=least(tmp_path, model), budget=RING) as handle:
        assert len(handle.plan.streamed) == 8
        options = {"max_new_tokens": 6, "do_sample": False, "decoder_start_token_id": 0}
        for _ in range(2):
            assert torch.equal(model.generate(TOKENS, **options), plain.generate(TOKENS, **options))
        # The first token of each text, and the second, which needs no encoder.
        assert handle.report.restarts <= 4


def test_adapters_stay_and_their_base_is_streamed(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    saved(llama(), tmp_path)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)

    def adapted(model: Any) -> Any:
        torch.manual_seed(5)
        return peft.get_peft_model(model, config).eval()

    plain = adapted(transformers.LlamaForCausalLM.from_pretrained(tmp_path))
    model = adapted(onelayer.torch.empty(llama()))
    for name, tensor in plain.named_parameters():
        if "lora_" in name:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor.detach().clone()))
    with torch.no_grad(), stream_forward(model, tmp_path, memory=least(tmp_path, model), budget=RING) as handle:
        assert handle.plan.streamed and not handle.plan.unused
        for _ in range(2):
            assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)


def test_other_dtypes(tmp_path: Path) -> None:
    saved(llama(), tmp_path)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = onelayer.torch.empty(llama(), dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, "bfloat16", "bf16"):
        with (
            torch.no_grad(),
            stream_forward(model, tmp_path, memory="10MiB", budget=RING, dtype=dtype) as handle,
        ):
            assert handle.plan.streamed
            assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale


class Stack(nn.Module):
    def __init__(self, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.order = list(range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for index in self.order:
            x = self.layers[index](x)
        return x


@pytest.fixture
def stack(tmp_path: Path) -> tuple[Stack, Stack, Path]:
    """A whole module, an empty one, and a file of its weights."""
    torch.manual_seed(2)
    plain = Stack()
    path = tmp_path / "stack.safetensors"
    safetensors.torch.save_file(plain.state_dict(), path)
    return plain, onelayer.torch.empty(Stack), path


X = torch.linspace(-1, 1, 16).reshape(2, 8)


def streamed(model: nn.Module, path: Path, **options: Any) -> Any:
    return stream_forward(model, path, memory=least(path, model), budget=RING, **options)


def test_another_order_of_calls_is_followed(stack: tuple[Stack, Stack, Path]) -> None:
    plain, model, path = stack
    with torch.no_grad(), streamed(model, path) as handle:
        for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 0, 1], [2, 4], [3]):
            plain.order = model.order = order
            assert torch.equal(model(X), plain(X))
        assert handle.report.restarts > 0
        assert handle.report.read_bytes > 0


def test_a_layer_that_fails_leaves_the_next_forward_whole(stack: tuple[Stack, Stack, Path]) -> None:
    plain, model, path = stack
    with torch.no_grad(), streamed(model, path):
        for _ in range(3):
            with pytest.raises(RuntimeError, match="shape"):
                model.layers[0](torch.ones(2, 9))
            assert torch.equal(model(X), plain(X))


def test_gradients_are_refused(stack: tuple[Stack, Stack, Path]) -> None:
    plain, model, path = stack
    with streamed(model, path):
        with pytest.raises(RuntimeError, match="gradients"):
            model(X.clone().requires_grad_())
        # Without anything that wants gradients there are none.
        assert torch.equal(model(X), plain(X))


def test_two_forwards_at_once_are_refused(stack: tuple[Stack, Stack, Path]) -> None:
    plain, model, path = stack
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        go_on.wait(20)

    found: list[torch.Tensor] = []

    def forward() -> None:
        with torch.no_grad():
            found.append(model(X))

    with torch.no_grad(), streamed(model, path):
        hook = model.layers[2].norm.register_forward_pre_hook(wait)
        thread = threading.Thread(target=forward)
        thread.start()
        assert inside.wait(20)
        hook.remove()
        with pytest.raises(RuntimeError, match="one forward at a time"):
            model(X)
        with pytest.raises(RuntimeError, match="one forward at a time"):
            model.layers[2](torch.ones(1, 384))
        go_on.set()
        thread.join()
        assert torch.equal(found[0], plain(X))


def test_a_compiled_module(stack: tuple[Stack, Stack, Path]) -> None:
    plain, model, path = stack
    with torch.no_grad(), streamed(model, path):
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            assert torch.equal(compiled(X), plain(X))


def test_names_that_do_not_fit_are_told(stack: tuple[Stack, Stack, Path], tmp_path: Path) -> None:
    plain, model, _ = stack
    state = plain.state_dict()
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({f"model.{name}": tensor for name, tensor in state.items()}, other)
    with torch.no_grad(), streamed(model, other):
        assert torch.equal(model(X), plain(X))
    safetensors.torch.save_file({f"t{number}": tensor for number, tensor in enumerate(state.values())}, other)
    with pytest.raises(ValueError, match="do not fit together"):
        stream_forward(model, other, memory="1GiB")
    del state["layers.3.up.weight"]
    safetensors.torch.save_file(state, other)
    with pytest.raises(ValueError, match=r"layers\.3\.up\.weight"):
        stream_forward(model, other, memory="1GiB")
    state["layers.3.up.weight"] = torch.ones(3, 3)
    safetensors.torch.save_file(state, other)
    with pytest.raises(ValueError, match="shape"):
        stream_forward(model, other, memory="1GiB")


def quantised(weight: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales, and the decoded weight, by the definitions of docs/quantise.md."""
    if form == "int8":
        scale = (weight.abs().amax(-1, keepdim=True) / 127).float()
        values = (weight.float() / scale).round().clamp(-127, 127)
        return values.to(torch.int8), scale, values * scale
    if form == "fp8":
        scale = (weight.abs().amax(-1, keepdim=True) / 448).float()
        values = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return values, scale, values.float() * scale
    groups = weight.float().unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
    values = (groups / scale.float()[..., None]).round().clamp(-7, 7)
    stored = (values.flatten(-2) + 8).to(torch.uint8)
    packed = stored[..., 0::2] | (stored[..., 1::2] << 4)
    return packed, scale, (values * scale.float()[..., None]).flatten(-2)


@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("kept", [0, 3])
def test_quantised_weights_are_decoded_just_in_time(
    form: str, kept: int, stack: tuple[Stack, Stack, Path], tmp_path: Path
) -> None:
    plain, model, path = stack
    stored = {}
    for name, tensor in plain.state_dict().items():
        stored[name] = tensor
        if name.endswith(("up.weight", "down.weight")):
            values, scale, decoded = quantised(tensor, form)
            stored |= {name: values, f"{name}_scale": scale}
            plain.get_parameter(name).data.copy_(decoded)
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path)
    memory = least(path, model) + kept * ((350 << 10) if form == "int4" else (600 << 10))
    with torch.no_grad(), stream_forward(model, path, memory=memory, budget=RING) as handle:
        assert bool(handle.plan.streamed) and handle.plan.decoded_bytes == 2 * 384 * 768 * 4 + (4 << 20)
        with torch.inference_mode():
            assert torch.equal(model(X), plain(X))
        assert torch.equal(model(X), plain(X))
        assert handle.report.decoding_seconds > 0
    with torch.no_grad(), stream_forward(model, path, memory="1GiB") as handle:
        assert not handle.plan.streamed
        assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize("form", ["int8", "fp8", "int4-g32"])
def test_weights_are_quantised_while_they_are_read(form: str, stack: tuple[Stack, Stack, Path], tmp_path: Path) -> None:
    """As those of a converted file are, with half of the layers streamed, and in less memory than the whole model."""
    plain, model, path = stack
    onelayer.convert(path, tmp_path / "converted", quantise=form)
    with torch.no_grad():
        with stream_forward(model, tmp_path / "converted", memory="1GiB") as handle:
            expected = model(X)
        assert not torch.equal(expected, plain(X))
        for memory in (least(path, model, quantise=form), least(path, model, quantise=form) + (1 << 20)):
            with stream_forward(model, path, memory=memory, budget=RING, quantise=form) as handle:
                assert handle.plan.streamed and handle.plan.needed <= memory
                assert torch.equal(model(X), expected) and torch.equal(model(X), expected)
        whole = stream_forward(model, path, memory="1GiB").plan
        with stream_forward(model, path, memory="1GiB", quantise=form) as handle:
            assert not handle.plan.streamed and handle.plan.kept_bytes < whole.mapped_bytes * 3 // 5
            assert torch.equal(model(X), expected)
    with pytest.raises(ValueError, match="int5"):
        stream_forward(model, path, memory="1GiB", quantise="int5")


def test_parts_of_layers_stay_where_that_reads_less(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = Stack(1024)
    path = tmp_path / "stack.safetensors"
    safetensors.torch.save_file(plain.state_dict(), path)
    model = onelayer.torch.empty(Stack, 1024)
    memory = least(path, model) + (68 << 20)
    with torch.no_grad(), stream_forward(model, path, memory=memory, budget=RING) as handle:
        plan = handle.plan
        assert plan.parts and plan.window == 2 and plan.needed <= memory
        assert "and parts of" in str(plan)
        streamed = {key for name in plan.streamed for key in plan.keys[name]}
        stays = {key for keys in plan.parts.values() for key in keys}
        assert streamed and not streamed & stays
        for order in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [5, 3, 1]):
            plain.order = model.order = order
            assert torch.equal(model(X), plain(X))
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_parts_are_the_least_that_fits() -> None:
    layers = [{"large": 60, "middle": 30, "small": 10}] * 10
    everything = sum(sum(sizes.values()) for sizes in layers)
    previous = everything + 1
    for room in range(100, everything, 50):
        for held in (2, 1):
            found = streamed_parts(layers, room, held)
            if found is None:
                assert room < 2 * 100 and held == 2
                continue
            sizes = [sum(layer[key] for key in keys) for layer, keys in zip(layers, found, strict=True)]
            assert everything - sum(sizes) + held * max(sizes) <= room
            # No worse than whole layers.
            assert sum(sizes) <= everything - (room - held * 100) // 100 * 100
        assert sum(sizes) <= previous
        previous = sum(sizes)


def test_memory_comes_back(stack: tuple[Stack, Stack, Path]) -> None:
    _, model, path = stack
    with torch.no_grad():
        for memory in (least(path, model), least(path, model) + LAYER):
            with stream_forward(model, path, memory=memory, budget=RING):
                model(X)
            before = threading.active_count()
            gc.collect()
            held = [
                tensor
                for tensor in gc.get_objects()
                if isinstance(tensor, nn.Parameter) and tensor.device.type == "cpu"
            ]
            inside = set(map(id, model.parameters()))
            assert not [tensor for tensor in held if id(tensor) in inside]
            assert threading.active_count() == before


def test_a_handle_is_entered_once(stack: tuple[Stack, Stack, Path]) -> None:
    plain, model, path = stack
    with torch.no_grad():
        handle = streamed(model, path)
        with handle:
            assert torch.equal(model(X), plain(X))
            with pytest.raises(RuntimeError, match="one `with` at a time"):
                handle.__enter__()
        with handle:
            assert torch.equal(model(X), plain(X))
        handle.close()


def test_an_interrupt_leaves_the_next_forward_whole(stack: tuple[Stack, Stack, Path]) -> None:
    plain, model, path = stack

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad(), streamed(model, path):
        for module in (model.layers[2].up, model.embed):
            hook = module.register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(X)
            hook.remove()
            assert torch.equal(model(X), plain(X))


def test_an_interrupt_in_a_part_of_the_model(stack: tuple[Stack, Stack, Path]) -> None:
    """A layer is called without the module around it, as an encoder is."""
    plain, model, path = stack

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    rows = torch.ones(1, 384)
    with torch.no_grad(), streamed(model, path):
        hook = model.layers[2].up.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.layers[2](rows)
        hook.remove()
        assert torch.equal(model.layers[2](rows), plain.layers[2](rows))
        assert torch.equal(model(X), plain(X))


def test_a_file_that_changed_is_an_error_until_it_is_back(stack: tuple[Stack, Stack, Path]) -> None:
    plain, model, path = stack
    before = path.stat()
    with torch.no_grad(), streamed(model, path):
        assert torch.equal(model(X), plain(X))
        # Layers that were read ahead may still come.
        os.utime(path, ns=(1, 1))
        with pytest.raises(onelayer.CheckpointError, match="changed"):
            for _ in range(3):
                model(X)
        with pytest.raises(onelayer.CheckpointError, match="changed"):
            model(X)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Recurrent(Block):
    """Modules with lists of their weights."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.mix = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.mix(x[None])[0][0])


class RecurrentStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Recurrent(384) for _ in range(5))
        self.order = list(range(5))


def test_modules_that_list_their_weights_let_go(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain, model, path = RecurrentStack(), onelayer.torch.empty(RecurrentStack), tmp_path / "x.safetensors"
    safetensors.torch.save_file(plain.state_dict(), path)
    with torch.no_grad(), streamed(model, path):
        for _ in range(3):
            assert torch.equal(model(X), plain(X))


def test_who_keeps_a_weight_is_told(stack: tuple[Stack, Stack, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, path = stack
    monkeypatch.setattr("onelayer.torch._sequence._STALL_SECONDS", 0.3)
    kept: list[torch.Tensor] = []
    with torch.no_grad(), streamed(model, path):
        hook = model.layers[0].register_forward_hook(lambda module, *_: kept.append(module.up.weight))
        model.layers[0]._forward_hooks.move_to_end(hook.id, last=False)
        with pytest.raises(onelayer.StalledError, match="still referred to"):
            model(X)
        hook.remove()
        kept.clear()
        assert torch.equal(model(X), plain(X))


def test_what_is_refused(stack: tuple[Stack, Stack, Path]) -> None:
    plain, model, path = stack
    with pytest.raises(ValueError, match=r"'embed\.weight' has memory already"):
        stream_forward(plain, path, memory="1GiB")
    for keep, message in ((["layers.9"], r"'layers\.9'.* is 'layers\.\d' meant"), ("nothing", "'nothing'"), (3, "3")):
        with pytest.raises(ValueError, match=message):
            stream_forward(model, path, memory="64MiB", budget=RING, keep=keep)
    for window in (0, True, "all", 2.5):
        with pytest.raises(ValueError, match="window"):
            stream_forward(model, path, memory="64MiB", window=window)
    with pytest.raises(ValueError, match="dtype='auto'"):
        stream_forward(model, path, memory="64MiB", dtype="auto")
    every = [f"layers.{number}" for number in range(6)]
    needed = stream_forward(model, path, memory="64MiB", budget=RING, keep=every).plan.needed
    assert not stream_forward(model, path, memory=needed, budget=RING, keep=every).plan.streamed
    with pytest.raises(onelayer.BudgetError):
        stream_forward(model, path, memory=needed - 1, budget=RING, keep=every)
    with pytest.raises(onelayer.BudgetError, match="budget of 1 B"):
        stream_forward(model, path, memory="64MiB", budget=1)
    adapter = nn.Parameter(torch.ones(384))
    model.layers[5].adapter = adapter
    with streamed(model, path), pytest.raises(RuntimeError, match="gradients"):
        model(X)
    with pytest.raises(TypeError, match="already"):
        onelayer.torch.empty(plain)


def test_one_handle_at_a_time_for_a_module(stack: tuple[Stack, Stack, Path]) -> None:
    plain, model, path = stack
    with torch.no_grad():
        one, other = streamed(model, path), streamed(model, path)
        with one, pytest.raises(RuntimeError, match="one `with` at a time"):
            other.__enter__()
        with other:
            assert torch.equal(model(X), plain(X))


def test_small_limits_without_a_budget(stack: tuple[Stack, Stack, Path]) -> None:
    plain, model, path = stack
    with torch.no_grad():
        with stream_forward(model, path, memory="12MiB", keep="none") as handle:
            assert handle.plan.streamed and handle.plan.needed <= 12 << 20
            assert torch.equal(model(X), plain(X))
        linear, file = onelayer.torch.empty(nn.Linear, 64, 64), path.parent / "linear.safetensors"
        whole = nn.Linear(64, 64)
        safetensors.torch.save_file(whole.state_dict(), file)
        with stream_forward(linear, file, memory="12MiB", dtype="bf16") as handle:
            assert not handle.plan.streamed and not handle.plan.mapped
            assert torch.equal(linear.weight, whole.weight.to(torch.bfloat16))


def test_tied_weights_with_two_copies_and_buffers_that_are_not_saved(tmp_path: Path) -> None:
    saved(llama(tie_word_embeddings=True), tmp_path)
    file = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(file)
    state["lm_head.weight"] = 2 * state["model.embed_tokens.weight"]
    state["model.rotary_emb.inv_freq"] = torch.ones(8)
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    model = onelayer.torch.empty(llama(tie_word_embeddings=True))
    for memory in (least(tmp_path, model), "1GiB"):
        with torch.no_grad(), stream_forward(model, tmp_path, memory=memory, budget=RING) as handle:
            assert handle.plan.unused == ("model.rotary_emb.inv_freq",)
            assert torch.allclose(model(TOKENS).logits, plain(TOKENS).logits, atol=1e-5)


def test_what_is_kept_by_name(stack: tuple[Stack, Stack, Path]) -> None:
    plain, model, path = stack
    with torch.no_grad():
        for keep, streams in (("none", 6), (["layers.0", "layers.5"], 4)):
            with stream_forward(model, path, memory="64MiB", budget=RING, keep=keep) as handle:
                assert len(handle.plan.streamed) == streams
                assert torch.equal(model(X), plain(X))
