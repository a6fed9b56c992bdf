"""Runs a program with a time limit, and samples the memory of the whole system meanwhile."""

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from typing import Optional

MIB = 1 << 20


class Deadline:
    """The time limit. A reserve is kept for writing the report."""

    def __init__(self, seconds, kept_back_seconds=5.0):
        self.start = time.monotonic()
        self.total_seconds = seconds
        self.end = self.start + seconds - kept_back_seconds

    def elapsed(self):
        return time.monotonic() - self.start

    def left(self):
        return max(0.0, self.end - time.monotonic())

    def fits(self, seconds):
        return seconds <= self.left()


@dataclasses.dataclass
class Outcome:
    """The result of a program."""

    words: list
    code: Optional[int]
    seconds: float
    stdout: str
    stderr: str
    timed_out: bool
    system_growth_bytes: Optional[int]

    def json(self):
        """The JSON object in stdout or its last line; None if there is none."""
        text = self.stdout.strip()
        for candidate in (text, text.rsplit("\n", 1)[-1]):
            try:
                found = json.loads(candidate)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
        return None

    def why(self):
        """The reason of a failure, in one line."""
        if self.timed_out:
            return f"stopped after {self.seconds:.0f} s"
        report = self.json() or {}
        error = report.get("error")
        if isinstance(error, dict):
            error = f"{error.get('code')}: {error.get('message')}"
        tail = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return f"exit {self.code}: {error or (tail[-1] if tail else 'no message')}"[:400]


def system_used_bytes():
    """System memory that is neither free nor page cache; includes driver-pinned memory outside any RSS."""
    try:
        with open("/proc/meminfo") as lines:
            values = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        spare = ("MemFree", "Buffers", "Cached", "SReclaimable")
        return (values["MemTotal"] - sum(values[name] for name in spare)) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None


def run(words, limit_seconds, env=None):
    """Runs a program to its end, or kills it and its children at the limit."""
    words = [str(word) for word in words]
    before = highest = system_used_bytes()
    start = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            # A new session, so that the limit applies to children, too.
            child = subprocess.Popen(words, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=env, start_new_session=True)
        except OSError as error:
            return Outcome(words, None, 0.0, "", str(error), False, None)
        timed_out = False
        try:
            while child.poll() is None:
                if time.monotonic() - start > limit_seconds:
                    timed_out = True
                    break
                used = system_used_bytes()
                if used is not None and highest is not None:
                    highest = max(highest, used)
                time.sleep(0.01)
        finally:
            if child.poll() is None:
                stop(child)
        seconds = time.monotonic() - start
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    grown = None if before is None or highest is None else highest - before
    return Outcome(words, child.returncode, seconds, texts[0], texts[1], timed_out, grown)


def stop(child):
    """Ends a child and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(timeout=3)
        except subprocess.TimeoutExpired:
            continue
