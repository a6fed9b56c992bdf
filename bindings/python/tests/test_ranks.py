"""Several ranks: divided tensors, and whole tensors read by one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

import onelayer
from checkpoints import FIXTURES, bytes_in_file, write_checkpoint
from onelayer.distributed import owners

numpy = pytest.importorskip("numpy")
pytest.importorskip("ml_dtypes")

NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())


@pytest.mark.parametrize("world", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("name", NAMES)
def test_shares_are_disjoint_and_balanced(name: str, world: int) -> None:
    checkpoint = onelayer.open(FIXTURES / name)
    readers = owners(checkpoint, world)
    assert sorted(readers) == sorted(checkpoint.keys())
    sizes = [0] * world
    for key, reader in readers.items():
        sizes[reader] += checkpoint.info(key).nbytes
    largest = max(checkpoint.info(key).nbytes for key in checkpoint)
    assert max(sizes) <= checkpoint.nbytes / world + largest
    assert readers == owners(checkpoint, world), "the same for every call"


def test_shares_of_a_selection() -> None:
    checkpoint = onelayer.open(FIXTURES / "llama")
    assert all("norm" in name for name in owners(checkpoint, 2, "norm"))
    with pytest.raises(ValueError, match="at least one rank"):
        owners(checkpoint, 0)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama", "llama_sharded", "gpt2"])
def test_parts_put_together_are_the_whole(name: str, world: int) -> None:
    checkpoint = onelayer.open(FIXTURES / name)
    whole = dict(checkpoint.tensors(framework="np", window="all"))
    parts = [dict(checkpoint.tensors(framework="np", window="all", shard=(rank, world))) for rank in range(world)]
    cut = 0
    for key, expected in whole.items():
        shapes = {part[key].shape for part in parts}
        if shapes == {expected.shape}:
            assert all(part[key].tobytes() == expected.tobytes() for part in parts)
            continue
        cut += 1
        if "c_attn" in key:
            # Queries, keys and values are fused: each is divided separately.
            blocks = [numpy.split(part[key], 3, axis=-1) for part in parts]
            found = numpy.concatenate([block[number] for number in range(3) for block in blocks], axis=-1)
        else:
            axis = next(axis for axis in range(expected.ndim) if parts[0][key].shape[axis] != expected.shape[axis])
            found = numpy.concatenate([part[key] for part in parts], axis=axis)
        assert found.tobytes() == expected.tobytes(), key
    assert cut > len(whole) // 3


def test_rules_of_the_caller_come_first(tmp_path: Path) -> None:
    shape = (64, 128)
    path = write_checkpoint(
        tmp_path / "a.safetensors", {"q_proj.weight": ("F32", shape), "mine.weight": ("F32", shape)}
    )
    expected = bytes_in_file(path)
    whole = {name: numpy.frombuffer(data, "f4").reshape(shape) for name, data in expected.items()}
    rules = {r"^mine": 1, r"q_proj": None}
    checkpoint = onelayer.open(path)
    found = dict(checkpoint.tensors(framework="np", window="all", shard=(1, 2), rules=rules))
    assert found["mine.weight"].tobytes() == whole["mine.weight"][:, 64:].tobytes()
    assert found["q_proj.weight"].tobytes() == expected["q_proj.weight"]


def test_a_rank_reads_no_more_than_its_rows(tmp_path: Path) -> None:
    tensors = {f"model.layers.{layer}.mlp.up_proj.weight": ("U8", (1024, 1024)) for layer in range(4)}
    path = write_checkpoint(tmp_path / "rows.safetensors", tensors)
    checkpoint = onelayer.open(path)
    for rank in range(4):
        with checkpoint.stream(shard=(rank, 4), window="all") as stream:
            assert sum(layer.nbytes for layer in stream) == checkpoint.nbytes // 4
        assert stream.report.read_bytes <= checkpoint.nbytes // 4 + 2 * 4096 * len(tensors)


@pytest.mark.parametrize("options", [{"shard": (2, 2)}, {"shard": (0, 0)}, {"shard": (0, 2), "rules": {"norm": 5}}])
def test_what_is_no_rank(layered: Path, options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        onelayer.open(layered).plan(**options)


def test_rules_need_a_rank(layered: Path) -> None:
    with pytest.raises(ValueError, match="shard"):
        onelayer.open(layered).plan(rules={"norm": 0})
