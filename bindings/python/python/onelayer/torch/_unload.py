"""Gives the memory of a module back, whoever loaded it, and tells who still holds it."""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _native
from .._receipt import Holder, Receipt

_USERS_MAX = 5
# Memory that comes and goes meanwhile.
_NOISE_BYTES = 256 << 10


def unload(module: nn.Module) -> Receipt:
    """Frees parameters and buffers of a module. They stay as tensors without memory, on the meta device.

    The receipt counts storages. ``held`` are those that somebody else still refers to, through the same
    tensor or another view; ``held_by`` names these tensors, and in ``used_by`` where Python refers to them:
    attributes of objects, entries of containers, variables of running functions. What only C++ code holds
    has no name.

    Of the freed rest, ``returned`` is what this process's unreclaimable memory (of a CUDA device: torch's
    reserved memory) shrank by, once the heap was trimmed and torch's cache emptied; up to 256 KiB and 1/64
    may be missing, since other memory changes meanwhile. What is missing beyond that is ``unconfirmed`` (on
    a device: ``kept_by_pool``): pages of mapped files, which are the page cache's anyway, and parts of
    allocations that others share.
    """
    found = list(_tensors(module))
    before: dict[torch.device, int | None] = {}
    for device in {tensor.device for _, _, _, tensor in found}:
        # What was free before is nobody's to count.
        _trim(device)
        before[device] = _taken(device)
    empty: dict[int, torch.Tensor] = {}
    names: dict[int, str] = {}
    storages: dict[int, tuple[Any, int, torch.device]] = {}
    for name, owner, leaf, tensor in found:
        storage = tensor.untyped_storage()
        names.setdefault(storage._cdata, name)
        storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes(), tensor.device))
        # Tied tensors stay one.
        # Not past `__setattr__`: modules such as LSTM keep lists of their weights.
        setattr(owner, leaf, empty.setdefault(id(tensor), _without_memory(tensor)))
    # No variable of this function may refer to what was freed.
    found.clear()
    tensor = storage = None
    gc.collect()
    held: set[int] = {data for data, (weak, _, _) in storages.items() if not weak.expired()}
    # A list first: a tuple must not be seen while it is made, and the search sees every object.
    holders = list(_holders(held, names))
    receipt = Receipt(asked=0, returned=0)
    for device, taken in before.items():
        here = {data: size for data, (_, size, where) in storages.items() if where == device}
        receipt = _add(receipt, _of_device(device, taken, here, held))
    return replace(receipt, held_by=tuple(holders))


def _tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Name, module, attribute and tensor of everything that has memory."""
    for path, owner in module.named_modules():
        for tensors in (owner._parameters, owner._buffers):
            for leaf, tensor in tensors.items():
                if tensor is None or tensor.device.type == "meta":
                    continue
                name = f"{path}.{leaf}" if path else leaf
                if tensor.layout != torch.strided:
                    raise TypeError(f"{name} is {tensor.layout}: only strided tensors can be unloaded")
                yield name, owner, leaf, tensor


def _of_device(device: torch.device, taken: int | None, sizes: dict[int, int], held: set[int]) -> Receipt:
    """The receipt of the storages on one device. Trims what is free."""
    asked = sum(sizes.values())
    held_bytes = sum(size for data, size in sizes.items() if data in held)
    freed = asked - held_bytes
    _trim(device)
    now = _taken(device)
    shrank = 0 if taken is None or now is None else max(taken - now, 0)
    # The process does other things meanwhile, and memory comes in pages.
    returned = freed if shrank + _NOISE_BYTES + freed // 64 >= freed else shrank
    rest = freed - returned
    if device.type == "cuda":
        return Receipt(asked=asked, returned=returned, kept_by_pool=rest, held=held_bytes)
    return Receipt(asked=asked, returned=returned, unconfirmed=rest, held=held_bytes)


def _add(one: Receipt, other: Receipt) -> Receipt:
    return Receipt(
        asked=one.asked + other.asked,
        returned=one.returned + other.returned,
        kept_by_pool=one.kept_by_pool + other.kept_by_pool,
        unconfirmed=one.unconfirmed + other.unconfirmed,
        held=one.held + other.held,
    )


def _taken(device: torch.device) -> int | None:
    """Memory that this process has: unreclaimable on the host, reserved by torch on a device."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    return _native.held_memory()[0][0]


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _holders(held: set[int], names: dict[int, str]) -> Iterator[Holder]:
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
    yield from _in_frames(tensor)
    for referrer in gc.get_referrers(tensor):
        if id(referrer) in ours:
            continue
        if _is_any_of(referrer, dict):
            yield from _in_dictionary(referrer, tensor)
        elif _is_any_of(referrer, list, tuple, set):
            yield f"a {type(referrer).__name__} of {len(referrer)}{_owner_of(referrer)}"
        elif type(referrer).__name__ == "cell":
            yield "a closure"
        elif type(referrer).__name__ not in ("frame", "module"):
            kind = type(referrer).__name__
            names = [key for key, value in getattr(referrer, "__dict__", {}).items() if value is tensor]
            yield f"attribute {names[0]!r} of a {kind}" if names else f"a {kind}"


def _in_frames(tensor: torch.Tensor) -> list[str]:
    """Variables of running functions."""
    found: list[str] = []
    frame: Any
    current: Any = None
    for frame in sys._current_frames().values():
        current = frame
        while current is not None:
            if current.f_globals.get("__name__") != __name__ and current.f_code.co_flags & inspect.CO_OPTIMIZED:
                variables: Any = current.f_locals
                names = [name for name, value in variables.items() if value is tensor]
                found += [f"variable {name!r} of {current.f_code.co_name}()" for name in names]
                if _is_any_of(variables, dict):
                    # Before Python 3.13 the frame keeps this copy, and with it every variable.
                    variables.clear()
            current = current.f_back
    # This function's own frame is among them: it would keep itself, and the tensor.
    frame = current = None
    return found


def _in_dictionary(found: dict[Any, Any], tensor: torch.Tensor) -> Iterator[str]:
    keys = [str(key) for key, value in found.items() if value is tensor]
    for owner in gc.get_referrers(found):
        if getattr(owner, "__dict__", None) is found:
            kind = f"module {owner.__name__}" if hasattr(owner, "__file__") else f"a {type(owner).__name__}"
            yield from (f"attribute {key!r} of {kind}" for key in keys)
            return
        if _is_any_of(owner, dict) and found is owner.get("_parameters"):
            yield from (f"parameter {key!r} of a module" for key in keys)
            return
    if found.get("__name__") and "__builtins__" in found:
        yield from (f"variable {key!r} of module {found['__name__']}" for key in keys)
        return
    yield from (f"entry {key!r} of a dictionary" for key in keys)


def _is_any_of(value: Any, *kinds: type[Any]) -> bool:
    """``isinstance``, after which the value still has any type."""
    return isinstance(value, kinds)


def _owner_of(container: object) -> str:
    for owner in gc.get_referrers(container):
        if _is_any_of(owner, dict) and "__builtins__" in owner:
            names = [name for name, value in owner.items() if value is container]
            return f", {names[0]!r} of module {owner.get('__name__')}" if names else ""
    return ""


def _trim(device: torch.device) -> None:
    """Freed memory goes back to the system."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
        return
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
