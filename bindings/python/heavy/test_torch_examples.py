"""The examples that need torch run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onelayer
from checkpoints import FIXTURES

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transformers_state_dict() -> None:
    for mode in ("owned", "mapped"):
        output = run(str(EXAMPLES / "transformers_state_dict.py"), str(FIXTURES / "gpt2"), mode)
        assert output.startswith("GPT2LMHeadModel: ")


def test_several_processes() -> None:
    source = FIXTURES / "llama"
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    lines = run(*words, str(EXAMPLES / "several_processes.py"), str(source)).splitlines()
    nbytes = onelayer.open(source).nbytes
    assert len(lines) == 2
    assert all(f"has {nbytes} bytes" in line for line in lines)
    assert sum(int(line.rsplit("read ", 1)[1].split()[0]) for line in lines) == nbytes
