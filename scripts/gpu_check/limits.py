"""The limits of the machine, measured by `device_limits` between the loads."""

from . import cache
from .process import run


class Limits:
    """The binary and its output."""

    def __init__(self, binary, ordinal, has_device, deadline):
        self.binary, self.ordinal, self.has_device, self.deadline = binary, ordinal, has_device, deadline
        self.full, self.threads, self.quick = {}, None, False

    def ask(self, *words, limit_seconds=90):
        limit = max(1.0, min(limit_seconds, self.deadline.left()))
        done = run([self.binary, "--device", self.ordinal, *words], limit)
        report = done.json()
        if done.code != 0 or report is None:
            return {"error": done.why()}
        return {**report, "process_seconds": done.seconds}

    def measure(self, folder, quick, seconds):
        """Measures all sections once. The files are one shard of a checkpoint, or a whole small one."""
        shard = cache.files(folder)[:1]
        words = ["--file", *shard, "--seconds", str(int(seconds))]
        self.quick = quick
        if quick:
            words.append("--quick")
        if not self.has_device:
            words += ["--only", "fill", "disk"]
        self.full = self.ask(*words, limit_seconds=seconds + 20)
        rates = [(row["gb_per_s"], row["threads"]) for row in self.full.get("fill", []) if "gb_per_s" in row]
        self.threads = max(rates)[1] if rates else None
        return self.full

    def speed(self):
        return ["--quick"] if self.quick else []

    def warm(self, folder, narrowed):
        """The limit of a warm load right now: the slower of the link alone, and of filling beside copying.

        With values narrowed on the way, the link moves half of the source's bytes.
        """
        words = ["--file", *cache.files(folder)[:1], "--threads", str(self.threads or 2), *self.speed()]
        sections = ["probe", "fill_and_copy"] if self.has_device else ["fill"]
        report = self.ask("--only", *sections, *words)
        if "error" in report:
            return report
        if not self.has_device:
            rows = [row["gb_per_s"] for row in report["fill"] if "gb_per_s" in row]
            return {"gb_per_s": max(rows), "is": "fill"} if rows else {"error": "no row of fill"}
        factor = 2 if narrowed else 1
        try:
            link = factor * report["probe"][0]["gb_per_s"]
            both = report["fill_and_copy"][0]
            overlap = both["fill"]["gb_per_s"]
        except (KeyError, IndexError):
            return {"error": f"incomplete: {str(report)[:200]}"}
        return {
            "gb_per_s": min(link, overlap), "is": "link" if link <= overlap else "fill beside copies",
            "link_gb_per_s": link / factor, "fill_beside_copies_gb_per_s": overlap, "copy_beside_fill_gb_per_s": both["copy"]["gb_per_s"],
        }

    def cold(self, folder):
        """The limit of a cold load right now: direct reads of one shard."""
        report = self.ask("--only", "disk", "--quick", "--file", *cache.files(folder)[:1])
        if "error" in report:
            return report
        row = (report.get("disk") or [{}])[0]
        return {"gb_per_s": row["gb_per_s"], "is": "disk, direct, 4 threads"} if "gb_per_s" in row else {"error": str(row)[:200]}
