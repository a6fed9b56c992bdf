"""Weights that a conversion has quantised, and their values: docs/quantise.md has the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from .._checkpoint import Checkpoint
from ._names import Slot

SCALE_SUFFIX = "_scale"
_GROUPS = (32, 64, 128)
# Rows are decoded in pieces of so many elements: the pieces in single precision stay in the processor's cache.
_PIECE_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight whose stored values have scales beside them."""

    scale: str
    """Name of the tensor with its scales."""
    shape: tuple[int, ...]
    """Shape of the decoded weight."""
    dtype: torch.dtype
    """Type of the decoded weight."""
    group: int | None
    """Elements of a row that share a scale in 4-bit form; ``None`` for 8 bits, with a scale for each row."""

    @property
    def nbytes(self) -> int:
        """Size of the decoded weight."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def decode(self, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the decoded weight to ``out``: value x scale in single precision, rounded to the type of ``out``."""
        columns = self.shape[-1]
        out, values = out.view(-1, columns), values.reshape(-1, values.shape[-1])
        scales = scales.reshape(-1, scales.shape[-1])
        step = max(1, _PIECE_ELEMENTS // columns)
        for start in range(0, out.shape[0], step):
            rows = slice(start, start + step)
            decoded = self._values(values[rows]).mul_(self._per_element(scales[rows]))
            out[rows].copy_(decoded)

    def _values(self, stored: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return stored.to(torch.float32)
        pairs = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)
        return pairs[:, : self.shape[-1]].to(torch.float32).sub_(8)

    def _per_element(self, scales: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return scales
        wide = scales.to(torch.float32).repeat_interleave(self.group, dim=-1)
        return wide[:, : self.shape[-1]]


def find_quantised(
    checkpoint: Checkpoint, slots: Mapping[str, Collection[Slot]], dtype: torch.dtype | None
) -> dict[str, QuantisedWeight]:
    """The quantised weights among tensors with a place in the module.

    They are decoded to ``dtype``, or to the type that the module gives them.
    """
    found = {}
    for key, places in slots.items():
        scale = key + SCALE_SUFFIX
        if scale not in checkpoint or scale in slots:
            continue
        stored, target = checkpoint.info(key), next(iter(places)).get()
        if target is None or stored.dtype not in ("I8", "U8", "F8_E4M3"):
            continue
        shape = tuple(target.shape)
        group = None
        if stored.dtype == "U8":
            scales = checkpoint.info(scale).shape[-1]
            group = next((size for size in _GROUPS if -(-shape[-1] // size) == scales), None)
            if group is None:
                raise ValueError(
                    f"tensor {scale!r}: {scales} scales in a row of {shape[-1]} fit no known size of groups"
                )
        found[key] = QuantisedWeight(scale, shape, dtype or target.dtype, group)
    return found


class DecodedLayer:
    """Memory for the decoded weights of one layer at a time. Layers of the same shapes use the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[tuple[int, ...], torch.dtype, int], torch.Tensor] = {}

    def decode(
        self, weights: Mapping[str, QuantisedWeight], stored: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The decoded weights, valid until the next call."""
        used: dict[tuple[tuple[int, ...], torch.dtype, int], torch.Tensor] = {}
        decoded = {}
        counts: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
        for key, weight in weights.items():
            number = counts.get((weight.shape, weight.dtype), 0)
            counts[weight.shape, weight.dtype] = number + 1
            place = (weight.shape, weight.dtype, number)
            out = self._buffers.pop(place, None)
            if out is None:
                out = torch.empty(weight.shape, dtype=weight.dtype, device=self._device)
            weight.decode(stored(key), stored(weight.scale), out)
            used[place] = decoded[key] = out
        # What this layer has no use for is freed: never more than the longest layer is held.
        self._buffers = used
        return decoded
