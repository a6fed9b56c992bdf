"""Correctness steps, then measurements, within a time limit. Always writes one JSON and one Markdown file."""

import argparse
import contextlib
import datetime
import os
import pathlib
import platform
import signal
import tempfile
import traceback

from . import correctness, limits, measure, peers
from .data import Data
from .loadcheck import Loadcheck, Wrong
from .process import Deadline
from .report import Report

EPILOG = """exit codes: 0 every correctness step passed; 1 a step failed, or a measured load broke its promise;
2 wrong usage; 4 no binaries or no device; 6 no failure, but a step had no time or no data; 130 interrupted. Both files
are written in every case but 2."""


def say(mark, what, detail=""):
    print(f"{mark:8} {what}{': ' if detail else ''}{detail}", flush=True)


def parse():
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__, epilog=EPILOG)
    parser.add_argument("binaries", type=pathlib.Path, metavar="BIN_DIR", help="holds the programs loadcheck, device_limits and device_cycles")
    parser.add_argument("output", type=pathlib.Path, metavar="OUT_DIR", help="gets gpu-check.json and gpu-check.md")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="22 GB of checkpoints, or 30 MB to try the check itself")
    parser.add_argument("--data", type=pathlib.Path, help="keep the checkpoints here and reuse them (default: a temporary folder)")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after this time and list the skipped parts (default: 9)")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="number of the CUDA device (default: 0)")
    parser.add_argument("--python", help="interpreter with other packages to compare with (default: the one that runs this)")
    # To test this program without a device. The files say so, and no step counts as passed.
    parser.add_argument("--stand-in", choices=("host", "none"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.minutes <= 0:
        parser.error("--minutes: more than 0")
    return args


def interrupt(number, frame):
    raise KeyboardInterrupt


def main():
    args = parse()
    args.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, interrupt)
    report = Report(args.output)
    deadline = Deadline(args.minutes * 60)
    report.found["stand_in"] = args.stand_in
    report.found["machine"] = machine(args)
    report.save()
    code = 1
    with contextlib.ExitStack() as stack:
        try:
            folder = args.data or stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-"))
            folder = pathlib.Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
            code = check(args, report, deadline, folder, stack)
        except KeyboardInterrupt:
            report.found["verdict"], code = "interrupted", 130
        except Exception as error:  # the files must be written after any error, and contain it
            report.found["verdict"] = f"broken: {type(error).__name__}: {error}"
            traceback.print_exc()
        report.found["seconds"] = deadline.elapsed()
        text = report.save()
    if report.found.get("table_error"):
        code = code or 1
    print("\n" + text)
    say(report.found["verdict"], f"{args.output / 'gpu-check.json'}, {args.output / 'gpu-check.md'}", f"{deadline.elapsed():.0f} s")
    return code


def machine(args):
    lines = text_of("/proc/cpuinfo").splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    return {
        "date": datetime.date.today().isoformat(), "cpu": cpu, "cores": os.cpu_count(), "kernel": platform.release(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "scale": args.scale, "minutes": args.minutes,
        "transparent_huge_pages": text_of("/sys/kernel/mm/transparent_hugepage/enabled"), "device": {},
    }


def text_of(path):
    try:
        return pathlib.Path(path).read_text().strip()
    except OSError as error:
        return f"not readable: {error.strerror}"


def no_device(report, reason):
    report.found["verdict"] = f"no device: {reason}"
    report.found["correctness"].append({"name": "driver and device", "outcome": "failed", "detail": reason, "seconds": 0.0})
    say("FAILED", "driver and device", reason)


def check(args, report, deadline, folder, stack):
    """Runs everything and returns the exit code."""
    binaries = {name: (args.binaries / name).resolve() for name in ("loadcheck", "device_limits", "device_cycles")}
    missing = [str(path) for path in binaries.values() if not os.access(path, os.X_OK)]
    if missing:
        report.found["verdict"] = f"no binaries: {', '.join(missing)}"
        say("FAILED", "binaries", f"not there or not executable: {', '.join(missing)}")
        return 4
    loadcheck = Loadcheck(binaries["loadcheck"], args.stand_in or f"cuda:{args.device}", deadline)
    report.found["tools"] = {"loadcheck": loadcheck.version, "python": platform.python_version()}
    watch, identity = None, {"driver": {}, "nvml": {}}
    if not args.stand_in:
        watch, identity = correctness.open_watch(args.device)
        stack.callback(watch.close)
        report.found["machine"]["device"] = {**identity["driver"], "nvml": identity["nvml"]}
        names = [str(identity[source].get("name", "")) for source in ("driver", "nvml")]
        report.found["simulated"] = any("simulated" in name.lower() for name in names)
        if "error" in identity["driver"]:
            no_device(report, identity["driver"]["error"])
            return 4
    data = Data(folder, args.scale, binaries["loadcheck"], deadline, say)
    data.make_all(0.3)
    report.found["data"] = {"made": data.made, "missing": data.missing}
    report.save()
    cycles = [str(binaries["device_cycles"]), "--device", str(args.device)]
    run_steps(correctness.Steps(loadcheck, data, watch, identity, cycles), report, deadline, args.scale == "tiny")
    run_measurements(args, report, deadline, loadcheck, binaries["device_limits"], data)
    return verdict(report)


def run_steps(steps, report, deadline, tiny):
    for name, need, step in steps.all():
        start = deadline.elapsed()
        outcome, found = "stand-in" if steps.loadcheck.stands_in else "passed", {}
        if not deadline.fits(1.0 if tiny else need):
            outcome, found = "skipped", {"detail": f"needs up to {need} s, {deadline.left():.0f} s are left"}
        else:
            try:
                found = step()
            except Wrong as error:
                outcome, found = "failed", {"detail": str(error)}
            except correctness.Skip as error:
                outcome, found = "skipped", {"detail": str(error)}
            except correctness.Absent as error:
                outcome, found = "absent", {"detail": str(error)}
        entry = {"name": name, "outcome": outcome, "seconds": deadline.elapsed() - start, **found}
        report.found["correctness"].append(entry)
        say("FAILED" if outcome == "failed" else outcome, name, entry["detail"])
        report.save()


def run_measurements(args, report, deadline, loadcheck, binary, data):
    tiny = args.scale == "tiny"
    bounds = limits.Limits(binary, args.device, not args.stand_in, deadline)
    name = "sharded" if "sharded" in data.made else "dense"
    if name in data.made and deadline.fits(5):
        seconds = min(60.0, deadline.left() / 5)
        found = bounds.measure(data.path(name), tiny, seconds)
        report.found["limits"] = found
        say("FAILED" if "error" in found else "measured", "limits of the machine", found.get("error") or f"{found['process_seconds']:.1f} s")
    else:
        report.found["skipped"].append({"group": "limits", "row": "all", "reason": "no data" if name not in data.made else "no time left"})
    report.save()
    others = peers.Peers(args.python, args.device, deadline)
    report.found["peers"] = others.versions
    rounds = measure.Measurements(loadcheck, bounds, others, data, deadline, say)
    report.found["skipped"] += rounds.skipped
    rounds.skipped = report.found["skipped"]
    rounds.wrong = report.found["wrong_while_measuring"]
    try:
        rounds.run(tiny)
    finally:
        report.found["measurements"] = rounds.summary()
        report.found["machine"]["file_huge_pages_bytes"] = huge_file_bytes()


def huge_file_bytes():
    """Page cache in large pages: copying out of small ones is slower."""
    for line in text_of("/proc/meminfo").splitlines():
        if line.startswith("FileHugePages:"):
            return int(line.split()[1]) * 1024
    return None


def verdict(report):
    """Prints the verdict and returns the exit code."""
    outcomes = [step["outcome"] for step in report.found["correctness"]]
    if "failed" in outcomes or report.found["wrong_while_measuring"]:
        report.found["verdict"] = "failed"
        return 1
    if report.found["stand_in"]:
        report.found["verdict"] = "stand-in"
        return 0
    if "skipped" in outcomes:
        report.found["verdict"] = "incomplete"
        return 6
    report.found["verdict"] = "passed"
    return 0
