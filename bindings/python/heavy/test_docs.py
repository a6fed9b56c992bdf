"""The code of docs/python.md runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from test_pipelines import stable_diffusion

import onelayer
import onelayer.torch

PAGE = Path(__file__).parents[3] / "docs" / "python.md"
SECTIONS = (
    "A model that does not fit",
    "transformers in one line",
    "diffusers in one line",
    "Load, and give back",
    "Free a module, and learn who holds it",
    "Measure, and find leaks",
    "Times and hashes",
    "What fits where",
    "Convert and verify",
)


def blocks(section: str) -> list[str]:
    text = PAGE.read_text()
    (found,) = re.findall(rf"^#+ {re.escape(section)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```python\n(.*?)^```", found, re.MULTILINE | re.DOTALL)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Small checkpoints under the names of the page, and its variables."""
    monkeypatch.chdir(tmp_path)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**small, num_hidden_layers=3, vocab_size=500, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config)
    for folder in ("gemma-2b", "llama"):
        model.save_pretrained(folder)
        transformers.GenerationConfig(pad_token_id=0).save_pretrained(folder)
    stable_diffusion(tmp_path / "stable-diffusion")
    pipeline = SimpleNamespace(text_encoder=torch.nn.Linear(8, 8))
    return {
        "checkpoint": onelayer.open("llama"),
        "onelayer": onelayer,
        "torch": torch,
        "transformers": transformers,
        "prompt": torch.arange(5, 9)[None],
        "pipeline": pipeline,
        "embeds": pipeline.text_encoder.weight,
    }


@pytest.mark.parametrize("section", SECTIONS)
def test_blocks_run(section: str, names: dict[str, Any]) -> None:
    found = blocks(section)
    assert found
    for block in found:
        exec(compile(block, f"docs/python.md: {section}", "exec"), names)
