#!/usr/bin/env python3
"""Compares conversions of GGUF files with gguf-py: every type, random blocks, as stored and as floats.

    python scripts/check_gguf.py [--loadcheck target/debug/loadcheck] [--rounds 3] [--seed 1]

Needs gguf 0.19, numpy, torch and safetensors. Each round writes a file with all types (any bytes, NaNs and
infinities among them), converts it four times, and compares every tensor: as stored byte by byte; in single
precision bit by bit, with any NaN equal to any other; in bf16 and f16 with torch's rounding of those numbers.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUFWriter
from safetensors import safe_open

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "fixtures"))
from make_gguf_blocks import NOT_DECODED, PLAIN, floats  # noqa: E402


def write(path, rng):
    """A file of random blocks; the blocks of each tensor, and its shape."""
    writer, tensors = GGUFWriter(path, "llama"), {}
    for qtype, (elements, size) in GGML_QUANT_SIZES.items():
        if qtype.name in PLAIN:
            continue
        rows, blocks = int(rng.integers(1, 9)), int(rng.integers(1, 40))
        data = rng.integers(0, 256, (rows, blocks * size), dtype=np.uint8)
        name = f"blk.{rng.integers(0, 4)}.{qtype.name.lower()}.weight"
        writer.add_tensor(name, data, raw_dtype=qtype)
        tensors[name] = (qtype.name, data, (rows, blocks * elements), size)
    norm = rng.standard_normal(64, dtype=np.float32)
    writer.add_tensor("output_norm.weight", norm)
    tensors["output_norm.weight"] = ("F32", norm, norm.shape, 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def converted(loadcheck, source, target, *more):
    words = [loadcheck, "convert", source, target, "--verify", "--json", *more]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{words}: {done.stdout}{done.stderr}")
    found, texts = {}, {}
    for path in target.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
            texts |= file.metadata() or {}
    return found, texts


def same(found, expected):
    """Bits are equal, or both are NaN."""
    integers = {4: torch.int32, 2: torch.int16}[found.element_size()]
    equal = found.view(integers) == expected.view(integers)
    return bool((equal | (found.isnan() & expected.isnan())).all())


def check(tensors, found, texts, dtype):
    wanted = {None: None, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    assert found.keys() == tensors.keys(), found.keys() ^ tensors.keys()
    numbers = 0
    for name, (kind, data, shape, size) in tensors.items():
        tensor = found[name]
        if kind == "F32":
            expected = torch.from_numpy(data)
            assert same(tensor, expected if wanted is None else expected.to(wanted)), name
            continue
        if wanted is None or kind in NOT_DECODED:
            assert tensor.dtype == torch.uint8 and (tensor.numpy() == data).all(), name
            assert texts[f"gguf_type.{name}"] == kind, name
            continue
        expected = torch.from_numpy(floats(data.reshape(-1, size), kind)).reshape(shape)
        assert tensor.dtype == wanted and tensor.shape == expected.shape, name
        assert same(tensor, expected.to(wanted)), (name, dtype)
        numbers += tensor.numel()
    return numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loadcheck", default=ROOT / "target" / "debug" / "loadcheck")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng, numbers = np.random.default_rng(args.seed), 0
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            tensors = write(folder / "model.gguf", rng)
            for dtype in (None, "f32", "bf16", "f16"):
                more = ["--dtype", dtype] if dtype else []
                found, texts = converted(args.loadcheck, folder / "model.gguf", folder / str(dtype), *more)
                numbers += check(tensors, found, texts, dtype)
    print(json.dumps({"rounds": args.rounds, "numbers": numbers, "differences": 0}))


if __name__ == "__main__":
    main()
