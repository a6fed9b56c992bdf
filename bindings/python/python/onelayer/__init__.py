"""Loads checkpoints layer by layer, within a host-memory budget that you choose.

>>> import onelayer, torch
>>> with onelayer.open("org/name").stream(device="cuda:0", budget="512MiB") as stream:
...     for layer in stream:                                      # a mapping: name -> tensor
...         for name, tensor in layer.items():
...             params[name].copy_(torch.from_dlpack(tensor))     # zero-copy import
>>> print(stream.report)
"""

from collections.abc import Mapping as _Mapping
from importlib import import_module as _import_module

from . import distributed, live
from ._checkpoint import Checkpoint, LayerInfo, TensorInfo, open
from ._errors import BudgetError, CancelledError, CheckpointError, DeviceError, StalledError
from ._lazy import LazyTensor, StateDict
from ._leak import LeakReport, leak
from ._measure import measure
from ._model import Holder, Model, Receipt, load
from ._native import Layer, LayerStream, Plan, Report, Tensor, __version__
from ._sizes import parse_size

_Mapping.register(Layer)


def __getattr__(name: str) -> object:
    """``onelayer.torch`` is imported when it is first used: it needs torch."""
    if name == "torch":
        return _import_module("onelayer.torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BudgetError",
    "CancelledError",
    "Checkpoint",
    "CheckpointError",
    "DeviceError",
    "Holder",
    "Layer",
    "LayerInfo",
    "LayerStream",
    "LazyTensor",
    "LeakReport",
    "Model",
    "Plan",
    "Receipt",
    "Report",
    "StalledError",
    "StateDict",
    "Tensor",
    "TensorInfo",
    "__version__",
    "distributed",
    "leak",
    "live",
    "load",
    "measure",
    "open",
    "parse_size",
]
