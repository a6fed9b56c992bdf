"""``load_file`` of ``safetensors.numpy``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ._file import load_all

if TYPE_CHECKING:
    import numpy


def load_file(filename: str | os.PathLike[str], *, backend: str = "pread") -> dict[str, numpy.ndarray[Any, Any]]:
    """Every tensor of a file, as numpy arrays. Types unknown to numpy need the package ml_dtypes."""
    return load_all(filename, "np", "cpu", backend)
