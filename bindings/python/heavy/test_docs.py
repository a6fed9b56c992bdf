"""The Python code of docs/python.md and of README runs as it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from test_pipelines import stable_diffusion

import onelayer
import onelayer.distributed
import onelayer.torch

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", "docs/python.md")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def sections() -> dict[str, list[str]]:
    """The blocks of Python below each heading."""
    found = {}
    for page in PAGES:
        parts = re.split(r"^#+ (.+)\n", (ROOT / page).read_text(), flags=re.MULTILINE)
        for title, text in zip(parts[1::2], parts[2::2], strict=True):
            found[f"{page}: {title}"] = PYTHON.findall(text)
    return {title: blocks for title, blocks in found.items() if blocks}


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Small checkpoints under the names of the page, and its variables."""
    monkeypatch.chdir(tmp_path)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**small, num_hidden_layers=3, vocab_size=500, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config)
    for folder in ("gemma-2b", "gemma-7b", "llama"):
        model.save_pretrained(folder)
        transformers.GenerationConfig(pad_token_id=0).save_pretrained(folder)
    stable_diffusion(tmp_path / "stable-diffusion")
    pipeline = SimpleNamespace(text_encoder=torch.nn.Linear(8, 8))
    params = {name: torch.empty_like(parameter) for name, parameter in model.named_parameters()}
    return {
        "params": params,
        "path": "llama",
        "pytest": pytest,
        "checkpoint": onelayer.open("llama"),
        "onelayer": onelayer,
        "torch": torch,
        "transformers": transformers,
        "prompt": torch.arange(5, 9)[None],
        "pipeline": pipeline,
        "embeds": pipeline.text_encoder.weight,
    }


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """`torch.distributed` of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("section", sections())
def test_blocks_run(section: str, names: dict[str, Any], one_rank: None) -> None:
    for block in sections()[section]:
        exec(compile(block, section, "exec"), names)
