"""The correctness steps: right bytes on the device, bounded memory, refusals, freed memory."""

import re
import shutil

from . import data, device
from .loadcheck import VRAM_SLACK_BYTES, Wrong, check_memory, check_verified, completed, slots, value
from .process import MIB, run

DTYPE_SHARE = {"bf16": 0.5, "f16": 0.5}


class Skip(Exception):
    """The step cannot run here, with the reason."""


class Absent(Exception):
    """The step tests a feature that this version does not have."""


class Steps:
    """All steps, one method per kind; `all` lists them with their seconds at full scale."""

    def __init__(self, loadcheck, made, watch, identity, cycles):
        self.loadcheck, self.data, self.watch, self.identity = loadcheck, made, watch, identity
        self.cycles_command = cycles

    def all(self):
        verify = self.verified
        return [
            ("driver and device", 5, self.found),
            ("verify: dense bf16, one file, buffered", 15, lambda: verify("dense", "--io", "buffered")),
            ("verify: dense bf16, one file, mmap", 15, lambda: verify("dense", "--io", "mmap")),
            ("verify: dense bf16, one file, direct", 15, lambda: verify("dense", "--io", "direct")),
            ("verify: every small dtype, odd sizes", 10, lambda: verify("mixed")),
            ("verify: ring of 4 slots", 20, self.narrow),
            ("verify: many small tensors", 15, lambda: verify("small")),
            ("verify: sharded", 30, lambda: verify("sharded")),
            ("verify: f32 narrowed to bf16", 25, lambda: self.narrowed("bf16")),
            ("verify: f32 narrowed to f16", 25, lambda: self.narrowed("f16")),
            ("verify: f16", 10, lambda: verify("f16")),
            ("verify: mixture of experts", 20, lambda: verify("moe")),
            ("larger than the device is refused", 10, self.larger_than_device),
            ("larger than --device-reserve leaves is refused", 10, self.larger_than_reserve),
            ("larger than --device-budget is refused", 10, self.larger_than_budget),
            ("10 loads and unloads give device memory back", 40, self.cycles),
        ]

    def folder(self, name):
        if name not in self.data.made:
            raise Skip(f"no data: {self.data.missing.get(name, 'not made')}")
        return self.data.path(name)

    def on_device(self):
        if self.loadcheck.stands_in:
            raise Skip(f"--stand-in {self.loadcheck.device}: needs a device")

    def found(self):
        self.on_device()
        driver, nvml = self.identity["driver"], self.identity["nvml"]
        if "error" in driver:
            raise Wrong(f"driver: {driver['error']}")
        if not driver["name"] or not driver["total_bytes"]:
            raise Wrong(f"driver: {driver}")
        text = f"{driver['name']}, {driver['uuid']}, {driver['total_bytes'] / 2**30:.1f} GiB, CUDA {driver['cuda_version']}"
        if "error" in nvml:
            return {"detail": f"{text}; NVML is not usable ({nvml['error']})"}
        if nvml["uuid"].lower() != driver["uuid"].lower():
            raise Wrong(f"the driver's device is {driver['uuid']}, NVML's is {nvml['uuid']}")
        return {"detail": f"{text}, driver {nvml['driver_version']}"}

    def load(self, folder, *flags):
        """Runs a verified load and checks its promises. Returns the report and its figures."""
        words = list(flags)
        if "--verify" in self.loadcheck.flags:
            words.append("--verify")
        elif not self.loadcheck.stands_in:
            raise Wrong("this loadcheck has no --verify: nothing shows that the right bytes landed")
        report = completed(self.loadcheck.run(folder, *words))
        one = report["runs"][0]
        if "--verify" in words:
            check_verified(report, one)
        row = check_memory(one, not self.loadcheck.stands_in)
        return report, one, row

    def verified(self, name, *flags):
        report, one, row = self.load(self.folder(name), *flags)
        if "--io" in flags and value(one, "params", "io") != flags[flags.index("--io") + 1]:
            raise Wrong(f"asked for {flags}, the report says {one['params']['io']}")
        return {"detail": self.told(report, row), "figures": row}

    def told(self, report, row):
        source = report["source"]
        proof = "read back and equal" if "--verify" in self.loadcheck.flags else "not read back"
        text = f"{source['tensors']} tensors, {source['bytes'] / 1e9:.2f} GB, {proof}; host +{row['host_growth_bytes'] / MIB:.1f} MiB"
        if row["pinned_bytes"] is not None:
            text += f", pinned {row['pinned_bytes'] / MIB:.1f} MiB"
        return f"{text} ({row['pinning']})" if row["pinning"] else text

    def narrow(self):
        folder = self.folder("dense")
        flags = [] if self.loadcheck.stands_in else ["--device", self.loadcheck.device]
        smallest = value(self.loadcheck.plan(folder, *flags), "smallest_budget_bytes")
        report, one, row = self.load(folder, "--budget", str(smallest))
        if slots(report, one) != 4:
            raise Wrong(f"the smallest budget ({smallest} bytes) gives {slots(report, one)} slots, not 4")
        return {"detail": f"--budget {smallest / MIB:.0f}MiB; {self.told(report, row)}", "figures": row}

    def narrowed(self, dtype):
        folder = self.folder("f32")
        if "--dtype" not in self.loadcheck.flags:
            if self.loadcheck.stands_in:
                raise Skip("this loadcheck has no --dtype")
            raise Wrong("this loadcheck has no --dtype")
        report, one, row = self.load(folder, "--dtype", dtype)
        share = value(one, "resident_bytes") / value(report, "source", "bytes")
        # Half of the bytes, plus padding of tensors and arenas.
        if not 0.45 < share < DTYPE_SHARE[dtype] + 0.05 + 64 * MIB / report["source"]["bytes"]:
            raise Wrong(f"narrowed to {dtype}, {share:.2f} of the source's bytes are resident")
        return {"detail": f"{self.told(report, row)}; resident {share:.2f} of the source", "figures": row}

    def refused(self, outcome):
        """Checks a refusal: its code, and that it names both sizes or the missing bytes."""
        report = outcome.json() or {}
        error = report.get("error") or {}
        if outcome.code != 2 or not str(error.get("code", "")).startswith("LC02"):
            raise Wrong(f"expected a refusal (exit 2, LC02xx): {outcome.why()}")
        text = f"{error.get('message')}; {error.get('help')}"
        if len(re.findall(r"\d[\d.]* ?[KMGT]?i?B\b", text)) < 2:
            raise Wrong(f"refused without naming the shortfall: {text}")
        return {"detail": f"{error['code']}: {text}"}

    def larger_than_device(self):
        self.on_device()
        total = self.identity["driver"].get("total_bytes")
        if not total:
            raise Wrong("the size of the device is not known")
        target = self.data.folder / "larger-than-device"
        try:
            data.write_larger_than(target, total)
            return self.refused(self.loadcheck.run(target, limit_seconds=30))
        except OSError as error:
            raise Skip(f"this file system holds no file that large: {error}") from None
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def larger_than_reserve(self):
        """Requests that the whole device stays free."""
        return self.larger_than("--device-reserve", self.identity["driver"].get("total_bytes"))

    def larger_than_budget(self):
        return self.larger_than("--device-budget", self.data.made.get("dense", {}).get("bytes", 0) // 2)

    def larger_than(self, flag, size):
        self.on_device()
        if flag not in self.loadcheck.flags:
            raise Absent(f"this loadcheck has no {flag}")
        return self.refused(self.loadcheck.run(self.folder("dense"), flag, str(size)))

    def cycles(self):
        """Device memory after each of ten rounds in one process, and before and after in another one."""
        self.on_device()
        before = self.watch.ask("memory")
        done = run([*self.cycles_command, self.folder("dense"), "--cycles", "10"], 60)
        report = done.json()
        if done.code != 0 or not report:
            raise Wrong(f"10 loads in one process: {done.why()}")
        after = self.watch.ask("memory")
        rounds = value(report, "cycles")
        if len(rounds) != 10:
            raise Wrong(f"{len(rounds)} rounds were reported, 10 were asked for")
        start = value(report, "device_free_before_bytes")
        for number, one in enumerate(rounds, 1):
            if value(one, "returned_bytes") != value(one, "resident_bytes") or one["resident_bytes"] == 0:
                raise Wrong(f"round {number}: {one['returned_bytes']} of {one['resident_bytes']} bytes were returned")
            kept = start - value(one, "device_free_after_bytes")
            if kept > VRAM_SLACK_BYTES:
                raise Wrong(f"round {number} left {kept} bytes of device memory behind")
        grown = value(rounds[-1], "rss_after_bytes") - value(rounds[0], "rss_after_bytes")
        if grown > 16 * MIB:
            raise Wrong(f"host memory grew by {grown / MIB:.1f} MiB from the first round to the last")
        outside = self.outside(before, after)
        seen = ", ".join(f"{name} {'not usable' if d is None else f'{d:+d} B'}" for name, d in outside.items())
        kept = start - value(report, "device_free_after_bytes")
        return {
            "detail": f"one process: {kept:+d} B of device memory, {grown / MIB:+.1f} MiB of host memory; from outside: {seen}",
            "figures": {"vram_difference_bytes": {"inside": kept, **outside}, "rounds": rounds},
        }

    def outside(self, before, after):
        """Growth of used device memory, as seen by a process that loads nothing, by each method."""
        found = {}
        for method in ("driver", "nvml"):
            if "error" in before[method] or "error" in after[method]:
                found[method] = None
                continue
            found[method] = after[method]["used_bytes"] - before[method]["used_bytes"]
            if abs(found[method]) > VRAM_SLACK_BYTES:
                raise Wrong(f"another process sees {found[method]:+d} bytes of device memory ({method}) after 10 loads")
        if all(difference is None for difference in found.values()):
            raise Wrong("neither the driver nor NVML could be asked from outside")
        return found


def open_watch(ordinal):
    """The process that queries the driver, and its description of the device."""
    watch = device.Watch(ordinal)
    return watch, watch.ask("describe")
