"""The native half. Names without an underscore in front are exported by the package."""

import os
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Any, TypeVar, final, overload

import numpy
import torch
from typing_extensions import CapsuleType

_Default = TypeVar("_Default")

__version__: str

@final
class NativeCheckpoint:
    def __new__(cls, path: str) -> NativeCheckpoint: ...
    def names(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: str, /) -> bool: ...
    def describe(self, name: str) -> tuple[str, list[int], int, os.PathLike[str]]: ...
    def layers(self) -> list[tuple[str, int, list[str]]]: ...
    @property
    def nbytes(self) -> int: ...
    def files(self) -> list[tuple[os.PathLike[str], list[tuple[str, str]]]]: ...
    @property
    def notes(self) -> list[str]: ...
    @property
    def metadata_bytes(self) -> int: ...
    def plan(self, options: dict[str, Any]) -> Plan: ...
    def stream(self, options: dict[str, Any]) -> LayerStream: ...
    def owners(self, world: int, names: set[str]) -> list[tuple[str, int]]: ...
    def reader(self) -> NativeReader: ...
    def mapping(self) -> NativeMapping: ...

@final
class NativeReader:
    def read(self, name: str) -> Tensor: ...
    def read_slice(self, name: str, ranges: list[tuple[int, int]]) -> Tensor: ...
    def read_part(self, name: str, offset_bytes: int, len_bytes: int) -> Tensor: ...
    @property
    def read_bytes(self) -> int: ...

@final
class NativeMapping:
    def view(self, name: str) -> Tensor: ...
    def read_ahead(self) -> None: ...

@final
class MemoryMeter:
    """Measures from when it is made to ``finish``: bytes above the start, or why they are not known."""

    def __new__(cls, device: int | None = None) -> MemoryMeter: ...
    def finish(
        self,
    ) -> tuple[tuple[int | None, str | None], tuple[int | None, str | None], tuple[int | None, str | None]]:
        """Growth of what the kernel cannot take back, of what is resident, and of what the device holds."""

def locate_in_cache(name: str, root: str | None, variables: list[str | None]) -> os.PathLike[str] | None: ...

@final
class LayerStream:
    """A running load: an iterator of layers, and a context manager that ends it.

    Waiting is done without the interpreter's lock; Ctrl-C works. Leaving the context ends the threads and gives back the
    ring, the files and the layers that nobody took; layers that were taken stay.
    """

    def __iter__(self) -> LayerStream: ...
    def __next__(self) -> Layer:
        """The next layer. Raises ``StalledError`` if the caller holds all that may be resident for too long."""
    def __len__(self) -> int:
        """Number of layers."""
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def cancel(self) -> None:
        """Makes the next layer that somebody waits for a ``CancelledError``; from any thread."""
    def __enter__(self) -> LayerStream: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    @property
    def report(self) -> Report:
        """What the load did so far; final once it has ended or was closed."""
    @property
    def plan(self) -> Plan: ...
    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of tensors that arrived, and of all of them; from any thread."""

@final
class Layer:
    """A resident layer: a mapping from names to tensors, in file order.

    Its memory is free when it was closed, or nobody refers to it or its tensors any more, and all that was exported from
    it is gone.
    """

    @property
    def name(self) -> str: ...
    @property
    def index(self) -> int:
        """Its place in execution order, from 0."""
    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
    @property
    def resident_bytes(self) -> int:
        """Bytes it takes where it lives."""
    def __getitem__(self, name: str, /) -> Tensor: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: object, /) -> bool: ...
    @overload
    def get(self, name: str) -> Tensor | None: ...
    @overload
    def get(self, name: str, default: _Default) -> Tensor | _Default: ...
    def keys(self) -> Collection[str]: ...
    def values(self) -> Collection[Tensor]: ...
    def items(self) -> Collection[tuple[str, Tensor]]: ...
    def close(self) -> None:
        """Lets go of the layer: its tensors can no longer be used, what was exported can."""
    @property
    def closed(self) -> bool: ...
    def __enter__(self) -> Layer: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@final
class Tensor:
    """A tensor in memory. ``torch.from_dlpack`` and others take it without a copy.

    What was exported owns its memory: it outlives tensor, layer, stream, checkpoint and interpreter. Exports of one tensor
    share its memory.
    """

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """As files spell it: ``BF16``, ``F8_E4M3``, ..."""
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """The protocol's capsule. Every refusal is a ``BufferError``.

        On a device, what the consumer queues in ``stream`` from now on waits until the tensor has arrived.
        """
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def view_bytes(self) -> Tensor:
        """The same memory as bytes, in one dimension: for types that a consumer does not know. On the CPU only."""
    def tobytes(self) -> bytes:
        """A copy of its bytes, little-endian and row-major."""
    def numpy(self) -> numpy.ndarray[Any, Any]:
        """An array that shares the memory; types that numpy lacks come from the package ml_dtypes."""
    def torch(self) -> torch.Tensor:
        """A tensor of torch that shares the memory."""

@final
class Plan:
    """What a load would do. ``str(plan)`` is the whole of it, for people."""

    @property
    def budget(self) -> int:
        """Host budget, in bytes."""
    @property
    def min_budget(self) -> int:
        """The smallest host budget that these settings accept, in bytes."""
    @property
    def host_bytes(self) -> int:
        """Host memory that counts against the budget."""
    @property
    def terms(self) -> list[tuple[str, int]]:
        """The same, term by term."""
    @property
    def resident_bytes(self) -> int:
        """Most bytes of layers at once, where they live."""
    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as they are delivered."""
    @property
    def read_bytes(self) -> int:
        """Bytes that are read, over-read included."""
    @property
    def layers(self) -> list[str]:
        """Names of the layers, in the order in which they come."""

@final
class Report:
    """What a load did. Memory is what it reserved, not a measurement: the marker ``loadcheck`` measures."""

    @property
    def seconds(self) -> float:
        """From the start of the load to its end, what the caller did in between included."""
    @property
    def preparing_seconds(self) -> float: ...
    @property
    def waited_seconds(self) -> float:
        """Seconds that the caller waited for layers."""
    @property
    def layers(self) -> int:
        """Layers that were handed out."""
    @property
    def nbytes(self) -> int:
        """Bytes of tensors that arrived."""
    @property
    def read_bytes(self) -> int: ...
    @property
    def budget(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def fallbacks(self) -> list[str]:
        """Why files were read in another way than was asked for."""
