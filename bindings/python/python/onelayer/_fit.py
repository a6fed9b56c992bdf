"""What fits where: GPUs first, then the host, then the disk. Every number is computed from headers and configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _native
from ._frameworks import float_name
from ._options import LayerMap, layer_map_text
from ._sizes import human_size, optional_size, parse_size

if TYPE_CHECKING:
    from ._checkpoint import Checkpoint

Tier = int | str
"""The number of a GPU, ``"cpu"`` or ``"disk"``."""

DeviceMap = Mapping[str, Any]
"""Modules or tensors, and their tiers, as accelerate has them. The longest name decides; ``""`` is everything else."""


@dataclass(frozen=True)
class TierUse:
    """The use of one tier, in bytes."""

    tier: Tier
    limit_bytes: int | None
    """``None`` is no limit."""
    layers: int
    """Number of layers."""
    weight_bytes: int
    cache_bytes: int
    activation_bytes: int
    """An estimate."""
    landing_bytes: int
    """Room for the largest layer that computes here and is kept elsewhere; on the host also the budget of the load."""
    needed_bytes: int
    """The sum."""


@dataclass(frozen=True)
class LayerPlace:
    """A layer and its tier."""

    name: str
    tier: Tier
    weight_bytes: int
    cache_bytes: int


@dataclass(frozen=True)
class Fit:
    """The tier of each layer, and what each tier needs. ``str(fit)`` is a table."""

    device_map: dict[str, Tier]
    """For ``onelayer.load``, accelerate and transformers."""
    tiers: tuple[TierUse, ...]
    """GPUs in order, the host, the disk."""
    layers: tuple[LayerPlace, ...]
    """In execution order."""
    computes_on: Tier
    """The tier that computes the layers that are not on a GPU."""
    weight_bytes: int
    cache_bytes: int | None
    """``None`` if unknown; ``cache_unknown`` says why."""
    cache_unknown: str | None
    activation_bytes: int | None
    """Intermediate results, an estimate. ``None`` if unknown."""
    model_context: int | None
    """The longest context that the model was made for, in tokens."""
    largest_context: int | None
    """The longest context that fits, in tokens, at this batch."""
    largest_context_on_gpus: int | None
    """The same with every layer on a GPU."""
    largest_batch: int | None
    """The largest batch that fits at this context. ``None`` also without a context."""
    largest_batch_on_gpus: int | None

    @property
    def is_all_on_gpus(self) -> bool:
        """True if every layer is on a GPU."""
        return all(isinstance(layer.tier, int) for layer in self.layers)

    def __str__(self) -> str:
        lines = [f"{'tier':8} {'layers':>6} {'weights':>11} {'cache':>11} {'needed':>11} {'limit':>11}"]
        for use in self.tiers:
            name = f"GPU {use.tier}" if isinstance(use.tier, int) else use.tier
            sizes = [use.weight_bytes, use.cache_bytes, use.needed_bytes]
            limit = "none" if use.limit_bytes is None else human_size(use.limit_bytes)
            lines.append(
                f"{name:8} {use.layers:>6} {' '.join(f'{human_size(size):>11}' for size in sizes)} {limit:>11}"
            )
        return "\n".join(lines)


def fit(
    checkpoint: Checkpoint,
    *,
    vram: Sequence[int | str] | int | str = (),
    host: int | str | None = None,
    budget: int | str = "64MiB",
    context: int = 0,
    batch: int = 1,
    kv_dtype: object = "bf16",
    dtype: object = None,
    quantise: str | None = None,
    precision: str | None = None,
    device_map: DeviceMap | None = None,
    layer_map: LayerMap | None = None,
) -> Fit:
    """See ``Checkpoint.fit``."""
    sizes = [vram] if isinstance(vram, (int, str)) else vram
    options = {
        "vram": [parse_size(size) for size in sizes],
        "host": optional_size(host),
        "budget": parse_size(budget),
        "context": context,
        "batch": batch,
        "kv_dtype": float_name(kv_dtype),
        "dtype": None if dtype is None else float_name(dtype),
        "quantise": quantise,
        "precision": precision,
        "device_map": None if device_map is None else device_map_text(device_map),
        "config": config_beside(checkpoint.path),
        "layer_map": layer_map_text(layer_map),
    }
    parts = _native.fit(checkpoint._native, options)
    tiers = tuple(TierUse(**use) for use in parts.pop("tiers"))
    layers = tuple(LayerPlace(*layer) for layer in parts.pop("layers"))
    return Fit(device_map=json.loads(parts.pop("device_map")), tiers=tiers, layers=layers, **parts)


def device_map_text(device_map: DeviceMap) -> str:
    """A device map as JSON. Devices of torch are taken by their names."""
    return json.dumps({name: place if isinstance(place, int) else str(place) for name, place in device_map.items()})


def config_beside(path: str) -> tuple[str, bytes] | None:
    """Path and bytes of the ``config.json`` beside the weights, if there is one."""
    config = os.path.join(path if os.path.isdir(path) else os.path.dirname(path), "config.json")
    try:
        with open(config, "rb") as file:
            return config, file.read()
    except FileNotFoundError:
        return None
