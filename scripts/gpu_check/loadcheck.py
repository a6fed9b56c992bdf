"""Runs `loadcheck` and reads its report. All used names of report fields are in this file."""

import re

from . import cache
from .process import MIB, run

SLACK_BYTES = 16 * MIB
# Device memory that the driver may keep after an unload: its page granularity.
VRAM_SLACK_BYTES = 2 * MIB


class Wrong(Exception):
    """A report has a wrong value or lacks a field."""


class Loadcheck:
    """The binary and its target device."""

    def __init__(self, binary, device, deadline):
        self.binary, self.device, self.deadline = binary, device, deadline
        self.flags = set(re.findall(r"--[a-z][a-z-]*", run([binary, "run", "--help"], 20).stdout))
        self.version = run([binary, "--version"], 20).stdout.strip()

    @property
    def stands_in(self):
        """True if the host stands in for the device: the results say nothing about a GPU."""
        return not self.device.startswith("cuda")

    def run(self, folder, *flags, command="run", limit_seconds=60):
        words = [self.binary, command, folder, "--device", self.device, "--json", "-q", *flags]
        return run(words, max(1.0, min(limit_seconds, self.deadline.left())))

    def plan(self, folder, *flags):
        done = run([self.binary, "plan", folder, "--json", "-q", *flags], 30)
        report = done.json()
        if done.code != 0 or not report:
            raise Wrong(f"plan: {done.why()}")
        return report["plan"]


def completed(outcome):
    """The report of a successful run; raises Wrong with the reason otherwise."""
    report = outcome.json()
    if outcome.code != 0 or report is None:
        raise Wrong(outcome.why())
    if report.get("verdict") != "pass" or not report.get("runs"):
        raise Wrong(f"verdict {report.get('verdict')} with {len(report.get('runs') or [])} runs")
    for one in report["runs"]:
        if one.get("outcome") != "completed":
            raise Wrong(f"outcome {one.get('outcome')}")
    return report


def value(source, *path):
    """A required field that is not null."""
    for name in path:
        source = source.get(name) if isinstance(source, dict) else None
    if source is None:
        raise Wrong(f"the report does not say {'.'.join(path)}")
    return source


def figures(one):
    """Memory and time of a run, as fields of a row; None if not measured."""
    peak, base, after = one.get("peak") or {}, one.get("baseline") or {}, one.get("after_unload") or {}

    def grown(name):
        return None if peak.get(name) is None or base.get(name) is None else peak[name] - base[name]

    return {
        "seconds": one.get("seconds"),
        "rss_growth_bytes": grown("rss_bytes"),
        "host_growth_bytes": grown("host_bytes"),
        "pinned_bytes": peak.get("pinned_bytes"),
        "vram_growth_bytes": grown("vram_bytes"),
        "vram_before_bytes": base.get("vram_bytes"),
        "vram_after_unload_bytes": after.get("vram_bytes"),
        "vram_method": peak.get("vram_method"),
        "resident_bytes": one.get("resident_bytes"),
        "pinning": (one.get("ring") or {}).get("pinning"),
    }


def check_memory(one, on_device):
    """The promise, computed here and not taken from the report: growth over the baseline within budget + 16 MiB."""
    budget = value(one, "params", "budget_bytes")
    row = figures(one)
    allowed = budget + SLACK_BYTES
    if not on_device:
        # Layers on the host belong to the caller.
        allowed += value(one, "resident_bytes")
    for name in ("rss_growth_bytes", "host_growth_bytes"):
        if row[name] is None:
            raise Wrong(f"the report does not say {name}")
        if row[name] > allowed:
            raise Wrong(f"{name} {row[name] / MIB:.1f} MiB, allowed {allowed / MIB:.1f} MiB")
    if on_device:
        if row["pinned_bytes"] is None or row["pinned_bytes"] > budget:
            raise Wrong(f"pinned_bytes {row['pinned_bytes']}, the budget is {budget}")
        check_vram(row)
    return row


def check_vram(row):
    """Checks that device memory was used and is back at its level before the load."""
    before, after, grown = row["vram_before_bytes"], row["vram_after_unload_bytes"], row["vram_growth_bytes"]
    if before is None or after is None or not row["vram_method"]:
        raise Wrong(f"device memory was not measured (before {before}, after {after}, method {row['vram_method']})")
    if grown is None or grown <= 0:
        raise Wrong(f"device memory grew by {grown} bytes during a load to the device")
    if abs(after - before) > VRAM_SLACK_BYTES:
        raise Wrong(f"device memory after unload {after - before:+d} bytes ({row['vram_method']})")


def check_verified(report, one):
    """Checks that every tensor was read back and equals its file. (A difference also gives exit code 5.)"""
    found = value(one, "verified")
    tensors = value(report, "source", "tensors")
    if value(found, "tensors") != tensors or value(found, "mismatches") != 0:
        raise Wrong(f"verified {found} of {tensors} tensors")


def slots(report, one):
    """Number of slots of the ring."""
    return value(one, "ring", "slots")


def slots(report, one):
    """Number of slots of the ring that was used."""
    ring = one.get("ring")
    return value(ring, "slots") if ring else value(report, "plan", "slots")


def prepare(folder, state):
    """Brings a checkpoint into the page cache or out of it; ValueError where that failed."""
    return cache.prepare(cache.files(folder), state)
