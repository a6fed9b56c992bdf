"""``%%loadcheck`` in IPython."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from onelayer._measure import measure

pytest.importorskip("IPython")


@pytest.fixture
def shell() -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell

    found = InteractiveShell.instance()
    found.run_line_magic("load_ext", "onelayer")
    yield found
    InteractiveShell.clear_instance()


def test_a_cell_is_measured_and_its_variables_stay(shell: Any) -> None:
    measured = shell.run_cell_magic("loadcheck", "", "kept = bytearray(64 << 20)\nkept[:] = b'1' * len(kept)")
    assert isinstance(measured, measure)
    assert measured.unreclaimable_growth is not None and measured.unreclaimable_growth >= 60 << 20
    assert len(shell.user_ns["kept"]) == 64 << 20 and "<svg" in measured._repr_html_()
    assert isinstance(shell.run_line_magic("loadcheck", "--max-host 1GiB 1 + 1"), measure)


def test_a_limit_fails_the_cell(shell: Any) -> None:
    with pytest.raises(MemoryError, match=r"--max-host is 8\.0 MiB"):
        shell.run_cell_magic("loadcheck", "--max-host 8MiB", "big = b'1' * (64 << 20)")
    with pytest.raises(ValueError, match="unrecognized arguments: --most"):
        shell.run_cell_magic("loadcheck", "--most 8MiB", "1")


def test_an_error_of_the_cell_is_shown_once(shell: Any) -> None:
    assert isinstance(shell.run_cell_magic("loadcheck", "--max-host 1MiB", "1 / 0"), measure)
