#!/usr/bin/env python3
"""Figures of the Python package and of its alternatives, on the same files in the same run.

    benches/python/figures.py FOLDER [--only stream,load_file,owned,owned_prepared,owned_cold,transformers]
                              [--rounds 5] [--markdown FILE]

FOLDER is a checkpoint of transformers (with config.json) in one safetensors file of a few gigabytes, such as
from `loadcheck synth mistral-7b FOLDER --layers 8`. Run it with an interpreter that has onelayer, torch,
transformers and safetensors, after `cargo build --release -p onelayer --example one_load`. Rounds are
interleaved, every run is a new process, and cold runs drop the files' cached pages first. Memory is measured
in separate runs, since measuring takes time.
"""

import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MIB = 1 << 20
ALLOWANCE = 16 * MIB

# A run, with arguments for the child such as `memory=yes`.
Run = Callable[..., dict[str, Any]]
MEMORY_RUNS = 2
PAUSE_SECONDS = 3
CLONE = "safe_open and clone()"
TOUCHED = "safetensors load_file, every byte read (mapped)"


def drop(files: list[Path]) -> None:
    """Drops the cached pages of the files."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(files: list[Path]) -> None:
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.read(8 * MIB):
                pass


def python(*words: object) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "child.py"), *map(str, words)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def rust(way: str, source: Path, budget_mib: int) -> dict[str, Any]:
    """Runs `one_load`, which prints `ready` and waits for "go"."""
    command = [
        str(ROOT / "target/release/examples/one_load"),
        way,
        str(source),
        "--budget-mib",
        str(budget_mib),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    process.stdin.write("go\n")
    process.stdin.flush()
    done = json.loads(process.stdout.readline())
    process.communicate("end\n")
    return {"seconds": done["seconds"], "bytes": done["bytes"]}


def prepare(size: int) -> None:
    """Touches and frees so much memory, so that the host of a virtual machine gives it to this one."""
    # MADV_HUGEPAGE and MADV_POPULATE_WRITE of Linux 5.14: pages of 2 MiB, touched by the kernel.
    huge, populate = 14, 23
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.madvise(huge)
        pages.madvise(populate)


def rounds(
    ways: dict[str, Run], files: list[Path], cache: str, count: int, prepared_bytes: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """Runs all ways in turn, each round in another order, and measures time only."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    names = list(ways)
    order = random.Random(1)
    for _ in range(count):
        order.shuffle(names)
        for name in names:
            # The host of a virtual machine takes back what the last process freed, within two seconds. Without the
            # pause, the next one would find the more of it, the more the last one has used.
            time.sleep(0.2 if prepared_bytes else PAUSE_SECONDS)
            (drop if cache == "cold" else warm)(files)
            if prepared_bytes:
                prepare(prepared_bytes)
            found[name].append(ways[name]())
    return found


def memory(ways: dict[str, Run], files: list[Path], cache: str) -> dict[str, list[dict[str, Any]]]:
    """Runs that measure only memory."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(MEMORY_RUNS):
        for name, way in ways.items():
            (drop if cache == "cold" else warm)(files)
            found[name].append(way("memory=yes"))
    return found


def table(
    title: str,
    ways: dict[str, Run],
    reference: str,
    files: list[Path],
    cache: str,
    count: int,
    prepared_bytes: int = 0,
) -> Iterator[str]:
    """One row per way: median speed, and median ratio to the reference in the same round."""
    found, measured = rounds(ways, files, cache, count, prepared_bytes), memory(ways, files, cache)
    yield f"\n### {title}\n"
    yield "| way | GB/s, median (min to max) | speed over reference | RSS growth, most | unreclaimable growth, most |"
    yield "|---|---:|---:|---:|---:|"
    for name, runs in found.items():
        speeds = [run["bytes"] / run["seconds"] / 1e9 for run in runs]
        ratios = [other["seconds"] / run["seconds"] for run, other in zip(runs, found[reference], strict=True)]
        speed = f"{statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})"
        yield (
            f"| {name} | {speed} | {statistics.median(ratios):.2f} | {most(measured[name], 'rss_growth_bytes')} "
            f"| {most(measured[name], 'host_growth_bytes')} |"
        )


def most(runs: list[dict[str, Any]], key: str) -> str:
    values = [run[key] for run in runs if run.get(key) is not None]
    return f"{max(values) / MIB:.0f} MiB" if values else "-"


def streams(folder: Path, files: list[Path], count: int) -> Iterator[str]:
    budget = 64
    for device, way in (("none", "none"), ("cpu", "host-1")):
        for cache in ("cold", "warm"):
            ways: dict[str, Run] = {
                "Rust": lambda *_, way=way: rust(way, folder, budget),
                "Python": lambda *words, device=device: python(
                    "stream",
                    folder,
                    f"device={device}",
                    f"budget={budget}MiB",
                    f"window={1 if device == 'cpu' else 2}",
                    *words,
                ),
            }
            yield from table(f"stream to {device}, {cache}, budget {budget} MiB", ways, "Rust", files, cache, count)
            yield f"\nBudget and allowance: {budget + ALLOWANCE // MIB} MiB, on the CPU beside one layer."


def load_files(files: list[Path], count: int) -> Iterator[str]:
    for backend in ("mmap", "pread"):
        for cache in ("cold", "warm"):
            ways: dict[str, Run] = {
                by: lambda *words, by=by, backend=backend: python(
                    "load_file", files[0], f"by={by}", f"backend={backend}", *words
                )
                for by in ("safetensors", "onelayer")
            }
            yield from table(f"load_file, {backend}, {cache}, every byte touched", ways, "safetensors", files, cache, count)


def owned_ways(files: list[Path]) -> dict[str, Run]:
    calls = {
        "clone": CLONE,
        "touched": TOUCHED,
        "stream": 'dict(checkpoint.tensors(window="all"))',
        "load_file": "load_file of onelayer, pread",
    }
    return {name: lambda *words, by=by: python("owned", files[0], f"by={by}", *words) for by, name in calls.items()}


def owned(files: list[Path], count: int) -> Iterator[str]:
    """Memory as the system gives it to a new process."""
    ways = {name: way for name, way in owned_ways(files).items() if name != TOUCHED}
    yield from table("owned tensors, warm, memory as found", ways, CLONE, files, "warm", count)


def owned_prepared(files: list[Path], count: int) -> Iterator[str]:
    """Memory that was touched and freed before."""
    prepared_bytes = 2 * sum(file.stat().st_size for file in files) + (1 << 30)
    title = "owned tensors, warm, memory prepared"
    ways = {name: way for name, way in owned_ways(files).items() if name != TOUCHED}
    yield from table(title, ways, CLONE, files, "warm", count, prepared_bytes)


def owned_cold(files: list[Path], count: int) -> Iterator[str]:
    yield from table("owned tensors, cold, memory as found", owned_ways(files), TOUCHED, files, "cold", count)


def transformers(folder: Path, files: list[Path], count: int) -> Iterator[str]:
    ways: dict[str, Run] = {
        "plain": lambda *words: python("transformers", folder, "by=transformers", *words),
        "onelayer, mapped": lambda *words: python("transformers", folder, "by=onelayer", "mode=mapped", *words),
        "onelayer, owned": lambda *words: python("transformers", folder, "by=onelayer", "mode=owned", *words),
    }
    for cache in ("cold", "warm"):
        yield from table(f"transformers, {cache}, every byte touched", ways, "plain", files, cache, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="stream,load_file,owned,owned_prepared,owned_cold,transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    files = sorted(arguments.folder.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    lines = [
        f"{len(files)} file(s), {total / 1e9:.2f} GB, {os.cpu_count()} cores, medians of {arguments.rounds} rounds"
    ]
    print(lines[0])
    makers: dict[str, Callable[[], Iterator[str]]] = {
        "stream": lambda: streams(arguments.folder, files, arguments.rounds),
        "load_file": lambda: load_files(files, arguments.rounds),
        "owned": lambda: owned(files, arguments.rounds),
        "owned_prepared": lambda: owned_prepared(files, arguments.rounds),
        "owned_cold": lambda: owned_cold(files, arguments.rounds),
        "transformers": lambda: transformers(arguments.folder, files, arguments.rounds),
    }
    for name in arguments.only.split(","):
        for line in makers[name]():
            print(line, flush=True)
            lines.append(line)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
