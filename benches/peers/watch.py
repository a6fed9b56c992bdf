"""Starts one load and measures it from outside, in the same way whatever it is written in.

    start -> imports -> "ready"   here: group, high-water mark reset, CPU time and memory before
          -> load    -> "done"    here: /proc/PID/status every 4 ms until then; CPU time, high-water mark
          -> "end"

Seconds are those that the loader counted itself, from after the imports to the last byte. CPU seconds are those of the process and
of its children that have ended. `host` is what the kernel cannot take back: anonymous, shared and swapped pages, by sampling; RSS is
the kernel's high-water mark. All are growth over what was there when the imports were over.
"""

import json
import mmap
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from figure_tools import Group  # noqa: E402

INTERVAL_SECONDS = 0.004
MADV_POPULATE_WRITE = 23
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
FIELDS = {b"VmHWM": "highest_rss", b"VmRSS": "rss", b"RssAnon": "anon", b"RssFile": "file", b"RssShmem": "shmem", b"VmSwap": "swap"}


class Cage(Group):
    """A memory group for one load; without a limit it only measures."""

    def __init__(self, limit_bytes=None):
        v1 = pathlib.Path("/sys/fs/cgroup/memory").exists()
        super().__init__(limit_bytes if limit_bytes is not None else "-1" if v1 else "max")
        # Disables swap, if there is any.
        for name, value in (("memory.memsw.limit_in_bytes", limit_bytes), ("memory.swap.max", 0)):
            if limit_bytes is not None and (self.path / name).exists():
                (self.path / name).write_text(str(value))

    def kills(self):
        """Number of processes of the group killed for lack of memory."""
        for name in ("memory.oom_control", "memory.events"):
            if (self.path / name).exists():
                fields = dict(line.split() for line in (self.path / name).read_text().splitlines())
                return int(fields.get("oom_kill", 0))
        return 0

    def remove(self):
        for _ in range(200):
            try:
                return super().remove()
            except OSError:  # the kernel is still cleaning up its processes
                time.sleep(0.01)


class Status:
    """Samples the memory of one process."""

    def __init__(self, pid):
        self.file = open(f"/proc/{pid}/status", "rb", buffering=0)

    def read(self):
        """Bytes by name; None when the process is gone."""
        try:
            text = os.pread(self.file.fileno(), 8192, 0)
        except ProcessLookupError:
            return None
        found = {}
        for line in text.splitlines():
            name, _, value = line.partition(b":")
            if name in FIELDS:
                found[FIELDS[name]] = int(value.split()[0]) * 1024
        if "anon" not in found:
            return None
        found["host"] = found["anon"] + found["shmem"] + found.get("swap", 0)
        return found

    def close(self):
        self.file.close()


def cpu_seconds(pid):
    """CPU seconds of a process and of its ended children."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ProcessLookupError):
        return None
    fields = text.rsplit(") ", 1)[1].split()
    return sum(int(value) for value in fields[11:15]) / TICKS_PER_SECOND


def back_memory(most_bytes):
    """Touches free memory and gives it back, right before a load. Where the machine is a guest, its host takes pages away that are free
    for some seconds, and hands them out again, zeroed, at a fraction of the speed of memory: a load that starts late after the one
    before it (imports) would pay for that, and one that starts at once would not."""
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemFree:"))
    size = min(most_bytes, free - (1 << 30))
    if size < 1 << 20:
        return
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        block.madvise(mmap.MADV_HUGEPAGE)
        block.madvise(MADV_POPULATE_WRITE)
    except OSError:  # before Linux 5.14
        pass
    block.close()


class Load:
    """One loading process."""

    def __init__(self, words, environment, cage, limit_seconds):
        self.deadline = time.monotonic() + limit_seconds
        self.limit_seconds = limit_seconds
        self.cage = cage
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [str(word) for word in words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            bufsize=0, env={**os.environ, **environment}, preexec_fn=cage.enter if cage else None, start_new_session=True,
        )
        self.text = b""

    def answer(self, at_each_turn=None):
        """The next JSON line; None at the end of the process or after the time limit. Calls `at_each_turn` every 4 ms."""
        stream = self.process.stdout.fileno()
        while b"\n" not in self.text:
            left = self.deadline - time.monotonic()
            if left <= 0:
                return None
            wait = min(left, INTERVAL_SECONDS if at_each_turn else 1.0)
            if select.select([stream], [], [], wait)[0]:
                block = os.read(stream, 65536)
                if not block:
                    return None
                self.text += block
            if at_each_turn:
                at_each_turn()
        line, self.text = self.text.split(b"\n", 1)
        return json.loads(line)

    def say(self, word):
        try:
            self.process.stdin.write(word + b"\n")
        except BrokenPipeError:
            pass

    def end(self):
        """Kills it if needed and returns its exit code: negative for a signal."""
        try:
            code = self.process.wait(timeout=0 if time.monotonic() > self.deadline else 10)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        return code

    def why(self, code):
        """The outcome of a load that did not print `done`."""
        if code is None:
            return {"outcome": "timeout", "reason": f"over {self.limit_seconds:.0f} s"}
        if code == -signal.SIGKILL and self.cage and self.cage.kills():
            return {"outcome": "killed", "reason": "killed by the limit"}
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        return {"outcome": "failed", "reason": f"exit code {code}: {lines[-1] if lines else 'no message'}"[:300]}


def measure(words, environment=None, limit_bytes=None, limit_seconds=300.0, memory_bytes=0):
    """One load; a dict with `outcome`: ok, killed, refused, timeout or failed. Touches `memory_bytes` of memory first."""
    try:
        cage = Cage(limit_bytes)
    except OSError as error:
        if limit_bytes is not None:
            return {"outcome": "failed", "reason": f"no memory group can be made here ({error})"}
        cage = None
    try:
        load = Load(words, environment or {}, cage, limit_seconds)
        try:
            result = followed(load, memory_bytes)
            load.say(b"end")
        finally:
            code = load.end()
        if "outcome" not in result:
            result.update(load.why(code))
        load.errors.close()
        if cage:
            result["group_peak_bytes"] = cage.peak()
        return result
    finally:
        if cage:
            cage.remove()


def followed(load, memory_bytes):
    """The measurements of a load; without `outcome` if it ended by itself."""
    ready = load.answer()
    if ready is None or "refused" in ready:
        return refusal(ready) | {"stage": "import"}
    result = {"import_seconds": ready["import_seconds"], "stage": "load"}
    pid = load.process.pid
    status = Status(pid)
    try:
        back_memory(memory_bytes)
        with open(f"/proc/{pid}/clear_refs", "w") as file:
            file.write("5")
        before, cpu_before = status.read(), cpu_seconds(pid)
        if before is None:
            return result
        highest = dict(before)

        def sample():
            now = status.read()
            if now:
                for name, value in now.items():
                    highest[name] = max(highest[name], value)

        load.say(b"go")
        done = load.answer(sample)
        # Measured before the answer is evaluated: the process waits and has freed nothing.
        sample()
        cpu_after = cpu_seconds(pid)
        result["before"] = before
        if done is None or "refused" in done:
            return result | refusal(done)
        result["growth"] = {name: highest[name] - before[name] for name in ("host", "anon", "file", "shmem")}
        result["growth"]["rss"] = highest["highest_rss"] - before["rss"]
        result["cpu_seconds"] = cpu_after - cpu_before
        return result | {name: done[name] for name in ("seconds", "bytes", "mapped_bytes", "held_bytes")} | {"outcome": "ok"}
    finally:
        status.close()


def refusal(answer):
    return {"outcome": "refused", "reason": answer["refused"]} if answer else {}
