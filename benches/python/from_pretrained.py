#!/usr/bin/env python3
"""Models that fit: `onelayer.transformers.from_pretrained` against transformers' own.

    benches/python/from_pretrained.py FOLDER [--rounds 7] [--ways transformers,mapped,owned] [--python PYTHON]
                                      [--markdown FILE]

FOLDER is a model of transformers, such as `loadcheck synth gemma-2b FOLDER` (5 GB). PYTHON has onelayer, torch and
transformers. Every load is a new process; the files are in the page cache; rounds are interleaved. Seconds are those
of the call, after the imports, and of a forward of one token after it. Memory is measured in processes of its own,
since sampling takes time: growth from before the call until after the forward.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from figure_tools import ROOT, files, mib

WAYS = ("transformers", "mapped", "owned")


def child(way, source, measures_memory):
    """One load in this process; prints a line of JSON."""
    import onelayer.transformers
    import torch
    import transformers
    from onelayer._native import MemoryMeter

    torch.set_grad_enabled(False)
    config = transformers.AutoConfig.from_pretrained(source)
    # Imports what every way imports.
    cls = getattr(transformers, config.architectures[0])
    meter = MemoryMeter() if measures_memory else None
    start = time.perf_counter()
    if way == "transformers":
        model = cls.from_pretrained(source)
    else:
        model = onelayer.transformers.from_pretrained(source, mode=way)
    loaded = time.perf_counter()
    logits = model(torch.arange(5, 6)[None], use_cache=False).logits
    done = time.perf_counter()
    found = {
        "load": loaded - start,
        "forward": done - loaded,
        "logits": logits.double().sum().item(),
    }
    if meter is not None:
        (host, _), (rss, _), _ = meter.finish()
        found |= {"host": host, "rss": rss}
    print(json.dumps(found))


def measured(python, way, source, measures_memory):
    command = [
        python,
        __file__,
        source,
        "--child",
        way,
        *(["--memory"] if measures_memory else []),
    ]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{way}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(runs, reference):
    heads = (
        "way",
        "load, s",
        "times transformers",
        "load and first forward, s",
        "times",
        "unreclaimable",
        "RSS",
    )
    yield f"| {' | '.join(heads)} |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for way, each in runs.items():
        cells = []
        for seconds in (load_of, both_of):
            found = [seconds(run) for run, _ in each]
            ratios = [
                one / seconds(other)
                for one, (other, _) in zip(found, runs[reference], strict=True)
            ]
            cells += [spread(found, 3), spread(ratios, 2)]
        host, rss = (
            statistics.median(memory[kind] for _, memory in each)
            for kind in ("host", "rss")
        )
        yield f"| {way} | {' | '.join(cells)} | {mib(host)} | {mib(rss)} |"


def load_of(run):
    return run["load"]


def both_of(run):
    return run["load"] + run["forward"]


def spread(numbers, digits):
    return f"{statistics.median(numbers):.{digits}f} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--ways", default=",".join(WAYS), help="transformers comes first"
    )
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, str(arguments.folder), arguments.memory)
        return
    sys.path.insert(0, str(ROOT / "scripts"))
    from gpu_check import cache

    cache.warm(files(arguments.folder))
    ways = arguments.ways.split(",")
    runs = {way: [] for way in ways}
    for number in range(arguments.rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            pair = [
                measured(arguments.python, way, arguments.folder, memory)
                for memory in (False, True)
            ]
            runs[way].append(pair)
            print(f"round {number}, {way}: {pair[0]}", file=sys.stderr, flush=True)
    assert len({run["logits"] for each in runs.values() for run, _ in each}) == 1, (
        "logits differ"
    )
    text = "\n".join(table(runs, ways[0]))
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
