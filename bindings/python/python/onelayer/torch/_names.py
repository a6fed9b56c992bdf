"""Which parameter of a module each tensor of a checkpoint is.

Names in checkpoints and modules differ by prefixes (``model.`` of transformers, ``base_model.model.``
of PEFT), and by the wrappers of adapters (``q_proj.base_layer.weight``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

# Modules that adapters put around a layer keep it under this name.
_WRAPPED = "base_layer"
_PREFIX_PARTS_MAX = 3
# At least this share of all tensors has to have a place.
_MATCHED_MIN = 0.5


@dataclass(frozen=True)
class Slot:
    """An attribute of a module that holds a tensor."""

    module: nn.Module
    leaf: str

    def put(self, tensor: torch.Tensor) -> None:
        """Sets the tensor. Parameters take no gradients."""
        if self.leaf in self.module._parameters:
            wrapped = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            self.module._parameters[self.leaf] = wrapped
        else:
            self.module._buffers[self.leaf] = tensor

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


def match(model: nn.Module, keys: Collection[str]) -> Names:
    """Finds the places of all tensors.

    Raises ``ValueError`` if the names do not fit together, or if a parameter without memory would
    stay empty.
    """
    places = _places(model)
    strip, add = _prefixes(keys, places)
    slots: dict[str, tuple[Slot, ...]] = {}
    taken: set[int] = set()
    unused = []
    # Sorted, so that of two stored copies of a tied weight the same one is used every time.
    for key in sorted(keys):
        name = _renamed(key, strip, add)
        place = None if name is None else places.get(name) or places.get(_inside_adapter(name))
        if place is None or id(place) in taken:
            unused.append(key)
        else:
            taken.add(id(place))
            slots[key] = tuple(place)
    if len(slots) < _MATCHED_MIN * len(keys):
        raise ValueError(
            f"the names of checkpoint and module do not fit together: {len(keys) - len(slots)} of {len(keys)} tensors "
            f"have no place, such as {_some(unused)}; the module has {_some(places)}"
        )
    missing = [name for name, place in places.items() if id(place) not in taken and _is_empty(place[0])]
    if missing:
        raise ValueError(
            f"{len(missing)} tensors of the module are not in the checkpoint and have no values: {_some(missing)}. "
            "If the model merges tensors when it is loaded (experts, for example), save it once with save_pretrained "
            "of its library, and stream that; else give them values first"
        )
    return Names(slots, tuple(unused), strip, add)


def _places(model: nn.Module) -> dict[str, list[Slot]]:
    """Every name of a parameter or buffer -> the attributes that hold it; tied names share a list."""
    found: dict[str, list[Slot]] = {}
    of_tensor: dict[int, list[Slot]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            place = of_tensor.setdefault(id(tensor), [])
            slot = Slot(module, leaf)
            if slot not in place:
                place.append(slot)
            found[f"{path}.{leaf}" if path else leaf] = place
    return found


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
