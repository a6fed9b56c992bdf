"""Turns an index into the ranges to read and the index to apply to the result."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

Ranges = list[tuple[int, int]]


def plan_index(index: Any, shape: Sequence[int]) -> tuple[Ranges, tuple[Any, ...] | None]:
    """A start and an end for each dimension, and an index into that part (``None``: the whole part).

    Accepts integers, slices with a positive step, and an ellipsis, alone or in a tuple. Raises
    ``IndexError`` for an index out of range and ``TypeError`` for anything else.
    """
    items: list[Any] = list(index) if _is(index, tuple) else [index]
    if sum(item is Ellipsis for item in items) > 1:
        raise IndexError("an index has at most one ellipsis")
    if Ellipsis in [item if item is Ellipsis else None for item in items]:
        at = next(place for place, item in enumerate(items) if item is Ellipsis)
        missing = len(shape) - (len(items) - 1)
        items[at : at + 1] = [slice(None)] * max(missing, 0)
    if len(items) > len(shape):
        raise IndexError(f"{len(items)} indices for {len(shape)} dimensions")
    items += [slice(None)] * (len(shape) - len(items))
    ranges: Ranges = []
    rest: list[Any] = []
    for dimension, (item, length) in enumerate(zip(items, shape, strict=True)):
        if _is(item, slice):
            start, stop, step = item.indices(length)
            if step < 1:
                raise ValueError(f"dimension {dimension}: a slice needs a positive step, not {step}")
            ranges.append((start, max(start, stop)))
            rest.append(slice(None, None, step))
        else:
            ranges.append(_position(item, dimension, length))
            rest.append(0)
    plain = all(item == slice(None, None, 1) for item in rest)
    return ranges, None if plain else tuple(rest)


def _is(value: Any, kind: type[Any]) -> bool:
    """``isinstance``, after which the value still has any type."""
    return isinstance(value, kind)


def _position(item: Any, dimension: int, length: int) -> tuple[int, int]:
    if isinstance(item, bool) or item is None:
        raise TypeError(f"dimension {dimension}: an index is an integer or a slice, not {item!r}")
    try:
        found = operator.index(item)
    except TypeError:
        message = f"dimension {dimension}: an index is an integer or a slice, not {type(item).__name__}"
        raise TypeError(message) from None
    position = found + length if found < 0 else found
    if not 0 <= position < length:
        raise IndexError(f"dimension {dimension}: index {found} is out of range for {length} elements")
    return position, position + 1


def is_whole(ranges: Ranges, shape: Sequence[int]) -> bool:
    """True if the ranges cover the whole shape."""
    return all(span == (0, length) for span, length in zip(ranges, shape, strict=True))
