#!/usr/bin/env python3
"""Writes grids.bin: the grids of the IQ types, as gguf-py packs them.

    python src/staging/cast/ggml/make_grids.py          (needs gguf 0.19)

A grid is a list of vectors of 4 or 8 numbers out of 3 or 8; each number is its index, in 2 or 4 bits.
"""
from pathlib import Path

from gguf import quants

TYPES = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"]

packed = b"".join(bytes.fromhex(getattr(quants, name).grid_hex.decode()) for name in TYPES)
assert len(packed) == 512 + 1024 + 2048 + 512 + 1024 + 4096
Path(__file__).with_name("grids.bin").write_bytes(packed)
