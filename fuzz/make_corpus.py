#!/usr/bin/env python3
"""Writes the seed inputs of each fuzz target: corpus/TARGET/seed-NNN. Deterministic.

    fuzz/make_corpus.py

Standard library only. Keeps inputs found by the fuzzer (`found-*`) and former failures (`fixed-*`).
"""

import json
import random
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent
FIXTURES = ROOT.parent / "fixtures"
# Longer inputs add nothing for a fuzzer.
SEED_BYTES_MAX = 2048


def write(target: str, inputs: list[bytes]) -> None:
    folder = ROOT / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("seed-*"):
        old.unlink()
    inputs = sorted({data for data in inputs if data and len(data) <= SEED_BYTES_MAX})
    for number, data in enumerate(inputs):
        (folder / f"seed-{number:03}").write_bytes(data)
    print(f"{target}: {len(inputs)} seeds, {sum(map(len, inputs))} bytes")


def noise(seed: int, count: int, lengths: tuple[int, int]) -> list[bytes]:
    numbers = random.Random(seed)
    return [numbers.randbytes(numbers.randint(*lengths)) for _ in range(count)]


def hostile(folder: Path) -> tuple[list[bytes], list[bytes]]:
    """Files and index texts of the hostile checkpoint corpus."""
    subprocess.run([sys.executable, FIXTURES / "hostile/make.py", folder], check=True, stdout=subprocess.DEVNULL)
    files, indices = [], []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > SEED_BYTES_MAX:
            continue
        if path.suffix == ".safetensors":
            data = path.read_bytes()
            files.append(data)
            # The same as text, without a length field to keep right.
            (length,) = struct.unpack("<Q", data[:8]) if len(data) >= 8 else (0,)
            if data[8:9] == b"{" and length <= len(data):
                files.append(data[8 : 8 + length])
        elif path.name.endswith(".json"):
            indices.append(path.read_bytes())
    return thinned(files, 240), thinned(indices, 40)


def thinned(inputs: list[bytes], most: int) -> list[bytes]:
    inputs = sorted(set(inputs))
    step = max(1, -(-len(inputs) // most))
    return inputs[::step]


def headers() -> list[bytes]:
    found = []
    for path in sorted(FIXTURES.glob("checkpoints/*/*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        # Some of its tensors, without gaps between them.
        kept, end = {}, 0
        for name, value in list(header.items())[:6]:
            if name != "__metadata__":
                start, stop = value["data_offsets"]
                end, value["data_offsets"] = end + stop - start, [end, end + stop - start]
            kept[name] = value
        found.append(json.dumps(kept, separators=(",", ":")).encode())
    return found


def index_seeds(texts: list[bytes]) -> list[bytes]:
    good = {"a.x": "a.safetensors", "a.y": "a.safetensors", "b.x": "b.safetensors"}
    nested = good | {"c.x": "sub/c.safetensors"}
    inputs = [
        (0b000101, {"metadata": {"total_size": 13}, "weight_map": good}),
        (0b010101, {"weight_map": nested}),
        (0b000101, good),
        (0b01001101, {"weight_map": good}),
        (0b001001, {"weight_map": {"a.x": "./a.safetensors", "both": "b.safetensors"}}),
        (0b001010, {"weight_map": {"a.x": "a.safetensors", "both": "b.safetensors"}}),
        (0b110111, {"weight_map": {"d": "d.safetensors"}}),
        (0b000001, {"weight_map": {"outside": "../outside.safetensors"}}),
        (0b000001, {"weight_map": {"outside": "/etc/passwd", "a.x": "a.safetensors"}}),
        (0b000001, {"weight_map": {"outside": "https://host/x.safetensors"}}),
        (0b10000101, {"weight_map": good}),
        (0b11000000, {"_class_name": "P", "unet": ["d", "U"], "text_encoder": ["t", "T"], "vae": [None, None]}),
        (0b11000000, {"unet": ["d", "U"], "../model": ["d", "U"], "vae": ["a", "b"]}),
        (0b11010101, {"_diffusers_version": "1", "sub": ["d", "U"], "safety_checker": [None, None]}),
    ]
    seeds = [bytes([choice]) + json.dumps(value).encode() for choice, value in inputs]
    return seeds + [bytes([0b000101 | (number % 4) << 6]) + text for number, text in enumerate(texts)]


def layer_seeds() -> list[bytes]:
    seeds = []
    for path in sorted(FIXTURES.glob("inventories/*.inventories")):
        for block in re.split(r"^@", path.read_text(), flags=re.MULTILINE)[1:]:
            lines = []
            for line in block.splitlines()[1:]:
                if "\t" not in line:
                    continue
                name, shape = line.split("\t", 1)
                shape = "" if shape.startswith("?") else "\t" + " ".join(re.findall(r"\d+", shape))
                # The first two indices of each range, or the listed ones.
                for number in range(2):
                    spelled = re.sub(r"\{(\d+)-\d+\}", lambda found: str(int(found[1]) + number), name)
                    if re.fullmatch(r"[^{}]+", spelled) and spelled + shape not in lines:
                        lines.append(spelled + shape)
            seeds.append("\n".join(lines)[:SEED_BYTES_MAX].rsplit("\n", 1)[0].encode())
    odd = [
        "", "a", ".", "..", "a..b", "0", "0.0.0.0.0", "1.a\n01.a\n001.a", "h.99999999999999999999.q.w\nh.1.q.w\nh.2.q.w",
        "a/0.w\na/1.w\nb/0.w", "w\nw_scale\nw_scale_scale\nw.weight_scale", "é.0.ü\né.1.ü", "logit_scale\nlogit\nx.absmax\nx.weight",
        "model.layers.0.a.weight\t4 4\nmodel.layers.0.a.weight_scale\t4\nmodel.layers.1.a.weight\t4 4\nmodel.layers.1.a.qzeros\t4",
    ]  # fmt: skip
    return thinned(seeds, 60) + [text.encode() for text in odd]


LAYER_MAPS = [
    "", "stacks = ['vision.neck']\nnot_stacks = ['vision.blocks']", "[groups]\nhead = ['model.norm', 'lm_head']",
    "order = ['lm_head', 'vision', 'model.layers.2', 'model.layers']", "stacks = ['model.layers.1.mlp.experts']",
    "order = ['model', 'model']", "stacks = ['model.layers']\nnot_stacks = ['model.layers']", "[groups]\n'' = ['a']",
    "[groups]\nhead = []", "[groups]\nlm_head = ['model.norm']", "[groups]\na = ['model']\nb = ['model.norm']",
    "stack = []", "order = 1", "order = [", "order = ['\u00e9', 1]", "[groups]\nall = ['']",
    "#n a.0.x\n#n a.1.x\n#n b\nstacks = ['a']\norder = ['b', 'a.1']", "#n 0\n#n 1\nstacks = ['']",
    "not_stacks = ['model.layers', 'vision.blocks', 'vision.neck']", "[groups]\n\"x.y\" = ['model.layers.0', 'vision']",
    "order = [\"\"\"lm_head\"\"\", '''vision''', \"\\u006dodel\"]", "stacks = []\nstacks = []", "groups = { a = ['lm_head'] }",
]  # fmt: skip
DEVICE_MAPS = [
    '{"": 0}', '{"": "disk"}', '{"a": 0, "head": "cpu"}', '{"a.embed": 0, "a.b.0": 0, "a.b.1": 1, "a.b.2": "cpu", "head": "disk"}',
    '{"a": "cuda:3", "head": "7"}', '{"a": "cuda"}', '{"a": 0, "a": 1}', '{"a": "gpu"}', '{"a": -1}', '{"a": 4294967296}',
    '{"a": {}}', '{"a": 0', "[]", "{}", '{"a": 0, "a.b": 1, "a.b.1": "cpu", "a.b.1.y": "disk", "head": 1}', '{"a.b.1.y.z.weight": 0, "": 1}',
    '{"a": 4294967295, "head": 0}', '{"a": 1e0}', '{"a": "+1"}', '{"\\u0061": 0, "head": 0}', '{"a.": 0, ".a": 1, "a..b": "cpu"}',
]  # fmt: skip


def manifest_seeds() -> list[bytes]:
    digits = "0123456789abcdef" * 4
    tensor = {"name": "a", "dtype": "BF16", "shape": [3], "bytes": 6, "blake3": digits}
    file = {"name": "model-00001-of-00001.safetensors", "bytes": 100, "blake3": digits, "layers": ["a"], "tensors": [tensor]}
    good = {
        "schema": "onelayer-manifest/1", "tool": "test 1", "fingerprint": "f", "source": {"path": "model", "files": [
            {"name": "model.safetensors", "bytes": 100, "modified_ns": -1, "header_blake3": digits}]},
        "options": ["--x"], "aliases": [{"name": "b", "same_as": "a"}], "left_out": ["c"], "files": [file],
        "side_files": [{"name": "config.json", "bytes": 3, "blake3": digits, "sha256": digits}],
    }  # fmt: skip
    texts = [json.dumps(good), json.dumps(good, indent=1)]
    full = dict(tensor, cast_from="F32", quantised="int8", sha256=digits)
    changes = [
        {"files": []}, {"files": [dict(file, name="../x")]}, {"files": [dict(file, name="/x")]}, {"files": [file, file]},
        {"files": [dict(file, bytes=5)]}, {"files": [dict(file, blake3="0")]}, {"files": [dict(file, sha256=digits, tensors=[full])]},
        {"files": [dict(file, tensors=[tensor, dict(tensor, bytes=(1 << 64) - 1)])]}, {"files": [dict(file, tensors=[])]},
        {"side_files": []}, {"side_files": [{"name": "./a", "bytes": 1, "blake3": digits}]}, {"schema": "onelayer-manifest/2"},
        {"side_files": [{"name": "a/b.txt", "bytes": 1, "blake3": digits}]}, {"more": {"x": [1, 2, None]}},
        {"source": {"path": "", "files": []}}, {"options": 1}, {"fingerprint": None},
    ]  # fmt: skip
    texts += [json.dumps(good | change) for change in changes]
    texts += [json.dumps({key: value for key, value in good.items() if key != left_out}) for left_out in good]
    texts += [json.dumps(good)[:cut] for cut in (1, 100, 400)] + [json.dumps(good)[:-1] + ',"tool":"again"}']
    reordered = {"files": [{"tensors": [], **{key: value for key, value in file.items() if key != "tensors"}}]}
    return [text.encode() for text in texts + [json.dumps(good | reordered)]]


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_file(keys: list[bytes], tensors: list[bytes], data: int, version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys + tensors)
    return header + b"\0" * (-len(header) % 32) + b"x" * data


def gguf_tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    numbers = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return gguf_text(name) + numbers


def gguf_seeds() -> list[bytes]:
    def key(name: str, kind: int, value: bytes) -> bytes:
        return gguf_text(name) + struct.pack("<I", kind) + value

    def array(kind: int, count: int, items: bytes) -> bytes:
        return struct.pack("<IQ", kind, count) + items

    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    keys = [key(f"k{kind}", kind, b"\1" * size) for kind, size in sizes.items()]
    keys += [key("general.architecture", 8, gguf_text("llama")), key("general.alignment", 4, struct.pack("<I", 64))]
    keys += [key("words", 9, array(8, 2, gguf_text("a") + gguf_text("bc"))), key("bytes", 9, array(0, 5, b"12345"))]
    keys += [key("nested", 9, array(9, 2, array(4, 1, b"1234") + array(8, 0, b"")))]
    keys += [key("split.no", 2, b"\0\0"), key("split.count", 2, b"\2\0"), key("split.tensors.count", 5, b"\1\0\0\0")]
    blocks = {2: (32, 18), 8: (32, 34), 12: (256, 144), 14: (256, 210), 39: (32, 17), 40: (64, 36), 41: (128, 18)}
    tensors = [gguf_tensor("token_embd.weight", [8, 2], 0, 0), gguf_tensor("blk.0.a", [4], 1, 64)]
    files = [gguf_file([], [], 0), gguf_file(keys[:1], [], 0, 2), gguf_file(keys[-3:], tensors, 72), gguf_file([], tensors, 72)]
    files += [gguf_file([one], [], 0) for one in keys]
    files += [gguf_file([], [gguf_tensor("t", [n, 2], kind, 0)], 2 * size) for kind, (n, size) in blocks.items()]
    files += [gguf_file([], [gguf_tensor("t", [3, 1, 2, 1], kind, 0)], 48) for kind in (24, 25, 26, 27, 28, 30)]
    files += [gguf_file([], [gguf_tensor("a", [8], 24, 5), gguf_tensor("b", [8], 24, at)], 40) for at in (6, 13, 20)]
    big = struct.pack(">4sIQQ", b"GGUF", 3, 1, 0) + struct.pack(">Q", 1) + b"t" + struct.pack(">IQIQ", 1, 4, 24, 0)
    files.append(big + b"\0" * (-len(big) % 32) + b"data")
    cuts = [file[:cut] for file in files[2:4] for cut in (30, 60, 100, 140)] + [file[8:] for file in files[2:4]]
    return files + cuts + [gguf_model(key, arch) for arch in ("llama", "gpt2", "bloom", "gemma")]


def gguf_model(key: Callable[[str, int, bytes], bytes], arch: str) -> bytes:
    """A block of a model with two heads: what is renamed and put in order."""
    keys = [key("general.architecture", 8, gguf_text(arch))]
    keys += [key(f"{arch}.attention.head_count{more}", 4, struct.pack("<I", 2)) for more in ("", "_kv")]
    q, qkv = ("blk.0.attn_q.weight", [32, 8]), ("blk.0.attn_qkv.weight", [4, 12])
    tensors = [gguf_tensor("token_embd.weight", [4, 3], 0, 0), gguf_tensor("rope_freqs.weight", [2], 0, 64)]
    tensors += [gguf_tensor(*q, 8, 96)] if arch == "llama" else [gguf_tensor(*qkv, 1, 96)]
    return gguf_file(keys, tensors, 400)


def torch_seeds() -> list[bytes]:
    """Small files that torch wrote, and the pickles in them."""
    seeds = []
    for path in sorted((FIXTURES / "torch").iterdir()):
        if path.suffix not in (".pt", ".ckpt"):
            continue
        seeds.append(path.read_bytes())
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                seeds += [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
    return seeds


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files, indices = hostile(Path(folder) / "corpus")
    write("gguf", gguf_seeds())
    write("header", files + headers())
    write("header_structure", noise(1, 40, (8, 120)))
    write("index", index_seeds(indices))
    write("layers", layer_seeds())
    write("layer_map", [text.encode() for text in LAYER_MAPS])
    write("device_map", [text.encode() for text in DEVICE_MAPS])
    write("manifest", manifest_seeds())
    write("plan", noise(2, 40, (40, 400)))
    write("torch", torch_seeds())


main()
