#!/usr/bin/env python3
"""Converts checkpoints there and back in several ways, and compares every tensor. Standard library only.

    python3 scripts/round_trip.py SOURCE [SOURCE ...] [--program target/release/loadcheck]

A SOURCE is an input of `loadcheck convert`: a directory, a pipeline, a file, an index. An independent reader
checks each result: same tensors with the same type, shape and bytes; data starts at a multiple of 4096,
tensors are aligned, file names sort in order, the index is right, side files exist, nothing else is there.
Exit code 1 if anything is wrong.
"""

import argparse
import hashlib
import json
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MANIFEST = "onelayer.manifest.json"
PIPELINE = "model_index.json"
WEIGHTS = (
    ".safetensors .bin .pt .pth .ckpt .gguf .h5 .msgpack .npz .onnx .onnx_data .pb .tflite .ot .safetensors.index.json .bin.index.json"
).split()
BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}

# Conversions of the source. The result of each is merged and converted once more.
WAYS = {
    "per layer": [],
    "experts per file": ["--experts", "per-file"],
    "files of 40 kB": ["--max-shard-size", "40kB"],
    "8 MiB, 8 threads, every byte written": ["--budget", "8MiB", "--jobs", "8", "--no-kernel-copy"],
}


def header(path):
    """The tensors of one file (name, entry, start of data), and the end of the tensors."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
    metadata = entries.pop("__metadata__", None)
    return entries, metadata, 8 + length


def tensors_of(path, found):
    entries, _, start = header(path)
    with open(path, "rb") as file:
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            file.seek(start + begin)
            digest = hashlib.sha256(file.read(end - begin)).hexdigest()
            found[name] = (entry["dtype"], tuple(entry["shape"]), digest)


def files_of(path):
    """The safetensors files of one model."""
    if path.is_file():
        if path.name.endswith(".index.json"):
            return sorted({path.parent / name for name in json.loads(path.read_text())["weight_map"].values()})
        return [path]
    indices = sorted(path.glob("*.safetensors.index.json"))
    return files_of(indices[0]) if indices else sorted(path.glob("*.safetensors"))


def read(path):
    """Every tensor, by component folder and name."""
    folders = [path]
    if path.is_dir() and (path / PIPELINE).exists():
        folders = sorted({file.parent for file in path.rglob("*.safetensors")})
    found = {}
    for folder in folders:
        names = {}
        for file in files_of(folder):
            tensors_of(file, names)
        component = "" if folder == path else folder.relative_to(path)
        found.update({f"{component}/{name}": value for name, value in names.items()})
    return found


def side_files(folder):
    found = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        name = path.relative_to(folder)
        is_ours = any(part.startswith(".") for part in name.parts) or path.name == MANIFEST
        if path.is_file() and not is_ours and not path.name.endswith(tuple(WEIGHTS)):
            found[str(name)] = path.read_bytes()
    return found


def check_file(path):
    """Problems in the layout of one file."""
    entries, _, start = header(path)
    if start % 4096:
        yield f"{path.name}: data begins at {start}"
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        align = max(BITS.get(entry["dtype"], 8) // 8, 1)
        if begin != end and begin % align:
            yield f"{path.name}: {name} of {entry['dtype']} begins at {begin}"


def check_index(folder):
    """Problems in the index and in file names."""
    paths = sorted(folder.glob("*.safetensors"))
    index = next(folder.glob("*.index.json"), None)
    if len(paths) == 1:
        if index is not None or paths[0].name != "model.safetensors" and not paths[0].name.startswith("diffusion_pytorch_model"):
            yield f"one file, {paths[0].name}, index {index}"
        return
    for number, path in enumerate(paths, 1):
        if not re.fullmatch(rf".*-{number:05}-of-{len(paths):05}\.safetensors", path.name):
            yield f"{path.name} is file {number} of {len(paths)}"
    if index is None:
        yield "there is no index"
        return
    told = json.loads(index.read_text())
    held, total = {}, 0
    for path in paths:
        for name, entry in header(path)[0].items():
            held[name] = path.name
            total += entry["data_offsets"][1] - entry["data_offsets"][0]
    if told["weight_map"] != held or list(told["weight_map"]) != sorted(held):
        yield "the index's map is wrong, or not sorted"
    if told["metadata"]["total_size"] != total:
        yield f"the index counts {told['metadata']['total_size']} bytes, the files hold {total}"


def check_target(target, source, expected):
    """Problems of a target."""
    found = read(target)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            yield f"{name} is {found.get(name)}, in the source {expected.get(name)}"
    for folder in sorted({path.parent for path in target.rglob("*.safetensors")}):
        yield from check_index(folder)
        for path in sorted(folder.glob("*.safetensors")):
            yield from check_file(path)
    theirs, ours = side_files(source.parent if source.name.endswith(".index.json") else source), side_files(target)
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            yield f"side file {name} {'differs' if name in theirs and name in ours else 'is only on one side'}"
    if not (target / MANIFEST).exists():
        yield "there is no manifest"
    for path in target.rglob(".*"):
        yield f"{path.name} is left over"


class Program:
    def __init__(self, path):
        self.path = path

    def run(self, command, *words):
        done = subprocess.run([str(word) for word in (self.path, command, *words, "-q")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return [f"{command} {' '.join(map(str, words))}: exit {done.returncode}: {done.stdout}"] if done.returncode else []


def there_and_back(program, source, folder):
    """Yields (way, number of files, problems)."""
    expected = read(source)
    contents = lambda target: {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file() and p.name != MANIFEST}
    for number, (way, flags) in enumerate(WAYS.items()):
        first, merged, again = (folder / f"{number}-{name}" for name in ("first", "merged", "again"))
        wrong = program.run("convert", source, first, *flags)
        wrong = wrong or [*check_target(first, source, expected), *program.run("verify", first, "--against", source)]
        yield way, len(list(first.rglob("*.safetensors"))), wrong
        if wrong:
            continue
        merge = ["--merge"] if number % 2 == 0 else ["--merge", "--max-shard-size", "150kB"]
        wrong = program.run("convert", first, merged, *merge)
        wrong = wrong or [*check_target(merged, first, expected), *program.run("verify", merged, "--against", source)]
        yield f"{way}, then {' '.join(merge)}", len(list(merged.rglob("*.safetensors"))), wrong
        if wrong:
            continue
        wrong = program.run("convert", merged, again, *flags)
        if not wrong and contents(first) != contents(again):
            wrong = ["the files are not those of the first time"]
        yield f"{way}, merged, and again", len(list(again.rglob("*.safetensors"))), wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=pathlib.Path)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "target/release/loadcheck")
    args = parser.parse_args()
    program = Program(args.program.resolve())
    failed = conversions = tensors = 0
    for source in args.sources:
        with tempfile.TemporaryDirectory() as name:
            tensors += len(read(source))
            for way, files, wrong in there_and_back(program, source, pathlib.Path(name)):
                conversions += 1
                failed += bool(wrong)
                if wrong:
                    print(f"WRONG {source}, {way}, {files} files: {'; '.join(wrong[:5])}", flush=True)
    print(f"{len(args.sources)} checkpoints, {tensors} tensors, {conversions} conversions: {failed} wrong")
    return 1 if failed or not tensors else 0


if __name__ == "__main__":
    sys.exit(main())
