"""Checkpoints as fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import BITS, FIXTURES, write_checkpoint


@pytest.fixture
def llama() -> Path:
    return FIXTURES / "llama"


@pytest.fixture
def every_dtype(tmp_path: Path) -> Path:
    """A file with one two-dimensional tensor of each type."""
    return write_checkpoint(tmp_path / "every.safetensors", {f"t.{dtype}": (dtype, (3, 8)) for dtype in BITS})


@pytest.fixture
def layered(tmp_path: Path) -> Path:
    """Eight layers of 64 KiB, with embedding, norm and head."""
    tensors = {"model.embed_tokens.weight": ("F32", (64, 64))}
    for layer in range(8):
        tensors[f"model.layers.{layer}.mlp.weight"] = ("F32", (64, 128))
        tensors[f"model.layers.{layer}.attn.weight"] = ("F32", (64, 128))
    tensors["model.norm.weight"] = ("F32", (64,))
    return write_checkpoint(tmp_path / "layered.safetensors", tensors, format="pt")
