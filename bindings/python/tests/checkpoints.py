"""Test checkpoints: fixtures of the repository, and small files written here."""

from __future__ import annotations

import json
import struct
from pathlib import Path

FIXTURES = Path(__file__).parents[3] / "fixtures" / "checkpoints"

# Bits per element of every type of the format.
BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def write_checkpoint(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], **metadata: str) -> Path:
    """Writes a file with tensors of these types and shapes. Bytes count up, so that positions differ."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    data = bytearray()
    for name, (dtype, shape) in tensors.items():
        elements = 1
        for dimension in shape:
            elements *= dimension
        length = elements * BITS[dtype] // 8
        start = len(data)
        data += bytes_of(name, dtype, length)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def bytes_of(name: str, dtype: str, length: int) -> bytes:
    """The bytes that ``write_checkpoint`` writes for a tensor."""
    seed = sum(name.encode())
    modulus = 2 if dtype == "BOOL" else 251
    return bytes((seed + at + at // 251) % modulus for at in range(length))


def bytes_in_file(path: Path) -> dict[str, bytes]:
    """The bytes of each tensor of a file, read without any library."""
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    data = whole[8 + length :]
    return {name: data[slice(*entry["data_offsets"])] for name, entry in header.items() if name != "__metadata__"}
