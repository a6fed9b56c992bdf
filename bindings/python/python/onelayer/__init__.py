"""Loads checkpoints layer by layer, within a host-memory budget that you choose.

>>> import onelayer, torch
>>> with onelayer.open("org/name").stream(device="cuda:0", budget="512MiB") as stream:
...     for layer in stream:                                      # a mapping: name -> tensor
...         for name, tensor in layer.items():
...             params[name].copy_(torch.from_dlpack(tensor))     # zero-copy import
>>> print(stream.report)
"""

from collections.abc import Mapping as _Mapping

from . import distributed
from ._checkpoint import Checkpoint, LayerInfo, TensorInfo, open
from ._errors import BudgetError, CancelledError, CheckpointError, DeviceError, StalledError
from ._lazy import LazyTensor, StateDict
from ._native import Layer, LayerStream, Plan, Report, Tensor, __version__
from ._sizes import parse_size

_Mapping.register(Layer)

__all__ = [
    "BudgetError",
    "CancelledError",
    "Checkpoint",
    "CheckpointError",
    "DeviceError",
    "Layer",
    "LayerInfo",
    "LayerStream",
    "LazyTensor",
    "Plan",
    "Report",
    "StalledError",
    "StateDict",
    "Tensor",
    "TensorInfo",
    "__version__",
    "distributed",
    "open",
    "parse_size",
]
