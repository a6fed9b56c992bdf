"""Which parameter of a module each tensor of a checkpoint is.

Names in checkpoints and modules differ by prefixes (``model.`` of transformers, ``base_model.model.``
of PEFT), and by the wrappers of adapters (``q_proj.base_layer.weight``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

# Modules that adapters put around a layer keep it under this name.
_WRAPPED = "base_layer"
_PREFIX_PARTS_MAX = 3
_MERGED = (
    "If transformers renames or merges tensors when it loads this model, as for mixtures of experts, save it once with "
    "save_pretrained(folder, save_original_format=False), and stream that"
)
# Below this share of the module's tensors the names are of something else.
_MATCHED_MIN = 0.5


@dataclass(frozen=True)
class Slot:
    """An attribute of a module that holds a tensor."""

    module: nn.Module
    leaf: str
    path: str = field(default="", compare=False)
    """The full name."""

    def put(self, tensor: torch.Tensor) -> None:
        """Sets the tensor. Parameters take no gradients."""
        if self.leaf in self.module._parameters and not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        # Not past `__setattr__`: modules such as LSTM keep lists of their weights.
        setattr(self.module, self.leaf, tensor)

    def get(self) -> torch.Tensor | None:
        return self.module._parameters.get(self.leaf, self.module._buffers.get(self.leaf))


@dataclass(frozen=True)
class Names:
    """The places of tensors in a module."""

    slots: Mapping[str, tuple[Slot, ...]]
    """Name in the checkpoint -> every attribute that holds this tensor: several for tied weights."""
    unused: tuple[str, ...]
    """Tensors of the checkpoint without a place in the module."""
    strip: str
    """The prefix of the checkpoint's names that the module's lack."""
    add: str
    """The prefix of the module's names that the checkpoint's lack."""

    def module_path(self, name: str) -> str | None:
        """The path of a module, from the name of a layer of the checkpoint."""
        if not (name + ".").startswith(self.strip):
            return None
        return self.add + name[len(self.strip) :]


def match(model: nn.Module, keys: Collection[str], aliases: Mapping[str, str]) -> Names:
    """Finds the places of all tensors. ``aliases`` are names of the same bytes as another key.

    Raises ``ValueError`` if the names do not fit together, or if a tensor without memory would stay
    empty. Buffers that are not saved with a module are not filled.
    """
    places, unsaved = _places(model)
    strip, add = _prefixes(keys, places)
    slots: dict[str, tuple[Slot, ...]] = {}
    unused: list[str] = []
    of_place: dict[int, dict[str, str]] = {}
    for key in keys:
        name = _renamed(key, strip, add)
        own = None if name is None else name if name in places else _inside_adapter(name)
        if own in places:
            of_place.setdefault(id(places[own]), {})[own] = key
        else:
            unused.append(key)
    for place in {id(place): place for place in places.values()}.values():
        stored = of_place.get(id(place))
        if not stored:
            continue
        # Tied weights share a tensor, unless the checkpoint has one for each name.
        first = next((slot.path for slot in place if slot.path in stored), next(iter(stored)))
        filled: dict[str, list[Slot]] = {}
        for slot in place:
            filled.setdefault(stored.get(slot.path, stored[first]), []).append(slot)
        slots.update((key, tuple(found)) for key, found in filled.items())
    for alias, key in aliases.items():
        if alias in slots:
            slots[key] = (*slots.get(key, ()), *slots.pop(alias))
    missing = [name for name, place in places.items() if id(place) not in of_place and _is_empty(place[0])]
    if not slots or (missing and len(slots) < _MATCHED_MIN * (len(slots) + len(missing))):
        raise ValueError(
            f"the names of checkpoint and module do not fit together: {len(unused)} of {len(keys)} tensors "
            f"have no place, such as {_some(unused)}; the module has {_some(places)}. {_MERGED}"
        )
    unsaved = [name for name in unsaved if name not in slots]
    if unsaved:
        raise ValueError(
            f"buffers of the module have no values, and are in no checkpoint: {_some(unsaved)}. "
            "Build the module with onelayer.torch.empty, which keeps the values of buffers"
        )
    if missing:
        raise ValueError(
            f"{len(missing)} tensors of the module are not in the checkpoint and have no values: {_some(missing)}. {_MERGED}"
        )
    return Names(slots, tuple(unused), strip, add)


def _places(model: nn.Module) -> tuple[dict[str, list[Slot]], list[str]]:
    """Every name of a parameter or buffer -> the attributes that hold it; tied names share a list.

    Also the names of buffers that are not saved with the module, and have no values.
    """
    found: dict[str, list[Slot]] = {}
    unsaved: list[str] = []
    of_tensor: dict[int, list[Slot]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            name = f"{path}.{leaf}" if path else leaf
            if leaf in module._non_persistent_buffers_set:
                if tensor.device.type == "meta":
                    unsaved.append(name)
                continue
            place = of_tensor.setdefault(id(tensor), [])
            slot = Slot(module, leaf, name)
            if slot not in place:
                place.append(slot)
            found[name] = place
    return found, unsaved


def _prefixes(keys: Collection[str], places: Collection[str]) -> tuple[str, str]:
    """The prefix to strip and the one to add with which most names fit. No prefix, if that is as good."""
    names = {*places, *(_outside_adapter(place) for place in places)}
    candidates = [(strip, add) for strip in _common_prefixes(keys) for add in _common_prefixes(names)]

    def fitting(candidate: tuple[str, str]) -> int:
        return sum(_renamed(key, *candidate) in names for key in keys)

    return max(candidates, key=lambda candidate: (fitting(candidate), -sum(map(len, candidate))))


def _common_prefixes(names: Iterable[str]) -> list[str]:
    """No prefix, and those that many of the names begin with."""
    names = list(names)
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        counts.update(".".join(parts[:length]) + "." for length in range(1, min(len(parts), _PREFIX_PARTS_MAX + 1)))
    return ["", *(prefix for prefix, count in counts.items() if 2 * count >= len(names))]


def _renamed(key: str, strip: str, add: str) -> str | None:
    return add + key[len(strip) :] if key.startswith(strip) else None


def _inside_adapter(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    return f"{module}.{_WRAPPED}.{leaf}"


def _outside_adapter(name: str) -> str:
    return name.replace(f".{_WRAPPED}.", ".")


def _is_empty(slot: Slot) -> bool:
    tensor = slot.get()
    return tensor is not None and tensor.device.type == "meta"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
