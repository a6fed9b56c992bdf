"""Streamed modules stay where they are: what would move their weights is an error, or gives them back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


def guard_moves(owner: Any, device: torch.device, dtype: torch.dtype | None, close: Callable[[], None]) -> None:
    """Replaces ``owner.to``: the same device and type are accepted, ``"meta"`` closes, all else is an error."""
    reference = weakref.ref(owner)

    def to(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        types = [each for each in given if isinstance(each, torch.dtype)]
        # A number is a GPU.
        places = [each for each in given if isinstance(each, (str, int, torch.device)) and not isinstance(each, bool)]
        devices = [torch.device(place) for place in places]
        if [each.type for each in devices] == ["meta"]:
            close()
        elif any(each != dtype for each in types) or not all(_is_same(each, device) for each in devices):
            raise _refusal("to")
        return reference()

    def apply(*_: Any, **__: Any) -> Any:
        raise _refusal("this conversion")

    owner.to = to
    if isinstance(owner, torch.nn.Module):
        # What float(), cuda() and others are made of.
        setattr(owner, "_apply", apply)  # noqa: B010


def refuse(owner: Any, name: str, remedy: str) -> None:
    """Replaces a method by an error."""

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{name}: the weights of a streamed pipeline come and go. {remedy}")

    if hasattr(owner, name):
        setattr(owner, name, refused)


def _is_same(given: torch.device, device: torch.device) -> bool:
    return given.type == device.type and given.index in (None, device.index)


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: streamed weights come and go, on their device and in their type. Choose the device and dtype= in "
        "from_pretrained, or load the model whole"
    )
