"""transformers loads through us what it loads by itself, bit for bit."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import onelayer
from checkpoints import FIXTURES

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
T5 = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}

# Beside those of the repository: an encoder, an encoder-decoder, experts, and a state space model.
MADE: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    ),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=3)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=8)),
}
NAMES = [*sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()), *MADE]


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param not in MADE:
        return FIXTURES / request.param
    torch.manual_seed(7)
    target = tmp_path / request.param
    MADE[request.param]().to(torch.bfloat16).save_pretrained(target)
    return target


def architecture(folder: Path) -> tuple[Any, Any]:
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]), config


def plainly(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    model, _ = architecture(folder)
    return model.from_pretrained(folder, **options).state_dict()


def through_us(folder: Path, source: Path, options: dict[str, Any], **ours: Any) -> dict[str, torch.Tensor]:
    model, config = architecture(folder)
    weights = onelayer.open(source).state_dict(**ours)
    return model.from_pretrained(None, config=config, state_dict=weights, **options).state_dict()


def assert_bit_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        # As bytes: NaN is not equal to itself, and zero equals its negative.
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("mode", ["owned", "mapped"])
def test_bit_equal(folder: Path, mode: str) -> None:
    assert_bit_equal(through_us(folder, folder, {}, mode=mode), plainly(folder))


def test_bit_equal_in_another_type(folder: Path) -> None:
    options = {"dtype": torch.float16}
    assert_bit_equal(through_us(folder, folder, options), plainly(folder, **options))


def test_bit_equal_without_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plainly(folder)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    assert_bit_equal(through_us(folder, folder, {}), expected)


def test_bit_equal_after_a_conversion(folder: Path, tmp_path: Path) -> None:
    program = shutil.which("loadcheck")
    assert program is not None, "the wheel brings loadcheck along"
    target = tmp_path / "converted"
    subprocess.run([program, "convert", str(folder), str(target), "--quiet"], check=True)
    assert len(list(target.glob("*.safetensors"))) > 1
    assert_bit_equal(through_us(folder, target, {}), plainly(folder))
