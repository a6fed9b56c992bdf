"""Which tensors of streamed layers stay in memory.

```text
whole layers   | stays | streamed | stays | streamed |    window: two whole layers
parts          | st. streamed | st. streamed | ...        window: two parts, so there is room for more that stays
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

# Of so many tensors of a layer, the largest, every sum is tried as the most that is streamed of a layer.
_LARGEST = 8
# Layers are visited in steps of this part of a turn, so that neighbours are far from each other.
_STEP = 0.618

Sizes = Mapping[str, int]


def streamed_parts(layers: Sequence[Sizes], room: int, held: int) -> list[list[str]] | None:
    """The tensors of each layer that are streamed, so that as little as possible is; ``None`` if nothing fits.

    ``layers`` has the size of each tensor. What stays, and ``held`` times the most that is streamed of a layer, fit
    into ``room`` bytes.
    """
    longest = max(layers, key=lambda sizes: sum(sizes.values()))
    large = sorted(longest.values())[-_LARGEST:]
    rest = sum(longest.values()) - sum(large)
    sums = {sum(chosen) for count in range(1, len(large) + 1) for chosen in combinations(large, count)}
    best: list[list[str]] | None = None
    least = 0
    for most in sorted({part + more for part in sums for more in (0, rest)}):
        found = _with_most(layers, room - held * most, most)
        streamed = 0 if found is None else _total(layers, found)
        if found is not None and (best is None or streamed < least):
            best, least = found, streamed
    return best


def _total(layers: Sequence[Sizes], chosen: Sequence[Sequence[str]]) -> int:
    return sum(sizes[key] for sizes, keys in zip(layers, chosen, strict=True) for key in keys)


def _with_most(layers: Sequence[Sizes], room: int, most: int) -> list[list[str]] | None:
    """What is streamed if it is ``most`` bytes of a layer at the most, and ``room`` takes what stays."""
    chosen = [_largest_within(sizes, most) for sizes in layers]
    left = room - sum(sum(sizes.values()) for sizes in layers) + _total(layers, chosen)
    if left < 0:
        return None
    # What is left over takes single tensors, here and there.
    for index in sorted(range(len(layers)), key=lambda index: index * _STEP % 1):
        sizes = layers[index]
        for key in sorted(chosen[index], key=lambda key: -sizes[key]):
            if sizes[key] <= left:
                left -= sizes[key]
                chosen[index].remove(key)
    return chosen


def _largest_within(sizes: Sizes, most: int) -> list[str]:
    """Tensors of ``most`` bytes together, the largest first."""
    chosen: list[str] = []
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if sizes[key] <= most:
            most -= sizes[key]
            chosen.append(key)
    return chosen
