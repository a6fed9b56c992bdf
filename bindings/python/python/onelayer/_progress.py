"""Bars of progress, through the package tqdm where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._native import Layer, LayerStream


class Bar:
    """A bar in bytes. Draws nothing without tqdm, and where standard error is neither a terminal nor a notebook."""

    def __init__(self, total_bytes: int, label: str) -> None:
        self._bar = _new_bar(total_bytes, label)

    def update_to(self, done_bytes: int) -> None:
        """So many bytes are done."""
        if self._bar is not None:
            self._bar.update(done_bytes - self._bar.n)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def progress(stream: LayerStream, label: str = "loading") -> Iterator[Layer]:
    """The layers of a stream, with a bar of the bytes that have arrived.

    >>> for layer in onelayer.progress(checkpoint.stream()):
    ...     with layer: ...
    """
    bar = Bar(stream.progress[1], label)
    try:
        for layer in stream:
            bar.update_to(stream.progress[0])
            yield layer
            # The caller may drop the layer before the next one arrives.
            del layer
    finally:
        bar.close()


def _new_bar(total_bytes: int, label: str) -> Any:
    try:
        tqdm: Any = import_module("tqdm.auto").tqdm
    except ImportError:
        return None
    if not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        return None
    return tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True, unit_divisor=1024)
