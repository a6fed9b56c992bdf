"""Runs the example that needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import onelayer

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_stream_layers(llama: Path) -> None:
    pytest.importorskip("ml_dtypes")
    command = [sys.executable, str(EXAMPLES / "stream_layers.py"), str(llama), "8MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 + len(onelayer.open(llama).layers)
    assert "layers" in lines[-1]
