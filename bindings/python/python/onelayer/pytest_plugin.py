"""The marker ``loadcheck``: a test fails if it exceeds a memory limit or if that cannot be measured.

>>> @pytest.mark.loadcheck(max_host="2GiB", max_vram="8GiB", device=0)
... def test_loading(): ...

- ``max_host``: peak growth of unreclaimable host memory during the test. Sampled every 5 ms.
- ``max_rss``: peak growth of resident memory, from the kernel's high-water mark.
- ``max_vram``: peak growth of used memory on CUDA device number ``device`` (0), by all processes. Sampled
  every 10 ms.

Memory of fixtures and child processes does not count.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from ._native import MemoryMeter
from ._sizes import parse_size

_LIMITS = ("max_host", "max_rss", "max_vram")
_MARKER = (
    "loadcheck(max_host=None, max_rss=None, max_vram=None, device=0): "
    "fails if the test takes more memory, or if that cannot be measured"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    marker = item.get_closest_marker("loadcheck")
    if marker is None:
        return (yield)
    limits, device = _limits(marker)
    meter = MemoryMeter(device if "max_vram" in limits else None)
    try:
        result = yield
    finally:
        measured: dict[str, tuple[int | None, str | None]] = dict(zip(_LIMITS, meter.finish(), strict=True))
    problems = [_problem(name, limit, *measured[name]) for name, limit in limits.items()]
    found = [problem for problem in problems if problem is not None]
    if found:
        pytest.fail("; ".join(found), pytrace=False)
    return result


def _limits(marker: pytest.Mark) -> tuple[dict[str, int], int]:
    given: dict[str, Any] = dict(marker.kwargs)
    device = given.pop("device", 0)
    unknown = sorted(set(given) - set(_LIMITS))
    limits = {name: parse_size(size) for name, size in given.items() if size is not None and name in _LIMITS}
    if marker.args or unknown or not limits:
        pytest.fail(
            f"loadcheck wants one of {', '.join(_LIMITS)} by keyword, not {marker.args or unknown}",
            pytrace=False,
        )
    return limits, device


def _problem(name: str, limit: int, growth: int | None, reason: str | None) -> str | None:
    what = {"max_host": "host memory", "max_rss": "resident memory", "max_vram": "device memory"}[name]
    if growth is None:
        return f"{what} cannot be measured here: {reason}"
    if growth > limit:
        return f"{what} grew by {growth} bytes, {name} is {limit}"
    return None
