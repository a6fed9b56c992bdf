"""Lazy tensors: state_dict, slices, mapped and owned memory."""

from __future__ import annotations

import copy
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

import onelayer
from checkpoints import BITS, FIXTURES, bytes_in_file, write_checkpoint
from onelayer._slices import plan_index

numpy = pytest.importorskip("numpy")
pytest.importorskip("ml_dtypes")

MODES = ("owned", "mapped")


@pytest.mark.parametrize("mode", MODES)
def test_a_state_dict_reads_what_is_asked_for(layered: Path, mode: str) -> None:
    checkpoint = onelayer.open(layered)
    expected = bytes_in_file(layered)
    weights = checkpoint.state_dict(framework="np", mode=mode)
    assert isinstance(weights, Mapping)
    assert list(weights) == list(expected) and len(weights) == len(expected)
    assert "model.norm.weight" in weights and "nothing" not in weights
    lazy = weights["model.layers.2.mlp.weight"]
    assert (lazy.get_shape(), lazy.get_dtype(), lazy.name) == ([64, 128], "F32", "model.layers.2.mlp.weight")
    for name, tensor in weights.items():
        assert tensor[...].tobytes() == expected[name]
    with pytest.raises(KeyError):
        weights["nothing"]
    chosen = checkpoint.state_dict(framework="np", mode=mode, select="norm")
    assert list(chosen) == ["model.norm.weight"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()))
def test_every_fixture_is_bit_equal(name: str, mode: str) -> None:
    checkpoint = onelayer.open(FIXTURES / name)
    expected = {}
    for file in checkpoint.files:
        expected.update(bytes_in_file(Path(file)))
    weights = checkpoint.state_dict(framework="np", mode=mode)
    assert {
        name: tensor[:].tobytes() if tensor.shape else tensor[()].tobytes() for name, tensor in weights.items()
    } == expected


@pytest.mark.parametrize("mode", MODES)
def test_every_type(every_dtype: Path, mode: str) -> None:
    expected = bytes_in_file(every_dtype)
    weights = onelayer.open(every_dtype).state_dict(framework="np", mode=mode)
    for dtype, bits in BITS.items():
        if bits < 8:
            continue
        tensor = weights[f"t.{dtype}"]
        whole = tensor[...]
        assert whole.tobytes() == expected[f"t.{dtype}"]
        assert tensor[1:, 2:5].tobytes() == whole[1:, 2:5].tobytes()


@pytest.mark.parametrize("mode", MODES)
def test_random_slices_are_those_of_the_whole(tmp_path: Path, mode: str) -> None:
    shapes = {"a": (7, 11, 13), "b": (300, 70), "c": (1000,), "d": (3, 1, 5, 2)}
    path = write_checkpoint(tmp_path / "s.safetensors", {name: ("I16", shape) for name, shape in shapes.items()})
    weights = onelayer.open(path).state_dict(framework="np", mode=mode)
    chance = random.Random(5)
    for _ in range(300):
        name = chance.choice(list(shapes))
        shape = shapes[name]
        front = chance.randint(0, len(shape))
        index = tuple(random_item(chance, length) for length in shape[:front])
        if chance.random() < 0.3:
            back = chance.randint(front, len(shape))
            index = (*index, ..., *(random_item(chance, length) for length in shape[back:]))
        whole = weights[name][...]
        assert numpy.array_equal(weights[name][index], whole[index]), (name, index)


def random_item(chance: random.Random, length: int) -> int | slice:
    if chance.random() < 0.25:
        return chance.randrange(-length, length)
    bounds = [None, *range(-length - 1, length + 2)]
    return slice(chance.choice(bounds), chance.choice(bounds), chance.choice([None, 1, 1, 2, 3]))


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (7, IndexError),
        (-8, IndexError),
        ((0, 0, 0), IndexError),
        ((..., ...), IndexError),
        (slice(None, None, -1), ValueError),
        (None, TypeError),
        (True, TypeError),
        ([0, 1], TypeError),
        ("a", TypeError),
        (1.5, TypeError),
    ],
)
def test_what_is_no_index(index: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        plan_index(index, (7, 3))


def test_a_slice_reads_no_more_than_it_needs(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "large.safetensors", {"w": ("U8", (4096, 1024))})
    reader = onelayer.open(path)._native.reader()
    assert reader.read_slice("w", [(8, 16), (0, 1024)]).nbytes == 8 * 1024
    # Uncached parts of a file are read in whole blocks.
    assert reader.read_bytes <= 8 * 1024 + 2 * 4096


def test_mapped_memory_is_private(layered: Path) -> None:
    before = layered.read_bytes()
    weights = onelayer.open(layered).state_dict(framework="np", mode="mapped")
    first, second = weights["model.norm.weight"][...], weights["model.norm.weight"][...]
    first[:] = 5
    assert (second == 5).all(), "views of one mapping"
    other = onelayer.open(layered).state_dict(framework="np", mode="mapped")["model.norm.weight"][...]
    assert (other != 5).any()
    assert layered.read_bytes() == before


def test_owned_memory_is_owned(layered: Path) -> None:
    weights = onelayer.open(layered).state_dict(framework="np")
    first, second = weights["model.norm.weight"][...], weights["model.norm.weight"][...]
    first[:] = 5
    assert (second != 5).any()
    del weights
    assert (first == 5).all()


def test_misaligned_tensors_can_be_mapped(tmp_path: Path) -> None:
    path = write_checkpoint(
        tmp_path / "odd.safetensors", {"a": ("U8", (3,)), "b": ("F32", (5, 5)), "c": ("BF16", (4,))}
    )
    expected = bytes_in_file(path)
    weights = onelayer.open(path).state_dict(framework="np", mode="mapped")
    for name, tensor in weights.items():
        found = tensor[...]
        assert found.tobytes() == expected[name]
        assert found.ctypes.data % found.itemsize == 0


def test_tensors_without_elements(tmp_path: Path) -> None:
    path = write_checkpoint(
        tmp_path / "none.safetensors", {"a": ("F32", (0, 3)), "b": ("F32", ()), "c": ("BF16", (2, 0))}
    )
    for mode in MODES:
        weights = onelayer.open(path).state_dict(framework="np", mode=mode)
        assert weights["a"][...].shape == (0, 3) and weights["c"][...].shape == (2, 0)
        assert weights["b"][...].shape == () and weights["b"][()].tobytes() == bytes_in_file(path)["b"]


def test_four_threads_read_at_once(layered: Path) -> None:
    expected = bytes_in_file(layered)
    weights = onelayer.open(layered).state_dict(framework="np")
    wrong = []

    def read(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(100):
            name = chance.choice(list(expected))
            if weights[name][...].tobytes() != expected[name]:
                wrong.append(name)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_file_that_changes_is_an_error(layered: Path) -> None:
    owned = onelayer.open(layered).state_dict(framework="np")
    mapped = onelayer.open(layered).state_dict(framework="np", mode="mapped")
    replaced = layered.with_suffix(".new")
    replaced.write_bytes(layered.read_bytes())
    replaced.rename(layered)
    for weights in (owned, mapped):
        with pytest.raises(onelayer.CheckpointError, match="changed"):
            weights["model.norm.weight"][...]


@pytest.mark.parametrize(
    "options",
    [
        {"framework": "tf"},
        {"mode": "shared"},
        {"framework": "np", "device": "cuda:0"},
        {"framework": "pt", "device": "cuda:0", "mode": "mapped"},
        {"budget": "1MiB"},
    ],
)
def test_options_are_checked(layered: Path, options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        onelayer.open(layered).state_dict(**options)  # type: ignore[arg-type]


def test_arrays_come_one_after_the_other(layered: Path) -> None:
    expected = bytes_in_file(layered)
    found = {}
    for name, array in onelayer.open(layered).tensors(framework="np", window=2, on_stall=5):
        found[name] = array.tobytes()
    assert found == expected
    assert len(dict(onelayer.open(layered).tensors(framework="np", window="all"))) == len(expected)


def test_a_file_that_was_written_again_is_not_mapped(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a.safetensors", {"w": ("U8", (64,))})
    weights = onelayer.open(path).state_dict(framework="np", mode="mapped")
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(onelayer.CheckpointError, match="changed"):
        weights["w"][...]


@pytest.mark.parametrize("option", ["order", "dtype", "shard", "rules"])
def test_ranks_share_tensors_as_the_files_have_them(option: str) -> None:
    value = {"order": "file", "dtype": "bf16", "shard": (0, 2), "rules": [("w", 0)]}[option]
    with pytest.raises(ValueError, match=option):
        onelayer.distributed.tensors(onelayer.open(FIXTURES / "llama"), **{option: value})


@pytest.mark.parametrize("mode", MODES)
def test_copies_share_the_open_files(layered: Path, mode: str) -> None:
    weights = onelayer.open(layered).state_dict(framework="np", mode=mode, select="norm|embed")
    expected = bytes_in_file(layered)
    # The copy needs no files of its own: these are gone.
    copies = (copy.deepcopy(weights), copy.copy(weights), copy.deepcopy(dict(weights)))
    for each in copies:
        assert list(each) == list(weights)
        assert all(each[name]._reader is weights[name]._reader for name in weights)
        assert all(tensor[...].tobytes() == expected[name] for name, tensor in each.items())


@pytest.mark.parametrize("mode", MODES)
def test_pickled_tensors_open_their_files_again(layered: Path, mode: str) -> None:
    weights = onelayer.open(layered).state_dict(framework="np", mode=mode, select="norm|embed")
    expected = bytes_in_file(layered)
    found = pickle.loads(pickle.dumps(weights))
    assert list(found) == list(weights)
    assert all(tensor[...].tobytes() == expected[name] for name, tensor in found.items())
    readers = {id(tensor._reader) for tensor in found.values()}
    assert len(readers) == 1 and not readers & {id(tensor._reader) for tensor in weights.values()}
    lazy = pickle.loads(pickle.dumps(weights["model.norm.weight"]))
    assert (lazy.name, lazy.dtype, lazy.shape) == ("model.norm.weight", "F32", (64,))
    assert lazy[3:5].tobytes() == expected["model.norm.weight"][12:20]


def test_another_process_reads_a_pickled_tensor(layered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(layered.parent)
    weights = onelayer.open(layered.name).state_dict(framework="np")
    script = "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer)[...].tobytes())"
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(weights["model.norm.weight"]), capture_output=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == bytes_in_file(layered)["model.norm.weight"]


def test_a_pickled_tensor_knows_its_checkpoint(layered: Path) -> None:
    weights = onelayer.open(layered).state_dict(framework="np")
    pickled = pickle.dumps(weights)
    changed = os.stat(layered)
    os.utime(layered, ns=(changed.st_atime_ns, changed.st_mtime_ns + 1))
    with pytest.raises(onelayer.CheckpointError, match="not the one that was pickled"):
        pickle.loads(pickled)
    os.utime(layered, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    pickle.loads(pickled)
    # Other types at the same time and of the same size.
    layered.write_bytes(layered.read_bytes().replace(b'"F32"', b'"I32"', 1))
    os.utime(layered, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    with pytest.raises(onelayer.CheckpointError, match="not the one that was pickled"):
        pickle.loads(pickled)
    layered.unlink()
    with pytest.raises(FileNotFoundError):
        pickle.loads(pickled)


def test_tensors_are_read_together(layered: Path) -> None:
    expected = bytes_in_file(layered)
    weights = onelayer.open(layered).state_dict(framework="np")
    assert {name: array.tobytes() for name, array in weights.read().items()} == expected
    assert list(weights.read(["model.norm.weight"])) == ["model.norm.weight"]
    assert repr(weights) == f"<onelayer.StateDict: {len(expected)} tensors>"
    with pytest.raises(KeyError):
        weights.read(["nothing"])


def test_a_lazy_tensor_is_no_parameter(layered: Path) -> None:
    lazy = onelayer.open(layered).state_dict(framework="np")["model.norm.weight"]
    assert lazy.size() == (64,) and not lazy.is_meta
    with pytest.raises(TypeError, match=r"weights\.read\(\)"):
        lazy.detach()
