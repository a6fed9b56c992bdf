"""Shared loading by four ranks on one machine, with gloo."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import onelayer
from checkpoints import BITS, FIXTURES, write_checkpoint
from onelayer.distributed import tensors

WORLD = 4
MIB = 1 << 20
UNKNOWN = {"F6_E2M3", "F6_E3M2"}


def digest(tensor: torch.Tensor) -> str:
    """A digest of bytes, type and shape."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    # Without a copy: the test measures the rank's memory.
    found.update(flat.numpy())
    return found.hexdigest()


def rows(info: onelayer.TensorInfo) -> int | None:
    """The dimension that tests divide: the first one divisible by four."""
    return next((axis for axis, length in enumerate(info.shape) if length and length % WORLD == 0), None)


def load_on_one_rank(rank: int, folder: str, source: str, cut: bool, options: dict[str, object]) -> None:
    """Runs in a separate process and writes its result to a file."""
    import torch.distributed as dist

    from onelayer._native import MemoryMeter

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    dist.barrier()
    checkpoint = onelayer.open(source)
    meter = MemoryMeter()
    shared = tensors(checkpoint, axis=rows if cut else None, **options)
    found = {name: digest(tensor) for name, tensor in shared}
    growth = meter.finish()[1][0]
    report = shared.report
    dist.barrier()
    dist.destroy_process_group()
    result = {
        "found": found,
        "rss_growth": growth,
        "nbytes": report.nbytes if report else 0,
        "read_bytes": report.read_bytes if report else 0,
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(result))


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., list[dict[str, object]]]:
    """Loads on four ranks and returns the result of each."""

    def run(source: Path, cut: bool = False, **options: object) -> list[dict[str, object]]:
        folder = tmp_path / "ranks"
        folder.mkdir()
        context = torch.multiprocessing.get_context("spawn")
        arguments = (str(folder), str(source), cut, options)
        ranks = [context.Process(target=load_on_one_rank, args=(rank, *arguments)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(180)
        assert [process.exitcode for process in ranks] == [0] * WORLD
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]

    return run


@pytest.mark.parametrize("name", ["gpt2", "llama_sharded", "qwen2_moe"])
def test_every_rank_has_every_bit(load: Callable[..., list[dict]], name: str) -> None:
    checkpoint = onelayer.open(FIXTURES / name)
    expected = {name: digest(tensor) for name, tensor in checkpoint.tensors()}
    ranks = load(FIXTURES / name)
    for rank in ranks:
        assert rank["found"] == expected
    assert sum(rank["nbytes"] for rank in ranks) == checkpoint.nbytes, "each byte arrives at one rank"


def test_parts_put_together_are_the_whole(load: Callable[..., list[dict]]) -> None:
    source = FIXTURES / "llama"
    checkpoint = onelayer.open(source)
    ranks = load(source, cut=True)
    for name, tensor in checkpoint.tensors():
        axis = rows(checkpoint.info(name))
        assert axis is not None
        for rank, part in enumerate(torch.chunk(tensor, WORLD, dim=axis)):
            assert ranks[rank]["found"][name] == digest(part), (name, rank)


def test_every_type_travels(load: Callable[..., list[dict]], tmp_path: Path) -> None:
    known = {f"t.{dtype}": (dtype, (4, 8)) for dtype in BITS if dtype not in UNKNOWN}
    odd = {"scalar": ("F32", ()), "none": ("BF16", (0, 3))}
    path = write_checkpoint(tmp_path / "types.safetensors", {**known, **odd})
    expected = {name: digest(tensor) for name, tensor in onelayer.open(path).tensors(window="all")}
    for rank in load(path):
        assert rank["found"] == expected


def test_each_rank_stays_within_its_budget(load: Callable[..., list[dict]], tmp_path: Path) -> None:
    """256 MiB in sixteen layers of four tensors; no rank exceeds the terms below."""
    tensor_bytes = 4 * MIB
    shapes = {
        f"model.layers.{layer}.w{number}.weight": ("U8", (2048, 2048)) for layer in range(16) for number in range(4)
    }
    path = tmp_path / "large.safetensors"
    write_zeros(path, shapes)
    budget = 24 * MIB
    own_layers = 2 * tensor_bytes
    ranks = load(path, budget=budget)
    for rank in ranks:
        # Budget, slack, the rank's layers in the window, the current and the next tensor.
        assert rank["rss_growth"] <= budget + 16 * MIB + own_layers + 2 * tensor_bytes, rank["rss_growth"] / MIB
    # Except for blocks at the ends of ranges, each byte is read once. (Small gaps are read, too.)
    nbytes = len(shapes) * tensor_bytes
    assert nbytes <= sum(rank["read_bytes"] for rank in ranks) <= nbytes + 2 * 4096 * len(shapes)


def write_zeros(path: Path, shapes: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Writes a large sparse file: a header and a hole."""
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
