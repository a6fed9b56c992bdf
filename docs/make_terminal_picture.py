#!/usr/bin/env python3
"""Makes docs/terminal.svg: runs loadcheck in a terminal of 118 columns, draws exactly what it printed, and
prints the text for readers who do not see the picture. A run that is not ok makes no picture.

    python3 docs/make_terminal_picture.py CHECKPOINT     (needs the package `rich`)
"""

import fcntl
import json
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios

from rich.console import Console
from rich.text import Text

COLUMNS = 118
# Width of a character in the pictures that `rich` draws.
CELL = 12.2
ROOT = pathlib.Path(__file__).resolve().parent.parent


def captured(program, *words):
    """What the command prints to a terminal, after the progress bar has gone; and its report."""
    report = pathlib.Path(tempfile.mkdtemp()) / "report.json"
    command = [program, *words, "--export-json", report]
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
    if child.wait() != 0:
        sys.exit(f"{command} failed: {text.decode()}")
    shown = " ".join(["loadcheck", *words])
    return f"$ {shown}\n" + text.decode().replace("\r\n", "\n"), json.loads(report.read_text())


def shifted(match):
    x, between, length, after, spaces = match.groups()
    width = spaces.count("&#160;") * CELL
    return f'x="{float(x) + width:.1f}"{between} textLength="{float(length) - width:.1f}"{after}>'


def main():
    folder = pathlib.Path(sys.argv[1]).resolve()
    program = ROOT / "target/release/loadcheck"
    os.chdir(folder.parent)
    name = folder.name
    runs = [
        captured(program, name, "--device", "none", "--cache", "cold"),
        captured(program, name, "--device", "host", "--window", "1", "--budget", "8MiB", "--max-memory", "2GiB"),
    ]
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)
    console.print(Text.from_ansi("\n".join(text for text, _ in runs)))
    svg = console.export_svg(title="loadcheck")
    # Fonts of the reader's own machine: a picture that loads nothing from elsewhere.
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.S).replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    # Some renderers drop leading spaces: move the text instead.
    svg = re.sub(r'x="([\d.]+)"([^>]*?) textLength="([\d.]+)"([^>]*)>((?:&#160;)+)', shifted, svg)
    (ROOT / "docs/terminal.svg").write_text(svg)
    size = runs[0][1]["source"]["bytes"] / 1e9
    answers = [report["answer"]["sentence"] for _, report in runs]
    print(f"loadcheck measures two loads of a checkpoint of {size:.0f} GB. Read only: {answers[0]} Into host memory, one layer at a time: {answers[1]}")


main()
