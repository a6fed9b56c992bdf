"""Host memory that is kept from one load to the next."""

from __future__ import annotations

from ._native import NativeSpare
from ._sizes import human_size, parse_size


class SpareMemory:
    """Host memory of dropped layers, kept for the next load: ``onelayer.load(..., spare=spare)``.

    Where the host of a virtual machine takes free memory back, its first touch takes seconds for each GiB. A
    program that loads one model after another can keep it instead. ``limit`` bounds what is kept and what
    models use together; a larger model works, and then nothing is kept beside it. Streams that keep
    everything (``window="all"``) take the option too; others reuse memory on their own.

    The memory is freed by ``free()``, at the end of a ``with`` block, and with the last object that uses it.
    """

    def __init__(self, limit: int | str) -> None:
        self._native = NativeSpare(parse_size(limit))

    @property
    def nbytes(self) -> int:
        """Bytes that are kept and that no model uses."""
        return self._native.idle_bytes

    def free(self) -> None:
        """Returns what no model uses to the system."""
        self._native.free()

    def __enter__(self) -> SpareMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def __repr__(self) -> str:
        return f"<onelayer.SpareMemory: {human_size(self.nbytes)} idle>"
