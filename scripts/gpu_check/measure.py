"""Loads in interleaved rounds: ours, other packages and the machine's limit, each round in another order.

A ratio is to the limit measured in the same round. Groups take turns, too, so that a slowdown of the machine
affects all of them. A group's next round starts only if there is time for it.
"""

import dataclasses
import statistics
from typing import Callable

from . import peers
from .loadcheck import Wrong, check_memory, completed, prepare
from .process import MIB

BUDGETS_MIB = (16, 32, 64, 128)


@dataclasses.dataclass
class Row:
    """One way of loading. `sample` returns a dict with `seconds` or `error`."""

    name: str
    sample: Callable
    ours: bool
    absent: str = ""


@dataclasses.dataclass
class Group:
    """Rows that load the same files from the same cache state, and their limit."""

    name: str
    data: str
    cache: str
    narrowed: bool
    rows: list
    limit: Callable
    rounds: int
    # Takes part only in every n-th round of all groups.
    every: int
    estimate_seconds: float


class Measurements:
    """The groups, their samples, and the skipped parts with reasons."""

    def __init__(self, loadcheck, limits, others, made, deadline, say):
        self.loadcheck, self.limits, self.others = loadcheck, limits, others
        self.data, self.deadline, self.say = made, deadline, say
        self.samples, self.skipped, self.wrong, self.files = {}, [], [], {}

    def groups(self, tiny):
        most = 2 if tiny else 7
        # The largest one, or a smaller one if there was no time to create it.
        main = "sharded" if "sharded" in self.data.made else "dense"
        groups = [
            self.group("warm", main, "warm", False, self.budgets(), peers.WARM, most, 1, 60),
            self.group("cold", main, "cold", False, self.cold(), peers.COLD, min(most, 3), 2, 60),
            self.group("small tensors, warm", "small", "warm", False, self.plain(), peers.SMALL, most, 1, 20),
            self.group("f32 to bf16, warm", "f32", "warm", True, self.narrowing(), peers.NARROWED, most, 2, 30),
            self.group("mixture of experts, warm", "moe", "warm", False, self.plain(), (), most, 2, 10),
        ]
        return [group for group in groups if group]

    def group(self, name, data, cache, narrowed, ours, others, rounds, every, estimate):
        if data not in self.data.made:
            self.skip(name, "all", f"no data: {self.data.missing.get(data, 'not made')}")
            return None
        folder = self.data.path(data)
        self.files[name] = data
        rows = [Row(f"onelayer, {text}", self.our_sample(folder, cache, flags), True) for text, flags in ours]
        for peer, setting, environment in others:
            absent = self.others.absent(peer) if not self.loadcheck.stands_in else "stand-in: no device"
            rows.append(Row(f"{peer}, {setting}", self.their_sample(peer, setting, environment, folder, cache, narrowed), False, absent or ""))
        limit = (lambda: self.limits.cold(folder)) if cache == "cold" else (lambda: self.limits.warm(folder, narrowed))
        return Group(name, data, cache, narrowed, rows, limit, rounds, every, estimate)

    def budgets(self):
        return [(f"budget {size} MiB", ("--budget", f"{size}MiB")) for size in BUDGETS_MIB]

    def plain(self):
        return [("budget 64 MiB", ("--budget", "64MiB"))]

    def narrowing(self):
        if "--dtype" not in self.loadcheck.flags:
            self.skip("f32 to bf16, warm", "onelayer", "this loadcheck has no --dtype")
            return []
        return [("budget 64 MiB, --dtype bf16", ("--budget", "64MiB", "--dtype", "bf16"))]

    def cold(self):
        return [(f"budget 64 MiB, {io}", ("--budget", "64MiB", "--io", io)) for io in ("direct", "buffered")]

    def our_sample(self, folder, state, flags):
        def sample():
            outcome = self.loadcheck.run(folder, "--cache", state, *flags)
            report = completed(outcome)
            one = report["runs"][0]
            share = (one.get("cache") or {}).get("cached_share")
            if share is not None and (share > 0.01 if state == "cold" else share < 0.999):
                raise Wrong(f"asked for a {state} cache, {share:.1%} of the files is cached")
            row = check_memory(one, not self.loadcheck.stands_in)
            row.update(cached_share=share, process_seconds=outcome.seconds, system_growth_bytes=outcome.system_growth_bytes)
            return row

        return sample

    def their_sample(self, peer, setting, environment, folder, state, narrowed):
        def sample():
            try:
                share = prepare(folder, state)
            except (OSError, ValueError) as error:
                return {"error": str(error)}
            found = self.others.load(peer, setting, environment, folder, narrowed, 60)
            return {**found, "cached_share": share}

        return sample

    def skip(self, group, row, reason):
        self.skipped.append({"group": group, "row": row, "reason": reason})
        self.say("skipped", f"{group}: {row}", reason)

    def run(self, tiny):
        """Runs rounds of all groups until all are done or the time is used up."""
        groups = self.groups(tiny)
        done, lasted = {group.name: 0 for group in groups}, {}
        for group in groups:
            for row in group.rows:
                if row.absent:
                    self.skip(group.name, row.name, row.absent)
            group.rows = [row for row in group.rows if not row.absent]
        # Rounds over all groups, until no group has rounds left; every group takes part in the first.
        for turn in range(max((group.rounds * group.every for group in groups), default=0)):
            for group in groups:
                if turn % group.every or done[group.name] >= group.rounds or not group.rows:
                    continue
                need = lasted.get(group.name, group.estimate_seconds if not tiny else 1.0) * 1.1
                if not self.deadline.fits(need):
                    if done[group.name] == 0:
                        self.skip(group.name, "all", f"a round needs about {need:.0f} s, {self.deadline.left():.0f} s are left")
                    done[group.name] = max(done[group.name], group.rounds)
                    continue
                start = self.deadline.elapsed()
                self.round(group, done[group.name])
                lasted[group.name] = self.deadline.elapsed() - start
                done[group.name] += 1
        return self.summary()

    def round(self, group, number):
        limit = group.limit()
        self.samples.setdefault((group.name, "limit"), []).append(limit)
        source = self.data.made[group.data]["bytes"]
        first = number % len(group.rows)
        for row in group.rows[first:] + group.rows[:first]:
            if not self.deadline.fits(2.0):
                self.samples.setdefault((group.name, row.name), []).append({"error": "no time left in this round"})
                continue
            try:
                sample = row.sample()
            except Wrong as error:
                sample = {"error": str(error)}
                if not self.deadline.fits(0.1):
                    sample = {"error": "no time left in this round"}
                else:
                    self.wrong.append({"group": group.name, "row": row.name, "reason": str(error)})
            if sample.get("absent"):
                self.skip(group.name, row.name, f"absent: {sample['absent']}")
                group.rows = [other for other in group.rows if other is not row]
                continue
            if not sample.get("error"):
                sample["gb_per_s"] = source / max(sample["seconds"], 1e-9) / 1e9
                if limit.get("gb_per_s"):
                    sample["ratio"] = sample["gb_per_s"] / limit["gb_per_s"]
            elif not row.ours:
                # It would fail in the next round, too.
                group.rows = [other for other in group.rows if other is not row]
            self.samples.setdefault((group.name, row.name), []).append({**sample, "round": number, "ours": row.ours, "data": group.data, "cache": group.cache})
            told = sample.get("error") or f"{sample['gb_per_s']:.2f} GB/s ({sample['seconds']:.3f} s)"
            self.say("FAILED" if sample.get("error") else "measured", f"{group.name}, round {number + 1}: {row.name}", told)

    def summary(self):
        """One dict per row: medians and spreads, and the maximum of each memory figure."""
        rows = []
        for (group, name), samples in self.samples.items():
            good = [sample for sample in samples if "gb_per_s" in sample]
            row = {"group": group, "row": name, "data": self.files.get(group), "samples": len(good), "raw": samples}
            errors = [sample["error"] for sample in samples if sample.get("error")]
            if errors:
                row["error"] = errors[-1]
            for field in ("gb_per_s", "seconds", "ratio", "process_seconds"):
                row[field] = spread([sample[field] for sample in good if field in sample])
            for field in ("rss_growth_bytes", "host_growth_bytes", "pinned_bytes", "vram_growth_bytes", "system_growth_bytes"):
                values = [sample[field] for sample in good if sample.get(field) is not None]
                row[field] = max(values) if values else None
            if name == "limit":
                row["limited_by"] = sorted({sample["is"] for sample in good})
            rows.append(row)
        return rows


def spread(values):
    """Median, minimum and maximum; None without values."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def mib(count):
    return "?" if count is None else f"{count / MIB:.1f}"
