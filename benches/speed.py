"""Figures of speed: cold against fio, warm against the fastest copy, automatic against fixed sources, under
limits, and pages left in the cache. Called by figures.py; deletes its generated files, except the two
large checkpoints.
"""

import json
import os
import pathlib
import re
import shutil
import statistics
import struct
import subprocess
import sys

from figure_tools import MIB, ROOT, Group, compare, files, mib, run, synth

sys.path.insert(0, str(ROOT / "scripts"))
from gpu_check import cache  # noqa: E402

GB = 1e9
HUGE_PAGES = pathlib.Path("/proc/sys/vm/nr_hugepages")
SOURCES = ("buffered", "mmap", "direct", "uring")


def began_as_asked(report):
    """True if the page cache was known to be in the requested state when the load began."""
    found = report["runs"][0]["cache"]
    share = found["cached_share"]
    return found["asked"] == "asis" or share is not None and (share < 0.01 if found["asked"] == "cold" else share > 0.99)


def measured(*words, **options):
    """The report of a run from the requested cache state; repeats the run if pages were evicted."""
    for _ in range(5):
        report = run(*words, **options)
        if began_as_asked(report):
            return report
    raise RuntimeError(f"five runs did not begin as asked: {report['runs'][0]['cache']}")


def rate(report):
    """Bytes of the source per second of the load, in GB/s."""
    return report["source"]["bytes"] / report["runs"][0]["seconds"] / GB


def four(args):
    return synth(args.directory / "mistral-8-layers", "mistral-7b", "--layers", "8")


def spread(values):
    return f"{min(values):.2f} to {max(values):.2f}"


def cores():
    return str(len(os.sched_getaffinity(0)))


# --- cold, against fio ---


class FioMemory:
    """Huge pages for fio's buffers: with small pages it is half as fast on a virtual disk."""

    def __enter__(self):
        self.before = HUGE_PAGES.read_text()
        HUGE_PAGES.write_text("128")
        self.memory = "shmhuge" if int(HUGE_PAGES.read_text()) >= 64 else None
        return self

    def __exit__(self, *_):
        HUGE_PAGES.write_text(self.before)


def fio(folder, engine, block, depth, memory, *more):
    """GB/s of one direct pass over the files."""
    cache.prepare(files(folder), "cold")
    words = ["fio", "--name=read", f"--filename={':'.join(map(str, files(folder)))}", "--rw=read", "--direct=1", "--readonly"]
    words += [f"--ioengine={engine}", f"--bs={block}", f"--iodepth={depth}", "--thread", "--numjobs=1", f"--mem={memory}"]
    words += ["--file_service_type=sequential", "--output-format=json", *more]
    text = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout.decode()
    job = json.loads(text[text.index("{"):])["jobs"][0]
    total = sum(path.stat().st_size for path in files(folder))
    assert job["read"]["io_bytes"] > 0.99 * total, "fio has read every file once"
    return job["read"]["bw_bytes"] / GB


FIO_WAYS = [("psync", block, 1) for block in ("1M", "2M", "4M", "8M")] + [
    ("io_uring", block, depth, *more)
    for block, depth in (("1M", 4), ("2M", 2), ("2M", 8), ("4M", 2), ("4M", 4), ("8M", 2))
    for more in ((), ("--fixedbufs=1",))
]


def fio_rate(folder, way, memory):
    engine, block, depth, *more = way
    return fio(folder, engine, block, depth, memory, *more)


def speed_cold(table, big, args):
    must = ">= 0.95"
    what = "17 GB cold, device none, auto, against fio's fastest direct reader"
    if shutil.which("fio") is None or not os.access(HUGE_PAGES, os.W_OK):
        table.add(what, must, "skipped: needs fio, and root for its huge pages", None)
        return
    with FioMemory() as huge:
        memory = huge.memory or "malloc"
        pilot = {way: max(fio_rate(big, way, memory) for _ in range(2)) for way in FIO_WAYS}
        fastest = sorted(pilot, key=pilot.get)[-2:]
        # Repeat the two fastest of the pilot in turns: a single pass may be luck.
        best = max(fastest, key=lambda way: statistics.median(fio_rate(big, way, memory) for _ in range(3)))
        theirs = lambda: fio_rate(big, best, memory)
        ours = lambda: rate(measured(big, "--device", "none", "--io", "auto", "--cache", "cold"))
        rounds = max(args.rounds, 7)
        a, b, ratio, low, high = compare(rounds, ours, theirs)
        *_, same, same_low, same_high = compare(rounds, theirs, theirs)
    engine, block, depth, *more = best
    table.add(
        what, must,
        f"{ratio:.3f} ({low:.2f} to {high:.2f}); {a:.2f} against {b:.2f} GB/s ({engine} {block} x {depth} {' '.join(more)}), "
        f"{rounds} rounds; fio against itself {same:.3f} ({same_low:.2f} to {same_high:.2f})",
        ratio >= 0.95,
    )


# --- warm, against the fastest copy ---


def speed_warm(table, big, args):
    """Chosen and measured by benches/limits.rs: pread, copies and non-temporal copies out of mappings, blocks of 256 KiB to 4 MiB."""
    rounds = max(args.rounds, 9)
    words = ["cargo", "bench", "-p", "onelayer", "--bench", "limits", "--", four(args), "--only", "warm", "--rounds", rounds]
    text = subprocess.run([str(w) for w in words], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode()
    for title, must in (("warm, against a ring of 64 MiB in turn", 0.92), ("warm, against hot memory", None)):
        section = text[text.index(title):]
        ratio, low, high = re.search(r"ours / limit: ([\d.]+) \(([\d.]+) to ([\d.]+)\)", section).groups()
        rates = re.findall(r"([\d.]+) GiB/s  (.*)", section[: section.index("ours / limit")])
        ways = "; ".join(f"{name} {rate} GiB/s" for rate, name in rates)
        table.add(
            f"4 GB {title}, device none, no hash, auto ({cores()} cores)", f">= {must}" if must else "for comparison",
            f"{ratio} ({low} to {high}); {ways}; {rounds} rounds", float(ratio) >= must if must else True,
        )


# --- auto against every fixed source ---


def prepare_half(source):
    """Caches every second 64 MiB of each file."""
    cache.prepare(files(source), "cold")
    stretch = 64 * MIB
    for path in files(source):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for start in range(0, path.stat().st_size, 2 * stretch):
                file.seek(start)
                left = stretch
                while left > 0 and (got := len(file.read(min(left, 4 * MIB)))):
                    left -= got


def auto_against_fixed(table, source, state, prepare, rounds):
    def measure(io):
        prepare()
        return rate(measured(source, "--device", "none", "--io", io, "--cache", "asis"))

    def pace(io):
        return statistics.median(rates[io])

    # A few rounds of all, then more rounds of the sources near the best, because of the disk's spread.
    usable = list(SOURCES)
    rates = {io: [] for io in ("auto", *usable)}
    for number in range(3 * rounds):
        if number == 4:
            fastest = max(map(pace, usable))
            usable = [io for io in usable if pace(io) > 0.8 * fastest]
        order = ["auto", *usable]
        for io in order[number % len(order):] + order[: number % len(order)]:
            rates[io].append(measure(io))
    best = max(usable, key=pace)
    ratios = [a / b for a, b in zip(rates["auto"], rates[best])]
    ratio = statistics.median(ratios)
    others = ", ".join(f"{io} {pace(io):.2f}" for io in SOURCES)
    table.add(
        f"auto against the best fixed source, {state}", ">= 0.97",
        f"{ratio:.2f} ({spread(ratios)}) of {best}; auto {pace('auto'):.2f}, {others} GB/s; {3 * rounds} rounds", ratio >= 0.97,
    )


def speed_auto(table, big, args):
    source, rounds = four(args), max(args.rounds, 7)
    auto_against_fixed(table, source, "4 GB cold", lambda: cache.prepare(files(source), "cold"), rounds)
    auto_against_fixed(table, source, "4 GB warm", lambda: cache.prepare(files(source), "warm"), rounds)
    auto_against_fixed(table, source, "4 GB half warm (every other 64 MiB)", lambda: prepare_half(source), rounds)


def speed_tmpfs(table, big, args):
    memory = pathlib.Path("/dev/shm/onelayer-figures")
    try:
        small = synth(memory, "mistral-7b", "--layers", "3")
        # Loads of a tenth of a second need more rounds.
        auto_against_fixed(table, small, "1.8 GB on tmpfs", lambda: None, 3 * max(args.rounds, 7))
    finally:
        shutil.rmtree(memory, ignore_errors=True)


# --- limits, page cache, CPU ---


def speed_cgroup(table, big, args):
    what, must = "17 GB cold inside a 128 MiB memory cgroup, auto, against no limit", "completes; >= 0.95"
    try:
        group = Group(128 * MIB)
    except OSError as error:
        table.add(what, must, f"skipped: no cgroup can be made here ({error})", None)
        return

    def within():
        cache.prepare(files(big), "cold")
        return rate(measured(big, "--device", "none", "--io", "auto", "--cache", "asis", setup=group.enter))

    def without():
        cache.prepare(files(big), "cold")
        return rate(measured(big, "--device", "none", "--io", "auto", "--cache", "asis"))

    try:
        a, b, ratio, low, high = compare(max(args.rounds, 5), within, without)
        peak = group.peak()
    finally:
        group.remove()
    table.add(what, must, f"{ratio:.2f} ({low:.2f} to {high:.2f}); {a:.2f} against {b:.2f} GB/s; the group's peak {mib(peak)}", ratio >= 0.95)


def cached_bytes(folder):
    """Cached bytes of the files, from mincore(2)."""
    return round(cache.cached_share(files(folder)) * sum(path.stat().st_size for path in files(folder)))


def page_cache_bytes():
    """Size of the machine's page cache."""
    lines = dict(line.split(":") for line in open("/proc/meminfo"))
    return int(lines["Cached"].split()[0]) * 1024


def speed_page_cache(table, big, args):
    cache.prepare(files(big), "cold")
    before, all_before = cached_bytes(big), page_cache_bytes()
    run(big, "--device", "none", "--io", "auto", "--cache", "asis")
    after, all_after = cached_bytes(big), page_cache_bytes()
    table.add(
        "page cache before and after a cold load of 17 GB, auto", "within 64 MiB",
        f"of the files {mib(before)} before, {mib(after)} after; of the machine {mib(all_after - all_before)} more",
        abs(after - before) <= 64 * MIB and all_after - all_before <= 64 * MIB,
    )


def speed_cpu(table, big, args):
    spent = []
    for _ in range(max(args.rounds, 3)):
        report = measured(big, "--device", "none", "--io", "auto", "--cache", "cold")
        spent.append(report["runs"][0]["cpu_seconds"] / (report["source"]["bytes"] / GB))
    table.add("CPU seconds per GB, 17 GB cold, device none, auto", "<= 0.10", f"{statistics.median(spent):.3f} ({min(spent):.3f} to {max(spent):.3f})", statistics.median(spent) <= 0.10)


# --- shapes ---


def write_tensors(path, sizes):
    """A checkpoint of contiguous U8 tensors of random bytes."""
    header, offset = {}, 0
    for number, size in enumerate(sizes):
        # Named like experts, which are many and small.
        header[f"model.layers.{number * 32 // len(sizes)}.mlp.experts.{number % (-(-len(sizes) // 32))}.up_proj.weight"] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    block = os.urandom(16 * MIB)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while offset > 0:
            offset -= file.write(block[: min(len(block), offset)])
        file.flush()
        os.fsync(file.fileno())


def rate_of_new_pages(folders, folder, state):
    """The rate of a run for which nothing was left in the cache of any folder, so that what is warm was read into it anew: where its pages
    happen to lie makes a tenth of the speed, and would be the same in all rounds."""
    for other in folders:
        cache.prepare(files(other), "cold")
    return rate(measured(folder, "--device", "none", "--io", "auto", "--cache", state))


def speed_small_tensors(table, big, args):
    folders = [args.directory / name for name in ("tensors-20000", "tensors-20")]
    total = 20000 * 64 * 1024
    try:
        for folder, sizes in zip(folders, ([64 * 1024] * 20000, [total // 20] * 20)):
            folder.mkdir(parents=True, exist_ok=True)
            write_tensors(folder / "model.safetensors", sizes)
        for state in ("cold", "warm"):
            small, large = (lambda folder=folder: rate_of_new_pages(folders, folder, state) for folder in folders)
            a, b, ratio, low, high = compare(max(args.rounds, 9), small, large)
            table.add(f"20,000 tensors of 64 KiB against the same bytes in 20 tensors, {state}", ">= 0.90", f"{ratio:.2f} ({low:.2f} to {high:.2f}); {a:.2f} against {b:.2f} GB/s", ratio >= 0.90)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def speed_cast(table, big, args):
    source = synth(args.directory / "f32", "mistral-7b", "--layers", "4", "--dtype", "f32")
    try:
        common = ("--device", "none", "--io", "auto", "--cache", "warm")
        a, b, ratio, low, high = compare(max(args.rounds, 9), lambda: rate(measured(source, *common, "--dtype", "bf16")), lambda: rate(measured(source, *common)))
        table.add("f32 -> bf16 while streaming 4 GB warm, against the same without it (bytes read per second)", ">= 0.85", f"{ratio:.2f} ({low:.2f} to {high:.2f}); {a:.1f} against {b:.1f} GB/s", ratio >= 0.85)
    finally:
        shutil.rmtree(source, ignore_errors=True)


FIGURES = [speed_cold, speed_warm, speed_auto, speed_tmpfs, speed_cgroup, speed_page_cache, speed_cpu, speed_small_tensors, speed_cast]
LARGE = {speed_cold, speed_cgroup, speed_page_cache, speed_cpu}
