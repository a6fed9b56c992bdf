"""Tests with torch, transformers and several processes; run by scripts/python-heavy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
# The helpers that write checkpoints.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from checkpoints import BITS, write_checkpoint


@pytest.fixture
def every_dtype(tmp_path: Path) -> Path:
    """A file with one two-dimensional tensor of each type."""
    return write_checkpoint(tmp_path / "every.safetensors", {f"t.{dtype}": (dtype, (3, 8)) for dtype in BITS})


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    """One thread is enough: tests compare bytes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
