"""Figures of `loadcheck convert`: memory, throughput against copying and another converter, casts, and
bytes independent of options. Called by figures.py; every target is deleted.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time

from figure_tools import LOADCHECK, MIB, RELEASE, ROOT, SLACK, Group, compare, files, mib, synth

sys.path.insert(0, str(ROOT / "scripts"))
from gpu_check import cache  # noqa: E402

BUDGET = 64 * MIB
GIB = 1 << 30


def cold(source):
    cache.prepare(files(source), "cold")


def convert(source, target, *flags, setup=None):
    """Converts to a new target. Returns the report and the seconds of the whole process."""
    shutil.rmtree(target, ignore_errors=True)
    words = [LOADCHECK, "convert", source, target, "--json", "-q", *flags]
    start = time.monotonic()
    done = subprocess.run([str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=setup)
    seconds = time.monotonic() - start
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))}: exit {done.returncode}\n{done.stderr.decode()}")
    return json.loads(done.stdout), seconds


def growth(report):
    one = report["runs"][0]
    return one["peak"]["rss_bytes"] - one["baseline"]["rss_bytes"]


def bytes_of(source):
    return sum(path.stat().st_size for path in files(source))


def gemma_2b(args):
    return synth(args.directory / "gemma-2b", "gemma-2b")


def four(args):
    return synth(args.directory / "mistral-8-layers", "mistral-7b", "--layers", "8")


def watched(source, target, *flags):
    """Converts under watch_rss. Returns the report and the peak RSS read from /proc by another process."""
    shutil.rmtree(target, ignore_errors=True)
    out = ROOT / "target/figures-report.json"
    words = [RELEASE / "examples/watch_rss", "--interval-ms", "2", "--", LOADCHECK, "convert", source, target, "-q"]
    words += ["--format", "json", "-o", out, *flags]
    out.unlink(missing_ok=True)
    done = subprocess.run([str(w) for w in words], stdout=subprocess.PIPE, check=True)
    return json.loads(out.read_text()), json.loads(done.stdout)


def convert_memory(table, big, args):
    target = args.directory / "converted"
    sources = [("gemma-2b (5 GB)", gemma_2b(args))]
    large = args.directory / "gemma-7b"
    room = shutil.disk_usage(args.directory).free + (bytes_of(large) if large.exists() else 0)
    if args.small or room < 45e9:
        table.add("convert gemma-7b (17 GB)", "<= 80 MiB", "skipped: takes 45 GB of disk, and no --small", None)
    else:
        sources.append(("gemma-7b (17 GB)", synth(large, "gemma-7b")))
    for name, source in sources:
        for what, flags in (("per layer", []), ("to f16", ["--dtype", "f16"])):
            cold(source)
            report, outside = watched(source, target, "--budget", "64MiB", *flags)
            seen = outside["largest_process"]["rss_peak_bytes"] - report["runs"][0]["baseline"]["rss_bytes"]
            table.add(
                f"convert {name}, {what}, budget 64 MiB: peak RSS - baseline", "<= 80 MiB",
                f"+{mib(growth(report))}; from outside +{mib(seen)}; {report['convert']['result']['seconds']:.1f} s",
                max(growth(report), seen) <= BUDGET + SLACK,
            )
    shutil.rmtree(target)


def convert_cgroup(table, big, args):
    source, target = gemma_2b(args), args.directory / "converted"
    what, must = "convert gemma-2b (5 GB) inside a 128 MiB memory cgroup", "completes within 80 MiB; every tensor verified"
    try:
        group = Group(128 * MIB)
    except OSError as error:
        table.add(what, must, f"skipped: no cgroup can be made here ({error})", None)
        return
    try:
        cold(source)
        report, seconds = convert(source, target, "--budget", "64MiB", setup=group.enter)
        peak = group.peak()
    finally:
        group.remove()
    done = subprocess.run([LOADCHECK, "verify", target, "--against", source, "--json", "-q"], stdout=subprocess.PIPE)
    verified = json.loads(done.stdout)
    shutil.rmtree(target)
    table.add(
        what, must,
        f"+{mib(growth(report))} in {seconds:.1f} s, the group's peak with pages of files {mib(peak)}; {verified['verification']['tensors']} tensors verified",
        growth(report) <= BUDGET + SLACK and done.returncode == 0,
    )


def synced(target):
    """Seconds to sync a folder and its files."""
    start = time.monotonic()
    subprocess.run(["sync", *target.iterdir(), target], check=True)
    return time.monotonic() - start


def copy(source, target):
    shutil.rmtree(target, ignore_errors=True)
    start = time.monotonic()
    subprocess.run(["cp", "-r", source, target], check=True)
    copied = time.monotonic() - start
    return copied + synced(target)


def copy_direct(source, target):
    """Copies files with direct `dd`, so that no dirty pages are left."""
    target.mkdir()
    start = time.monotonic()
    for path in files(source):
        words = ["dd", f"if={path}", f"of={target / path.name}", "bs=8M", "iflag=direct", "oflag=direct", "conv=fsync", "status=none"]
        subprocess.run(words, check=True)
    return time.monotonic() - start + synced(target)


def convert_throughput(table, big, args):
    source, target = four(args), args.directory / "converted"
    gib = bytes_of(source) / GIB

    def rested(measure):
        # Each starts with a cold source and an idle disk.
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["sync"], check=True)
        cold(source)
        return gib / measure()

    rounds = max(args.rounds, 7)
    written = ("every byte written", ["--no-kernel-copy"])
    copies = [("`cp` and fsync", copy), ("`dd` with direct I/O and fsync", copy_direct)]
    for (name, flags), (other, copying) in ((written, copies[0]), (("as it is by default", []), copies[0]), (written, copies[1])):
        ours = lambda: rested(lambda: convert(source, target, *flags)[1])
        theirs = lambda: rested(lambda: copying(source, target))
        a, b, ratio, low, high = compare(rounds, ours, theirs)
        table.add(
            f"convert 4 GB, {name}, cold, against {other} of the same bytes", ">= 0.90",
            f"{ratio:.2f} ({low:.2f} to {high:.2f}); {a:.2f} against {b:.2f} GiB/s, {rounds} rounds", ratio >= 0.90,
        )
    shutil.rmtree(target)


def convert_peer(table, big, args):
    what, must = "convert 4 GB, cold, against a converter on the package safetensors", "faster; <= 1/5 of its memory"
    check = [args.python or "false", "-c", "import safetensors.torch"]
    if args.python is None or subprocess.run(check, stderr=subprocess.DEVNULL).returncode != 0:
        table.add(what, must, "skipped: name a --python with safetensors and torch", None)
        return
    source, target = four(args), args.directory / "converted"
    memory = {"ours": [], "theirs": []}

    def ours():
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["sync"], check=True)
        cold(source)
        report, seconds = convert(source, target)
        memory["ours"].append(growth(report))
        return 1 / seconds

    def theirs():
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["sync"], check=True)
        cold(source)
        words = [args.python, ROOT / "benches/peers/per_layer.py", source, target]
        found = json.loads(subprocess.run([str(w) for w in words], stdout=subprocess.PIPE, check=True).stdout)
        memory["theirs"].append(found["peak_bytes"] - found["before_bytes"])
        return 1 / found["seconds"]

    rounds = max(args.rounds, 5)
    a, b, ratio, low, high = compare(rounds, ours, theirs)
    shutil.rmtree(target)
    # Our worst against their best.
    mine, other = max(memory["ours"]), min(memory["theirs"])
    table.add(
        what, must,
        f"{ratio:.2f} times as fast ({low:.2f} to {high:.2f}), {1 / a:.1f} s against {1 / b:.1f} s without its imports; "
        f"+{mib(mine)} against +{mib(other)} over the start: {mine / other:.3f}; {rounds} rounds",
        ratio > 1 and mine <= other / 5,
    )


def convert_cast(table, big, args):
    source = synth(args.directory / "mistral-4-layers-f32", "mistral-7b", "--layers", "4", "--dtype", "f32")
    target = args.directory / "converted"
    gib = bytes_of(source) / GIB

    def rate(*flags):
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["sync"], check=True)
        cold(source)
        return gib / convert(source, target, "--no-kernel-copy", *flags)[1]

    rounds = max(args.rounds, 5)
    a, b, ratio, low, high = compare(rounds, lambda: rate("--dtype", "bf16"), rate)
    shutil.rmtree(target)
    table.add(
        f"convert f32 ({gib:.1f} GiB) to bf16, cold, against the same without a cast, bytes read per second", ">= 0.85",
        f"{ratio:.2f} ({low:.2f} to {high:.2f}); {a:.2f} against {b:.2f} GiB/s, {rounds} rounds", ratio >= 0.85,
    )


def digests(folder):
    """A hash of every file except the manifest, which contains source and options."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "onelayer.manifest.json":
            with open(path, "rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "blake2b").hexdigest()
    return found


def convert_identity(table, big, args):
    source = synth(args.directory / "mistral-2-layers", "mistral-7b", "--layers", "2", "--max-shard-size", "300MB")
    target, merged = args.directory / "converted", args.directory / "merged"
    convert(source, target, "--jobs", "1")
    first = digests(target)
    same = {}
    for name, flags in (("again", ["--jobs", "1"]), ("--jobs 2", ["--jobs", "2"]), ("--jobs 8", ["--jobs", "8"]), ("8 MiB", ["--budget", "8MiB"])):
        for kernel, more in (("", []), (" and every byte written", ["--no-kernel-copy"])):
            convert(source, target, *flags, *more)
            same[name + kernel] = digests(target) == first
    table.add(
        f"convert: {len(first)} files byte-identical across runs, threads, budgets and the kernel's copy", "all",
        f"{sum(same.values())} of {len(same)}: {', '.join(same)}", all(same.values()),
    )
    ways = {"one file": ["--merge"], "shards of 500 MB": ["--merge", "--max-shard-size", "500MB"]}
    for name, flags in ways.items():
        convert(target, merged, *flags)
        words = [LOADCHECK, "verify", merged, "--against", source, "--json", "-q"]
        forth = subprocess.run([str(w) for w in words], stdout=subprocess.PIPE)
        tensors = json.loads(forth.stdout)["verification"]["tensors"]
        back = args.directory / "converted-again"
        convert(merged, back)
        is_same = digests(back) == first
        shutil.rmtree(back)
        shutil.rmtree(merged)
        table.add(
            f"convert -> merge ({name}) -> convert", "bit-equal tensors, stable names",
            f"{tensors} tensors of the merged files verified: {'equal' if forth.returncode == 0 else 'NOT equal'}; "
            f"{len(first)} files and names {'the same' if is_same else 'NOT the same'}",
            forth.returncode == 0 and is_same,
        )
    shutil.rmtree(target)


FIGURES = [convert_memory, convert_cgroup, convert_throughput, convert_peer, convert_cast, convert_identity]
