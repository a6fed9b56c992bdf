"""``load_file`` of ``safetensors.torch``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ._file import load_all

if TYPE_CHECKING:
    import torch


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "pread",
) -> dict[str, torch.Tensor]:
    """Every tensor of a file, as torch tensors on a device.

    With ``backend="pread"`` tensors own their memory; ``"mmap"`` (CPU only) gives views of a private,
    copy-on-write mapping.
    """
    return load_all(filename, "pt", device, backend)
