"""Which type weights must have, against the type that they have in the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from .._checkpoint import Checkpoint
from .._frameworks import torch_dtype
from ._names import match

_FLOATS = ("F64", "F32", "F16", "BF16")


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """The float type of most bytes of a checkpoint; ``None`` without floats."""
    sizes: Counter[str] = Counter()
    for name in checkpoint.keys():
        info = checkpoint.info(name)
        sizes[info.dtype] += info.nbytes if info.dtype in _FLOATS else 0
    floats = [name for name, size in sizes.most_common() if size]
    return torch_dtype(floats[0]) if floats else None


def narrowed_dtype(
    model: nn.Module, checkpoint: Checkpoint, wanted: Callable[[str, torch.dtype], torch.dtype]
) -> torch.dtype | None:
    """The ``dtype=`` of ``stream_forward`` with which every weight has the wanted type. ``None`` if the files have it.

    ``wanted`` gives the type of a weight from its name in the module and the type it has there. Raises
    ``ValueError`` if a weight would have to become wider, or if some were to be narrowed and others not.
    """
    targets: set[torch.dtype] = set()
    wide: list[tuple[str, torch.dtype]] = []
    for key, slots in match(model, checkpoint.keys(), checkpoint.aliases).slots.items():
        held = slots[0].get()
        stored = checkpoint.info(key).dtype
        if held is None or stored not in _FLOATS or not held.is_floating_point():
            continue
        found, target = torch_dtype(stored), wanted(slots[0].path, held.dtype)
        if found == target:
            wide.append((key, found))
        elif found.itemsize > target.itemsize:
            targets.add(target)
        else:
            raise _refusal(key, found, target)
    if not targets:
        return None
    (target, *others) = targets
    for key, found in wide:
        if found.itemsize > target.itemsize:
            raise _refusal(key, target, found)
    if others:
        raise ValueError(f"weights would become {_name(target)} and {_name(others[0])}: streams narrow to one type")
    return target


def _refusal(key: str, found: torch.dtype, wanted: torch.dtype) -> ValueError:
    return ValueError(
        f"tensor {key!r} would be {_name(found)}, and the library wants it as {_name(wanted)}: streamed weights have "
        "the type of the files, or are all narrowed to one type. Leave dtype out, or load the model whole, save it "
        "once in the wanted type with save_pretrained, and stream that"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
