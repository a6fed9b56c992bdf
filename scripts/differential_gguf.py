#!/usr/bin/env python3
"""Compares the reader of GGUF headers with gguf-py's on generated and corrupted files.

    cargo build --release --example open_each
    python scripts/differential_gguf.py [--files 100000] [--seed 1] [--minutes 10]

Needs gguf 0.19 and numpy. Both readers get the same file; `open_each` reads paths from its input and says for
each `ok`, with every tensor's name, type, shape, offset and length, or `refused` with the reason. Files that
one of them refuses fall into classes, which are explained below; a difference without a class is an error.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import time
import warnings

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What only we refuse, by our reason. gguf-py reads lists into Python objects and checks little of them.
STRICTER = {
    "at most 63 bytes": "ggml stores names in 64 bytes",
    "at most 4 dimensions": "ggml has four dimensions",
    "dimensions above zero": "ggml refuses them; llama.cpp divided by zero",
    "rows of whole blocks": "gguf-py rounds the length down",
    "behind those of": "two tensors over the same bytes",
    "a key of at most": "the format limits keys",
    "levels": "arrays of arrays, deeper than any file needs",
    "big-endian order": "the data would have to be swapped",
    "size below 2^64": "gguf-py's product wraps",
    "bytes short": "gguf-py cuts a mapping that is too short, and then fails or gives fewer elements",
    "than the rest of the file can hold": "gguf-py reads past the end as empty",
    "up to the end": "gguf-py reads past the end as empty",
    "inside the file": "the offset wraps",
    "from 0 to 12": "the type of an array without elements, which gguf-py does not look at",
    "removed this type": "a type that gguf-py does not know either, in another order of checks",
}
# What only gguf-py refuses, by the beginning of its message.
LAXER = {
    "UnicodeDecodeError": "texts that nobody asked for are not decoded",
    "ValueError: When changing": "a cut at the end of the file, where we need no more bytes",
}


def text(value):
    return struct.pack("<Q", len(value)) + value


def random_value(rng):
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    kind = rng.choice([*sizes, 8, 8, 9, 9])
    if kind == 8:
        return kind, text(bytes(rng.choices(b"abcdefgh. ", k=rng.randint(0, 40))))
    if kind == 9:
        item = rng.choice([*sizes, 8])
        count = rng.randint(0, 6)
        items = b"".join(text(b"w" * rng.randint(0, 5)) if item == 8 else rng.randbytes(sizes[item]) for _ in range(count))
        return kind, struct.pack("<IQ", item, count) + items
    if kind == 7:
        return kind, rng.choice([b"\0", b"\1"])
    return kind, rng.randbytes(sizes[kind])


def random_file(rng):
    alignment = rng.choice([32, 32, 32, 1, 8, 64, 256])
    keys = [(b"general.architecture", 8, text(b"llama"))]
    if alignment != 32:
        keys.append((b"general.alignment", 4, struct.pack("<I", alignment)))
    keys += [(f"k.{at}".encode(), *random_value(rng)) for at in range(rng.randint(0, 6))]
    rng.shuffle(keys)
    tensors, offset = [], 0
    for at in range(rng.randint(0, 6)):
        qtype = rng.choice(list(GGML_QUANT_SIZES))
        elements, size = GGML_QUANT_SIZES[qtype]
        dims = [elements * rng.randint(1, 3)] + [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.1:
            offset += rng.randint(0, 100)
        tensors.append((f"blk.{at}.w".encode(), dims, int(qtype), offset))
        offset += int(np.prod(dims)) // elements * size
        offset += -offset % alignment if rng.random() < 0.95 else 0
    header = b"GGUF" + struct.pack("<IQQ", rng.choice([2, 3]), len(tensors), len(keys))
    header += b"".join(text(name) + struct.pack("<I", kind) + value for name, kind, value in keys)
    for name, dims, kind, place in tensors:
        header += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, place)
    return header + b"\0" * (-len(header) % alignment) + b"\5" * offset, len(header)


def corrupted(rng, file, header):
    data = bytearray(file)
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
        at = rng.randrange(max(1, min(header, len(data))))
        # Bytes that are lost or added spoil all that follows: rarely.
        match rng.choices(range(7), [6, 1, 1, 2, 4, 4, 6])[0]:
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at : at + 1] = b""
            case 2:
                data[at:at] = bytes([rng.randrange(256)])
            case 3:
                data = data[: rng.randrange(len(data) + 1)]
            case 4:
                data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2, 7, 1 << 20, 1 << 32, 1 << 63, (1 << 64) - 1]))
            case 5:
                data[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 2, 3, 8, 9, 12, 30, 39, 64, 255]))
            case _:
                data[at] ^= 1 << rng.randrange(8)
        if not data:
            break
    return bytes(data)


def by_gguf_py(path):
    """The tensors as gguf-py sees them, or its refusal."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            reader = GGUFReader(path)
            found = [
                [t.name, t.tensor_type.name, [int(n) for n in reversed(t.shape.tolist())], int(t.data_offset), int(t.n_bytes)]
                for t in reader.tensors
            ]
            short = any(t.data.nbytes != t.n_bytes for t in reader.tensors)
        return sorted(found), "short" if short else ""
    except Exception as error:  # noqa: BLE001 - whatever it raises is its refusal
        return None, f"{type(error).__name__}: {error}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--reader", default=ROOT / "target" / "release" / "examples" / "open_each")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    classes, end = collections.Counter(), time.monotonic() + 60 * args.minutes
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        path = pathlib.Path(folder) / "model.gguf"
        ours = subprocess.Popen([args.reader], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(args.files):
            if time.monotonic() > end:
                break
            file = corrupted(rng, *random_file(rng))
            path.write_bytes(file)
            # Files far past a limit make gguf-py loop for minutes; nobody needs its verdict then.
            ours.stdin.write(f"{path}\n")
            ours.stdin.flush()
            answer = json.loads(ours.stdout.readline())
            if "refused" in answer and "announced, more than the rest" in answer["refused"]:
                classes["we refuse: counts that the file cannot hold (gguf-py not asked: it counts to the end)"] += 1
                continue
            theirs, reason = by_gguf_py(path) if file else (None, "empty")
            if "refused" in answer:
                if theirs is None:
                    classes["both refuse"] += 1
                    continue
                known = [why for words, why in STRICTER.items() if words in answer["refused"]]
                if not known:
                    print(f"file {number}: we refuse ({answer['refused']}), gguf-py reads {theirs}")
                    classes["UNEXPLAINED"] += 1
                    (pathlib.Path(tempfile.gettempdir()) / f"difference-{number}.gguf").write_bytes(file)
                else:
                    classes[f"we refuse: {known[0]}"] += 1
            elif theirs is None:
                known = [why for words, why in LAXER.items() if reason.startswith(words)]
                if not known:
                    print(f"file {number}: gguf-py refuses ({reason}), we read {answer['ok']}")
                    classes["UNEXPLAINED"] += 1
                    (pathlib.Path(tempfile.gettempdir()) / f"difference-{number}.gguf").write_bytes(file)
                else:
                    classes[f"gguf-py refuses: {known[0]}"] += 1
            elif sorted(answer["ok"]) == theirs and not reason:
                classes["the same tensors"] += 1
            else:
                print(f"file {number}: we read {sorted(answer['ok'])}, gguf-py {theirs} {reason}")
                classes["UNEXPLAINED"] += 1
        ours.stdin.close()
        ours.wait()
    for name, count in classes.most_common():
        print(f"{count:8}  {name}")
    print(f"{sum(classes.values()):8}  files")
    sys.exit(1 if classes["UNEXPLAINED"] else 0)


if __name__ == "__main__":
    main()
