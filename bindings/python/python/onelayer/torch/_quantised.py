"""Weights that a conversion or a load has quantised, and their values: docs/quantise.md has the definitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from .. import _native
from .._checkpoint import Checkpoint, TensorInfo
from .._frameworks import float_name, torch_dtype
from ._names import Slot

SCALE_SUFFIX = "_scale"
_GROUPS = (32, 64, 128)
# Elements that share a scale, by the name of the form.
_FORMS: dict[str, int | None] = {"int8": None, "fp8": None, "int4": 128} | {f"int4-g{size}": size for size in _GROUPS}
# Rows are decoded in pieces of so many elements: the pieces in single precision stay in the processor's cache.
_PIECE_ELEMENTS = 1 << 18
PIECE_BYTES = 4 << 20
"""Memory that decoding takes beside the result: a piece in several forms."""
# Other formats have these beside their weights and scales.
_FOREIGN = ("_zero_point", "_scale_2", "_g_idx")


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

    def empty(self, device: torch.device) -> torch.Tensor:
        """Memory for the decoded weight, which may be written in every mode."""
        with torch.inference_mode(False):
            return torch.empty(self.shape, dtype=self.dtype, device=device)

    def decode(self, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the decoded weight to ``out``: value x scale in single precision, rounded to the type of ``out``."""
        columns = self.shape[-1]
        form = "fp8" if values.dtype == torch.float8_e4m3fn else "int8"
        form = form if self.group is None else f"int4-g{self.group}"
        tensors = (values, scales, out)
        if all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors):
            _native.decode_rows(form, float_name(out.dtype), columns, *map(_bytes, tensors))
            return
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


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and length of a contiguous tensor."""
    return tensor.data_ptr(), tensor.nbytes


def find_quantised(
    checkpoint: Checkpoint,
    slots: Mapping[str, Collection[Slot]],
    dtype: torch.dtype | None,
    quantise: str | None = None,
) -> dict[str, QuantisedWeight]:
    """The quantised weights among tensors with a place in the module: in the files, and by a load with ``quantise``.

    They are decoded to the type in which the other floats arrive: as stored, or narrowed to ``dtype``.
    Raises ``ValueError`` for weights that something else has quantised.
    """
    found: dict[str, QuantisedWeight] = {}
    by_load = set(checkpoint.plan(quantise=quantise, window="all").scales) if quantise else set[str]()
    plain: Counter[str] = Counter()
    for key in slots:
        info = checkpoint.info(key)
        # Vectors are often kept in single precision beside narrower matrices.
        plain[info.dtype] += info.nbytes if len(info.shape) > 1 else 0
    floats = [name for name, size in plain.most_common() if size and name in ("BF16", "F16", "F32")]
    arrives = (dtype if floats[0] == "F32" and dtype else torch_dtype(floats[0])) if floats else dtype
    for key, places in slots.items():
        scale = key + SCALE_SUFFIX
        target = next(iter(places)).get()
        stored = checkpoint.info(key)
        if quantise and scale in by_load and target is not None:
            if (shape := tuple(target.shape)) == stored.shape:
                found[key] = QuantisedWeight(
                    scale, shape, _narrower(torch_dtype(stored.dtype), dtype), _FORMS[quantise]
                )
            continue
        if scale not in checkpoint or scale in slots or target is None or stored.dtype not in ("I8", "U8", "F8_E4M3"):
            continue
        shape = tuple(target.shape)
        group = _group(stored, checkpoint.info(scale), shape)
        foreign = [key + suffix for suffix in _FOREIGN if key + suffix in checkpoint]
        if group == 0 or foreign:
            raise ValueError(
                f"tensor {key!r} was quantised in a way that is not known here ({stored.dtype} {list(stored.shape)} with "
                f"scales {list(checkpoint.info(scale).shape)}): convert the original with loadcheck convert --quantise"
            )
        found[key] = QuantisedWeight(scale, shape, arrives or target.dtype, group)
    return found


def _narrower(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The type in which a load with ``dtype`` delivers a float."""
    return dtype if dtype is not None and dtype.itemsize < stored.itemsize else stored


def _group(stored: TensorInfo, scale: TensorInfo, shape: tuple[int, ...]) -> int | None:
    """Elements that share a scale; ``None`` for a row. Zero if types and shapes are not those of docs/quantise.md."""
    if len(shape) < 2:
        return 0
    *rows, columns = shape
    if stored.dtype != "U8":
        fits = stored.shape == shape and scale.shape == (*rows, 1) and scale.dtype == "F32"
        return None if fits else 0
    if stored.shape != (*rows, -(-columns // 2)) or scale.dtype != "BF16":
        return 0
    return next((size for size in _GROUPS if scale.shape == (*rows, -(-columns // size))), 0)


class DecodedLayer:
    """Memory for the decoded weights of one layer at a time. Layers of the same shapes use the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_used = False
        self._buffers: dict[tuple[tuple[int, ...], torch.dtype, int], torch.Tensor] = {}

    def decode(
        self, weights: Mapping[str, QuantisedWeight], stored: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The decoded weights, valid until ``release``."""
        if self._is_used:
            raise RuntimeError("a layer with quantised weights calls another one: their decoded weights share memory")
        self._is_used = True
        counts: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()
        places: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {}
        for key, weight in weights.items():
            kind = (weight.shape, weight.dtype)
            places[key] = (*kind, counts[kind])
            counts[kind] += 1
        # What this layer has no use for is freed first: never more than the longest layer is held.
        wanted = set(places.values())
        self._buffers = {place: buffer for place, buffer in self._buffers.items() if place in wanted}
        decoded: dict[str, torch.Tensor] = {}
        for key, weight in weights.items():
            if places[key] not in self._buffers:
                self._buffers[places[key]] = weight.empty(self._device)
            decoded[key] = self._buffers[places[key]]
            weight.decode(stored(key), stored(weight.scale), decoded[key])
        return decoded

    def release(self) -> None:
        """The layer has run."""
        self._is_used = False
