"""``python -m onelayer`` is the program ``loadcheck`` of the same installation."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from importlib import metadata


def find_program() -> str | None:
    """The program that was installed with the package, or one on the path."""
    try:
        files = metadata.files("onelayer") or []
    except metadata.PackageNotFoundError:
        files = []
    installed = (str(file.locate()) for file in files if file.name == "loadcheck")
    return next(filter(os.path.exists, installed), None) or shutil.which("loadcheck")


def main() -> None:
    """Becomes the program: signals, exit code and pipes are its own."""
    program = find_program()
    if program is None:
        sys.exit("the program loadcheck is not installed: install onelayer with pip, or a wheel of it")
    # The interpreter ignores these, and a program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execv(program, ["loadcheck", *sys.argv[1:]])


if __name__ == "__main__":
    main()
