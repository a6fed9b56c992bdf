#!/usr/bin/env python3
"""Makes and reads PyTorch files with torch, for benches/formats.py.

    python3 formats_child.py bin SOURCE.safetensors... TARGET.bin    a PyTorch file with the same tensors
    python3 formats_child.py million TARGET.bin [views]              10^6 tensors of four elements
    python3 formats_child.py split SOURCE.bin TARGET                 one safetensors file per layer: torch.load, save_file
    python3 formats_child.py equal SOURCE.bin DIRECTORY              compares each tensor with its converted twin

Each prints one JSON object. Packages are imported before the clock starts.
"""

import json
import os
import pathlib
import sys
import time
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "peers"))

from per_layer import layer_of, memory, sync  # noqa: E402

COPY_BYTES = 16 << 20


def make_bin(*paths):
    """Writes the frame with `torch.save` and no data, then copies the bytes of each storage into it."""
    import torch
    from safetensors import safe_open

    *sources, target = paths
    tensors, places = {}, []
    for source in sources:
        with open(source, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        with safe_open(source, framework="pt") as file:
            for name, entry in header.items():
                view = file.get_slice(name)
                dtype = view[0:0].dtype if view.get_shape() else file.get_tensor(name).dtype
                tensors[name] = torch.empty(view.get_shape(), dtype=dtype)
                places.append((source, 8 + header_bytes + entry["data_offsets"][0], tensors[name].nbytes))
    with torch.serialization.skip_data():
        torch.save(tensors, target)
    archive = zipfile.ZipFile(target)
    root = archive.namelist()[0].split("/")[0]
    with open(target, "r+b") as out:
        for key, (source, start, length) in enumerate(places):
            offset = archive.getinfo(f"{root}/data/{key}").header_offset
            local = os.pread(out.fileno(), 30, offset)
            offset += 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
            with open(source, "rb") as file:
                while length:
                    piece = os.pread(file.fileno(), min(length, COPY_BYTES), start)
                    os.pwrite(out.fileno(), piece, offset)
                    start, offset, length = start + len(piece), offset + len(piece), length - len(piece)
    return {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors.values())}


def make_million(target, views=None):
    import torch

    base = torch.arange(4_000_000, dtype=torch.float32)
    names = (f"model.layers.{number // 100}.experts.{number % 100}.weight" for number in range(1_000_000))
    part = (lambda number: base[4 * number : 4 * number + 4]) if views else (lambda number: base[:4] + number)
    torch.save({name: part(number) for number, name in enumerate(names)}, target)
    return {"bytes": os.path.getsize(target)}


def split(source, target):
    import torch
    from safetensors.torch import save_file

    before, start = memory(), time.monotonic()
    tensors = torch.load(source, weights_only=True)
    layers = {}
    for name in tensors:
        layers.setdefault(layer_of(name), []).append(name)
    target = pathlib.Path(target)
    target.mkdir()
    for number, (_, names) in enumerate(sorted(layers.items()), 1):
        path = target / f"model-{number:05}-of-{len(layers):05}.safetensors"
        save_file({name: tensors[name].contiguous() for name in names}, path, metadata={"format": "pt"})
        sync(path)
    seconds = time.monotonic() - start
    return {"seconds": seconds, "before_bytes": before["VmRSS"], "peak_bytes": memory()["VmHWM"]}


def equal(source, directory):
    import torch
    from safetensors import safe_open

    wanted = torch.load(source, weights_only=True, mmap=True)
    found = 0
    for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                left, right = wanted.pop(name), file.get_tensor(name)
                same = left.dtype == right.dtype and left.shape == right.shape
                if not same or not torch.equal(left.contiguous().view(torch.uint8), right.view(torch.uint8)):
                    sys.exit(f"{name} differs")
                found += 1
    # Tied weights are written once; the manifest names the others.
    manifest = json.loads((pathlib.Path(directory) / "onelayer.manifest.json").read_text())
    tied = {alias["name"] for alias in manifest["aliases"]}
    return {"tensors": found, "tied": len(tied & wanted.keys()), "missing": sorted(wanted.keys() - tied)[:5]}


ACTIONS = {
    "bin": make_bin,
    "million": make_million,
    "split": split,
    "equal": equal,
}

if __name__ == "__main__":
    print(json.dumps(ACTIONS[sys.argv[1]](*sys.argv[2:])))
