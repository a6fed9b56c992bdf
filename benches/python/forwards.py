#!/usr/bin/env python3
"""Forwards of models that do not fit into memory: ours, the program's own passes, and what people use today.

    benches/python/forwards.py FOLDER [--only small_group,large_group,fits,quantised,generate] [--rounds 3]
                               [--big FOLDER] [--python PYTHON] [--scratch FOLDER] [--state FILE] [--markdown FILE]

FOLDER is `loadcheck synth gemma-2b FOLDER` (5 GB), the big one `loadcheck synth gemma-7b FOLDER` (17 GB). PYTHON has
onelayer, torch, transformers, accelerate, diffusers and airllm. Every run is a new process in a memory group (root).
Rounds are interleaved and begin with an empty page cache, checked by mincore. A run makes one forward that
does not count and two that do. The scratch folder takes what others write: up to three copies of the model.
`--state` keeps every round: a later call with the same file adds its rounds to the tables.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from figure_tools import LOADCHECK, ROOT, Group, files, mib

sys.path.insert(0, str(ROOT / "scripts"))
from gpu_check import cache

HERE = pathlib.Path(__file__).resolve().parent
GIB = 1 << 30
FORWARDS = 3


def cold(folder):
    """Drops the cached pages of a checkpoint, and checks that they are gone."""
    cache.drop(files(folder))
    share = cache.cached_share(files(folder))
    assert share is not None and share < 0.001, f"{share} of {folder} is still cached"


def warm(folder):
    cache.warm(files(folder))


class Runs:
    def __init__(self, arguments):
        self.python = arguments.python
        self.scratch = arguments.scratch
        self.rounds = arguments.rounds
        self.state_file = arguments.state
        # Title of a table -> rounds, each a report (or the reason of a failure) by way.
        self.state = json.loads(self.state_file.read_text()) if self.state_file and self.state_file.exists() else {}
        self.lines = []

    def say(self, line):
        print(line, flush=True)
        self.lines.append(line)

    def in_group(self, limit, command):
        """Output of a command in a group with a limit; an error message if it fails."""
        group = Group(limit)
        try:
            done = subprocess.run(
                [str(word) for word in command],
                capture_output=True,
                text=True,
                preexec_fn=group.enter,
                timeout=900,
                check=False,
            )
            peak = group.peak()
        except subprocess.TimeoutExpired:
            return None, "not done after 15 minutes"
        finally:
            time.sleep(0.3)
            group.remove()
        if done.returncode != 0:
            said = "killed" if done.returncode in (-9, 137) else (done.stderr.strip().splitlines() or ["?"])[-1][:160]
            return None, said
        # The program writes nothing but its report; libraries may write before ours.
        report = done.stdout if done.stdout.startswith("{\n") else done.stdout.splitlines()[-1]
        return dict(json.loads(report), group_peak=peak), None

    def child(self, limit, way, folder, *words, forwards=FORWARDS):
        script = HERE / "forward_child.py"
        command = [self.python, script, way, folder, forwards, f"scratch={self.scratch}", *words]
        return self.in_group(limit, command)

    def passes(self, limit, folder, *words):
        """The program's own passes over the same layers."""
        window = [] if "--window" in words else ["--window", 2]
        flags = ["--device", "host", *window, "--keep", "outside", "--passes", FORWARDS, "--json", "-q", *words]
        report, failed = self.in_group(limit, [LOADCHECK, "run", folder, *flags])
        if failed:
            return None, failed
        run = report["runs"][0]
        seconds = [each["seconds"] for each in run["passes"]["each"]]
        growth = run["peak"]["rss_bytes"] - run["baseline"]["rss_bytes"]
        return {"forwards": seconds, "rss_growth_bytes": growth, "logits": "-"}, None

    def compare(self, title, folder, ways, reference, prepare=cold):
        """A table: seconds of a forward of each way, and their ratio to the reference in the same round."""
        rounds = self.state.setdefault(title, [])
        names = list(ways)
        for number in range(len(rounds), len(rounds) + self.rounds):
            failed = {name for each in rounds for name, done in each.items() if "failed" in done}
            rounds.append({})
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if name in failed:
                    continue
                prepare(folder)
                time.sleep(0.5)
                done, why = ways[name]()
                rounds[-1][name] = {"failed": why} if done is None else done
                said = why if done is None else [round(seconds, 2) for seconds in done["forwards"]]
                print(f"  {title}, round {number}, {name}: {said}", file=sys.stderr)
            if self.state_file:
                self.state_file.write_text(json.dumps(self.state))
        found = {name: [each[name] for each in rounds if "forwards" in each.get(name, {})] for name in ways}
        for run in [run for each in found.values() for run in each]:
            run["each"] = statistics.median(run["forwards"][1:] or run["forwards"])
        self.say(f"\n### {title}\n")
        self.say(f"{len(rounds)} rounds.\n")
        self.say("| way | s a forward, median (min to max) | times the reference | first forward, s | RSS growth | unreclaimable | logits |")
        self.say("|---|---:|---:|---:|---:|---:|---|")
        for name, runs in found.items():
            if not runs:
                why = next((each[name]["failed"] for each in rounds if "failed" in each.get(name, {})), "not run")
                self.say(f"| {name} | {why} | | | | | |")
                continue
            each = [run["each"] for run in runs]
            pairs = [(one[name], one[reference]) for one in rounds if {name, reference} <= one.keys()]
            ratios = [run["each"] / other["each"] for run, other in pairs if "each" in run and "each" in other]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
            first = statistics.median(run["forwards"][0] + run.get("ready", 0) for run in runs)
            host = [run["host_growth_bytes"] for run in runs if run.get("host_growth_bytes")]
            self.say(
                f"| {name} | {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f}) | {ratio} | {first:.1f} "
                f"| {mib(max(run['rss_growth_bytes'] for run in runs))} | {mib(max(host)) if host else '-'} "
                f"| {runs[0]['logits']} |"
            )
        return found

    def others(self, limit, folder, cpu):
        words = [f"cpu={cpu}"]
        return {
            "plain (mapped by transformers)": lambda: self.child(limit, "plain", folder),
            "transformers, device_map": lambda: self.child(limit, "device_map", folder, *words),
            "accelerate, disk": lambda: self.child(limit, "accelerate", folder, *words),
            "diffusers, groups on disk": lambda: self.child(limit, "group_offload", folder),
            "AirLLM": lambda: self.child(limit, "airllm", folder),
        }


def small_group(runs, folder, _):
    # The program's passes have a window of two layers. So have we with 1500 MiB; 1300 MiB are enough for one.
    ways = {
        "ours, 1500 MiB": lambda: runs.child(2 * GIB, "streamed", folder, "memory=1500MiB"),
        "ours, 1300 MiB": lambda: runs.child(2 * GIB, "streamed", folder, "memory=1300MiB"),
        "the program's passes": lambda: runs.passes(2 * GIB, folder),
        **runs.others(2 * GIB, folder, "1400MiB"),
    }
    runs.compare("5 GB, one token, in a group of 2 GiB, cold", folder, ways, "ours, 1500 MiB")


def large_group(runs, folder, _):
    others = runs.others(4 * GIB, folder, "3GiB")
    # What reads the whole model at each forward takes as long as in the small group.
    ways = {
        "ours, 3 GiB": lambda: runs.child(4 * GIB, "streamed", folder, "memory=3GiB"),
        "ours, 3 GiB, window 1": lambda: runs.child(4 * GIB, "streamed", folder, "memory=3GiB", "window=1"),
        **{name: way for name, way in others.items() if name not in ("diffusers, groups on disk", "AirLLM")},
    }
    runs.compare("5 GB, one token, in a group of 4 GiB, cold", folder, ways, "ours, 3 GiB")


def fits(runs, folder, _):
    limit = 16 * GIB
    ways = {
        "plain (mapped by transformers)": lambda: runs.child(limit, "plain", folder, forwards=6),
        "ours, 8 GiB": lambda: runs.child(limit, "streamed", folder, "memory=8GiB", forwards=6),
    }
    runs.compare("5 GB, one token, everything fits, warm", folder, ways, "plain (mapped by transformers)", warm)


def quantised(runs, folder, _):
    converted = runs.scratch / "int8"
    if not converted.exists():
        command = [LOADCHECK, "convert", folder, converted, "--quantise", "int8", "-q"]
        subprocess.run([str(word) for word in command], check=True)

    def both(_):
        cold(folder)
        cold(converted)

    ways = {
        "bf16, keep none": lambda: runs.child(2 * GIB, "streamed", folder, "memory=1500MiB", "keep=none"),
        "int8, keep none": lambda: runs.child(2 * GIB, "streamed", converted, "memory=1500MiB", "keep=none"),
        "int8, 1500 MiB": lambda: runs.child(2 * GIB, "streamed", converted, "memory=1500MiB"),
    }
    runs.compare("int8 files against bf16, in a group of 2 GiB, cold", folder, ways, "bf16, keep none", both)


def generate(runs, _, big):
    # One pass a token is the limit of disk and memory: nothing is computed.
    ways = {
        "ours, 2200 MiB": lambda: runs.child(3 * GIB, "streamed", big, "memory=2200MiB", "generate=8", forwards=1),
        "the program's passes, window 1": lambda: runs.passes(3 * GIB, big, "--window", 1),
    }
    runs.compare("17 GB, generate 8 tokens, in a group of 3 GiB, cold", big, ways, "ours, 2200 MiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--big", type=pathlib.Path)
    parser.add_argument("--only", default="small_group,large_group,fits,quantised")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--scratch", type=pathlib.Path, default=pathlib.Path("forwards-scratch"))
    parser.add_argument("--state", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    runs = Runs(arguments)
    makers = {maker.__name__: maker for maker in (small_group, large_group, fits, quantised, generate)}
    for name in arguments.only.split(","):
        makers[name](runs, arguments.folder, arguments.big)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(runs.lines) + "\n")
    shutil.rmtree(arguments.scratch / "accelerate", ignore_errors=True)


if __name__ == "__main__":
    main()
