"""The pages that are checked: of loads of small checkpoints, and of names that attack a page."""

import json
import subprocess

# What a tensor or a file may be called.
HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">'\"&\u202e\u0007"


def make(program, folder):
    """The paths of the pages, each made when it is asked for."""

    def loadcheck(*words, exits=(0,)):
        done = subprocess.run([program, "-q", *map(str, words)], cwd=folder, capture_output=True, text=True)
        if done.returncode not in exits:
            raise RuntimeError(f"loadcheck {' '.join(map(str, words))}: {done.stderr}")

    model = folder / "model"
    loadcheck("synth", "tiny-llama", model)
    load = ("model", "--device", "host", "--timeline", "1")
    loadcheck(*load, "--window", "1", "--max-memory", "1GiB", "--export-html", "run.html", "-o", "a.json")
    loadcheck(*load, "--budget", "32MiB", "-o", "b.json")
    loadcheck("report", "a.json", "b.json", "-o", "both.html")
    loadcheck("compare", "model", "-s", "stream", "-s", "read", "-o", "compare.html")
    loadcheck(*load, "--max-memory", "1KiB", "-o", "failed.json", exits=(1,))
    loadcheck("report", "failed.json", "-o", "failed.html")

    # Device memory needs a device: here it grows with the samples.
    report = json.loads((folder / "a.json").read_text())
    samples = report["runs"][0]["samples"]
    samples["columns"].append("vram_bytes")
    for index, row in enumerate(samples["rows"]):
        row.append(3 * 2**30 * index // len(samples["rows"]))
    report["runs"][0]["peak"]["vram_bytes"] = 3 * 2**30
    (folder / "device.json").write_text(json.dumps(report))
    loadcheck("report", "device.json", "-o", "device.html")

    report = json.loads((folder / "a.json").read_text())
    report["source"]["given"] = HOSTILE
    report["answer"]["sentence"] += HOSTILE
    report["notes"].append(HOSTILE) if "notes" in report else report.update(notes=[HOSTILE])
    rows = report["runs"][0]["deliveries"]["rows"]
    for index, row in enumerate(rows):
        row["layer"] = f"{HOSTILE}{index}" + "very_long_name" * 20
    (folder / "hostile.json").write_text(json.dumps(report))
    loadcheck("report", "hostile.json", "-o", "hostile.html")
    return [folder / f"{name}.html" for name in ("run", "both", "compare", "failed", "device", "hostile")]
