"""Models on several devices, host and disk, by a device map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import _native
from ._fit import DeviceMap, Tier, config_beside, device_map_text
from ._options import stream_options_of
from ._receipt import Holder, Receipt, receipt_of
from ._sizes import human_size

if TYPE_CHECKING:
    from ._checkpoint import Checkpoint
    from ._lazy import LazyTensor, StateDict
    from ._native import NativePlacedModel, Report, Tensor


class PlacedModel(Mapping[str, "Tensor | LazyTensor"]):
    """A model by a device map: a mapping from names to tensors. Made by ``load(device_map=...)``.

    Tensors on GPUs and on the host are resident. A tensor on the disk is a ``LazyTensor``, which is read
    when it is indexed. Closing the model, or dropping it, frees what nobody holds.
    """

    def __init__(self, native: NativePlacedModel, disk: StateDict) -> None:
        self._native = native
        self._disk = disk

    # Models are compared by identity: a mapping would compare every tensor.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]  (mappings have none)

    def __getitem__(self, name: str) -> Tensor | LazyTensor:
        found = self._native.tensor(name)
        return self._disk[name] if found is None else found

    def __iter__(self) -> Iterator[str]:
        yield from self._native.names()
        yield from self._disk

    def __len__(self) -> int:
        return len(self._native.names()) + len(self._disk)

    @property
    def layers(self) -> dict[str, Tier]:
        """The resident layers and their tiers."""
        return {name: tier for name, tier, _ in self._native.layers()}

    @property
    def resident_bytes(self) -> int:
        """Memory of the resident layers on all tiers."""
        return self._native.resident_bytes

    @property
    def reports(self) -> list[tuple[Tier, Report]]:
        """The report of each tier, in the order of loading."""
        return self._native.reports

    @property
    def holders(self) -> list[Holder]:
        """Tensors that were taken: they would keep their layers if all were unloaded."""
        return [Holder(*parts) for parts in self._native.holders()]

    def unload(self, part: str | None = None) -> Receipt:
        """Frees a part on every tier: a layer, a prefix or a component; without a name everything."""
        return receipt_of(self._native.unload(part))

    def close(self) -> None:
        """Frees everything that nobody holds."""
        self.unload()

    def __enter__(self) -> PlacedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        size = human_size(self.resident_bytes)
        return f"<onelayer.PlacedModel: {len(self.layers)} layers, {size} resident, {len(self._disk)} tensors on disk>"


def place(checkpoint: Checkpoint, device_map: DeviceMap, options: Mapping[str, Any]) -> PlacedModel:
    """Loads by a device map."""
    config = config_beside(checkpoint.path)
    complete = stream_options_of(checkpoint, **options)
    native = _native.NativePlacedModel(checkpoint._native, device_map_text(device_map), config, complete)
    return PlacedModel(native, checkpoint.state_dict(select=native.on_disk))
