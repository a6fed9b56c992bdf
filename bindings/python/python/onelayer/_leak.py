"""Does memory grow from cycle to cycle? The statistics are those of ``loadcheck leak``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import _native
from ._sizes import human_size, parse_size

Verdict = Literal["flat", "leak", "unclear"]

_CYCLES_MIN = 8
# Every pair of cycles is compared.
_CYCLES_MAX = 2000
_VERDICTS: dict[str | None, Verdict] = {"within": "flat", "above": "leak", "around": "unclear"}


@dataclass(frozen=True)
class LeakReport:
    """The growth of unreclaimable memory from one cycle to the next. ``str(report)`` is the verdict in a sentence."""

    verdict: Verdict
    """``flat``: at most the limit. ``leak``: above it. ``unclear``: more cycles would decide."""
    bytes_per_cycle: float
    """The slope: the median between two cycles."""
    low: float
    """The lower end of its confidence interval of 99 %."""
    high: float
    limit: int
    """Growth a cycle that is no leak, in bytes."""
    points: tuple[int, ...]
    """Unreclaimable memory after each cycle that counts, in bytes."""

    def __str__(self) -> str:
        each = f"{'-' if self.bytes_per_cycle < 0 else ''}{human_size(abs(round(self.bytes_per_cycle)))} a cycle"
        if self.verdict == "leak":
            return f"leak: memory grows by {each}"
        if self.verdict == "flat":
            most = human_size(self.limit)
            return f"no growth of host memory above {most} a cycle: {each} over {len(self.points)} cycles"
        return f"unclear: {each}, and the limit of {human_size(self.limit)} is within the noise; try more cycles"


def leak(
    function: Callable[[], object], *, cycles: int = 30, warmup: int = 3, limit: int | str = "16KiB"
) -> LeakReport:
    """Calls ``function`` again and again, and tells whether unreclaimable memory grows from call to call.

    - ``cycles``: calls that count, 8 to 2000; ``warmup`` come before them.
    - ``limit``: growth a cycle that is no leak.

    What the function returns is dropped, and garbage is collected, before memory is read. It is the host memory
    of this process: neither the page cache nor a device. Raises ``RuntimeError`` if memory cannot be
    measured here.
    """
    if not _CYCLES_MIN <= cycles <= _CYCLES_MAX:
        raise ValueError(f"cycles={cycles}: a slope needs {_CYCLES_MIN} or more, and takes at most {_CYCLES_MAX}")
    if warmup < 0:
        raise ValueError(f"warmup={warmup}: expected a number of calls")
    most = parse_size(limit)
    points: list[int] = []
    for number in range(warmup + cycles):
        function()
        gc.collect()
        held, reason = _native.held_memory()[0]
        if held is None:
            raise RuntimeError(f"memory cannot be measured here: {reason}")
        if number >= warmup:
            points.append(held)
    found = _native.slope_of(list(enumerate(points)), most)
    assert found is not None
    value, low, high, _, growth = found
    assert low is not None and high is not None
    return LeakReport(_VERDICTS[growth], value, low, high, most, tuple(points))
