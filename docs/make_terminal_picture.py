#!/usr/bin/env python3
"""Makes docs/terminal.svg: runs loadcheck in a terminal of 114 columns and draws exactly what it printed.

    python3 docs/make_terminal_picture.py CHECKPOINT     (needs the package `rich`)
"""

import fcntl
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import termios

from rich.console import Console
from rich.text import Text

COLUMNS = 114
# Width of a character in the pictures that `rich` draws.
CELL = 12.2
ROOT = pathlib.Path(__file__).resolve().parent.parent


def captured(command, shown):
    """What the command prints to a terminal, after the progress bar has gone."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, close_fds=True)
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        text += piece
    if child.wait() not in (0, 1):
        sys.exit(f"{command} failed")
    return f"$ {shown}\n" + text.decode().replace("\r\n", "\n")


def shifted(match):
    x, between, length, after, spaces = match.groups()
    width = spaces.count("&#160;") * CELL
    return f'x="{float(x) + width:.1f}"{between} textLength="{float(length) - width:.1f}"{after}>'


def main():
    folder = pathlib.Path(sys.argv[1]).resolve()
    program = ROOT / "target/release/loadcheck"
    os.chdir(folder.parent)
    name = folder.name
    text = captured([program, name, "--device", "none", "--cache", "cold", "--io", "direct"],
                    f"loadcheck {name} --device none --cache cold --io direct")
    text += "\n" + captured([program, name, "--window", "1", "--budget", "8MiB", "--max-host", "1GiB"],
                            f"loadcheck {name} --window 1 --budget 8MiB --max-host 1GiB")
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title="loadcheck")
    # Fonts of the reader's own machine: a picture that loads nothing from elsewhere.
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.S).replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    # Some renderers drop leading spaces: move the text instead.
    svg = re.sub(r'x="([\d.]+)"([^>]*?) textLength="([\d.]+)"([^>]*)>((?:&#160;)+)', shifted, svg)
    (ROOT / "docs/terminal.svg").write_text(svg)


main()
