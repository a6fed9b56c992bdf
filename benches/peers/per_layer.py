#!/usr/bin/env python3
"""A simple converter to one file per layer, written with the packages safetensors and torch.

    python3 per_layer.py SOURCE TARGET

It holds one layer and opens one shard at a time, and syncs its files like ours. It has no hashes, no resuming,
no side files and no temporary names. Prints one JSON object: seconds from the first header to the last sync,
and memory before and at the peak, from the kernel's high-water mark. Packages are imported before the clock
starts.
"""

import json
import os
import pathlib
import re
import sys
import time

import torch  # noqa: F401
from safetensors import safe_open
from safetensors.torch import save_file


def memory():
    with open("/proc/self/status") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def shards(source):
    """Tensor name -> file."""
    index = source / "model.safetensors.index.json"
    if index.exists():
        return {name: source / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    path = source / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        return {name: path for name in file.keys()}


def layer_of(name):
    """The layer of a tensor: its stack and number, or a name outside the stacks."""
    found = re.match(r"(.*?)\.(\d+)\.", name)
    return (found[1], int(found[2])) if found else (name, -1)


def convert(source, target):
    where = shards(source)
    layers = {}
    for name in where:
        layers.setdefault(layer_of(name), []).append(name)
    target.mkdir()
    weight_map, total = {}, 0
    for number, (_, names) in enumerate(sorted(layers.items()), 1):
        tensors = {}
        for path in sorted({where[name] for name in names}):
            with safe_open(path, framework="pt") as file:
                for name in names:
                    if where[name] == path:
                        tensors[name] = file.get_tensor(name)
        file_name = f"model-{number:05}-of-{len(layers):05}.safetensors"
        save_file(tensors, target / file_name, metadata={"format": "pt"})
        sync(target / file_name)
        weight_map.update({name: file_name for name in tensors})
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = target / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    sync(index)
    sync(target)
    return total


def main():
    source, target = (pathlib.Path(word) for word in sys.argv[1:])
    before = memory()
    start = time.monotonic()
    total = convert(source, target)
    seconds = time.monotonic() - start
    print(json.dumps({"bytes": total, "seconds": seconds, "before_bytes": before["VmRSS"], "peak_bytes": memory()["VmHWM"]}))


if __name__ == "__main__":
    main()
