#!/usr/bin/env python3
"""Measures PyTorch files: memory, speed against safetensors and against torch. (GGUF: gguf_speed.py.)

    python3 benches/formats.py DIR --python PYTHON [--only NAME ...] [--rounds 5] [--save]

PYTHON has torch and safetensors. DIR gets up to 34 GB (a gemma-7b of random bytes as one PyTorch file,
and its conversion); `--small` takes a gemma-2b (5 GB) instead. Ratios are taken within a round, against a
baseline that ran next to it; the table has median and spread. Cold means that no page of the file was cached
when the clock started, which is checked. `--save` writes benches/results/DATE-formats.md.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys

sys.dont_write_bytecode = True

from conversions import convert  # noqa: E402
from figure_tools import LOADCHECK, MIB, ROOT, SLACK, Group, Table, compare, files, growth, mib, run, synth  # noqa: E402

sys.path.insert(0, str(ROOT / "scripts"))

from gpu_check import cache  # noqa: E402

BUDGET = 64 * MIB


def child(args, *words):
    done = subprocess.run([args.python, ROOT / "benches/formats_child.py", *map(str, words)], stdout=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(f"formats_child.py {' '.join(map(str, words))}: exit {done.returncode}")
    return json.loads(done.stdout)


def as_bin(args, preset):
    """A preset as safetensors and as one PyTorch file."""
    folder, target = args.directory / preset, args.directory / f"{preset}.bin"
    if not target.exists():
        synth(folder, preset)
        child(args, "bin", *files(folder), target)
    return folder, target


def big(args):
    folder, target = as_bin(args, "gemma-2b" if args.small else "gemma-7b")
    if not args.small:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def torch_memory(table, args):
    source = big(args)
    for device in ("none", "host"):
        cache.prepare([source], "cold")
        window = [] if device == "none" else ["--window", "1"]
        report = run(source, "--device", device, *window, "--budget", "64MiB", *(["--verify"] if device == "host" else []))
        terms = 80 * MIB if device == "none" else BUDGET + SLACK + resident(report)
        rate = report["source"]["bytes"] / report["runs"][0]["seconds"] / (1 << 30)
        what = f"{report['source']['bytes'] / 1e9:.0f} GB .bin, cold, budget 64 MiB, device {device}" + (", every tensor verified" if window else "")
        table.add(what, f"<= {mib(terms)}", f"+{mib(growth(report))}; {rate:.2f} GiB/s", growth(report) <= terms)


def resident(report):
    """Bytes of the layers that a load to the host keeps at once."""
    return report["plan"]["resident_bytes"]


def torch_group(table, args):
    source, target = big(args), args.directory / "converted"
    group = Group(128 * MIB)
    try:
        cache.prepare([source], "cold")
        report = run(source, "--device", "none", "--budget", "64MiB", setup=group.enter)
        size = f"{report['source']['bytes'] / 1e9:.0f} GB .bin"
        table.add(f"{size} inside a 128 MiB memory cgroup, streamed", "completes; <= 80 MiB", f"+{mib(growth(report))}, the group's peak with pages of files {mib(group.peak())}", growth(report) <= 80 * MIB)
        cache.prepare([source], "cold")
        report, seconds = convert(source, target, "--budget", "64MiB", setup=group.enter)
        peak = group.peak()
    finally:
        group.remove()
    found = child(args, "equal", source, target)
    shutil.rmtree(target)
    table.add(
        f"{size} inside a 128 MiB memory cgroup, converted", "completes; <= 80 MiB; bit-equal to torch.load",
        f"+{mib(growth(report))} in {seconds:.1f} s, the group's peak {mib(peak)}; {found['tensors']} tensors equal, {len(found['missing'])} missing",
        growth(report) <= 80 * MIB and not found["missing"],
    )


def torch_speed(table, args):
    folder, target = as_bin(args, "gemma-2b")
    for state in ("cold", "warm"):
        def rate(paths, source):
            cache.prepare(paths, state)
            report = run(source, "--device", "none", "--budget", "64MiB")
            return report["source"]["bytes"] / report["runs"][0]["seconds"] / (1 << 30)

        a, b, ratio, low, high = compare(args.rounds, lambda: rate([target], target), lambda: rate(files(folder), folder))
        table.add(f"5 GB .bin against safetensors, {state}", ">= 0.95", f"{ratio:.2f} ({low:.2f} to {high:.2f}); {a:.2f} against {b:.2f} GiB/s, {args.rounds} rounds", ratio >= 0.95)


def torch_million(table, args):
    for name, words in (("each its own storage", []), ("views of one storage", ["views"])):
        target = args.directory / "million.bin"
        child(args, "million", target, *words)
        words = [ROOT / "target/release/examples/open_checkpoint", target]
        opened = [json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout) for _ in range(args.rounds)]
        seconds, peak = min(one["seconds"] for one in opened), max(one["growth_bytes"] for one in opened)
        target.unlink()
        table.add(f"10^6 tensors in one PyTorch file, {name}", "<= 1 s, <= 250 MiB", f"{seconds:.2f} s at best of {args.rounds}, +{mib(peak)}", seconds <= 1 and peak <= 250 * MIB)


def torch_convert(table, args):
    _, source = as_bin(args, "gemma-2b")
    target, memory = args.directory / "converted", {"ours": [], "theirs": []}

    def start():
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["sync"], check=True)
        cache.prepare([source], "cold")

    def ours():
        start()
        report, seconds = convert(source, target)
        memory["ours"].append(growth(report))
        return 1 / seconds

    def theirs():
        start()
        found = child(args, "split", source, target)
        memory["theirs"].append(found["peak_bytes"] - found["before_bytes"])
        return 1 / found["seconds"]

    a, b, ratio, low, high = compare(args.rounds, ours, theirs)
    shutil.rmtree(target)
    mine, other = max(memory["ours"]), min(memory["theirs"])
    table.add(
        "5 GB .bin to per-layer safetensors, cold, against torch.load and save_file", "faster; <= 1/20 of its memory",
        f"{ratio:.2f} times as fast ({low:.2f} to {high:.2f}), {1 / a:.1f} s against {1 / b:.1f} s without its imports; +{mib(mine)} against +{mib(other)}: {mine / other:.3f}; {args.rounds} rounds",
        ratio > 1 and mine <= other / 20,
    )


FIGURES = (torch_million, torch_speed, torch_convert, torch_memory, torch_group)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--python", type=pathlib.Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[figure.__name__ for figure in FIGURES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    cargo = lambda *words: subprocess.run(["cargo", *words], cwd=ROOT, check=True)
    cargo("build", "--release", "-p", "loadcheck")
    cargo("build", "--release", "-p", "onelayer", "--example", "open_checkpoint")
    args.directory.mkdir(parents=True, exist_ok=True)
    table = Table()
    for figure in FIGURES:
        if not args.only or figure.__name__ in args.only:
            figure(table, args)
    print("\n" + table.markdown())
    if args.save:
        target = ROOT / f"benches/results/{datetime.date.today()}-formats.md"
        head = (
            f"# PyTorch files, {datetime.date.today()}\n\n`python3 benches/formats.py DIR --python PYTHON --rounds {args.rounds}` on "
            f"{os.cpu_count()} cores, Linux {platform.release()}, no GPU. Random data; growth of RSS over the baseline, from the kernel's high-water mark.\n\n"
        )
        target.write_text(head + table.markdown())
        print(f"wrote {target.relative_to(ROOT)}")
    sys.exit(any(passed is False for *_, passed in table.rows))


if __name__ == "__main__":
    main()
