"""Checkpoints of random bytes for the measurements, written by `loadcheck synth` or here."""

import json
import os
import random
import shutil
import struct

from . import cache
from .process import run

GB = 10**9
# A small mixture-of-experts configuration, with the field names of Qwen3-MoE.
TINY_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3, "vocab_size": 1024,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False, "norm_topk_prob": True,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
}
# Name -> arguments of `loadcheck synth` and approximate bytes, in order of importance.
SYNTH = {
    "full": {
        "dense": (["llama-3.2-1b"], 2.5 * GB),
        "sharded": (["llama-3.1-8b", "--layers", "16", "--max-shard-size", "3GB"], 9.1 * GB),
        "f32": (["llama-3.2-1b", "--dtype", "f32"], 4.9 * GB),
        "f16": (["qwen2.5-0.5b", "--dtype", "f16"], 1.0 * GB),
        "moe": (["qwen3-30b-a3b", "--layers", "2"], 3.7 * GB),
    },
    "tiny": {
        "dense": (["tiny-llama"], 5e6),
        "sharded": (["tiny-llama", "--max-shard-size", "2MB"], 5e6),
        "f32": (["tiny-llama", "--dtype", "f32"], 1e7),
        "f16": (["tiny-llama", "--dtype", "f16"], 5e6),
        "moe": ([TINY_MOE], 2e6),
    },
}
SMALL_TENSORS = {"full": 20_000, "tiny": 300}
SMALL_TENSOR_BYTES = 64 << 10
ORDER = ("dense", "mixed", "sharded", "small", "f32", "f16", "moe")
# Element sizes of the dtypes of the `mixed` checkpoint.
MIXED = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1, "I16": 2, "U16": 2, "BF16": 2, "F16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8}


class Data:
    """Creates each checkpoint once in a folder, and reports failures."""

    def __init__(self, folder, scale, loadcheck, deadline, say):
        self.folder, self.scale, self.loadcheck, self.deadline, self.say = folder, scale, loadcheck, deadline, say
        self.made, self.missing, self.rate = {}, {}, None

    def make_all(self, share):
        """Creates them in order of importance, within a share of the whole time."""
        end = self.deadline.elapsed() + share * self.deadline.total_seconds
        for name in ORDER:
            need = self.size(name)
            left = end - self.deadline.elapsed()
            if (self.folder / name / "complete").exists():
                self.made[name] = self.describe(name, 0.0)
                continue
            if left <= 0 or (self.rate and need / self.rate > left):
                self.missing[name] = f"no time to make {need / GB:.1f} GB: {max(left, 0):.0f} s of the time for data were left"
                self.say("skipped", f"data {name}", self.missing[name])
                continue
            free = shutil.disk_usage(self.folder).free
            if need > free * 0.9:
                self.missing[name] = f"{need / GB:.1f} GB do not fit the {free / GB:.1f} GB free in {self.folder}"
                self.say("skipped", f"data {name}", self.missing[name])
                continue
            self.make(name, max(left, 1.0))

    def make(self, name, limit_seconds):
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        start = self.deadline.elapsed()
        problem = self.write(name, target, limit_seconds)
        if problem is None:
            for path in cache.files(target):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            (target / "complete").touch()
            seconds = self.deadline.elapsed() - start
            self.made[name] = self.describe(name, seconds)
            # Not written by `synth`, so its rate does not count.
            if self.made[name]["bytes"] > GB and name in SYNTH[self.scale]:
                self.rate = self.made[name]["bytes"] / max(seconds, 1e-3)
            self.say("made", f"data {name}", f"{self.made[name]['bytes'] / 1e6:.0f} MB in {seconds:.1f} s")
        else:
            self.missing[name] = problem
            self.say("FAILED", f"data {name}", problem)

    def write(self, name, target, limit_seconds):
        if name == "small":
            return write_small(target, SMALL_TENSORS[self.scale])
        if name == "mixed":
            return write_mixed(target)
        words, _ = SYNTH[self.scale][name]
        words = list(words)
        if isinstance(words[0], dict):
            config = self.folder / f"{name}.config.json"
            config.write_text(json.dumps(words[0]))
            words[0] = config
        done = run([self.loadcheck, "synth", words[0], target, "-q", *words[1:]], limit_seconds)
        return None if done.code == 0 else done.why()

    def size(self, name):
        if name == "small":
            return SMALL_TENSORS[self.scale] * SMALL_TENSOR_BYTES
        return 1e6 if name == "mixed" else SYNTH[self.scale][name][1]

    def describe(self, name, seconds):
        paths = cache.files(self.folder / name)
        size = sum(path.stat().st_size for path in paths)
        return {"files": len(paths), "bytes": size, "seconds_to_make": seconds}

    def path(self, name):
        return self.folder / name


def write_safetensors(path, tensors):
    """Writes one file of the safetensors format: `tensors` gives (name, dtype, shape, bytes)."""
    header, offset, parts = {}, 0, []
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
        parts.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=8 << 20) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for part in parts:
            file.write(part)


def write_small(target, count):
    """Many tensors of 64 KiB, each a different window of the same noise, so that swapped ones are found."""
    target.mkdir(parents=True)
    noise = memoryview(random.Random(1).randbytes(4 << 20))
    places = len(noise) - SMALL_TENSOR_BYTES

    def tensors():
        for index in range(count):
            start = index * 97 % places
            name = f"model.layers.{index // 100}.part.{index % 100}.weight"
            yield name, "BF16", [SMALL_TENSOR_BYTES // 512, 256], noise[start : start + SMALL_TENSOR_BYTES]

    write_safetensors(target / "model.safetensors", tensors())


def write_mixed(target):
    """Every dtype from one to eight bytes, odd sizes, an empty tensor and a scalar."""
    target.mkdir(parents=True)
    noise = random.Random(2)

    def tensors():
        for index, (dtype, size) in enumerate(MIXED.items()):
            for elements in (1, 1023 + index, 40_001):
                data = noise.randbytes(elements * size)
                if dtype == "BOOL":
                    data = bytes(value & 1 for value in data)
                yield f"model.layers.{index}.{dtype.lower()}_{elements}", dtype, [elements], data
        yield "model.empty.weight", "F32", [0, 16], b""
        yield "model.scalar.weight", "I64", [], noise.randbytes(8)

    write_safetensors(target / "model.safetensors", tensors())


def write_larger_than(target, device_bytes):
    """A sparse checkpoint larger than a device, without data on disk."""
    target.mkdir(parents=True, exist_ok=True)
    part = 1 << 30
    count = device_bytes // part + 2
    header = {
        f"model.layers.{index}.weight": {"dtype": "BF16", "shape": [part // 2], "data_offsets": [index * part, (index + 1) * part]}
        for index in range(count)
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = target / "model.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + count * part)
    return count * part
