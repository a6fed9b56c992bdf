"""Shared by the figures: programs, reports, memory groups, interleaved comparisons, and the table."""

import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RELEASE = ROOT / "target/release"
LOADCHECK = RELEASE / "loadcheck"
MIB = 1 << 20
SLACK = 16 * MIB


def synth(folder, preset, *flags):
    if not (folder / "config.json").exists():
        subprocess.run([LOADCHECK, "synth", preset, folder, *flags], check=True)
    return folder


def run(folder, *flags, setup=None):
    """Runs `loadcheck run` and returns its report."""
    words = [LOADCHECK, "run", folder, "--json", "-q", *flags]
    done = subprocess.run([str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=setup)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))}: exit {done.returncode}\n{done.stderr.decode()}")
    return json.loads(done.stdout)


def growth(report):
    one = report["runs"][0]
    return one["peak"]["rss_bytes"] - one["baseline"]["rss_bytes"]


def mib(count):
    return f"{count / MIB:.1f} MiB"


def files(folder):
    return sorted(folder.glob("*.safetensors"))


class Table:
    def __init__(self):
        self.rows = []

    def add(self, what, must, measured, passed):
        self.rows.append((what, must, measured, passed))
        print(f"{'ok  ' if passed else 'FAIL' if passed is False else 'skip'} {what}: {measured} (must: {must})", flush=True)

    def markdown(self):
        lines = ["| what | must show | measured | |", "|---|---|---|---|"]
        for what, must, measured, passed in self.rows:
            mark = "yes" if passed else "NO" if passed is False else "skipped"
            lines.append(f"| {what} | {must} | {measured} | {mark} |")
        return "\n".join(lines) + "\n"


class Group:
    """A memory cgroup with a limit, v1 or v2; needs permission to create one."""

    def __init__(self, limit):
        v1 = pathlib.Path("/sys/fs/cgroup/memory")
        base, name = (v1, "memory.limit_in_bytes") if v1.exists() else (pathlib.Path("/sys/fs/cgroup"), "memory.max")
        self.path = base / f"onelayer-figures-{os.getpid()}"
        self.path.mkdir()
        try:
            (self.path / name).write_text(str(limit))
        except OSError:  # version 2 without the controller
            self.path.rmdir()
            raise

    def enter(self):
        (self.path / "cgroup.procs").write_text("0" if (self.path / "memory.max").exists() else str(os.getpid()))

    def peak(self):
        """Peak usage of the group, page cache included; None if the kernel does not report it."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if (self.path / name).exists():
                return int((self.path / name).read_text())

    def remove(self):
        self.path.rmdir()


def compare(rounds, ours, theirs):
    """Interleaved rounds in alternating order: medians of both, and of the ratio within a round."""
    left, right = [], []
    for number in range(rounds):
        pair = [(left, ours), (right, theirs)]
        for values, measure in pair if number % 2 == 0 else reversed(pair):
            values.append(measure())
    ratios = [a / b for a, b in zip(left, right)]
    return statistics.median(left), statistics.median(right), statistics.median(ratios), min(ratios), max(ratios)
