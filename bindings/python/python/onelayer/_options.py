"""Options of loads, as the native module takes them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ._frameworks import float_name
from ._sizes import optional_size

if TYPE_CHECKING:
    from ._checkpoint import Checkpoint, TensorInfo
    from ._native import LayerTimes, PassTimes
    from ._spare import SpareMemory

Select = str | Collection[str] | Callable[["TensorInfo"], bool]
"""A regular expression to search in names, a collection of names, or a predicate on each tensor."""

LayerMap = str | os.PathLike[str] | Mapping[str, Any]
"""The path of a TOML file of layer rules, or its contents."""


@dataclass(frozen=True)
class Split:
    """How a tensor is divided among ranks."""

    axis: int
    """The dimension that is divided, from 0."""
    blocks: int = 1
    """Fused tensors of one shape in that dimension, such as 3 for q, k and v: each is divided on its own."""
    multiple: int | None = None
    """Pads the dimension to this multiple before it is divided: the last ranks have less. For vocabularies."""
    range: tuple[int, int] | None = None
    """Start and end of this rank's elements, instead of an even part."""

    def __post_init__(self) -> None:
        chosen = [name for name in ("multiple", "range") if getattr(self, name) is not None]
        if len(chosen) > 1 or (chosen and self.blocks != 1):
            raise ValueError(f"{self}: give one of blocks, multiple and range")


def opening(
    header_bytes_max: int | str | None = None,
    allow_opaque_dtypes: bool = False,
    prefix: str | None = None,
    names: str | None = None,
) -> dict[str, Any]:
    """How a checkpoint is opened."""
    if names not in (None, "hf"):
        raise ValueError(f'names={names!r}: give "hf", or None for the names of the file')
    return {
        "header_bytes_max": optional_size(header_bytes_max),
        "allow_opaque_dtypes": bool(allow_opaque_dtypes),
        "prefix": prefix,
        "names": names,
    }


def stream_options_of(
    checkpoint: Checkpoint,
    *,
    device: object = "cpu",
    budget: int | str | None = None,
    device_budget: int | str | None = None,
    window: int | Literal["all"] | None = None,
    prefetch: int | None = None,
    select: Select | None = None,
    order: str = "execution",
    io: str | None = None,
    readers: int | None = None,
    dtype: object = None,
    passes: int | Literal["endless"] | None = None,
    keep: Collection[str] | Literal["outside"] | None = None,
    call_order: Collection[str] | None = None,
    quantise: str | None = None,
    quantise_only: Select | None = None,
    read_through: int | str | None = None,
    device_reserve: int | str | None = None,
    shard: tuple[int, int] | None = None,
    rules: Mapping[str, int | Split | None] | None = None,
    share: tuple[int, int] | None = None,
    layer_map: LayerMap | None = None,
    hash: bool = False,  # noqa: A002 -- the word of the library
    on_layer: Callable[[LayerTimes], object] | None = None,
    on_pass: Callable[[PassTimes], object] | None = None,
    on_stall: float | None = None,
    spare: SpareMemory | None = None,
) -> dict[str, Any]:
    """The options of ``Checkpoint.stream``, complete."""
    if rules and shard is None:
        raise ValueError("rules divide tensors among ranks: shard=(rank, world) is missing")
    if shard is not None and share is not None:
        raise ValueError("shard and share exclude each other: parts of all tensors, or some tensors whole")
    return {
        "target": _target(device),
        "budget": optional_size(budget),
        "device_budget": optional_size(device_budget),
        "window": _window(window),
        "prefetch": prefetch,
        "select": None if select is None else selected_tensors(checkpoint, select),
        "order": order,
        "io": io,
        "readers": readers,
        "dtype": None if dtype is None else float_name(dtype),
        "passes": _passes(passes),
        "keep": _kept(checkpoint, keep, layer_map),
        "call_order": None if call_order is None else list(call_order),
        "quantise": quantise,
        "quantise_only": None if quantise_only is None else selected_tensors(checkpoint, quantise_only),
        "read_through": optional_size(read_through),
        "device_reserve": optional_size(device_reserve),
        "shard": shard,
        "cuts": _cuts(checkpoint, rules or {}),
        "share": share,
        "layer_map": layer_map_text(layer_map),
        "hash": bool(hash),
        "on_layer": on_layer,
        "on_pass": on_pass,
        "stall_seconds": None if on_stall is None else float(on_stall),
        "spare": None if spare is None else spare._native,
    }


def selected_names(checkpoint: Checkpoint, select: Select) -> set[str]:
    """The names of tensors that a selection takes. Raises ``KeyError`` for a name that there is not."""
    if isinstance(select, str):
        pattern = re.compile(select)
        return {name for name in checkpoint.keys() if pattern.search(name)}
    if callable(select):
        return {name for name in checkpoint.keys() if select(checkpoint.info(name))}
    names = set(select)
    for name in names:
        if name not in checkpoint:
            raise KeyError(name)
    return names


def selected_tensors(checkpoint: Checkpoint, select: Select) -> set[str]:
    """The same without further names of tied weights: the tensors that have the bytes."""
    return {checkpoint.aliases.get(name, name) for name in selected_names(checkpoint, select)}


def matches(checkpoint: Checkpoint, rules: Mapping[str, Any]) -> dict[str, Any]:
    """The value of the first rule, a regular expression, that matches each tensor's name."""
    patterns = [(re.compile(pattern), value) for pattern, value in rules.items()]
    # The first rule is entered last.
    found = (
        (name, value) for name in checkpoint.keys() for pattern, value in reversed(patterns) if pattern.search(name)
    )
    return dict(found)


def layer_map_text(layer_map: LayerMap | None) -> str | None:
    """The text of a file of layer rules."""
    if layer_map is None:
        return None
    if not isinstance(layer_map, Mapping):
        with open(layer_map, encoding="utf-8") as file:
            return file.read()
    lists = {key: value for key, value in layer_map.items() if key != "groups"}
    groups = {_toml(name): _toml(prefixes) for name, prefixes in layer_map.get("groups", {}).items()}
    lines = [f"{_toml(key)} = {_toml(value)}" for key, value in lists.items()]
    return "\n".join([*lines, "[groups]", *(f"{name} = {prefixes}" for name, prefixes in groups.items())])


def _toml(value: str | Sequence[str]) -> str:
    """A string, or a list of strings: TOML writes them as JSON does."""
    return json.dumps(value if isinstance(value, str) else list(value), ensure_ascii=False)


def _kept(checkpoint: Checkpoint, keep: Collection[str] | str | None, layer_map: LayerMap | None) -> list[str] | None:
    if keep == "outside":
        return [layer.name for layer in checkpoint.layers_by(layer_map) if layer.stack is None]
    if isinstance(keep, str):
        raise ValueError(f"keep={keep!r}: expected names of layers, or 'outside'")
    return None if keep is None else list(keep)


def _cuts(
    checkpoint: Checkpoint, rules: Mapping[str, int | Split | None]
) -> dict[str, tuple[int, int, int | None, tuple[int, int] | None] | None]:
    """The cut of each tensor that a rule matches."""
    splits = {pattern: Split(rule) if isinstance(rule, int) else rule for pattern, rule in rules.items()}
    return {
        name: None if split is None else (split.axis, split.blocks, split.multiple, split.range)
        for name, split in matches(checkpoint, splits).items()
    }


def _target(device: object) -> str:
    """The native name of a device."""
    if isinstance(device, int) and not isinstance(device, bool):
        return f"cuda:{device}"
    name = str(device)
    return {"cpu": "host", "cpu:0": "host", "cuda": "cuda:0"}.get(name, name)


def _passes(passes: int | str | None) -> int | None:
    """Zero stands for without end."""
    if passes == "endless":
        return 0
    if passes is None or (isinstance(passes, int) and passes > 0):
        return passes
    raise ValueError(f"passes={passes!r}: expected a number of passes, or 'endless'")


def _window(window: int | str | None) -> int | None:
    if window == "all":
        return 0
    if window is None or (isinstance(window, int) and window > 0):
        return window
    raise ValueError(f"window={window!r}: expected a number of layers, or 'all'")
