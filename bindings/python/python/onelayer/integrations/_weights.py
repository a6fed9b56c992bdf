"""What the plug-ins share: options from an engine's configuration, and weights of the files that an engine has chosen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onelayer

if TYPE_CHECKING:
    import torch

OPTIONS = frozenset({"budget", "device", "device_budget", "io", "on_stall", "prefetch", "readers", "window"})
"""What an engine's configuration may say to us: options of ``Checkpoint.stream``."""


def split_options(configured: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our options, and what is left for the engine's own loader, which refuses what it does not know.

    Raises ``ValueError`` for a configuration that is no mapping, for sizes that are none, and for a window of one layer: an engine
    holds the last weight of a layer while it asks for the first of the next.
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
        raise ValueError("window=1: engines hold a weight while they ask for the next one: at least 2 layers, or 'all'")
    return ours, {name: value for name, value in configured.items() if name not in OPTIONS}


def weights(
    files: Sequence[str],
    options: Mapping[str, Any],
    *,
    skips: Callable[[str], bool] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of these safetensors files with their names, on the device that the options name.

    Tensors come in the order in which the model runs them if the files are all that their checkpoint has, else file by file.
    What ``skips`` accepts by name is not read. They share the memory of their layer, which is free when the last of them is.
    """
    options = {**options, "device": options.get("device") or current_device()}
    for checkpoint in _checkpoints(files):
        kept = [name for name in checkpoint.keys() if skips is None or not skips(name)]
        if kept:
            yield from checkpoint.tensors(select=kept, **options)


def current_device() -> str:
    """The device that torch works on: CUDA's current one if there is any, else the CPU."""
    import torch

    # torch for ROCm calls its devices `cuda` too.
    if torch.version.cuda is not None and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


def _checkpoints(files: Sequence[str]) -> Iterator[onelayer.Checkpoint]:
    """One checkpoint of all the files if they are what their directory holds, else one of each."""
    wanted = {os.path.realpath(file) for file in files}
    directories = {os.path.dirname(os.path.abspath(file)) for file in files}
    if len(directories) == 1 and len(files) > 1:
        try:
            whole = onelayer.open(directories.pop())
        except (OSError, onelayer.CheckpointError):
            # Files that belong to no index, or to several: each is a checkpoint of its own, and told about if it is none.
            whole = None
        if whole is not None and {os.path.realpath(file) for file in whole.files} == wanted:
            yield whole
            return
    for file in files:
        yield onelayer.open(file)
