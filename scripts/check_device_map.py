#!/usr/bin/env python3
"""Loads a checkpoint with transformers and accelerate by a device map of ours, for tests/cli_place.rs.

    scripts/check_device_map.py PROGRAM CHECKPOINT HOST_SIZE

Asks PROGRAM for a map that puts a part on the host and a part on the disk, loads the model by it, and compares its answer with that of
the model loaded as a whole.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM


def main():
    program, checkpoint, host = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "map.json"
        plan = [program, "plan", checkpoint, "--budget", "8MiB", "--host", host, "-q", "--export-device-map", path]
        subprocess.run(plan, check=True, stdout=subprocess.DEVNULL)
        device_map = json.loads(path.read_text())
        places = sorted(set(device_map.values()))
        assert places == ["cpu", "disk"], places
        whole = AutoModelForCausalLM.from_pretrained(checkpoint)
        placed = AutoModelForCausalLM.from_pretrained(checkpoint, device_map=device_map, offload_folder=folder)
        words = torch.arange(1, 12)[None]
        with torch.no_grad():
            expected, found = whole(words).logits, placed(words).logits
        assert torch.equal(expected, found), "the answers differ"
        print(f"{len(device_map)} entries on {' and '.join(places)}: the same answer")


main()
