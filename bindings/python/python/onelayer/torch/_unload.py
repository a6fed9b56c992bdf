"""Gives the memory of a module back, whoever loaded it, and tells who still holds it."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .._model import Holder, Receipt

_USERS_MAX = 5


def unload(module: nn.Module) -> Receipt:
    """Frees parameters and buffers of a module. They stay as tensors without memory, on the meta device.

    The receipt counts storages: ``returned`` are those that are gone, ``held`` those that somebody else
    still refers to, through the same tensor or another view. ``held_by`` names these tensors, and in
    ``used_by`` where Python refers to them: attributes of objects, entries of containers, variables of
    running functions. What only C++ code holds has no name. Freed memory goes back to the system: unused
    parts of the heap are trimmed, and torch's cache of a CUDA device is emptied.
    """
    names: dict[int, str] = {}
    storages: dict[int, tuple[StorageWeakRef, int]] = {}
    devices = set()
    for path, owner in module.named_modules():
        for tensors in (owner._parameters, owner._buffers):
            for leaf, tensor in tensors.items():
                if tensor is None or tensor.device.type == "meta":
                    continue
                storage = tensor.untyped_storage()
                devices.add(tensor.device.type)
                names.setdefault(storage._cdata, f"{path}.{leaf}" if path else leaf)
                storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
                tensors[leaf] = _without_memory(tensor)
    # No variable of this function may refer to what was freed.
    tensor = storage = tensors = None
    gc.collect()
    held = {data: size for data, (weak, size) in storages.items() if not weak.expired()}
    holders = tuple(_holders(held, names))
    _trim(devices)
    asked = sum(size for _, size in storages.values())
    held_bytes = sum(held.values())
    return Receipt(asked=asked, returned=asked - held_bytes, held=held_bytes, held_by=holders)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _holders(held: dict[int, int], names: dict[int, str]) -> Iterator[Holder]:
    """The tensors that share the storages, and who refers to them."""
    users: dict[int, list[str]] = {data: [] for data in held}
    counts = dict.fromkeys(held, 0)
    objects = gc.get_objects() if held else []
    tensors = [found for found in objects if _is_tensor(found) and found.untyped_storage()._cdata in held]
    ours = {id(objects), id(tensors)}
    for index in range(len(tensors)):
        data = tensors[index].untyped_storage()._cdata
        counts[data] += 1
        users[data] += list(_referrers(tensors[index], ours))
    for data in held:
        layer = names[data].rpartition(".")[0]
        yield Holder(layer, names[data], counts[data], tuple(dict.fromkeys(users[data]))[:_USERS_MAX])


def _is_tensor(found: Any) -> bool:
    try:
        # By type: `isinstance` runs code of objects that pretend to be something else.
        return bool(
            issubclass(type(found), torch.Tensor) and found.device.type != "meta" and found.layout == torch.strided
        )
    except (ReferenceError, RuntimeError):
        # A proxy of something that is gone.
        return False


def _referrers(tensor: torch.Tensor, ours: set[int]) -> Iterator[str]:
    """Where a tensor is referred to, in words."""
    for frame in sys._current_frames().values():
        current: Any = frame
        while current is not None:
            if current.f_globals.get("__name__") != __name__:
                for name, value in current.f_locals.items():
                    if value is tensor:
                        yield f"variable {name!r} of {current.f_code.co_name}()"
            current = current.f_back
    for referrer in gc.get_referrers(tensor):
        if id(referrer) in ours:
            continue
        if isinstance(referrer, dict):
            yield from _in_dictionary(referrer, tensor)
        elif isinstance(referrer, (list, tuple, set)):
            yield f"a {type(referrer).__name__} of {len(referrer)}{_owner_of(referrer)}"
        elif type(referrer).__name__ == "cell":
            yield "a closure"
        elif type(referrer).__name__ not in ("frame", "module"):
            kind = type(referrer).__name__
            names = [key for key, value in getattr(referrer, "__dict__", {}).items() if value is tensor]
            yield f"attribute {names[0]!r} of a {kind}" if names else f"a {kind}"


def _in_dictionary(found: dict[Any, Any], tensor: torch.Tensor) -> Iterator[str]:
    keys = [str(key) for key, value in found.items() if value is tensor]
    for owner in gc.get_referrers(found):
        if getattr(owner, "__dict__", None) is found:
            kind = f"module {owner.__name__}" if hasattr(owner, "__file__") else f"a {type(owner).__name__}"
            yield from (f"attribute {key!r} of {kind}" for key in keys)
            return
        if isinstance(owner, dict) and found is owner.get("_parameters"):
            yield from (f"parameter {key!r} of a module" for key in keys)
            return
    if found.get("__name__") and "__builtins__" in found:
        yield from (f"variable {key!r} of module {found['__name__']}" for key in keys)
        return
    yield from (f"entry {key!r} of a dictionary" for key in keys)


def _owner_of(container: object) -> str:
    for owner in gc.get_referrers(container):
        if isinstance(owner, dict) and "__builtins__" in owner:
            names = [name for name, value in owner.items() if value is container]
            return f", {names[0]!r} of module {owner.get('__name__')}" if names else ""
    return ""


def _trim(devices: set[str]) -> None:
    """Freed memory goes back to the system."""
    if "cuda" in devices:
        torch.cuda.empty_cache()
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
