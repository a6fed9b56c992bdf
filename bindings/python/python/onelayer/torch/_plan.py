"""Which weights stay in memory, which are mapped, and which come from the files at each forward.

```text
memory = outside stacks + kept layers + window of streamed layers + decoded layer + ring
```
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

from torch import nn

from .._checkpoint import Checkpoint, LayerInfo
from .._errors import BudgetError
from .._sizes import human_size
from ._names import Names
from ._parts import streamed_parts
from ._quantised import PIECE_BYTES, QuantisedWeight

Keep = Literal["auto", "none"] | Collection[str]

_RING_BYTES = 64 << 20
# Tensors begin at multiples of this, and the memory of a layer may end with a huge page that it fills in part.
_ALIGNMENT = 256
_HUGE_PAGE = 2 << 20
# Parts of layers stay only if so much less is read than with whole layers.
_WORTH_PARTS = 0.97


@dataclass(frozen=True, kw_only=True)
class ForwardPlan:
    """Where the weights of a module are during forwards. ``str(plan)`` says it in sentences."""

    memory: int
    """The given limit, in bytes."""
    kept: tuple[str, ...] = ()
    """Names of the layers that stay in memory, those outside stacks included."""
    kept_bytes: int = 0
    mapped: tuple[str, ...] = ()
    """Names of the tensors that are mapped: their pages belong to the page cache."""
    mapped_bytes: int = 0
    streamed: tuple[str, ...] = ()
    """Names of the layers that are read at each forward, in execution order."""
    streamed_bytes: int = 0
    """Bytes that one forward reads."""
    window: int = 0
    """Streamed layers in memory at once."""
    window_bytes: int = 0
    """Their memory."""
    decoded_bytes: int = 0
    """Memory for the decoded weights of one quantised layer."""
    budget: int = 0
    """Host memory for reading, in bytes."""
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"], repr=False)
    """Name of a streamed layer -> names of its tensors that stay. They count as kept."""
    keys: Mapping[str, tuple[str, ...]] = field(repr=False)
    """Name of a kept or streamed layer -> names of its tensors that have a place in the module, without ``parts``."""
    stacked: frozenset[str] = field(repr=False)
    """Names of the layers of stacks, kept or streamed: quantised weights of others are decoded once."""
    unused: tuple[str, ...] = field(repr=False)
    """Names of the tensors of the checkpoint that have no place in the module."""

    @property
    def needed(self) -> int:
        """Upper bound of kept layers, window, decoded weights and reading, in bytes. Mapped tensors do not count."""
        return self.kept_bytes + self.window_bytes + self.decoded_bytes + self.budget

    def _in_part(self) -> str:
        return f", and parts of {len(self.parts)}" if self.parts else ""

    def __str__(self) -> str:
        if not self.streamed and self.mapped:
            parts = [f"{human_size(self.mapped_bytes)} mapped, in the page cache"]
            parts += [f"{human_size(self.kept_bytes)} stay in memory"] if self.kept_bytes else []
            return f"everything fits: {', '.join(parts)}"
        if not self.streamed:
            return f"everything fits: {human_size(self.kept_bytes)} stay in memory"
        parts = [
            f"{human_size(self.kept_bytes)} stay in memory ({len(self.kept)} layers{self._in_part()})",
            f"{human_size(self.streamed_bytes)} are read at each forward ({len(self.streamed)} layers)",
        ]
        if self.mapped:
            parts.append(f"{human_size(self.mapped_bytes)} mapped")
        return f"{', '.join(parts)}; needs {human_size(self.needed)} of {human_size(self.memory)}"


def make_plan(
    model: nn.Module,
    checkpoint: Checkpoint,
    names: Names,
    quantised: Mapping[str, QuantisedWeight],
    *,
    memory: int,
    budget: int | None,
    keep: Keep,
    window: int,
    options: Mapping[str, Any],
) -> ForwardPlan:
    """Plans a module's forwards in ``memory`` bytes.

    Most valuable first: what is outside stacks stays, then as many layers as fit. Raises
    ``BudgetError`` if not even the smallest window fits.
    """
    scales = {weight.scale for weight in quantised.values()}
    wanted = {key for key in checkpoint.keys() if key in names.slots or key in scales}
    keys = {layer.name: tuple(key for key in layer.keys if key in wanted) for layer in checkpoint.layers}
    layers = [layer for layer in checkpoint.layers if keys[layer.name]]

    whole = checkpoint.plan(select=[key for layer in layers for key in keys[layer.name]], window="all", **options)
    sizes = dict(zip(whole.layers, whole.layer_bytes, strict=True))
    _check_keep(keep, sizes)
    stacks = _stacks(model, layers, names, keys)
    stacked = {layer.name for stack in stacks.values() for layer in stack}
    outside = [layer.name for layer in layers if layer.name not in stacked]
    is_as_stored = options["device"].type == "cpu" and not options.get("dtype")
    is_plain = is_as_stored and not quantised
    tables = _lookup_tables(names, [key for name in outside for key in keys[name]]) if is_as_stored else []
    mapped = [key for key in tables if key not in quantised]
    mapped_bytes = sum(checkpoint.info(key).nbytes for key in mapped)
    for name in outside:
        keys[name] = tuple(key for key in keys[name] if key not in mapped)
    select = [key for name in outside for key in keys[name]]
    outside_bytes = checkpoint.plan(select=select, window="all", **options).resident_bytes if select else 0
    # Quantised weights outside stacks stay decoded.
    outside_bytes += sum(_decoded_bytes(keys[name], quantised) for name in outside)
    decoded = max((_decoded_bytes(keys[name], quantised) for name in stacked), default=0)
    decoded += PIECE_BYTES if quantised else 0
    select = [key for name in stacked for key in keys[name]]
    floor = whole.min_budget
    if select:
        floor = max(floor, checkpoint.plan(select=select, window=window, passes="endless", **options).min_budget)
    # A small limit gets a small ring.
    ring = max(floor, min(_RING_BYTES, memory // 16)) if budget is None else budget
    if ring < floor:
        raise BudgetError(
            f"budget of {human_size(ring)}: reading needs {human_size(floor)} or more", required=floor, budget=ring
        )

    plan = partial(
        ForwardPlan,
        memory=memory,
        keys=keys,
        stacked=frozenset(stacked),
        unused=tuple(key for key in names.unused if key not in scales),
    )
    total = outside_bytes + sum(sizes[name] for name in stacked)
    if keep == "auto" and is_plain and total + mapped_bytes <= memory:
        # Everything fits. Pages of a mapping are shared with the page cache, so nothing is copied.
        every = (*mapped, *(key for name in keys for key in keys[name]))
        return plan(mapped=every, mapped_bytes=total + mapped_bytes)
    plan = partial(plan, mapped=tuple(mapped), mapped_bytes=mapped_bytes, decoded_bytes=decoded, budget=ring)
    fixed = outside_bytes + decoded + ring
    if keep == "auto" and total + decoded + ring <= memory:
        return plan(kept=tuple(name for name in sizes if keys[name]), kept_bytes=total)
    named: set[str] = set() if isinstance(keep, str) else {name for name in keep if name in stacked}
    longest = max((sizes[name] for name in stacked - named), default=0)
    fixed += sum(sizes[name] for name in named)
    held = next((held for held in range(window, 0, -1) if fixed + held * longest <= memory), None)
    if held is None:
        raise BudgetError(
            f"memory of {human_size(memory)} is too small: at least {human_size(fixed + longest)} are needed, "
            f"{human_size(fixed - decoded - ring)} for what stays, {human_size(longest)} for one layer, "
            f"and {human_size(decoded + ring)} to read and decode",
            required=fixed + longest,
            budget=memory,
        )
    stayed = _fitting_layers(stacks, sizes, memory - fixed - held * longest) if keep == "auto" else named
    if keep == "auto" and not quantised and len(stacks) == 1:
        (stack,) = stacks.values()
        whole_bytes = _stored_bytes(
            checkpoint, {layer.name: keys[layer.name] for layer in stack if layer.name not in stayed}
        )
        found = _parts(checkpoint, [layer.name for layer in stack], keys, memory - fixed, held, options)
        if found is not None and found.streamed_bytes < _WORTH_PARTS * whole_bytes:
            streamed = tuple(name for name in sizes if name in found.streamed)
            return plan(
                keys={**keys, **found.streamed},
                parts={name: found.kept[name] for name in streamed if found.kept[name]},
                kept=tuple(name for name in sizes if name not in found.streamed and keys[name]),
                kept_bytes=outside_bytes + found.kept_bytes,
                streamed=streamed,
                streamed_bytes=found.streamed_bytes,
                window=min(held, len(streamed)),
                window_bytes=min(held, len(streamed)) * found.longest_bytes,
            )
    streamed = tuple(name for name in sizes if name in stacked and name not in stayed)
    held = min(held, len(streamed))
    return plan(
        kept=tuple(name for name in sizes if name in stayed or (name in outside and keys[name])),
        kept_bytes=outside_bytes + sum(sizes[name] for name in stayed),
        streamed=streamed,
        streamed_bytes=_stored_bytes(checkpoint, {name: keys[name] for name in streamed}),
        window=held,
        window_bytes=held * max((sizes[name] for name in streamed), default=0),
    )


@dataclass(frozen=True)
class _Parts:
    """What is streamed of the layers of a stack, and what stays."""

    streamed: dict[str, tuple[str, ...]]
    kept: dict[str, tuple[str, ...]]
    streamed_bytes: int
    kept_bytes: int
    longest_bytes: int


def _parts(
    checkpoint: Checkpoint,
    stack: Sequence[str],
    keys: Mapping[str, tuple[str, ...]],
    room: int,
    held: int,
    options: Mapping[str, Any],
) -> _Parts | None:
    """Parts of the layers of a stack that are streamed through a window of ``held`` of them, within ``room`` bytes."""

    def layer_bytes(names: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
        select = [key for each in names.values() for key in each]
        found = checkpoint.plan(select=select, window="all", **options) if select else None
        return dict(zip(found.layers, found.layer_bytes, strict=True)) if found else {}

    sizes = [{key: checkpoint.info(key).nbytes + _ALIGNMENT for key in keys[name]} for name in stack]
    chosen = streamed_parts(sizes, room - (len(stack) + held) * _HUGE_PAGE, held)
    if chosen is None:
        return None
    # In the order of the files.
    streamed = {
        name: tuple(key for key in keys[name] if key in part) for name, part in zip(stack, chosen, strict=True) if part
    }
    kept = {name: tuple(key for key in keys[name] if key not in streamed.get(name, ())) for name in stack}
    streamed_sizes, kept_sizes = layer_bytes(streamed), layer_bytes(kept)
    longest, kept_bytes = max(streamed_sizes.values(), default=0), sum(kept_sizes.values())
    if kept_bytes + held * longest > room:
        return None
    return _Parts(streamed, kept, _stored_bytes(checkpoint, streamed), kept_bytes, longest)


def _stored_bytes(checkpoint: Checkpoint, keys: Mapping[str, tuple[str, ...]]) -> int:
    """Bytes of the tensors of layers in their files."""
    return sum(checkpoint.info(key).nbytes for each in keys.values() for key in each)


def _stacks(
    model: nn.Module, layers: Collection[LayerInfo], names: Names, keys: Mapping[str, tuple[str, ...]]
) -> dict[str, list[LayerInfo]]:
    """The stacks whose layers are modules, and share no tensor with anything else."""
    stacks: dict[str, list[LayerInfo]] = {}
    for layer in layers:
        if layer.stack is not None and _is_whole_module(model, layer, names, keys[layer.name]):
            stacks.setdefault(layer.stack, []).append(layer)
    return stacks


def _is_whole_module(model: nn.Module, layer: LayerInfo, names: Names, keys: Collection[str]) -> bool:
    path = names.module_path(layer.name)
    try:
        module = model.get_submodule(path) if path else None
    except AttributeError:
        return False
    if module is None or cast(Any, type(module)).forward is nn.Module.forward:
        # Lists are never called.
        return False
    inside = set(map(id, module.modules()))
    return all(id(slot.module) in inside for key in keys for slot in names.slots.get(key, ()))


def _lookup_tables(names: Names, keys: Collection[str]) -> list[str]:
    """Embeddings that nothing else uses: a forward touches a few rows of them."""
    return [
        key
        for key in keys
        if key in names.slots and all(isinstance(slot.module, nn.Embedding) for slot in names.slots[key])
    ]


def _decoded_bytes(keys: Collection[str], quantised: Mapping[str, QuantisedWeight]) -> int:
    return sum(quantised[key].nbytes for key in keys if key in quantised)


def _check_keep(keep: Any, names: Collection[str]) -> None:
    if isinstance(keep, str):
        wrong: list[Any] = [] if keep in ("auto", "none") else [keep]
    elif isinstance(keep, Collection):
        wrong = [name for name in cast("Collection[object]", keep) if name not in names]
    else:
        wrong = [keep]
    if wrong:
        near = [] if keep is wrong[0] else difflib.get_close_matches(str(wrong[0]), names, 1)
        hint = f"; is {near[0]!r} meant?" if near else ""
        raise ValueError(f"keep={wrong[0]!r}: expected 'auto', 'none', or names of layers of the checkpoint{hint}")


def _fitting_layers(stacks: Mapping[str, list[LayerInfo]], sizes: Mapping[str, int], left: int) -> set[str]:
    """As many layers of stacks as fit into ``left`` bytes."""
    stayed: set[str] = set()
    # The last stack first: a decoder's runs for every token.
    for stack in reversed(list(stacks.values())):
        longest = max(sizes[layer.name] for layer in stack)
        count = min(left // longest, len(stack))
        # Spread evenly: while one that stays runs, the next one is read.
        spread: set[int] = {len(stack) * number // count for number in range(count)} if count else set()
        here = [layer.name for position, layer in enumerate(stack) if position in spread]
        left -= sum(sizes[name] for name in here)
        stayed.update(here)
    return stayed
