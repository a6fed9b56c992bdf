"""The DLPack protocol, with numpy and with a ctypes consumer that reads the structures."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import onelayer
from checkpoints import BITS, bytes_in_file, write_checkpoint

numpy = pytest.importorskip("numpy")

# Type names in files -> DLPack code, bits and lanes, and values per element.
ELEMENTS = {
    "BOOL": (6, 8, 1),
    "F4": (17, 4, 2),
    "F6_E2M3": (15, 6, 1),
    "F6_E3M2": (16, 6, 1),
    "U8": (1, 8, 1),
    "I8": (0, 8, 1),
    "F8_E5M2": (12, 8, 1),
    "F8_E4M3": (10, 8, 1),
    "F8_E8M0": (14, 8, 1),
    "F8_E4M3FNUZ": (11, 8, 1),
    "F8_E5M2FNUZ": (13, 8, 1),
    "I16": (0, 16, 1),
    "U16": (1, 16, 1),
    "F16": (2, 16, 1),
    "BF16": (4, 16, 1),
    "I32": (0, 32, 1),
    "U32": (1, 32, 1),
    "F32": (2, 32, 1),
    "C64": (5, 64, 1),
    "F64": (2, 64, 1),
    "I64": (0, 64, 1),
    "U64": (1, 64, 1),
}


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Versioned(ctypes.Structure):
    pass


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(Versioned))
Versioned._fields_ = [
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", DELETER),
    ("flags", ctypes.c_uint64),
    ("tensor", DLTensor),
]


def inside(capsule: object) -> Versioned:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.cast(get(capsule, b"dltensor_versioned"), ctypes.POINTER(Versioned)).contents


def tensors(path: Path, **options: object) -> Iterator[onelayer.Tensor]:
    with onelayer.open(path).stream(window="all", **options) as stream:
        for layer in stream:
            yield from layer.values()


def test_every_type_as_the_structure_says_it(every_dtype: Path) -> None:
    expected = bytes_in_file(every_dtype)
    seen = set()
    for tensor in tensors(every_dtype):
        capsule = tensor.__dlpack__(max_version=(1, 0))
        managed = inside(capsule)
        found = managed.tensor
        assert (managed.major, managed.flags) == (1, 0)
        assert (found.device_type, found.device_id) == tensor.__dlpack_device__() == (1, 0)
        assert (found.code, found.bits, found.lanes) == ELEMENTS[tensor.dtype]
        innermost = 8 // found.lanes
        assert (found.ndim, found.shape[0], found.shape[1]) == (2, 3, innermost)
        if found.strides:
            assert (found.strides[0], found.strides[1]) == (innermost, 1)
        assert found.data % 64 == 0
        assert ctypes.string_at(found.data + found.byte_offset, tensor.nbytes) == expected[tensor.name]
        seen.add(tensor.dtype)
    assert seen == set(BITS)


def test_every_type_that_numpy_or_ml_dtypes_has(every_dtype: Path) -> None:
    pytest.importorskip("ml_dtypes")
    expected = bytes_in_file(every_dtype)
    refused = set()
    for tensor in tensors(every_dtype):
        try:
            array = tensor.numpy()
        except TypeError:
            refused.add(tensor.dtype)
            assert numpy.from_dlpack(tensor.view_bytes()).tobytes() == expected[tensor.name]
            continue
        assert array.shape == tensor.shape
        assert array.tobytes() == expected[tensor.name]
    assert refused == {"F4", "F6_E2M3", "F6_E3M2"}


def test_bytes_have_one_dimension(every_dtype: Path) -> None:
    for tensor in tensors(every_dtype):
        view = tensor.view_bytes()
        assert (view.dtype, view.shape, view.nbytes) == ("U8", (tensor.nbytes,), tensor.nbytes)
        assert numpy.from_dlpack(view).shape == (tensor.nbytes,)


def test_scalars_and_tensors_without_elements(tmp_path: Path) -> None:
    path = write_checkpoint(
        tmp_path / "odd.safetensors",
        {"scalar": ("F32", ()), "none": ("F64", (3, 0, 2)), "one": ("U8", (1,)), "bf16": ("BF16", (0, 4))},
    )
    found = {tensor.name: tensor.numpy() for tensor in tensors(path) if tensor.dtype != "BF16"}
    assert found["scalar"].shape == () and found["none"].shape == (3, 0, 2) and found["one"].shape == (1,)
    expected = bytes_in_file(path)
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: data for name, data in expected.items() if name != "bf16"
    }
    # Without elements there is no memory, also in the byte view for types unknown to numpy.
    empty = next(tensor for tensor in tensors(path) if tensor.dtype == "BF16")
    assert empty.view_bytes().numpy().shape == (0,) and empty.tobytes() == b""
    if importlib.util.find_spec("ml_dtypes"):
        assert empty.numpy().shape == (0, 4)


def test_exports_share_and_copies_do_not(layered: Path) -> None:
    tensor = next(tensors(layered))
    first, second = tensor.numpy(), numpy.from_dlpack(tensor)
    copy = numpy.from_dlpack(tensor, copy=True)
    assert first.ctypes.data == second.ctypes.data != copy.ctypes.data
    assert first.flags.writeable and copy.flags.writeable
    first[0, 0] = 5
    assert second[0, 0] == 5 != copy[0, 0]
    assert inside(tensor.__dlpack__(max_version=(1, 1), copy=True)).flags == 2
    assert inside(tensor.__dlpack__(max_version=(1, 1), copy=False)).flags == 0


def test_old_consumers_get_the_old_structure(layered: Path) -> None:
    capsule = next(tensors(layered)).__dlpack__()
    assert '"dltensor"' in repr(capsule)
    for version in ((0, 8), None):
        assert '"dltensor"' in repr(next(tensors(layered)).__dlpack__(max_version=version))


@pytest.mark.parametrize(
    "arguments",
    [
        {"stream": 1},
        {"stream": "legacy"},
        {"max_version": 1},
        {"max_version": (1,)},
        {"dl_device": (2, 0)},
        {"dl_device": "cpu"},
        {"copy": "yes"},
    ],
)
def test_refusals_are_buffer_errors(layered: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(BufferError):
        next(tensors(layered)).__dlpack__(**arguments)  # type: ignore[arg-type]


def test_arguments_that_change_nothing(layered: Path) -> None:
    tensor = next(tensors(layered))
    for arguments in ({"stream": -1}, {"stream": None}, {"dl_device": (1, 0)}, {"copy": None}):
        assert inside(tensor.__dlpack__(max_version=(1, 0), **arguments)).flags == 0
    with pytest.raises(TypeError):
        tensor.__dlpack__(1)  # type: ignore[misc]


def test_capsules_that_nobody_takes_free_what_they_hold(layered: Path) -> None:
    with onelayer.open(layered).stream(window=1, on_stall=5) as stream:
        for layer in stream:
            for tensor in layer.values():
                del_later = [tensor.__dlpack__(max_version=(1, 0)), tensor.__dlpack__()]
            del tensor
            layer.close()
            # Keeping these would fill the window, and the next layer would never arrive.
            del del_later
    assert stream.report.layers == 10


def test_memory_is_back_after_many_exports_from_four_threads(tmp_path: Path) -> None:
    """10,000 exports and deletions, consumed or not; deleters run on other threads than exports."""
    path = write_checkpoint(tmp_path / "many.safetensors", {"weight": ("F32", (256, 256))})
    tensor = next(tensors(path))
    expected = tensor.tobytes()
    failures = []

    def cycle(count: int) -> None:
        for number in range(count):
            version = (1, 0) if number % 2 else None
            tensor.__dlpack__(max_version=version)
            array = numpy.from_dlpack(tensor, copy=number % 50 == 0)
            if number % 500 == 0 and array.tobytes() != expected:
                failures.append(number)

    def run(count: int) -> None:
        threads = [threading.Thread(target=cycle, args=(count,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run(250)
    before = resident_bytes()
    run(2500)
    gc.collect()
    assert not failures
    # Leaking one structure per export would be 2 MiB, one tensor in fifty 50 MiB.
    assert resident_bytes() - before < 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("end", ["", "import os, signal; signal.raise_signal(signal.SIGTERM)"])
def test_exit_with_live_tensors(layered: Path, end: str) -> None:
    """Tensors, arrays, capsules, layers and a running stream are alive when the interpreter exits."""
    program = textwrap.dedent(
        f"""
        import numpy, onelayer, sys, threading
        checkpoint = onelayer.open({str(layered)!r})
        stream = checkpoint.stream(window=4)
        layers = [next(stream), next(stream)]
        tensors = [tensor for layer in layers for tensor in layer.values()]
        arrays = [numpy.from_dlpack(tensor) for tensor in tensors]
        sys.kept = [tensor.__dlpack__(max_version=(1, 0)) for tensor in tensors]
        cycle = [arrays, stream]
        cycle.append(cycle)
        thread = threading.Thread(target=lambda: next(stream), daemon=True)
        thread.start()
        print("exit", flush=True)
        {end}
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "exit\n"
    assert done.stderr == ""
    assert done.returncode == (0 if not end else -15)
