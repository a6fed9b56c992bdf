#!/usr/bin/env python3
"""Compares our reading of PyTorch files with torch's, on random files, whole and damaged.

    cargo build --release -p onelayer --example describe
    scripts/torch_differential.py target/release/examples/describe [--files 100000] [--seed 1] [--folder FOLDER]

Each file is a random nest of dictionaries, lists and tensors (all dtypes, views, shared storages), saved by torch in one
of its formats and protocols; half of them are then damaged. `torch.load(weights_only=True)` is the oracle. Where both
read a file, every name, dtype, shape and byte has to be equal. Where one refuses, the reason has to be one of the classes
below. Prints the classes with their counts, and fails if a difference has none.
"""

import argparse
import collections
import json
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
import zipfile
from pathlib import Path

import torch

warnings.filterwarnings("ignore")

NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32", torch.complex64: "C64",
    torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float4_e2m1fn_x2: "F4",
}  # fmt: skip
UNKNOWN_DTYPES = [torch.complex128, torch.complex32, torch.bits8, torch.bits16]

# Our refusals that torch does not share: (class, pattern of our message).
STRICTER = [
    ("expanded tensors: stride 0 is not read", r"expanded tensors are not read"),
    ("a dtype that safetensors does not have", r"elements of type|float4_e2m1fn_x2 with strides"),
    ("sparse, quantised, nested or meta tensors", r"found a (sparse|quantised|nested) tensor|meta device"),
    ("conjugated or negated views", r"conjugated view|negated view"),
    ("a name twice: `a.b` and `a` with `b` inside", r"expected each key once"),
    ("a dictionary key twice, or one that is no text or number", r"a key twice|neither a text nor a number"),
    ("containers in themselves, or many times in each other", r"holds itself|hold each other"),
    ("a tensor outside its storage, which torch enlarges", r"inside its storage"),
    ("a storage longer than its entry, or of another length than before", r"bytes in its entry|one length of storage"),
    ("a damaged zip: records that contradict each other, names, sizes, checksums, gaps", r"PyTorch zip file, at byte"),
    ("a zip entry that says it is compressed or encrypted", r"is (compressed|encrypted)"),
    ("objects with tensors inside, or tensors made of objects", r"tensors inside an object|that `.*` makes"),
    ("a damaged legacy file", r"legacy PyTorch file, at byte"),
    ("a size beyond 64 bits", r"size below 2\^64 bits"),
    ("bytes that are no longer those of a PyTorch file", r"safetensors"),
    ("big-endian, which torch swaps", r"big-endian"),
    ("a part of the archive that is missing", r"without the entry|of which the file has no bytes"),
    ("larger than the limit", r"over the limit"),
]  # fmt: skip
# As many of them may befall a file that nobody damaged.
WHOLE = 5
# Refusals of torch that we do not share: (class, pattern of its message).
MORE_TOLERANT = [
    ("opcodes of newer protocols, which weights_only does not know", r"Unsupported operand"),
    ("classes that weights_only does not allow, and that stand beside the tensors", r"Unsupported global|Unsupported class|UnpicklingError.*(reduce|Can only|NEWOBJ|GLOBAL)|whose module"),
    ("archives without the entry `version`, or with another", r"version|PytorchStreamReader"),
    ("values beside the tensors that do not make sense to Python", r"TypeError|ValueError|AttributeError|KeyError|IndexError|AssertionError|UnicodeDecodeError|OverflowError|LookupError|RuntimeError|RecursionError|EOFError|UnpicklingError|MemoryError|error:"),
    ("torch itself crashes or runs out of memory", r"crashed"),
    ("legacy files with types that have no class of storages: torch writes them and cannot read them", r"UntypedStorage' has no attribute 'dtype'"),
]  # fmt: skip


class Maker:
    """Random values, and files of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.pool: list[torch.Tensor] = []

    def base(self) -> torch.Tensor:
        """A tensor with a storage of its own."""
        chance = self.random
        dims = [chance.choice([0, 1, 1, 2, 3, 4, 5]) for _ in range(chance.choice([0, 1, 1, 2, 2, 2, 3, 4]))]
        dtypes = list(NAMES) if chance.random() < 0.995 else UNKNOWN_DTYPES
        dtype = chance.choice(dtypes)
        count = 1
        for dim in dims:
            count *= dim
        raw = torch.tensor([chance.randrange(256) for _ in range(count * dtype.itemsize)], dtype=torch.uint8)
        if dtype == torch.bool:
            raw &= 1
        return raw.view(dtype).reshape(dims) if count else torch.empty(dims, dtype=dtype)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        chance = self.random
        kind = chance.randrange(8)
        try:
            if kind == 0 and tensor.dim() > 1:
                return tensor.transpose(0, 1)
            if kind == 1 and tensor.dim() and tensor.shape[0] > 1:
                return tensor[1:]
            if kind == 2 and tensor.dim() and tensor.shape[-1] > 1:
                return tensor[..., ::2]
            if kind == 3:
                return tensor.reshape(-1)
            if kind == 4 and chance.random() < 0.2:
                return tensor.unsqueeze(0).expand(2, *tensor.shape)
            if kind == 5 and tensor.numel():
                return tensor.reshape(-1)[-1]
            if kind == 6 and tensor.dim():
                return tensor.unsqueeze(chance.randrange(tensor.dim() + 1))
        except RuntimeError:
            pass
        return tensor

    def tensor(self) -> object:
        chance = self.random
        tensor = chance.choice(self.pool) if self.pool and chance.random() < 0.3 else self.base()
        self.pool = [*self.pool[-8:], tensor]
        if chance.random() < 0.4:
            tensor = self.view(tensor)
        odd = chance.random()
        if odd < 0.05 and (tensor.is_floating_point() or tensor.is_complex()):
            tensor = torch.nn.Parameter(tensor, requires_grad=chance.random() < 0.5)
            if chance.random() < 0.3:
                tensor.note = "kept"
        elif odd < 0.06:
            tensor = tensor.detach()
            tensor.note = 1
        elif odd < 0.065 and tensor.dtype == torch.float32:
            tensor = tensor.to_sparse()
        elif odd < 0.07 and tensor.dtype == torch.complex64:
            tensor = tensor.conj()
        elif odd < 0.073 and tensor.dtype == torch.float32 and tensor.dim():
            tensor = torch.quantize_per_tensor(tensor.nan_to_num(), 1.0, 0, torch.quint8)
        elif odd < 0.076:
            tensor = torch.empty(2, device="meta")
        return tensor

    def scalar(self) -> object:
        chance = self.random
        return chance.choice([
            lambda: None, lambda: chance.random() < 0.5, lambda: chance.randrange(-5, 300), lambda: chance.getrandbits(chance.choice([20, 40, 70, 200])),
            lambda: chance.random(), lambda: "text" * chance.randrange(4), lambda: (1, 2, "x"), lambda: {1, 2}, lambda: complex(1, 2),
            lambda: torch.Size([2, 3]), lambda: torch.device("cpu"), lambda: torch.float32, lambda: bytearray(b"abc"), lambda: b"bytes",
            lambda: collections.Counter("abca"), lambda: [], lambda: {}, lambda: torch.float32, lambda: torch.ones(2).untyped_storage(),
        ])()  # fmt: skip

    def key(self) -> object:
        chance = self.random
        plain = f"{chance.choice(['layer', 'model.layers', 'w', 'weight', 'bias', 'ü'])}.{chance.randrange(40)}"
        return chance.choice([plain, plain, plain, plain, chance.randrange(9), chance.choice(["", "a", "b", "a.b", "state_dict"])])

    def value(self, depth: int) -> object:
        chance = self.random
        kind = chance.random()
        if depth > 3 or kind < 0.6:
            return self.tensor()
        if kind < 0.72:
            return self.scalar()
        return self.container(depth + 1)

    def container(self, depth: int) -> object:
        chance = self.random
        count = chance.randrange(7)
        if chance.random() < 0.7:
            made = (collections.OrderedDict if chance.random() < 0.5 else dict)((self.key(), self.value(depth)) for _ in range(count))
            if isinstance(made, collections.OrderedDict) and chance.random() < 0.3:
                made._metadata = {"version": 1}  # type: ignore[attr-defined]
            return made
        values = [self.value(depth) for _ in range(count)]
        return values if chance.random() < 0.6 else tuple(values)

    def save(self, path: Path) -> str:
        """Writes a file. Returns how."""
        chance = self.random
        self.pool = []
        root = self.container(0) if chance.random() < 0.95 else self.tensor()
        protocol = chance.choice([2, 2, 2, 2, 2, 2, 1, 3, 4, 5])
        is_zip = chance.random() < 0.7
        torch.save(root, path, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
        kind = f"{'zip' if is_zip else 'legacy'}, protocol {protocol}"
        if chance.random() < 0.5:
            return f"{kind}, whole"
        return f"{kind}, {self.damage(path, is_zip)}"

    def damage(self, path: Path, is_zip: bool) -> str:
        chance = self.random
        data = bytearray(path.read_bytes())
        if chance.random() < 0.08:
            del data[chance.randrange(len(data)) :]
            path.write_bytes(data)
            return "cut"
        if not is_zip:
            self.change(data, 0, len(data) if chance.random() < 0.3 else min(len(data), 600))
            path.write_bytes(data)
            return "changed"
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            pickled = next(entry for entry in entries if entry.filename.endswith("/data.pkl"))
            parts = {entry.filename: archive.read(entry) for entry in entries}
        choice = chance.random()
        start = data.index(parts[pickled.filename][:20])
        if choice < 0.55:
            self.change(data, start, start + pickled.file_size)
            path.write_bytes(data)
            return "pickle changed"
        if choice < 0.75:
            self.change(data, data.rindex(b"PK\x06\x06") - 60 * len(entries), len(data))
            path.write_bytes(data)
            return "directory changed"
        if choice < 0.85:
            self.change(data, 0, len(data))
            path.write_bytes(data)
            return "changed"
        # Another writer of archives, with or without changes.
        text = bytearray(parts[pickled.filename])
        if chance.random() < 0.6:
            self.change(text, 0, len(text))
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if chance.random() < 0.05 else zipfile.ZIP_STORED) as archive:
            for name, part in parts.items():
                archive.writestr(name, bytes(text) if name == pickled.filename else part)
        return "archived again"

    def change(self, data: bytearray, start: int, end: int) -> None:
        chance = self.random
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            at = chance.randrange(max(start, 0), end)
            kind = chance.random()
            if kind < 0.5:
                data[at] ^= 1 << chance.randrange(8)
            elif kind < 0.8:
                data[at] = chance.choice([0, 1, 2, 3, 255, chance.randrange(256)])
            else:
                other = chance.randrange(max(start, 0), end)
                data[at], data[other] = data[other], data[at]


def flat(value: object, name: str, found: list[tuple[str, object]]) -> None:
    """Names and tensors, as we name them."""
    if isinstance(value, torch.Tensor):
        found.append(("tensor" if name is None else name, value))
    elif isinstance(value, dict):
        for key, inner in value.items():
            flat(inner, f"{name}.{key}" if name is not None else str(key), found)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            flat(inner, f"{name}.{index}" if name is not None else str(index), found)


def described(tensor: torch.Tensor) -> list:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        return ["unreadable"]
    if tensor.device.type == "meta" or tensor.dtype not in NAMES or tensor.is_conj() or tensor.is_neg():
        return ["unreadable"]
    shape = list(tensor.shape)
    if tensor.dtype == torch.float4_e2m1fn_x2:
        if not shape:
            return ["unreadable"]
        shape[-1] *= 2
    if tensor.numel() > 1 << 20:
        return ["too large to compare"]
    if not tensor.numel():
        return [NAMES[tensor.dtype], shape, ""]
    # Copies make every true byte 1.
    raw = tensor.detach().view(torch.uint8) if tensor.dtype == torch.bool else tensor.detach()
    plain = torch.empty(raw.shape, dtype=raw.dtype).copy_(raw)
    return [NAMES[tensor.dtype], shape, bytes(plain.reshape(-1).view(torch.uint8).tolist()).hex()]


def torch_reads(path: Path, trusted: bool) -> dict:
    """What torch makes of a file."""
    try:
        value = torch.load(path, weights_only=True, map_location="cpu")
    except BaseException as error:  # noqa: BLE001
        # torch would check them during the next load.
        torch._utils._get_sparse_tensors_to_validate().clear()
        message = f"{type(error).__name__}: {error}"
        if not (trusted and re.search("Unsupported operand|Unsupported global", message)):
            return {"error": message[:2000]}
        # Our own file, undamaged: the protocol is newer than weights_only knows.
        try:
            value = torch.load(path, weights_only=False, map_location="cpu")
        except AttributeError as error:
            return {"error": f"AttributeError: {error}"}
    found: list[tuple[str, object]] = []
    try:
        flat(value, None, found)
    except RecursionError:
        return {"error": "a container in itself"}
    if isinstance(value, torch.Tensor):
        found = [("tensor", value)]
    return {"tensors": [(name, described(tensor)) for name, tensor in found]}


def torch_batch(paths: list[tuple[Path, bool]]) -> list[dict]:
    """What torch makes of files, in processes of their own: it may crash."""
    results: list[dict] = []
    while len(results) < len(paths):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
            try:
                with os.fdopen(writer, "wb") as out:
                    for path, trusted in paths[len(results) :]:
                        pickle.dump(torch_reads(path, trusted), out)
                        out.flush()
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as into:
            while True:
                try:
                    results.append(pickle.load(into))  # noqa: S301
                except EOFError:
                    break
        os.waitpid(child, 0)
        if len(results) < len(paths):
            results.append({"error": "crashed"})
    return results


def first(classes: list[tuple[str, str]], message: str) -> str | None:
    return next((name for name, pattern in classes if re.search(pattern, message)), None)


def compare(ours: dict, theirs: dict, whole: bool) -> tuple[str, str | None]:
    """The class of a difference, and what is unexplained about it."""
    if "error" in ours and "error" in theirs and not whole:
        return "both refuse", None
    if "error" in ours:
        name = first(STRICTER[:WHOLE] if whole else STRICTER, ours["message"])
        return f"we refuse: {name}", None if name else f"we refuse, torch reads: {ours['message']}"
    if "error" in theirs:
        name = first(MORE_TOLERANT[-1:] if whole else MORE_TOLERANT, theirs["error"])
        return f"torch refuses: {name}", None if name else f"torch refuses, we read: {theirs['error']}"
    rows = dict(theirs["tensors"])
    if len(rows) != len(theirs["tensors"]):
        return "both read", f"torch has a name twice: {sorted(name for name, _ in theirs['tensors'])}"
    if any(row == ["unreadable"] for row in rows.values()):
        return "both read", "torch has tensors that we cannot have"
    if any(row == ["too large to compare"] for row in rows.values()):
        return "both read, too large to compare", None
    if rows.keys() != ours["tensors"].keys():
        return "both read", f"names: {sorted(rows)} and {sorted(ours['tensors'])}"
    for name, row in rows.items():
        if row != ours["tensors"][name]:
            return "both read", f"{name}: torch {row}, we {ours['tensors'][name]}"
    return "both read, all equal", None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("describe")
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    maker, counts, unexplained = Maker(options.seed), collections.Counter(), 0
    kinds: collections.Counter = collections.Counter()
    kept = Path(tempfile.mkdtemp(prefix="torch-differences-", dir=options.folder))
    reader = subprocess.Popen([options.describe], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin
    assert reader.stdout
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for start in range(0, options.files, 250):
            batch = []
            for number in range(start, min(start + 250, options.files)):
                path = Path(folder) / f"{number % 250}.pt"
                kind = maker.save(path)
                kinds[kind] += 1
                batch.append((path, kind.endswith("whole")))
            theirs = torch_batch(batch)
            for (path, whole), torch_result in zip(batch, theirs, strict=True):
                reader.stdin.write(f"*\t{path}\n")
                reader.stdin.flush()
                ours = json.loads(reader.stdout.readline())
                name, why = compare(ours, torch_result, whole)
                counts[name] += 1
                if why:
                    unexplained += 1
                    copy = kept / f"{start}-{path.name}"
                    shutil.copy(path, copy)
                    if unexplained <= 20:
                        print(f"{copy}: {why[:1000]}", flush=True)
    reader.stdin.close()
    reader.wait()
    for name, count in counts.most_common():
        print(f"{count:8} {name}")
    print(f"{sum(kinds.values())} files of {len(kinds)} kinds, {unexplained} unexplained")
    if not unexplained:
        kept.rmdir()
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
