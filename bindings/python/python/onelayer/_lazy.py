"""Lazily read tensors, and their readers: into owned memory, from a private mapping, or piece by piece
to a device."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ._errors import BudgetError, CheckpointError
from ._frameworks import to_numpy, to_torch, torch_dtype, torch_shape
from ._slices import Ranges, is_whole, plan_index

if TYPE_CHECKING:
    import torch

    from ._checkpoint import Checkpoint
    from ._native import NativeCheckpoint, NativeReader, Tensor

Mode = Literal["owned", "mapped"]

# Maximum memory of a reader besides the tensors: eight pieces of 2 MiB.
_SCRATCH_BYTES = 16 << 20
# Maximum number of reading threads: transformers starts four.
_THREADS = 4
# Tensors that are read at once where all of them are wanted.
_AT_ONCE = 2
_PIECE_BYTES_MIN = 1 << 20
_PIECE_BYTES_MAX = 32 << 20


@dataclass(frozen=True)
class Origin:
    """What another process needs to make the same reader, and to know that the files are the same."""

    path: str
    opening: tuple[tuple[str, Any], ...]
    framework: str
    device: str
    mode: str
    budget: int | None
    files: tuple[tuple[str, int, int], ...]
    """Path, size in bytes and time of the last change in nanoseconds of each file, when it was opened."""


class TensorReader(ABC):
    """Reads tensors, whole or in part. A copy is the same reader; a pickled one opens its files again."""

    origin: Origin
    checkpoint: Checkpoint

    @abstractmethod
    def whole(self, name: str) -> Any: ...

    @abstractmethod
    def part(self, name: str, ranges: Ranges) -> Any: ...

    def expect_all(self) -> None:
        """Announces that every tensor will be read soon. Does nothing by default."""
        return

    def all_of(self, names: Collection[str]) -> dict[str, Any]:
        """Whole tensors, by name."""
        return {name: self.whole(name) for name in names}

    def __copy__(self) -> TensorReader:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorReader:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (self.origin, _described(self.checkpoint))


class OwnedReader(TensorReader):
    """Reads tensors into memory that they own."""

    def __init__(self, reader: NativeReader, convert: Callable[[Tensor], Any]) -> None:
        self._native_reader = reader
        self._convert = convert

    def whole(self, name: str) -> Any:
        return self._convert(self._native_reader.read(name))

    def part(self, name: str, ranges: Ranges) -> Any:
        return self._convert(self._native_reader.read_slice(name, ranges))

    def all_of(self, names: Collection[str]) -> dict[str, Any]:
        # Two at a time: new memory is touched for one while the other waits for the disk.
        with ThreadPoolExecutor(_AT_ONCE, "onelayer-tensor") as pool:
            try:
                return dict(zip(names, pool.map(self.whole, names), strict=True))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


class MappedReader(TensorReader):
    """Returns views of private mappings: pages belong to the page cache until they are written to."""

    def __init__(self, native: NativeCheckpoint, convert: Callable[[Tensor], Any]) -> None:
        self._mapping = native.mapping()
        self._describe = native.describe
        self._convert = convert

    def whole(self, name: str) -> Any:
        return self._convert(self._mapping.view(name))

    def part(self, name: str, ranges: Ranges) -> Any:
        dtype = self._describe(name)[0]
        return self.whole(name)[tuple(slice(*span) for span in _stored(dtype, ranges))]

    def expect_all(self) -> None:
        # Otherwise page faults would read only a few pages at a time.
        self._mapping.read_ahead()


class DeviceReader(TensorReader):
    """Reads torch tensors to a device piece by piece: the host never holds a whole one."""

    def __init__(self, native: NativeCheckpoint, device: torch.device, piece_bytes: int) -> None:
        self._native_reader = reader = native.reader()
        self._describe = native.describe
        self._device = device
        self._piece_bytes = piece_bytes
        self._host = OwnedReader(reader, to_torch)

    def whole(self, name: str) -> Any:
        import torch

        dtype, shape, nbytes, _ = self._describe(name)
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        for start in range(0, nbytes, self._piece_bytes):
            length = min(self._piece_bytes, nbytes - start)
            flat[start : start + length].copy_(to_torch(self._native_reader.read_part(name, start, length)))
        return flat.view(torch_dtype(dtype)).reshape(torch_shape(dtype, shape))

    def part(self, name: str, ranges: Ranges) -> Any:
        import torch

        dtype, shape, nbytes, _ = self._describe(name)
        lengths = [stop - start for start, stop in ranges]
        found = torch.empty(torch_shape(dtype, lengths), dtype=torch_dtype(dtype), device=self._device)
        bits = 8 * nbytes // max(math.prod(shape), 1)
        for piece in _pieces(ranges, bits, self._piece_bytes):
            inside = [(start - at, stop - at) for (start, stop), (at, _) in zip(piece, ranges, strict=True)]
            target = found[tuple(slice(*span) for span in _stored(dtype, inside))]
            target.copy_(self._host.part(name, piece))
        return found


def _pieces(ranges: Ranges, element_bits: int, piece_bytes: int) -> Iterator[Ranges]:
    """Divides ranges into pieces of at most ``piece_bytes``, along one dimension, with one index in each before it."""
    lengths = [stop - start for start, stop in ranges]
    if not ranges or 0 in lengths:
        yield ranges
        return
    row_bits = [element_bits * math.prod(lengths[dimension + 1 :]) for dimension in range(len(lengths))]
    cut = next(dimension for dimension, bits in enumerate(row_bits) if bits <= 8 * piece_bytes)
    step = 8 * piece_bytes // row_bits[cut]
    # Even, so that pairs of 4-bit elements stay together.
    step -= step % 2 if step > 1 else 0
    start, stop = ranges[cut]
    for before in itertools.product(*(range(*span) for span in ranges[:cut])):
        for first in range(start, stop, step):
            yield [*((at, at + 1) for at in before), (first, min(first + step, stop)), *ranges[cut + 1 :]]


def _stored(dtype: str, ranges: Ranges) -> Ranges:
    """Ranges in stored units: 4-bit elements are stored in pairs."""
    if dtype != "F4" or not ranges:
        return ranges
    start, stop = ranges[-1]
    if start % 2 or stop % 2:
        raise ValueError(f"elements {start} to {stop} of F4 do not begin and end at byte boundaries")
    return [*ranges[:-1], (start // 2, stop // 2)]


class LazyTensor:
    """A tensor that indexing reads: ``tensor[...]`` reads it whole, ``tensor[2:5]`` only these rows."""

    __slots__ = ("_dtype", "_name", "_reader", "_shape")

    def __init__(self, reader: TensorReader, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        self._reader = reader
        self._name = name
        self._dtype = dtype
        self._shape = shape

    @property
    def name(self) -> str:
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> str:
        """As spelled in the file."""
        return self._dtype

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Any) -> Any:
        ranges, rest = plan_index(index, self._shape)
        if self._dtype == "F4" and rest is not None and rest[-1] != slice(None, None, 1):
            raise ValueError("elements of F4 are stored in pairs: the last dimension takes no index and no step")
        found = (
            self._reader.whole(self._name) if is_whole(ranges, self._shape) else self._reader.part(self._name, ranges)
        )
        return found if rest is None else found[rest]

    # For `torch.nn.Module.load_state_dict`: without `assign`, each tensor is read, copied and dropped.
    is_meta = False

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        read = {name: _read(value) for name, value in (kwargs or {}).items()}
        return function(*map(_read, args), **read)

    def size(self) -> tuple[int, ...]:
        return self._shape

    def detach(self) -> Any:
        """Refuses: this is how torch begins to make a parameter of something."""
        raise TypeError(
            f"{self._name!r} is a lazy tensor, which cannot become a parameter: "
            "pass tensors, as in module.load_state_dict(weights.read(), assign=True)"
        )

    def __copy__(self) -> LazyTensor:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyTensor, (self._reader, self._name, self._dtype, self._shape)

    def __repr__(self) -> str:
        return f"<onelayer.LazyTensor {self._name!r}: {self._dtype} {list(self._shape)}>"


def _read(value: Any) -> Any:
    return value[...] if isinstance(value, LazyTensor) else value


class StateDict(Mapping[str, LazyTensor]):
    """All tensors by name, read lazily. Threads may read at the same time.

    A copy shares the open files. A pickled one opens them again where it is loaded, by their absolute
    path, with the same options. It raises ``CheckpointError`` if they are not the same files, unchanged.
    """

    def __init__(self, tensors: dict[str, LazyTensor]) -> None:
        self._tensors = tensors

    def read(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """Reads tensors, all or those of ``names``. For ``module.load_state_dict(weights.read(), assign=True)``."""
        return {name: self._tensors[name][...] for name in (self._tensors if names is None else names)}

    def __getitem__(self, name: str) -> LazyTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def copy(self) -> dict[str, LazyTensor]:
        """A plain dictionary of the same tensors."""
        return dict(self._tensors)

    def __repr__(self) -> str:
        return f"<onelayer.StateDict: {len(self)} tensors>"


def converter(framework: str) -> Callable[[Any], Any]:
    """The function that converts our tensors to a framework."""
    names = {"pt": to_torch, "torch": to_torch, "pytorch": to_torch, "np": to_numpy, "numpy": to_numpy}
    if framework not in names:
        raise ValueError(f"framework={framework!r}: expected 'pt' or 'np'")
    return names[framework]


def reader_for(
    checkpoint: Checkpoint, *, framework: str, device: object, mode: str, budget: int | None
) -> TensorReader:
    """The reader for these options."""
    reader = _reader(checkpoint, framework, device, mode, budget)
    reader.checkpoint = checkpoint
    reader.origin = Origin(
        path=os.path.abspath(checkpoint.path),
        opening=tuple(checkpoint._opening.items()),
        framework=framework,
        device=str(device),
        mode=mode,
        budget=budget,
        files=_identity(checkpoint),
    )
    return reader


def _reader(checkpoint: Checkpoint, framework: str, device: object, mode: str, budget: int | None) -> TensorReader:
    native = checkpoint._native
    convert = converter(framework)
    if mode not in ("owned", "mapped"):
        raise ValueError(f"mode={mode!r}: expected 'owned' or 'mapped'")
    on_host = str(device) in ("cpu", "cpu:0", "host")
    if not on_host and convert is not to_torch:
        raise ValueError(f"device={device!r}: numpy arrays are on the CPU")
    if not on_host and mode == "mapped":
        raise ValueError(f"device={device!r}: only tensors on the CPU can be mapped")
    if mode == "mapped":
        return MappedReader(native, convert)
    piece_bytes = _piece_bytes(native.metadata_bytes, budget, on_host)
    if on_host:
        return OwnedReader(native.reader(), convert)
    import torch

    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(str(device))
    return DeviceReader(native, target, piece_bytes)


def _opened_again(origin: Origin, described: str) -> TensorReader:
    """The reader of another process, here."""
    from ._checkpoint import Checkpoint

    checkpoint = Checkpoint(origin.path, **dict(origin.opening))
    if _identity(checkpoint) != origin.files or _described(checkpoint) != described:
        raise CheckpointError(
            f"{origin.path}: the checkpoint is not the one that was pickled: its files were changed or replaced. "
            "Open it again with onelayer.open",
            path=origin.path,
        )
    return reader_for(
        checkpoint, framework=origin.framework, device=_device(origin.device), mode=origin.mode, budget=origin.budget
    )


def _device(name: str) -> object:
    """An index was a number."""
    return int(name) if name.isdecimal() else name


def _identity(checkpoint: Checkpoint) -> tuple[tuple[str, int, int], ...]:
    stats = [(os.path.abspath(path), os.stat(path)) for path in checkpoint.files]
    return tuple((path, found.st_size, found.st_mtime_ns) for path, found in stats)


def _described(checkpoint: Checkpoint) -> str:
    """A hash of the names, types and shapes of all tensors."""
    found = hashlib.sha256()
    for name in checkpoint.keys():
        dtype, shape, _, _ = checkpoint._native.describe(name)
        found.update(f"{name}\0{dtype}\0{shape}\n".encode())
    return found.hexdigest()


def _piece_bytes(metadata_bytes: int, budget: int | None, on_host: bool) -> int:
    """The size of pieces for which all reading threads together stay within the budget."""
    if budget is None:
        return _PIECE_BYTES_MAX // 4
    least = metadata_bytes + _SCRATCH_BYTES + (0 if on_host else _THREADS * _PIECE_BYTES_MIN)
    if budget < least:
        message = f"a budget of {budget} bytes is too small to read single tensors: at least {least} bytes are needed"
        raise BudgetError(message, required=least, budget=budget)
    left = (budget - metadata_bytes - _SCRATCH_BYTES) // _THREADS
    return min(left, _PIECE_BYTES_MAX)
