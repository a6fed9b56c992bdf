#!/usr/bin/env python3
"""Measures every figure quoted in docs/figures.md and docs/design.md, and prints one table.

    python3 benches/figures.py DIR [--only NAME ...] [--rounds 3] [--python PYTHON] [--save]

DIR gets a 17 GB checkpoint (a gemma-7b of random bytes) and smaller ones, which are kept until you delete
them. Figures whose names begin with `convert` temporarily write up to 17 GB more. `--python` names an
interpreter with the packages `safetensors` and `blake3` for the comparison with the reference reader, and
`torch` for the comparison with another converter. Without it, fixtures/reference_hashes.json (computed the
same way) replaces them for the small checkpoints, and the table says what is skipped. `--save` writes
benches/results/DATE-figures.md.

Ratios are taken within a round, against a baseline that ran next to it. The table has median and spread. Cold
means that no page of the files was cached when the clock started, which the program checks.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

sys.dont_write_bytecode = True

import conversions  # noqa: E402
import speed  # noqa: E402
from figure_tools import LOADCHECK, MIB, RELEASE, ROOT, Group, Table, compare, files, growth, mib, run, synth  # noqa: E402


def build():
    examples = [word for name in ("plain_reader", "watch_rss", "inventories") for word in ("--example", name)]
    cargo = lambda *words: subprocess.run(["cargo", *words], cwd=ROOT, check=True)
    cargo("build", "--release", "-p", "loadcheck")
    cargo("build", "--release", "-p", "onelayer", *examples)
    cargo("test", "--release", "-p", "onelayer", "--no-run", "--test", "loader")


def watched(folder, *flags):
    """Runs under watch_rss. Returns the report and the peak RSS read from /proc by another process."""
    target = ROOT / "target/figures-report.json"
    words = [RELEASE / "examples/watch_rss", "--interval-ms", "2", "--", LOADCHECK, "run", folder, "-q", "--force"]
    words += ["--format", "json", "-o", target, *flags]
    done = subprocess.run([str(w) for w in words], stdout=subprocess.PIPE, check=True)
    return json.loads(target.read_text()), json.loads(done.stdout)


def memory(table, big, args):
    for io in ("buffered", "mmap", "direct"):
        for cache in ("cold", "warm"):
            report, outside = watched(big, "--device", "none", "--io", io, "--cache", cache)
            inside = growth(report)
            base = report["runs"][0]["baseline"]["rss_bytes"]
            seen = outside["largest_process"]["rss_peak_bytes"] - base
            cached = report["runs"][0]["cache"]["cached_share"]
            rate = report["source"]["bytes"] / report["runs"][0]["seconds"] / (1 << 30)
            table.add(
                f"17 GB, device none, {io}, {cache} ({cached:.0%} cached)", "<= 80 MiB",
                f"+{mib(inside)}; from outside +{mib(seen)}; {rate:.2f} GiB/s",
                inside <= 80 * MIB and seen <= 80 * MIB,
            )


def host(table, big, args):
    for io in ("buffered", "mmap", "direct"):
        report = run(big, "--device", "host", "--window", "1", "--io", io)
        one = report["runs"][0]
        # The arena of the largest layer: rounded up to 2 MiB.
        largest = report["source"]["largest_layer"]["bytes"]
        limit = largest + 80 * MIB
        back = one["after_unload"]["rss_bytes"] - one["baseline"]["rss_bytes"]
        table.add(
            f"17 GB, device host, window 1, {io}", f"<= largest layer ({mib(largest)}) + 80 MiB; back within 4 MiB",
            f"+{mib(growth(report))}, that is layer {mib(growth(report) - largest)}; after the run +{mib(back)}",
            growth(report) <= limit and back <= 4 * MIB,
        )


def small(table, big, args):
    for io in ("buffered", "mmap", "direct"):
        report = run(big, "--device", "none", "--io", io, "--budget", "8MiB")
        table.add(f"17 GB, device none, {io}, --budget 8MiB", "<= 24 MiB", f"+{mib(growth(report))}", growth(report) <= 24 * MIB)


def reference_hashes(big, python):
    """Name -> BLAKE3 of the bytes read by Python's safetensors package."""
    code = (
        "import sys, json, blake3, safetensors\n"
        "for path in sys.argv[1:]:\n"
        "    for name, t in safetensors.deserialize(open(path, 'rb').read()):\n"
        "        print(json.dumps([name, blake3.blake3(t['data'], max_threads=2).hexdigest()]), flush=True)\n"
    )
    found = {}
    for path in files(big):  # one process per shard: the reference holds a shard twice
        out = subprocess.run([python, "-c", code, path], stdout=subprocess.PIPE, check=True).stdout.decode()
        found.update(json.loads(line) for line in out.splitlines())
    return found


def cgroup(table, big, args):
    must = "completes; every hash right"
    try:
        group = Group(128 * MIB)
    except OSError as error:
        table.add("17 GB inside a 128 MiB memory cgroup", must, f"skipped: no cgroup can be made here ({error})", None)
        return
    try:
        reports = {io: run(big, "--device", "none", "--io", io, "--hash", setup=group.enter) for io in ("buffered", "mmap", "direct")}
    finally:
        group.remove()
    if args.python is None:
        table.add("17 GB inside a 128 MiB memory cgroup", must, "skipped: name a --python with safetensors and blake3", None)
        return
    expected = reference_hashes(big, args.python)
    for io, report in reports.items():
        found = {h["name"]: h["blake3"] for h in report["hashes"]}
        right = sum(found.get(name) == value for name, value in expected.items())
        table.add(
            f"17 GB inside a 128 MiB memory cgroup, {io}", must,
            f"completed in {report['runs'][0]['seconds']:.1f} s, {right} of {len(expected)} hashes right",
            right == len(expected) == len(found),
        )


def plain(folder, *flags):
    words = [RELEASE / "examples/plain_reader", *flags, *files(folder)]
    out = subprocess.run([str(w) for w in words], stdout=subprocess.PIPE, check=True).stdout.decode()
    return float(out.split(" GiB/s")[0].split()[-1])


def rate(report):
    return report["source"]["bytes"] / report["runs"][0]["seconds"] / (1 << 30)


def direct(table, big, args):
    readers = str(max(4, os.cpu_count() or 1))
    ours = lambda: rate(run(big, "--device", "none", "--io", "direct", "--cache", "cold", "--readers", readers))
    theirs = lambda: plain(big, "--direct", "--cold", "--threads", readers, "--block", "4MiB")
    a, b, ratio, low, high = compare(args.rounds, ours, theirs)
    table.add(
        "17 GB cold, direct, against a plain direct reader (4 MiB blocks, same threads)", ">= 0.90",
        f"{ratio:.2f} ({low:.2f} to {high:.2f}); {a:.2f} against {b:.2f} GiB/s, {args.rounds} rounds", ratio >= 0.90,
    )


def warm(table, big, args):
    four = synth(args.directory / "mistral-8-layers", "mistral-7b", "--layers", "8")
    threads = str(os.cpu_count() or 1)
    theirs = lambda: plain(four, "--buffered", "--threads", threads, "--block", "4MiB", "--buffer", "64MiB")
    plain(four, "--buffered")
    results = {}
    for io in ("buffered", "mmap"):
        ours = lambda: rate(run(four, "--device", "none", "--io", io, "--cache", "warm", "--readers", threads))
        results[io] = compare(max(args.rounds, 7), ours, theirs)
    best = max(results, key=lambda io: results[io][2])
    text = "; ".join(
        f"{io} {ratio:.2f} ({low:.2f} to {high:.2f}), {a:.1f} against {b:.1f} GiB/s"
        for io, (a, b, ratio, low, high) in results.items()
    )
    table.add(f"4 GB warm, best source ({best}), against plain pread into 64 MiB, {threads} threads", ">= 0.85", text, results[best][2] >= 0.85)


def checkpoints(table, big, args):
    expected = json.loads((ROOT / "fixtures/reference_hashes.json").read_text())
    right = total = 0
    for name, tensors in expected.items():
        for io in ("buffered", "mmap", "direct"):
            for device in ("host", "none"):
                report = run(ROOT / "fixtures/checkpoints" / name, "--io", io, "--device", device, "--hash")
                found = {h["name"]: h["blake3"] for h in report["hashes"]}
                assert len(found) == len(tensors), name
                right += sum(found.get(tensor) == value["blake3"] for tensor, value in tensors.items())
                total += len(tensors)
    table.add(f"{len(expected)} checkpoints of transformers, 3 sources, 2 devices", "every tensor bit-equal", f"{right} of {total}", right == total > 0)


def million(table, big, args):
    out = subprocess.run(
        ["cargo", "test", "--release", "-p", "onelayer", "--test", "loader", "--", "checkpoint_million", "--nocapture"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )
    lines = [line for line in out.stdout.decode().splitlines() if "1000000" in line or "10^6" in line or "million" in line.lower()]
    table.add("header with 10^6 tensors", "<= 1 s, <= 250 MiB", "; ".join(lines[:2]) or "no line printed", out.returncode == 0 and bool(lines))


def inventories(table, big, args):
    folder = args.inventories or ROOT / "fixtures/inventories"
    out = subprocess.run([RELEASE / "examples/inventories", folder], stdout=subprocess.PIPE)
    lines = [line.strip() for line in out.stdout.decode().splitlines() if "exact" in line or line.startswith("real")]
    table.add("layer grouping", ">= 95 % transformers, >= 92 % diffusers, 0 lost", "; ".join(lines), out.returncode == 0)


FIGURES = [memory, host, small, cgroup, direct, warm, checkpoints, million, inventories, *speed.FIGURES, *conversions.FIGURES]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", choices=[f.__name__ for f in FIGURES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", type=pathlib.Path)
    parser.add_argument("--inventories", type=pathlib.Path, help="a folder of full inventories instead of the fixtures")
    parser.add_argument("--small", action="store_true", help="convert no checkpoint of 17 GB")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    build()
    args.directory.mkdir(parents=True, exist_ok=True)
    chosen = [f for f in FIGURES if not args.only or f.__name__ in args.only]
    large = {memory, host, small, cgroup, direct, *speed.LARGE}
    big = synth(args.directory / "gemma-7b", "gemma-7b") if large & set(chosen) else None
    table = Table()
    for figure in chosen:
        figure(table, big, args)
    cpu = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
    head = (
        f"# Figures, {datetime.date.today()}\n\n`python3 benches/figures.py DIR --rounds {args.rounds}` on {os.cpu_count()} cores ({cpu}), "
        f"Linux {platform.release()}, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // MIB} MiB of memory, no GPU. "
        "Random data; growth of RSS over the baseline, from the kernel's high-water mark.\n\n"
    )
    print("\n" + table.markdown())
    if args.save:
        target = ROOT / f"benches/results/{datetime.date.today()}-figures.md"
        target.write_text(head + table.markdown())
        print(f"wrote {target.relative_to(ROOT)}")
    sys.exit(any(passed is False for *_, passed in table.rows))


if __name__ == "__main__":
    main()
