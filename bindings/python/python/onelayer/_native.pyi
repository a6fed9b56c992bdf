"""The native module. The package exports a part of it."""

import os
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any, TypeVar, final, overload

import numpy
import torch
from typing_extensions import CapsuleType

_Default = TypeVar("_Default")

__version__: str

@final
class NativeCheckpoint:
    def __new__(cls, path: str, opening: dict[str, Any]) -> NativeCheckpoint: ...
    def names(self) -> list[str]: ...
    def aliases(self) -> list[tuple[str, str]]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: str, /) -> bool: ...
    def describe(self, name: str) -> tuple[str, list[int], int, os.PathLike[str]]: ...
    def layers(self, rules: str | None) -> list[tuple[str, str | None, int, list[str]]]: ...
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
    """Measures memory growth from its creation to ``finish``."""

    def __new__(cls, device: int | None = None) -> MemoryMeter: ...
    def finish(
        self,
    ) -> tuple[tuple[int | None, str | None], tuple[int | None, str | None], tuple[int | None, str | None]]:
        """Growth of unreclaimable host memory, resident memory and device memory: bytes, or a reason."""
    def finish_summary(self) -> tuple[str, tuple[int | None, str | None]]:
        """All that was measured of the host, as JSON, and the growth of device memory."""

def held_memory() -> tuple[tuple[int | None, str | None], tuple[int | None, str | None]]: ...
def slope_of(
    points: list[tuple[int, int]], max_bytes: int
) -> tuple[float, float | None, float | None, float, str | None] | None: ...
def live_allocations() -> list[NativeAllocation]: ...

@final
class NativeAllocation:
    @property
    def number(self) -> int: ...
    @property
    def memory(self) -> str: ...
    @property
    def used_for(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def age_seconds(self) -> float: ...
    @property
    def layer(self) -> str | None: ...
    @property
    def tensors(self) -> list[tuple[str, str, list[int], int, int]]: ...

@final
class NativeReceipt:
    @property
    def asked(self) -> int: ...
    @property
    def returned(self) -> int: ...
    @property
    def kept_by_pool(self) -> int: ...
    @property
    def queued(self) -> int: ...
    @property
    def reused(self) -> int: ...
    @property
    def lent(self) -> int: ...
    @property
    def unconfirmed(self) -> int: ...
    @property
    def held(self) -> int: ...
    @property
    def parked(self) -> int: ...
    @property
    def held_by(self) -> list[tuple[str, str, int]]: ...

@final
class NativeSpare:
    def __new__(cls, bytes_max: int) -> NativeSpare: ...
    @property
    def idle_bytes(self) -> int: ...
    def free(self) -> None: ...

@final
class NativeModel:
    def __new__(cls, checkpoint: NativeCheckpoint, options: dict[str, Any]) -> NativeModel: ...
    def layers(self) -> list[tuple[str, int]]: ...
    def names(self) -> list[str]: ...
    def tensor(self, name: str) -> Tensor: ...
    def unload(self, name: str | None) -> NativeReceipt: ...
    def park(self, name: str | None, folder: str | None) -> NativeReceipt: ...
    def restore(self, name: str | None) -> int: ...
    def replace(self, layer: str, checkpoint: NativeCheckpoint, options: dict[str, Any]) -> NativeReceipt: ...
    def holders(self) -> list[tuple[str, str, int]]: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def parked_bytes(self) -> int: ...
    @property
    def report(self) -> Report: ...
    @property
    def plan(self) -> Plan: ...

@final
class NativePlacedModel:
    def __new__(
        cls,
        checkpoint: NativeCheckpoint,
        device_map: str,
        config: tuple[str, bytes] | None,
        options: dict[str, Any],
    ) -> NativePlacedModel: ...
    @property
    def on_disk(self) -> list[str]: ...
    def layers(self) -> list[tuple[str, int | str, int]]: ...
    def names(self) -> list[str]: ...
    def tensor(self, name: str) -> Tensor | None: ...
    def unload(self, name: str | None) -> NativeReceipt: ...
    def holders(self) -> list[tuple[str, str, int]]: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def reports(self) -> list[tuple[int | str, Report]]: ...

def decode_rows(
    form: str, to: str, columns: int, values: tuple[int, int], scales: tuple[int, int], target: tuple[int, int]
) -> None: ...
def fit(checkpoint: NativeCheckpoint, options: dict[str, Any]) -> dict[str, Any]: ...
def convert(
    source: str, target: str, options: dict[str, Any], finish: bool, progress: Callable[[int, int], object] | None
) -> dict[str, Any]: ...
def verify(
    directory: str, against: str | None, options: dict[str, Any], progress: Callable[[int, int], object] | None
) -> dict[str, Any]: ...

@final
class LayerTimes:
    """The times of one layer in one pass, in seconds. Moments are counted from the start of the load."""

    @property
    def name(self) -> str: ...
    @property
    def index(self) -> int:
        """Its place in the order of the stream, from 0."""
    @property
    def pass_number(self) -> int:
        """The pass, from 0."""
    @property
    def is_kept(self) -> bool:
        """True if it stays from the first pass to the last."""
    @property
    def reading_seconds(self) -> float:
        """Time that all readers together spent reading it."""
    @property
    def filling_seconds(self) -> float:
        """Time that all threads together spent casting, gathering, or copying it on the host."""
    @property
    def linking_seconds(self) -> float:
        """Time until its bytes were known to be on the device."""
    @property
    def waits(self) -> dict[str, float]:
        """Waits since the layer before it was handed out, by cause: disk, fill, link, engine."""
    @property
    def opened_seconds(self) -> float:
        """When it could first be read."""
    @property
    def handed_out_seconds(self) -> float:
        """When it could be taken."""
    @property
    def released_seconds(self) -> float | None:
        """When its memory was free again. ``None`` for a kept layer, and if the stream ended before."""

@final
class PassTimes:
    """The times of one pass."""

    @property
    def pass_number(self) -> int:
        """The pass, from 0."""
    @property
    def seconds(self) -> float: ...
    @property
    def waits(self) -> dict[str, float]:
        """Waits in seconds, by cause: disk, fill, link, engine."""
    @property
    def read_bytes(self) -> int:
        """Bytes read meanwhile, including layers of the next pass that were read ahead."""

def locate_in_cache(name: str, root: str | None, variables: list[str | None]) -> os.PathLike[str] | None: ...

@final
class LayerStream:
    """A running load: an iterator of layers, and a context manager that ends it.

    Waiting releases the interpreter lock, and Ctrl-C works. Leaving the context ends the threads and frees
    the ring, the files and the layers not yet handed out. Layers that were handed out stay valid.
    """

    def __iter__(self) -> LayerStream: ...
    def __next__(self) -> Layer:
        """The next layer. Raises ``StalledError`` if the caller holds the whole window for too long."""
    def __len__(self) -> int:
        """Number of layers."""
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def cancel(self) -> None:
        """Cancels the load, from any thread: the next wait for a layer raises ``CancelledError``."""
    def __enter__(self) -> LayerStream: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    @property
    def report(self) -> Report:
        """The report so far; final once the load has ended or was closed."""
    @property
    def plan(self) -> Plan: ...
    @property
    def progress(self) -> tuple[int, int]:
        """Tensor bytes that have arrived, and in total; from any thread."""

@final
class Layer:
    """A resident layer: a mapping from names to tensors, in file order.

    Its memory is freed once the layer is closed (or unreferenced) and no exported tensor is left.
    """

    @property
    def name(self) -> str: ...
    @property
    def index(self) -> int:
        """Index in execution order, from 0."""
    @property
    def pass_number(self) -> int:
        """The pass in which it was handed out, from 0."""
    @property
    def nbytes(self) -> int:
        """Size of its tensors, in bytes."""
    @property
    def resident_bytes(self) -> int:
        """Memory on its device, in bytes."""
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
        """Closes the layer: its tensors become unusable, exported tensors stay valid."""
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
    """A tensor in memory. ``torch.from_dlpack`` and others import it without a copy.

    An export keeps the memory alive, even after tensor, layer, stream, checkpoint and interpreter are
    gone. Exports of one tensor share its memory.
    """

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """As spelled in the file: ``BF16``, ``F8_E4M3``, ..."""
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
        """The capsule of the DLPack protocol. Every refusal is a ``BufferError``.

        On a device, work that the consumer queues in ``stream`` from now on waits until the tensor has arrived.
        """
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def view_bytes(self) -> Tensor:
        """The same memory as a one-dimensional byte tensor, for types unknown to a consumer. CPU only."""
    def hash(self) -> str:
        """BLAKE3 of its bytes as delivered, as 64 hexadecimal digits. With ``device="none"``: stream with ``hash=True``."""
    def tobytes(self) -> bytes:
        """A copy of its bytes, little-endian and row-major."""
    def numpy(self) -> numpy.ndarray[Any, Any]:
        """A numpy array that shares the memory. Types unknown to numpy need the package ml_dtypes."""
    def torch(self) -> torch.Tensor:
        """A torch tensor that shares the memory."""

@final
class Plan:
    """The plan of a load. ``str(plan)`` is the whole plan as text."""

    @property
    def budget(self) -> int:
        """Host budget, in bytes."""
    @property
    def min_budget(self) -> int:
        """The smallest possible host budget with these options, in bytes."""
    @property
    def host_bytes(self) -> int:
        """Host memory that counts against the budget."""
    @property
    def terms(self) -> list[tuple[str, int]]:
        """The terms of ``host_bytes``, by name."""
    @property
    def resident_bytes(self) -> int:
        """Maximum bytes of resident layers on their device."""
    @property
    def nbytes(self) -> int:
        """Size of all tensors as delivered, in bytes."""
    @property
    def read_bytes(self) -> int:
        """Bytes to read, over-read included."""
    @property
    def layers(self) -> list[str]:
        """Names of the layers, in delivery order."""
    @property
    def layer_bytes(self) -> list[int]:
        """Memory of each of ``layers`` on its device, in bytes."""
    @property
    def scales(self) -> list[str]:
        """Names of the scales (``NAME_scale``) of the tensors that are quantised during the load."""

@final
class Report:
    """The report of a load. Memory is the reserved amount; the pytest marker ``loadcheck`` measures."""

    @property
    def seconds(self) -> float:
        """Duration of the load, including the caller's work between layers."""
    @property
    def preparing_seconds(self) -> float: ...
    @property
    def waited_seconds(self) -> float:
        """Seconds the caller waited for layers."""
    @property
    def waits(self) -> dict[str, float]:
        """Seconds of waiting by cause: the caller waited for ``disk``, ``fill`` (casts, copies) or ``link``;
        the loader waited for the caller (``engine``)."""
    @property
    def passes(self) -> int:
        """Complete passes over all layers."""
    @property
    def layers(self) -> int:
        """Number of layers handed out."""
    @property
    def nbytes(self) -> int:
        """Tensor bytes that have arrived."""
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
        """The reasons why files were not read in the requested way."""
