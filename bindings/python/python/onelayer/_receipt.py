"""Receipts: what an unload has given back, and who holds the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._sizes import human_size

if TYPE_CHECKING:
    from ._native import NativeReceipt


@dataclass(frozen=True)
class Holder:
    """A tensor that was taken, and keeps the memory of its layer."""

    layer: str
    tensor: str
    owners: int
    """How many objects share it: exports to torch or numpy, and ``Tensor`` objects."""
    used_by: tuple[str, ...] = ()
    """Where it is referred to in Python, as far as is known."""


@dataclass(frozen=True)
class Receipt:
    """What came back. ``asked`` is the sum of the numbers after it, up to ``held``; ``str(receipt)`` says it."""

    asked: int
    """Bytes that were to be freed."""
    returned: int
    """Bytes that the system or the driver has confirmed to have back."""
    kept_by_pool: int = 0
    """Bytes that the device's pool keeps for the next layer."""
    queued: int = 0
    """Bytes that the device frees after work that is queued."""
    reused: int = 0
    """Bytes that a running stream uses for its next layers."""
    lent: int = 0
    """Bytes in memory that the caller provided."""
    unconfirmed: int = 0
    """Bytes given up without a confirmation."""
    held: int = 0
    """Bytes that somebody holds. They are freed with the last holder."""
    parked: int = 0
    """Bytes that were copied elsewhere first. No part of the sum."""
    held_by: tuple[Holder, ...] = ()
    """The tensors that are held."""

    @property
    def is_complete(self) -> bool:
        """True if every byte that was asked for is back."""
        return self.returned == self.asked

    def __str__(self) -> str:
        parts = [f"{human_size(self.asked)} asked, {human_size(self.returned)} returned"]
        others = {
            "kept by the device's pool": self.kept_by_pool,
            "queued on the device to be freed": self.queued,
            "reused by the stream": self.reused,
            "in the caller's own memory": self.lent,
            "given up without a confirmation": self.unconfirmed,
        }
        parts += [f"{human_size(size)} {words}" for words, size in others.items() if size]
        if self.held:
            named = [holder.tensor + _users(holder) for holder in self.held_by[:3]]
            more = f" and {len(self.held_by) - 3} more" if len(self.held_by) > 3 else ""
            parts.append(f"{human_size(self.held)} held by {', '.join(named) or 'an owner that is just leaving'}{more}")
        return ", ".join(parts)


def _users(holder: Holder) -> str:
    return f" (in {', '.join(holder.used_by[:2])})" if holder.used_by else ""


def receipt_of(native: NativeReceipt) -> Receipt:
    return Receipt(
        asked=native.asked,
        returned=native.returned,
        kept_by_pool=native.kept_by_pool,
        queued=native.queued,
        reused=native.reused,
        lent=native.lent,
        unconfirmed=native.unconfirmed,
        held=native.held,
        parked=native.parked,
        held_by=tuple(Holder(*parts) for parts in native.held_by),
    )
