"""Resident models: loaded at once, and given back in parts, with receipts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _native
from ._checkpoint import Checkpoint
from ._checkpoint import open as open_checkpoint
from ._sizes import human_size

if TYPE_CHECKING:
    from ._native import NativeModel, NativeReceipt, Plan, Report, Tensor


@dataclass(frozen=True)
class Holder:
    """A tensor that was taken, and keeps the memory of its layer."""

    layer: str
    tensor: str
    owners: int
    """How many objects share it: exports to torch or numpy, and ``Tensor`` objects."""
    used_by: tuple[str, ...] = ()
    """Where it is referred to in Python, as far as is known."""


@dataclass(frozen=True)
class Receipt:
    """What came back. ``asked`` is the sum of the numbers after it, up to ``held``; ``str(receipt)`` says it."""

    asked: int
    """Bytes that were to be freed."""
    returned: int
    """Bytes that the system or the driver has confirmed to have back."""
    kept_by_pool: int = 0
    """Bytes that the device's pool keeps for the next layer."""
    queued: int = 0
    """Bytes that the device frees after work that is queued."""
    reused: int = 0
    """Bytes that a running stream uses for its next layers."""
    lent: int = 0
    """Bytes in memory that the caller provided."""
    unconfirmed: int = 0
    """Bytes given up without a confirmation."""
    held: int = 0
    """Bytes that somebody holds. They are freed with the last holder."""
    parked: int = 0
    """Bytes that were copied elsewhere first. No part of the sum."""
    held_by: tuple[Holder, ...] = ()
    """The tensors that are held."""

    @property
    def is_complete(self) -> bool:
        """True if every byte that was asked for is back."""
        return self.returned == self.asked

    def __str__(self) -> str:
        parts = [f"{human_size(self.asked)} asked, {human_size(self.returned)} returned"]
        others = {
            "kept by the device's pool": self.kept_by_pool,
            "queued on the device to be freed": self.queued,
            "reused by the stream": self.reused,
            "in the caller's own memory": self.lent,
            "given up without a confirmation": self.unconfirmed,
        }
        parts += [f"{human_size(size)} {words}" for words, size in others.items() if size]
        if self.held:
            named = [holder.tensor + _users(holder) for holder in self.held_by[:3]]
            more = f" and {len(self.held_by) - 3} more" if len(self.held_by) > 3 else ""
            parts.append(f"{human_size(self.held)} held by {', '.join(named) or 'an owner that is just leaving'}{more}")
        return ", ".join(parts)


def _users(holder: Holder) -> str:
    return f" (in {', '.join(holder.used_by[:2])})" if holder.used_by else ""


def _receipt(native: NativeReceipt) -> Receipt:
    return Receipt(
        asked=native.asked,
        returned=native.returned,
        kept_by_pool=native.kept_by_pool,
        queued=native.queued,
        reused=native.reused,
        lent=native.lent,
        unconfirmed=native.unconfirmed,
        held=native.held,
        parked=native.parked,
        held_by=tuple(Holder(*parts) for parts in native.held_by),
    )


class Model(Mapping[str, "Tensor"]):
    """A resident model: a mapping from names to tensors. Made by ``load``.

    A part is named by a layer, a prefix of whole words (``"model.layers"``) or a component of a pipeline
    (``"text_encoder"``); without a name it is everything. A name that the model never had is a ``KeyError``.
    A tensor that was taken keeps the memory of its layer: receipts name it. Closing the model, or
    dropping it, frees what nobody holds.
    """

    def __init__(self, native: NativeModel, options: dict[str, Any]) -> None:
        self._native = native
        self._options = options

    # Models are compared by identity: a mapping would compare every tensor.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Tensor:
        return self._native.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.names())

    def __len__(self) -> int:
        return len(self._native.names())

    @property
    def layers(self) -> dict[str, int]:
        """The resident layers and their memory in bytes, in execution order."""
        return dict(self._native.layers())

    @property
    def resident_bytes(self) -> int:
        """Memory of the resident layers."""
        return self._native.resident_bytes

    @property
    def parked_bytes(self) -> int:
        """Bytes of parked layers, in host memory and in files."""
        return self._native.parked_bytes

    @property
    def report(self) -> Report:
        """The report of the load."""
        return self._native.report

    @property
    def plan(self) -> Plan:
        """The plan of the load."""
        return self._native.plan

    @property
    def holders(self) -> list[Holder]:
        """Tensors that were taken: they would keep their layers if all were unloaded."""
        return [Holder(*parts) for parts in self._native.holders()]

    def unload(self, part: str | None = None) -> Receipt:
        """Frees a part, resident or parked.

        A part that is unloaded already gives an empty receipt, even if a tensor of it is still held.
        """
        return _receipt(self._native.unload(part))

    def park(self, part: str | None = None, *, folder: str | os.PathLike[str] | None = None) -> Receipt:
        """Copies a part out of its memory and frees that: to host memory, or to a nameless file in ``folder``.

        A layer stays if a tensor of it is held. A model on the CPU is parked in a folder.
        """
        if folder is None and str(self._options.get("device", "cpu")).startswith("cpu"):
            raise ValueError("folder: the model is in host memory already, so it is parked in a folder")
        return _receipt(self._native.park(part, None if folder is None else os.fspath(folder)))

    def restore(self, part: str | None = None) -> int:
        """Brings parked layers of a part back, bit for bit. Returns their memory in bytes."""
        return self._native.restore(part)

    def replace(self, layer: str, source: str | os.PathLike[str] | Checkpoint) -> Receipt:
        """Replaces a layer by the one of the same name in another checkpoint, with the options of the load.

        This also loads a layer again that was unloaded. Both must have tensors of the same names, types and shapes.
        """
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        options = checkpoint._options(**self._options)
        return _receipt(self._native.replace(layer, checkpoint._native, options))

    @contextmanager
    def scope(self, part: str | None = None) -> Iterator[Model]:
        """A ``with`` block for a part: restored if it was parked, and unloaded at the end in any case."""
        try:
            self.restore(part)
            yield self
        finally:
            self.unload(part)

    def close(self) -> None:
        """Frees everything that nobody holds."""
        self.unload()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<onelayer.Model: {len(self.layers)} layers, {human_size(self.resident_bytes)} resident>"


def load(source: str | os.PathLike[str] | Checkpoint, **stream_options: Any) -> Model:
    """Loads a whole checkpoint, within the host budget, and keeps it.

    Options as for ``Checkpoint.stream``; ``window``, ``passes`` and ``order`` have no meaning here.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    native = _native.NativeModel(checkpoint._native, checkpoint._options(**stream_options))
    return Model(native, stream_options)
