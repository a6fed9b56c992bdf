"""Resident models: loaded at once, and given back in parts, with receipts."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

from . import _native
from ._checkpoint import Checkpoint
from ._checkpoint import open as open_checkpoint
from ._fit import DeviceMap
from ._options import stream_options_of
from ._placed import PlacedModel, place
from ._receipt import Holder, Receipt, receipt_of
from ._sizes import human_size

if TYPE_CHECKING:
    from ._native import NativeModel, Plan, Report, Tensor


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
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]  (mappings have none)

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
        return receipt_of(self._native.unload(part))

    def park(self, part: str | None = None, *, folder: str | os.PathLike[str] | None = None) -> Receipt:
        """Copies a part out of its memory and frees that: to host memory, or to a nameless file in ``folder``.

        A layer stays if a tensor of it is held. A model on the CPU is parked in a folder.
        """
        if folder is None and str(self._options.get("device", "cpu")).startswith("cpu"):
            raise ValueError("folder: the model is in host memory already, so it is parked in a folder")
        return receipt_of(self._native.park(part, None if folder is None else os.fspath(folder)))

    def restore(self, part: str | None = None) -> int:
        """Brings parked layers of a part back, bit for bit. Returns their memory in bytes."""
        return self._native.restore(part)

    def replace(self, layer: str, source: str | os.PathLike[str] | Checkpoint) -> Receipt:
        """Replaces a layer by the one of the same name in another checkpoint, with the options of the load.

        This also loads a layer again that was unloaded. Both must have tensors of the same names, types and shapes.
        """
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        options = stream_options_of(checkpoint, **self._options)
        return receipt_of(self._native.replace(layer, checkpoint._native, options))

    @contextmanager
    def scope(self, part: str | None = None) -> Generator[Model, None, None]:
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


@overload
def load(
    source: str | os.PathLike[str] | Checkpoint, *, device_map: DeviceMap, **stream_options: Any
) -> PlacedModel: ...


@overload
def load(source: str | os.PathLike[str] | Checkpoint, *, device_map: None = None, **stream_options: Any) -> Model: ...


def load(
    source: str | os.PathLike[str] | Checkpoint, *, device_map: DeviceMap | None = None, **stream_options: Any
) -> Model | PlacedModel:
    """Loads a whole checkpoint, within the host budget, and keeps it.

    Options as for ``Checkpoint.stream``; ``window``, ``passes`` and ``order`` have no meaning here. With a
    ``device_map``, as ``Checkpoint.device_map`` makes and accelerate takes it, each module goes where the
    map says: a GPU, ``"cpu"`` or ``"disk"``; ``device`` then has no meaning.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if device_map is not None:
        return place(checkpoint, device_map, stream_options)
    native = _native.NativeModel(checkpoint._native, stream_options_of(checkpoint, **stream_options))
    return Model(native, stream_options)
