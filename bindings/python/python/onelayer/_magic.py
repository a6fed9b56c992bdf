"""The magic ``%%loadcheck`` of IPython and Jupyter: measures a cell, or an expression with ``%loadcheck``.

>>> %load_ext onelayer
>>> %%loadcheck --max-host 2GiB
... model = onelayer.load("org/name")
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

from ._measure import measure
from ._sizes import human_size, parse_size

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MEASURED = {"max_host": "unreclaimable_growth", "max_rss": "rss_growth", "max_vram": "vram_growth"}


class _Words(argparse.ArgumentParser):
    """A parser whose mistakes are errors of the cell, and not the end of the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"loadcheck: {message}; {self.format_usage().strip()}")


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Called by ``%load_ext onelayer``."""

    def loadcheck(line: str, cell: str | None = None) -> measure:
        words, code = _words(line, cell)
        limits = {name: parse_size(size) for name in _MEASURED if (size := getattr(words, name)) is not None}
        with measure(device=words.device) as measured:
            result = shell.run_cell(code)
        # IPython has shown the error of the cell.
        if result.error_in_exec or result.error_before_exec:
            return measured
        over = [text for name, limit in limits.items() if (text := _over(measured, name, limit)) is not None]
        if over:
            raise MemoryError("; ".join(over))
        return measured

    shell.register_magic_function(loadcheck, "line_cell", "loadcheck")


def _words(line: str, cell: str | None) -> tuple[Any, str]:
    """The options, and the code: the cell, or what stands behind the options."""
    parser = _Words("%%loadcheck", add_help=False)
    for name, what in (("max_host", "unreclaimable"), ("max_rss", "resident"), ("max_vram", "device")):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, metavar="SIZE", help=f"most growth of {what} memory, such as 2GiB")
    parser.add_argument("--device", type=int, metavar="N", help="number of a CUDA device")
    if cell is not None:
        return parser.parse_args(line.split()), cell
    words, code = line.split(), line
    options: list[str] = []
    while words and words[0].startswith("--"):
        taken = 1 if "=" in words[0] else 2
        options += words[:taken]
        for word in words[:taken]:
            code = code.partition(word)[2]
        words = words[taken:]
    return parser.parse_args(options), code.strip()


def _over(measured: measure, name: str, limit: int) -> str | None:
    growth: int | None = getattr(measured, _MEASURED[name])
    option = f"--{name.replace('_', '-')}"
    if growth is None:
        return f"{option}: this memory cannot be measured here"
    return f"memory grew by {human_size(growth)}, {option} is {human_size(limit)}" if growth > limit else None
