"""The package's own memory, allocation by allocation: rings, windows, layers, and who holds them.

>>> mark = onelayer.live.snapshot()
>>> ...
>>> print(onelayer.live.snapshot().since(mark))
"""

from __future__ import annotations

from dataclasses import dataclass

from . import _native
from ._sizes import human_size

__all__ = ["Allocation", "Difference", "LiveTensor", "Snapshot", "snapshot"]


@dataclass(frozen=True)
class LiveTensor:
    """A tensor of a resident layer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    owners: int
    """How many objects hold it now."""


@dataclass(frozen=True)
class Allocation:
    """One allocation."""

    number: int
    """Unique in the process."""
    memory: str
    """``cpu`` or ``cuda:0``."""
    used_for: str
    """``ring``: buffer of reads. ``scratch``: other bytes on their way. ``filling``: a layer that is being read.
    ``layer``: a resident layer. ``window``: memory that the layers of several passes share. ``parked``: a layer
    parked in host memory. ``idle``: free for the next layer."""
    nbytes: int
    age_seconds: float
    layer: str | None
    tensors: tuple[LiveTensor, ...]


@dataclass(frozen=True)
class Difference:
    """The changes from one snapshot to another."""

    new: tuple[Allocation, ...]
    gone: tuple[Allocation, ...]

    def __bool__(self) -> bool:
        return bool(self.new or self.gone)

    def __str__(self) -> str:
        lines = [f"{sign} {_line(one)}" for sign, found in (("+", self.new), ("-", self.gone)) for one in found]
        return "\n".join(lines) or "no difference"


@dataclass(frozen=True)
class Snapshot:
    """All allocations at one moment, oldest first."""

    allocations: tuple[Allocation, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(one.nbytes for one in self.allocations)

    def since(self, earlier: Snapshot) -> Difference:
        """The changes since an earlier snapshot."""
        before = {one.number for one in earlier.allocations}
        now = {one.number for one in self.allocations}
        return Difference(
            tuple(one for one in self.allocations if one.number not in before),
            tuple(one for one in earlier.allocations if one.number not in now),
        )

    def __str__(self) -> str:
        return "\n".join(map(_line, self.allocations)) or "nothing"


def snapshot() -> Snapshot:
    """All current allocations of the package."""
    return Snapshot(tuple(map(_allocation, _native.live_allocations())))


def _allocation(native: _native.NativeAllocation) -> Allocation:
    tensors = tuple(
        LiveTensor(name, dtype, tuple(shape), size, owners) for name, dtype, shape, size, owners in native.tensors
    )
    return Allocation(
        native.number, native.memory, native.used_for, native.nbytes, native.age_seconds, native.layer, tensors
    )


def _line(one: Allocation) -> str:
    held = sum(tensor.owners for tensor in one.tensors)
    what = f" {one.layer}" if one.layer else ""
    return f"{human_size(one.nbytes)} on {one.memory}: {one.used_for}{what}" + (f", taken {held} times" if held else "")
