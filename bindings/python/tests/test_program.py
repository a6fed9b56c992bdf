"""``python -m onelayer`` is the program: its exit codes, its signals, its pipes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from onelayer.__main__ import find_program

pytestmark = pytest.mark.skipif(find_program() is None, reason="the program is not installed")
COMMAND = [sys.executable, "-m", "onelayer"]


def test_arguments_output_and_exit_codes_are_those_of_the_program(llama: Path) -> None:
    found = subprocess.run([*COMMAND, "inspect", str(llama)], capture_output=True, text=True, check=False)
    assert found.returncode == 0 and "llama" in found.stdout
    assert subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True).stdout.startswith(
        "loadcheck "
    )
    wrong = subprocess.run([*COMMAND, "--no-such-option"], capture_output=True, text=True, check=False)
    direct = subprocess.run([str(find_program()), "--no-such-option"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr) == (direct.returncode, direct.stderr) and wrong.returncode != 0


def test_an_interrupt_ends_the_program_that_runs_a_command() -> None:
    words = [*COMMAND, "exec", "--", "sh", "-c", "echo up; sleep 60"]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline().strip() == "up"
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 130 and "interrupted by SIGINT" in errors and "Traceback" not in errors


def test_a_closed_pipe_is_no_error(llama: Path) -> None:
    running = subprocess.Popen([*COMMAND, "man"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    assert running.stderr.read() == "" and running.wait(timeout=30) == 0
