"""``onelayer.safetensors`` behaves like ``safetensors``, alone and compared with it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from checkpoints import BITS, FIXTURES, bytes_in_file, write_checkpoint
from onelayer._lazy import MappedReader
from onelayer.safetensors import SafetensorError, safe_open
from onelayer.safetensors.numpy import load_file

numpy = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")

BACKENDS = ("pread", "mmap")
FILES = sorted(str(path.relative_to(FIXTURES)) for path in FIXTURES.glob("*/*.safetensors"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_come_sorted_or_in_the_order_of_their_bytes(tmp_path: Path, backend: str) -> None:
    path = write_checkpoint(tmp_path / "f.safetensors", {"b": ("U8", (2,)), "c": ("U8", (1,)), "a": ("U8", (3,))})
    with safe_open(path, "np", backend=backend) as file:
        assert file.keys() == ["a", "b", "c"]
        assert file.offset_keys() == ["b", "c", "a"]
        assert list(file.get_tensors()) == ["b", "c", "a"]


def test_files_that_are_mapped_whole_are_read_ahead(layered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[MappedReader] = []
    read_ahead = MappedReader.expect_all
    monkeypatch.setattr(MappedReader, "expect_all", lambda self: (asked.append(self), read_ahead(self)))
    with safe_open(layered, "np", backend="mmap") as file:
        file.get_tensor("model.norm.weight")
    assert not asked, "one tensor is wanted"
    load_file(layered, backend="mmap")
    assert len(asked) == 1


def test_metadata_is_the_text_of_the_header(tmp_path: Path) -> None:
    with_text = write_checkpoint(tmp_path / "a.safetensors", {"a": ("U8", (2,))}, format="pt", by="me")
    without = write_checkpoint(tmp_path / "b.safetensors", {"a": ("U8", (2,))})
    with safe_open(with_text, "np") as file:
        assert file.metadata() == {"format": "pt", "by": "me"}
    with safe_open(without, "np") as file:
        assert file.metadata() is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_are_those_of_the_file(every_dtype: Path, backend: str) -> None:
    expected = bytes_in_file(every_dtype)
    with safe_open(str(every_dtype), framework="numpy", device="cpu", backend=backend) as file:
        for dtype in BITS:
            if BITS[dtype] >= 8:
                tensor = file.get_tensor(f"t.{dtype}")
                assert tensor.shape == (3, 8) and tensor.tobytes() == expected[f"t.{dtype}"]
                assert tensor.flags.writeable


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_outlive_their_file(layered: Path, backend: str) -> None:
    file = safe_open(layered, "np", backend=backend)
    with file:
        tensor = file.get_tensor("model.norm.weight")
        part = file.get_slice("model.norm.weight")
    del file
    assert tensor.tobytes() == bytes_in_file(layered)["model.norm.weight"]
    # A slice object from before the file was closed can still be read.
    assert part[2:4].tobytes() == tensor[2:4].tobytes()


def test_a_closed_file_is_closed(layered: Path) -> None:
    with safe_open(layered, "np") as file:
        pass
    for use in (file.keys, file.offset_keys, file.metadata, file.get_tensors):
        with pytest.raises(SafetensorError, match="closed"):
            use()
    with pytest.raises(SafetensorError, match="closed"):
        file.get_tensor("model.norm.weight")
    with pytest.raises(SafetensorError, match="closed"):
        file.get_slice("model.norm.weight")


def test_errors_name_file_and_tensor(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "f.safetensors", {"a": ("U8", (8,)), "b": ("U8", (8,))})
    with safe_open(path, "np") as file:
        for get in (file.get_tensor, file.get_slice):
            with pytest.raises(SafetensorError, match="does not contain tensor") as caught:
                get("c")
            assert (caught.value.path, caught.value.tensor) == (str(path), "c")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SafetensorError, match="1 bytes short") as caught:
        safe_open(path, "np")
    assert (caught.value.path, caught.value.tensor) == (str(path), "b")
    with pytest.raises(FileNotFoundError):
        safe_open(tmp_path / "nothing", "np")
    with pytest.raises(IsADirectoryError):
        safe_open(tmp_path, "np")


def test_arguments_are_checked(layered: Path) -> None:
    with pytest.raises(ValueError, match="framework"):
        safe_open(layered, "caffe")
    with pytest.raises(ValueError, match="backend"):
        safe_open(layered, "np", backend="tape")


def test_who_catches_theirs_catches_ours(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors")
    (tmp_path / "text").write_text("{}")
    with pytest.raises(theirs.SafetensorError):
        safe_open(tmp_path / "text", "np")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FILES)
def test_every_fixture_as_theirs(name: str, backend: str) -> None:
    theirs = pytest.importorskip("safetensors")
    path = FIXTURES / name
    with theirs.safe_open(path, framework="np") as their_file, safe_open(path, "np", backend=backend) as file:
        assert file.keys() == their_file.keys()
        assert file.offset_keys() == their_file.offset_keys()
        assert file.metadata() == their_file.metadata()
        for key in file.keys():
            assert same(file.get_tensor(key), their_file.get_tensor(key))
            ours, other = file.get_slice(key), their_file.get_slice(key)
            assert (ours.get_shape(), ours.get_dtype()) == (other.get_shape(), other.get_dtype())
    from safetensors.numpy import load_file as their_load_file

    ours, others = load_file(path, backend=backend), their_load_file(path)
    assert set(ours) == set(others) and all(same(ours[key], others[key]) for key in ours)


def same(ours: Any, others: Any) -> bool:
    return ours.shape == others.shape and ours.dtype == others.dtype and ours.tobytes() == others.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FILES)
def test_a_thousand_random_slices_as_theirs(name: str, backend: str) -> None:
    """Compares a few tensors of each file."""
    theirs = pytest.importorskip("safetensors")
    chance = random.Random(name)
    path = FIXTURES / name
    with theirs.safe_open(path, framework="np") as their_file, safe_open(path, "np", backend=backend) as file:
        keys = file.keys()
        for _ in range(1000):
            key = chance.choice(keys)
            ours, other = file.get_slice(key), their_file.get_slice(key)
            index = random_index(chance, ours.get_shape())
            assert same(ours[index], other[index]), (key, index)


def random_index(chance: random.Random, shape: list[int]) -> tuple[slice | int, ...]:
    """Indices that safetensors accepts: no negative bounds, no steps, nothing empty."""
    index: list[slice | int] = []
    for length in shape[: chance.randint(0, len(shape))]:
        start = chance.randrange(length)
        stop = chance.randint(start + 1, length)
        forms = [slice(start, stop), slice(None, stop), slice(start, None), slice(None)]
        index.append(chance.choice(forms) if chance.random() < 0.85 else start)
    return tuple(index)


@pytest.mark.parametrize(
    "index",
    [
        ...,
        slice(None),
        slice(2, 5),
        (slice(None), slice(3, 7)),
        (..., slice(3, 7)),
        (slice(1, 2), ...),
        0,
        -1,
        (0, 0),
        (slice(None), 4),
        (),
    ],
)
def test_forms_of_an_index_as_theirs(tmp_path: Path, index: object) -> None:
    theirs = pytest.importorskip("safetensors")
    path = write_checkpoint(tmp_path / "f.safetensors", {"w": ("I32", (6, 8))})
    with theirs.safe_open(path, framework="np") as their_file, safe_open(path, "np") as file:
        assert same(file.get_slice("w")[index], their_file.get_slice("w")[index])


def test_four_bit_floats_are_whole_or_refused(every_dtype: Path) -> None:
    with safe_open(every_dtype, "np") as file, pytest.raises(TypeError, match="view_bytes"):
        file.get_tensor("t.F4")
