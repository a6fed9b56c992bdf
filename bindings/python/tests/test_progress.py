"""Bars of progress, with a stand-in for tqdm."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import onelayer
from checkpoints import FIXTURES
from onelayer._progress import Bar


class FakeBar:
    made: list[FakeBar] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self.n, self.options, self.is_closed = 0, options, False
        FakeBar.made.append(self)

    def update(self, more: int) -> None:
        self.n += more

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[FakeBar]:
    FakeBar.made = []
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=FakeBar))  # type: ignore[arg-type]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    return FakeBar.made


def test_a_stream_has_a_bar_in_bytes(bars: list[FakeBar]) -> None:
    checkpoint = onelayer.open(FIXTURES / "llama")
    names = []
    for layer in onelayer.progress(checkpoint.stream()):
        names.append(layer.name)
        layer.close()
    (bar,) = bars
    assert names == [layer.name for layer in checkpoint.layers]
    assert bar.n == bar.options["total"] == checkpoint.nbytes and bar.is_closed


def test_conversions_have_a_bar(bars: list[FakeBar], tmp_path: Any) -> None:
    onelayer.convert(FIXTURES / "llama", tmp_path / "layers", progress=True)
    assert bars[0].n == bars[0].options["total"] and bars[0].is_closed


def test_nothing_is_drawn_without_tqdm_or_a_terminal(bars: list[FakeBar], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    Bar(10, "x").update_to(5)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # type: ignore[arg-type]
    Bar(10, "x").close()
    assert not bars
