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
from ._convert import ConvertReport, Difference, QuantisationError, VerifyReport, convert, verify
from ._errors import BudgetError, CancelledError, CheckpointError, DeviceError, StalledError
from ._fit import Fit, LayerPlace, TierUse
from ._lazy import LazyTensor, StateDict
from ._leak import LeakReport, leak
from ._magic import load_ipython_extension
from ._measure import measure
from ._model import Model, load
from ._native import Layer, LayerStream, LayerTimes, PassTimes, Plan, Report, Tensor, __version__
from ._options import Split
from ._placed import PlacedModel
from ._progress import progress
from ._receipt import Holder, Receipt
from ._sizes import parse_size
from ._spare import SpareMemory

_Mapping.register(Layer)  # type: ignore[attr-defined, unused-ignore]  # pyright: ignore


def __getattr__(name: str) -> object:
    """These are imported when they are first used: they need packages of these names."""
    if name in ("diffusers", "torch", "transformers"):
        return _import_module(f"onelayer.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BudgetError",
    "CancelledError",
    "Checkpoint",
    "CheckpointError",
    "ConvertReport",
    "DeviceError",
    "Difference",
    "Fit",
    "Holder",
    "Layer",
    "LayerInfo",
    "LayerPlace",
    "LayerStream",
    "LayerTimes",
    "LazyTensor",
    "LeakReport",
    "Model",
    "PassTimes",
    "PlacedModel",
    "Plan",
    "QuantisationError",
    "Receipt",
    "Report",
    "SpareMemory",
    "Split",
    "StalledError",
    "StateDict",
    "Tensor",
    "TensorInfo",
    "TierUse",
    "VerifyReport",
    "__version__",
    "convert",
    "distributed",
    "leak",
    "live",
    "load",
    "load_ipython_extension",
    "measure",
    "open",
    "parse_size",
    "progress",
    "verify",
]
