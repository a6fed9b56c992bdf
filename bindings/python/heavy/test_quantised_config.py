"""Quantised conversions as transformers opens them through compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import onelayer

pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")

SIZES = {"vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {**SIZES, **HEADS}),
    "qwen2": (transformers.Qwen2Config, {**SIZES, **HEADS}),
    "gemma2": (transformers.Gemma2Config, {**SIZES, **HEADS, "head_dim": 16}),
    "opt": (
        transformers.OPTConfig,
        {"vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 64, "ffn_dim": 160, "num_attention_heads": 4},
    ),
}


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_opens_what_was_quantised(name: str, form: str, tmp_path: Path) -> None:
    """Every weight is the value times the scale that we wrote, and nothing is missing."""
    config, sizes = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**sizes), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    onelayer.convert(tmp_path / "model", tmp_path / "quantised", quantise=form)
    assert "quantization_config" in json.loads((tmp_path / "quantised/config.json").read_text())
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", output_loading_info=True)
    assert not any(info.values()), info
    tokens = torch.randint(0, 300, (1, 16))
    with torch.no_grad():
        opened(tokens)  # weights are decoded by the first forward
    files = onelayer.open(tmp_path / "quantised")
    stored = {name: torch.from_dlpack(tensor).clone() for name, tensor in files.tensors(window="all")}
    decoded = 0
    for key, weight in opened.state_dict().items():
        scales = stored.get(f"{key}_scale")
        if scales is None or weight.dtype.itemsize == 1:
            continue
        wanted = (stored[key].float() * scales).to(weight.dtype)
        assert torch.allclose(wanted.float(), weight.float(), rtol=2**-7, atol=0), key
        decoded += 1
    assert decoded >= 10, "the forward decodes every layer"
