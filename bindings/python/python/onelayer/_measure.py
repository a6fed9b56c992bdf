"""Measures the memory of a block of code."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ._native import MemoryMeter
from ._sizes import human_size

_WIDTH, _HEIGHT, _LEFT = 640, 200, 70


class measure:  # noqa: N801  (used as a function)
    """Measures host memory of this process, and memory of a CUDA device, while a ``with`` block runs.

    >>> with onelayer.measure() as m:
    ...     model = load()
    >>> print(m.unreclaimable_growth, m.rss_growth)

    Growth is counted from the start of the block. ``device`` is the number of a CUDA device. One block
    at a time: two would reset each other's peak. In a notebook the result shows itself.
    """

    def __init__(self, *, device: int | None = None) -> None:
        self._device = device
        self._meter: MemoryMeter | None = None
        self._summary: dict[str, Any] | None = None
        self._reason = "nothing was measured yet: read it after the `with` block"
        self._vram: tuple[int | None, str | None] = (None, None)

    def __enter__(self) -> measure:
        self._meter = MemoryMeter(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._meter is not None
        meter, self._meter = self._meter, None
        try:
            text, self._vram = meter.finish_summary()
            self._summary = json.loads(text)
        except RuntimeError as error:
            # Not in place of the block's own error.
            self._reason = str(error)

    def _told(self) -> dict[str, Any]:
        if self._summary is None:
            raise RuntimeError(self._reason)
        return self._summary

    @property
    def seconds(self) -> float:
        """Duration of the block."""
        return float(self._told()["seconds"])

    @property
    def unreclaimable_growth(self) -> int | None:
        """Peak growth of memory that the kernel cannot take back, in bytes; sampled every 5 ms.

        ``None`` if it could not be measured, here and below.
        """
        return self._growth("host")

    @property
    def rss_growth(self) -> int | None:
        """Peak growth of resident memory, pages of mapped files included; from the kernel's high-water mark."""
        return self._growth("rss")

    @property
    def kept_growth(self) -> int | None:
        """Unreclaimable memory that is left at the end of the block, over that at its start."""
        told = self._told()
        before, after = (told[when]["memory"]["host_bytes"] for when in ("baseline", "after"))
        return None if before is None or after is None else after - before

    @property
    def vram_growth(self) -> int | None:
        """Peak growth of used memory on the device, by all processes."""
        self._told()
        return self._vram[0]

    @property
    def cgroup(self) -> dict[str, Any] | None:
        """Memory of the control group at the end of the block: what the kernel tells of it."""
        group: dict[str, Any] | None = self._told()["after"].get("cgroup")
        return group

    @property
    def timeline(self) -> list[dict[str, float | None]]:
        """Memory over time: at most 512 moments, each the highest of its time, with bytes by kind."""
        told = self._told()["timeline"]
        return [dict(zip(told["columns"], row, strict=True)) for row in told["rows"]]

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with the numbers and the curve: one file that needs no network."""
        page = f"<!doctype html><meta charset=utf-8><title>memory</title><body>{self._repr_html_()}</body>\n"
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in self._rows()
        )
        return f"<table>{rows}</table>{_curve(self.timeline)}"

    def _rows(self) -> list[tuple[str, str]]:
        numbers = [
            ("unreclaimable memory, peak growth", self.unreclaimable_growth),
            ("resident memory, peak growth", self.rss_growth),
            ("unreclaimable memory left at the end", self.kept_growth),
            ("device memory, peak growth", self.vram_growth),
        ]
        told = [(name, _signed(size)) for name, size in numbers if size is not None]
        return [("seconds", f"{self.seconds:.2f}"), *told]

    def __repr__(self) -> str:
        if self._summary is None:
            return "<onelayer.measure: not done>"
        return f"<onelayer.measure: {', '.join(f'{name} {text}' for name, text in self._rows())}>"

    def _growth(self, name: str) -> int | None:
        told = self._told()
        peak, before = told["peak"][name], told["baseline"]["memory"][f"{name}_bytes"]
        return None if peak is None or before is None else max(peak["bytes"] - before, 0)


def _signed(size: int) -> str:
    return f"-{human_size(-size)}" if size < 0 else human_size(size)


def _curve(timeline: Sequence[dict[str, float | None]]) -> str:
    """Unreclaimable and resident memory over time, as a drawing."""
    kinds = {"rss_bytes": ("resident", "#9db7d5"), "host_bytes": ("unreclaimable", "#c0392b")}
    known = [(row["seconds"] or 0.0, row) for row in timeline]
    most = max((row[kind] or 0 for _, row in known for kind in kinds), default=0)
    if not known or not most:
        return ""
    duration = known[-1][0] or 1e-9
    lines: list[str] = []
    labels: list[str] = []
    for number, (kind, (name, colour)) in enumerate(kinds.items()):
        points = " ".join(
            f"{_LEFT + (_WIDTH - _LEFT) * at / duration:.1f},{_HEIGHT - (_HEIGHT - 20) * (row[kind] or 0) / most:.1f}"
            for at, row in known
        )
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>')
        labels.append(f'<text x="{_LEFT + 110 * number}" y="{_HEIGHT + 16}" fill="{colour}">{name}</text>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 24}" style="max-width:{_WIDTH}px;font:12px sans-serif" role="img" '
        f'aria-label="memory over {duration:.2f} seconds">'
        f'<text x="0" y="24" fill="currentColor">{human_size(round(most))}</text>'
        f'<text x="0" y="{_HEIGHT}" fill="currentColor">0</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end" fill="currentColor">{duration:.2f} s</text>'
        f"{''.join(lines)}{''.join(labels)}</svg>"
    )
