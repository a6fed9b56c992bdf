#!/usr/bin/env python3
"""Loads a checkpoint with transformers and a device map of ours, for crates/loadcheck/tests/cli/place.rs.

    scripts/check_device_map.py PROGRAM CHECKPOINT HOST_SIZE

PROGRAM writes a map with one part on the host and one on the disk. The model loaded with it must give the
same result as the model loaded whole.
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
