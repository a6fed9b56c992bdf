#!/usr/bin/env python3
"""Speed of GGUF files: blocks as stored, and turned into bf16 on the way, warm and interleaved.

    cargo build --release && python benches/gguf_speed.py [--directory DIR] [--mib 1024] [--pairs 7] [TYPE...]

Needs gguf 0.19 and numpy. Makes one file for each type (layers of two tensors, blocks of
fixtures/gguf_blocks.safetensors) and removes it. Reports source bytes per second: of a plain load, of one
with --dtype bf16, both with two readers to host memory and to no device, their ratio as the median of pairs,
the peak of memory over the start; and of gguf-py's dequantize on a part of the file (single precision, one
thread).

With --candle, the path of `gguf_reader` (cargo build --release --example gguf_reader in bindings/candle), it
compares with candle's own reader instead: to f32 and to bf16, ours with one reader and with two, interleaved;
medians, with the lowest and the highest of all rounds.
"""

import argparse
import json
import pathlib
import statistics
import struct
import subprocess
import tempfile
import time

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from safetensors.numpy import load_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOADCHECK = ROOT / "target" / "release" / "loadcheck"
COLUMNS = 4096


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def make(path, name, mib, layers):
    """A file of `layers` layers with two tensors each, about `mib` MiB."""
    qtype = GGMLQuantizationType[name]
    elements, size = GGML_QUANT_SIZES[qtype]
    row_bytes = COLUMNS // elements * size
    rows = (mib << 20) // (2 * layers * row_bytes) // 32 * 32
    tensor_bytes = rows * row_bytes
    infos, offset = b"", 0
    for layer in range(layers):
        for part in ("ffn_up", "ffn_down"):
            infos += text(f"blk.{layer}.{part}.weight") + struct.pack("<IQQIQ", 2, COLUMNS, rows, qtype, offset)
            offset += (tensor_bytes + 31) // 32 * 32
    header = b"GGUF" + struct.pack("<IQQ", 3, 2 * layers, 1)
    header += text("general.architecture") + struct.pack("<I", 8) + text("llama") + infos
    blocks = load_file(ROOT / "fixtures" / "gguf_blocks.safetensors")[f"{name}.blocks"]
    data = np.tile(blocks.reshape(-1), tensor_bytes // blocks.size + 1)[:tensor_bytes].tobytes()
    with open(path, "wb") as file:
        file.write(header + b"\0" * (-len(header) % 32))
        for _ in range(2 * layers):
            file.write(data + b"\0" * (-len(data) % 32))
    return 2 * layers * tensor_bytes


def load(path, device, *more, readers=2):
    words = [LOADCHECK, "run", path, "--device", device, "--window", "1", "--readers", readers, "--cache", "warm"]
    words += ["--json", *more]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr + done.stdout)
    return json.loads(done.stdout)


def by_gguf_py(path, name, mib=64):
    data = np.fromfile(path, dtype=np.uint8, count=(mib << 20), offset=4096)
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    rows = data[: len(data) // (COLUMNS // elements * size) * (COLUMNS // elements * size)]
    rows = rows.reshape(-1, COLUMNS // elements * size)
    with np.errstate(all="ignore"):
        start = time.perf_counter()
        quants.dequantize(rows, GGMLQuantizationType[name])
        return rows.nbytes / (time.perf_counter() - start)


def beside_candle(path, source_bytes, name, reader, rounds):
    """Prints the rates and peaks of candle's reader and of ours."""
    for dtype in ("f32", "bf16"):
        found = {"candle": [], "ours, 1 reader": [], "ours, 2 readers": []}
        for _ in range(rounds):
            done = subprocess.run([reader, path, dtype], capture_output=True, text=True, check=True)
            seconds, peak_mib = done.stdout.split()
            found["candle"].append((source_bytes / float(seconds) / 1e9, float(peak_mib)))
            for readers in (1, 2):
                run = load(path, "host", "--dtype", dtype, readers=readers)["runs"][0]
                peak_bytes = run["peak"]["rss_bytes"] - run["baseline"]["rss_bytes"]
                who = "ours, 1 reader" if readers == 1 else "ours, 2 readers"
                found[who].append((source_bytes / run["seconds"] / 1e9, peak_bytes / (1 << 20)))
        for who, runs in found.items():
            rates, peaks = zip(*runs)
            spread = f"({min(rates):.2f} to {max(rates):.2f})"
            print(f"{name:6} {dtype:5} {who:16} {statistics.median(rates):6.2f} GB/s {spread:16} {max(peaks):6.0f} MiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=["Q4_K", "Q6_K", "Q8_0"])
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--candle", type=pathlib.Path, help="compare with candle's reader: the path of gguf_reader")
    args = parser.parse_args()
    if args.candle:
        for name in args.types:
            path = args.directory / f"onelayer-{name}.gguf"
            try:
                source_bytes = make(path, name, args.mib, args.layers)
                beside_candle(path, source_bytes, name, args.candle, args.pairs)
            finally:
                path.unlink()
        return
    print(f"{'type':8} {'device':7} {'plain GB/s':>11} {'bf16 GB/s':>10} {'ratio':>6} {'peak MiB':>9} {'gguf-py':>8}")
    for name in args.types:
        path = args.directory / f"onelayer-{name}.gguf"
        source_bytes = make(path, name, args.mib, args.layers)
        try:
            oracle = by_gguf_py(path, name)
            for device in ("host", "none"):
                pairs = []
                for _ in range(args.pairs):
                    runs = [load(path, device, *more)["runs"][0] for more in ((), ("--dtype", "bf16"))]
                    pairs.append([source_bytes / run["seconds"] / 1e9 for run in runs])
                    peak = runs[1]["peak"]["rss_bytes"] - runs[1]["baseline"]["rss_bytes"]
                plain, bf16 = (statistics.median(column) for column in zip(*pairs))
                ratio = statistics.median(right / left for left, right in pairs)
                print(
                    f"{name:8} {device:7} {plain:11.2f} {bf16:10.2f} {ratio:6.2f} {peak / (1 << 20):9.0f} {oracle / 1e9:8.3f}"
                )
        finally:
            path.unlink()


if __name__ == "__main__":
    main()
