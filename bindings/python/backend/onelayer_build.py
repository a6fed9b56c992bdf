"""Builds the wheel: the program `loadcheck` first, then maturin's wheel around it.

pip calls the functions below (PEP 517), from the root of the repository or from `bindings/python`; the `pyproject.toml`
of both folders names this module. scripts/python-wheel runs it as a program:

    python3 onelayer_build.py [--out FOLDER] [MATURIN OPTIONS ...]

maturin builds either a library or a program, so the program is built here and handed over as a script of the wheel. It
is a program of its own and no entry point that calls the library: it measures the memory of processes that it starts
from itself, and an interpreter in each of them would be measured too.

The library and the program are built with one profile and the same features, so they share everything that cargo
builds, also with `cargo build --release`. `CARGO_TARGET_DIR` is honoured; where it is relative, it belongs to the folder
that the build was started in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent
REPOSITORY = PACKAGE.parent.parent
# What maturin puts among the scripts of the wheel: `data` in pyproject.toml.
SCRIPTS = PACKAGE / "onelayer.data" / "scripts"

Settings = Mapping[str, Any] | None


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Builds the wheel and returns its file name."""
    import maturin

    folder = os.path.abspath(wheel_directory)
    _prepare(maturin.get_maturin_pep517_args(config_settings))
    return maturin.build_wheel(folder, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds the wheel of `pip install --editable`: the Python files stay where they are."""
    import maturin

    folder = os.path.abspath(wheel_directory)
    _prepare(maturin.get_maturin_pep517_args(config_settings))
    return maturin.build_editable(folder, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Refuses: the wheel needs the whole workspace."""
    raise SystemExit("there is no source distribution: install from a checkout of the repository, or from a wheel")


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Nothing beside what `pyproject.toml` requires."""
    return []


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Nothing beside what `pyproject.toml` requires."""
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """Writes the metadata without a build and returns the folder's name."""
    import maturin

    folder = os.path.abspath(metadata_directory)
    os.chdir(PACKAGE)
    return maturin.prepare_metadata_for_build_wheel(folder, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def _prepare(maturin_options: Sequence[str]) -> None:
    """Settles where cargo builds, builds the program, and enters the folder that maturin reads."""
    target = os.environ.get("CARGO_TARGET_DIR")
    if target:
        os.environ["CARGO_TARGET_DIR"] = os.path.abspath(target)
    _place_program(_profile(maturin_options))
    os.chdir(PACKAGE)


def _profile(maturin_options: Sequence[str]) -> str:
    """The cargo profile of the options, `release` without one."""
    for index, word in enumerate(maturin_options):
        if word == "--profile" and index + 1 < len(maturin_options):
            return maturin_options[index + 1]
        if word.startswith("--profile="):
            return word.removeprefix("--profile=")
    return "release"


def _place_program(profile: str) -> None:
    """Builds `loadcheck` and copies it, without debug information, to where maturin takes it from.

    Exits with cargo's status if it cannot be built.
    """
    if shutil.which("cargo") is None:
        raise SystemExit("cargo was not found: install Rust, or install onelayer from a wheel")
    command = ["cargo", "build", "--locked", "--quiet", "--package", "loadcheck", "--profile", profile]
    # cargo tells where the program is: the folder depends on profile, target and configuration.
    command += ["--message-format", "json-render-diagnostics"]
    built = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        raise SystemExit(built.returncode)
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    programs = [message["executable"] for message in messages if message.get("executable")]
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    # Written beside it and renamed: another build may be reading the program.
    copy = SCRIPTS.parent / f"loadcheck.{os.getpid()}"
    shutil.copy(programs[-1], copy)
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-debug", str(copy)], check=True)
    copy.replace(SCRIPTS / "loadcheck")


def _main(words: list[str]) -> int:
    """Builds a wheel for distribution: maturin sets its tag by the C library that it needs."""
    _prepare(words)
    return subprocess.run(["maturin", "build", "--quiet", *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
