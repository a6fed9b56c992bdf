"""Shared by the plug-ins: options from an engine's configuration, and weights from its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onelayer

if TYPE_CHECKING:
    import torch

OPTIONS = frozenset({"budget", "device", "device_budget", "io", "on_stall", "prefetch", "readers", "window"})
"""The options of ``Checkpoint.stream`` that an engine's configuration may set."""


def split_options(configured: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a configuration into our options and the rest for the engine's own loader.

    Raises ``ValueError`` if it is not a mapping, for invalid sizes, and for a window of one layer: an engine
    holds the last weight of a layer while it requests the first of the next.
    """
    if configured is None:
        configured = {}
    if not isinstance(configured, Mapping):
        raise ValueError(f"model_loader_extra_config: expected a mapping, found {configured!r}")
    ours = {name: value for name, value in configured.items() if name in OPTIONS}
    for name in ("budget", "device_budget"):
        if ours.get(name) is not None:
            ours[name] = onelayer.parse_size(ours[name])
    if ours.get("window") == 1:
        raise ValueError(
            "window=1: engines hold a weight while they request the next one; use at least 2 layers, or 'all'"
        )
    return ours, {name: value for name, value in configured.items() if name not in OPTIONS}


def weights(
    files: Sequence[str],
    options: Mapping[str, Any],
    *,
    skips: Callable[[str], bool] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of these safetensors files with their names, on the device in the options.

    Tensors come in execution order if the files are a whole checkpoint, else file by file. Names for
    which ``skips`` is true are not read. Tensors share the memory of their layer, which is freed with the
    last of them.
    """
    options = {**options, "device": options.get("device") or current_device()}
    for checkpoint in _checkpoints(files):
        kept = [name for name in checkpoint.keys() if skips is None or not skips(name)]
        if kept:
            yield from checkpoint.tensors(select=kept, **options)


def current_device() -> str:
    """The current CUDA device of torch if there is one, else the CPU."""
    import torch

    # torch for ROCm names its devices `cuda`, too.
    if torch.version.cuda is not None and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


def _checkpoints(files: Sequence[str]) -> Iterator[onelayer.Checkpoint]:
    """One checkpoint if the files are all files of their directory, else one for each file."""
    wanted = {os.path.realpath(file) for file in files}
    directories = {os.path.dirname(os.path.abspath(file)) for file in files}
    if len(directories) == 1 and len(files) > 1:
        try:
            whole = onelayer.open(directories.pop())
        except (OSError, onelayer.CheckpointError):
            # Files of no index or of several: open each as a checkpoint, which reports errors.
            whole = None
        if whole is not None and {os.path.realpath(file) for file in whole.files} == wanted:
            yield whole
            return
    for file in files:
        yield onelayer.open(file)
