"""Parses sizes such as ``512MiB``, with the same rules as the program ``loadcheck``."""

from __future__ import annotations

import re
from fractions import Fraction

_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKMGTP]?)(i?)B?")


def parse_size(size: int | str) -> int:
    """Bytes of ``512 << 20``, ``"512MiB"``, ``"512Mi"`` or ``"0.5GB"`` (10⁹), rounded down.

    Raises ``ValueError`` for anything else.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        found = size
    else:
        match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
        if match is None or (match[3] and not match[2]) or match[2] + match[3] == "ki":
            raise ValueError(f"size {size!r}: write a number of bytes, or for example '512MiB' or '10GB'")
        base = 1024 if match[3] else 1000
        found = int(Fraction(match[1]) * base ** _POWERS[match[2]])
    if not 0 <= found < 1 << 64:
        raise ValueError(f"size {size!r}: expected 0 to 2**64 bytes")
    return found


def optional_size(size: int | str | None) -> int | None:
    """Like ``parse_size``; ``None`` stays ``None``."""
    return None if size is None else parse_size(size)


def human_size(size: int) -> str:
    """A size as people write it: ``1.5 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
