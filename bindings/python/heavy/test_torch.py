"""torch as a consumer: every supported type, streams of tensors, devices, lifetimes."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import onelayer
from checkpoints import FIXTURES, bytes_in_file, write_checkpoint
from onelayer._frameworks import torch_dtype
from onelayer.safetensors import load_file, safe_open

# Types that torch does not have.
UNKNOWN = {"F6_E2M3", "F6_E3M2"}


def data(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def test_every_type_that_torch_knows(every_dtype: Path) -> None:
    expected = bytes_in_file(every_dtype)
    seen = set()
    with onelayer.open(every_dtype).stream(window="all") as stream:
        for layer in stream:
            for name, tensor in layer.items():
                if tensor.dtype in UNKNOWN:
                    with pytest.raises((BufferError, RuntimeError)):
                        torch.from_dlpack(tensor)
                    assert data(torch.from_dlpack(tensor.view_bytes())) == expected[name]
                    continue
                found = torch.from_dlpack(tensor)
                assert found.dtype == torch_dtype(tensor.dtype)
                assert found.shape == ((3, 4) if tensor.dtype == "F4" else (3, 8))
                assert data(found) == expected[name]
                assert data(tensor.torch()) == expected[name]
                seen.add(tensor.dtype)
    assert len(seen) == 20


@pytest.mark.parametrize("mode", ["owned", "mapped"])
def test_every_type_on_demand(every_dtype: Path, mode: str) -> None:
    expected = bytes_in_file(every_dtype)
    for name, tensor in onelayer.open(every_dtype).state_dict(mode=mode).items():
        if tensor.dtype in UNKNOWN:
            with pytest.raises((BufferError, RuntimeError)):
                tensor[...]
        else:
            assert data(tensor[...]) == expected[name]


def test_exports_share_copies_do_not(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a.safetensors", {"w": ("F32", (8, 8))})
    with onelayer.open(path).stream() as stream:
        tensor = next(stream)["w"]
        first, second = torch.from_dlpack(tensor), torch.from_dlpack(tensor)
        copy = torch.from_dlpack(tensor, copy=True)
        assert first.data_ptr() == second.data_ptr() != copy.data_ptr()
        first[0, 0] = 7
        assert second[0, 0] == 7 != copy[0, 0]
        with pytest.raises((BufferError, RuntimeError)):
            torch.from_dlpack(tensor, device="cuda:0")


def test_a_tensor_outlives_everything(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a.safetensors", {"w": ("F32", (512, 512))})
    stream = onelayer.open(path).stream()
    kept = torch.from_dlpack(next(stream)["w"])
    stream.close()
    del stream
    gc.collect()
    path.unlink()
    # Another thread frees it.
    expected = data(kept[3])
    assert data(kept.clone()[3]) == expected
    box = [kept]
    del kept
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()


def test_exit_with_live_tensors(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a.safetensors", {f"w.{number}": ("BF16", (64, 64)) for number in range(8)})
    program = textwrap.dedent(
        f"""
        import onelayer, torch, sys
        checkpoint = onelayer.open({str(path)!r})
        torch.kept = dict(checkpoint.tensors(window="all"))
        torch.lazy = [tensor[...] for tensor in checkpoint.state_dict(mode="mapped").values()]
        torch.stream = checkpoint.stream(window=4)
        sys.capsule = next(torch.stream)["w.0"].__dlpack__(max_version=(1, 0))
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_ten_thousand_exports_from_four_threads(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a.safetensors", {"w": ("BF16", (256, 256))})
    with onelayer.open(path).stream() as stream:
        tensor = next(stream)["w"]

    def cycle() -> None:
        for number in range(2500):
            torch.from_dlpack(tensor, copy=True if number % 50 == 0 else None)

    def run() -> None:
        threads = [threading.Thread(target=cycle) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    # Threads bring the allocator's arenas along, the first time; what leaks grows every time. One structure of each export would be
    # 512 pages, and one copy of each that is made 6400.
    counts = []
    for _ in range(4):
        run()
        counts.append(resident_pages())
    assert min(after - before for before, after in itertools.pairwise(counts)) < 256, counts


def test_tensors_one_after_the_other() -> None:
    for folder in ("llama", "llama_sharded", "gpt2"):
        checkpoint = onelayer.open(FIXTURES / folder)
        expected = {}
        for file in checkpoint.files:
            expected.update(bytes_in_file(Path(file)))
        assert {name: data(tensor) for name, tensor in checkpoint.tensors(budget="8MiB")} == expected


@pytest.mark.parametrize("backend", ["pread", "mmap"])
def test_load_file_is_theirs(every_dtype: Path, backend: str) -> None:
    from safetensors.torch import load_file as theirs

    path = every_dtype.with_name("known.safetensors")
    known = [dtype for dtype in bytes_in_file(every_dtype) if dtype[2:] not in UNKNOWN]
    write_checkpoint(path, {name: (name[2:], (3, 8)) for name in known}, format="pt")
    for file in (path, *FIXTURES.glob("*/*.safetensors")):
        ours, others = load_file(file, backend=backend), theirs(str(file))
        assert set(ours) == set(others)
        for name, tensor in ours.items():
            assert (tensor.dtype, tensor.shape) == (others[name].dtype, others[name].shape)
            assert data(tensor) == data(others[name])


@pytest.mark.parametrize("backend", ["pread", "mmap"])
def test_slices_are_theirs(backend: str) -> None:
    import random

    from safetensors import safe_open as theirs

    chance = random.Random(3)
    for path in sorted(FIXTURES.glob("*/*.safetensors")):
        with theirs(path, framework="pt") as their_file, safe_open(path, "pt", backend=backend) as file:
            keys = file.keys()
            for _ in range(1000):
                key = chance.choice(keys)
                shape = file.get_slice(key).get_shape()
                index = []
                for length in shape[: chance.randint(0, len(shape))]:
                    start = chance.randrange(length)
                    index.append(slice(start, chance.randint(start + 1, length)))
                ours, other = file.get_slice(key)[tuple(index)], their_file.get_slice(key)[tuple(index)]
                assert ours.dtype == other.dtype and torch.equal(ours, other)


def test_a_device_is_filled_in_pieces(tmp_path: Path) -> None:
    """The device path, tested on the CPU."""
    from onelayer._lazy import DeviceReader

    path = write_checkpoint(
        tmp_path / "a.safetensors", {"w": ("BF16", (1000, 7)), "f4": ("F4", (4, 6)), "n": ("F32", (0, 2))}
    )
    native = onelayer.open(path)._native
    reader = DeviceReader(native, torch.device("cpu"), 1000)
    expected = bytes_in_file(path)
    for name in expected:
        assert data(reader.whole(name)) == expected[name]
    assert reader.whole("w").shape == (1000, 7) and reader.whole("f4").shape == (4, 3)
    assert data(reader.part("w", [(10, 20), (0, 7)])) == expected["w"][140:280]
    assert reader.part("f4", [(1, 3), (2, 6)]).view(torch.uint8).tolist() == [
        list(expected["f4"][row * 3 + 1 : row * 3 + 3]) for row in (1, 2)
    ]
    assert reader.part("n", [(0, 0), (0, 2)]).shape == (0, 2)


def test_a_slice_for_a_device_comes_in_pieces(tmp_path: Path) -> None:
    """The host holds at most one piece, for every division."""
    import random

    from onelayer._lazy import DeviceReader, _pieces

    shapes = {"a": (40, 30, 20), "b": (3000,), "c": (2, 3000), "d": (5, 1, 7, 60)}
    path = write_checkpoint(tmp_path / "s.safetensors", {name: ("I16", shape) for name, shape in shapes.items()})
    native = onelayer.open(path)._native
    with onelayer.open(path).stream(window="all") as stream:
        wholes = {name: torch.from_dlpack(tensor).clone() for layer in stream for name, tensor in layer.items()}
    chance = random.Random(7)
    for _ in range(200):
        name, piece_bytes = chance.choice(list(shapes)), chance.choice([64, 100, 1000])
        ranges = [(start := chance.randrange(length), chance.randint(start, length)) for length in shapes[name]]
        for piece in _pieces(ranges, 16, piece_bytes):
            assert 2 * torch.Size([stop - start for start, stop in piece]).numel() <= piece_bytes
        found = DeviceReader(native, torch.device("cpu"), piece_bytes).part(name, ranges)
        assert torch.equal(found, wholes[name][tuple(slice(*span) for span in ranges)])


@pytest.mark.parametrize("mode", ["owned", "mapped"])
def test_slices_of_4_bit_elements_are_cut_between_bytes(tmp_path: Path, mode: str) -> None:
    path = write_checkpoint(tmp_path / "f.safetensors", {"f4": ("F4", (4, 8))})
    rows = [bytes_in_file(path)["f4"][row * 4 : row * 4 + 4] for row in range(4)]
    lazy = onelayer.open(path).state_dict(mode=mode)["f4"]
    assert data(lazy[1:3, 4:8]) == rows[1][2:] + rows[2][2:]
    assert lazy[:, 4:8].shape == (4, 2) and data(lazy[::2]) == rows[0] + rows[2]
    for index in [(0, slice(1, 3)), (slice(None), 2), (slice(None), slice(0, 8, 2))]:
        with pytest.raises(ValueError):
            lazy[index]


def test_pinned_names_of_devices() -> None:
    checkpoint = onelayer.open(FIXTURES / "llama")
    for device in ("cpu", torch.device("cpu")):
        checkpoint.stream(device=device).close()
    for device in (99, "cuda:99", torch.device("cuda", 99)):
        with pytest.raises(onelayer.DeviceError):
            checkpoint.stream(device=device)
