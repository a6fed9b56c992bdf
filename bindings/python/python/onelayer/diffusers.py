"""Pipelines of diffusers in one line, whose parts share one limit of memory.

>>> import onelayer.diffusers
>>> pipeline = onelayer.diffusers.from_pretrained("org/name", memory="8GiB", dtype=torch.bfloat16)
>>> image = pipeline("a lake").images[0]
>>> print(pipeline.onelayer_stream.report)
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import diffusers
import torch
import transformers

from ._checkpoint import Checkpoint
from ._checkpoint import open as open_checkpoint
from ._sizes import parse_size
from ._sources import locate
from .torch import empty
from .torch._casts import narrowed_dtype, stored_dtype
from .torch._moves import guard_moves, refuse
from .torch._turns import Part, PartReport, Turns
from .transformers import build, wanted_dtypes

__all__ = ["PartReport", "Turns", "from_pretrained"]

_WEIGHT_NAMES = ("diffusion_pytorch_model", "model")
# Methods that move weights themselves.
_MOVERS = (
    "enable_model_cpu_offload",
    "enable_sequential_cpu_offload",
    "enable_group_offload",
    "load_lora_weights",
    "load_ip_adapter",
    "load_textual_inversion",
    "save_pretrained",
)
# Keywords of diffusers that need its own way of loading.
_ONLY_DIFFUSERS = ("device_map", "quantization_config", "use_onnx", "use_flashpack", "custom_pipeline", "max_memory")


def from_pretrained(
    source: str | os.PathLike[str],
    *,
    memory: int | str,
    cls: Any = None,
    device: Any = None,
    dtype: Any = None,
    variant: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    download: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    window: int = 2,
    budget: int | str | None = None,
    io: str | None = None,
    **keywords: Any,
) -> Any:
    """A pipeline of diffusers whose weights, all parts together, take ``memory`` bytes. It runs as always.

    A part (transformer or unet, text encoders, vae) gets its weights when it is called. If all of it fits
    into what is free, it is kept; if not, the parts that were used longest ago are dropped first. A part that
    does not even fit alone is streamed: as many of its layers stay as fit, the others are read at each
    forward. Parts that alternate at every step, as a control net does, share the memory.

    ``source`` is a folder with ``model_index.json``, or ``org/name[@revision]`` of the local cache of the hub;
    ``download=True`` downloads it first. Options:

    - ``memory``: limit of the weights and of reading them, as in ``onelayer.torch.stream_forward``. On the
      CPU, parts that fit are mapped where that is possible: they count, though the kernel can take them back.
      Activations come on top.
    - ``cls``: the class of the pipeline. Default: the one that the folder names.
    - ``device``: where the parts run. Default: the CPU.
    - ``dtype`` (also ``torch_dtype``): as in diffusers, one type or one for each part. Wider weights are
      narrowed. Default: the type of the files, where diffusers would widen everything to single precision.
    - ``variant``: as in diffusers, such as ``"fp16"``.
    - ``window``, ``budget``, ``io``: as in ``stream_forward``.

    Other keywords go to diffusers; parts among them (``vae=...``, ``safety_checker=None``) are taken as they are,
    and are outside the limit. ``pipeline.onelayer_stream`` is the handle: ``print`` it for the plan,
    ``report`` tells what each part took, and ``close()``, or a ``with`` block on it, frees the weights. So
    does dropping the pipeline.

    Raises ``BudgetError`` with the name of the part if ``memory`` is too small for one, before anything is read,
    and ``ValueError`` for what cannot be streamed.
    """
    for name in _ONLY_DIFFUSERS:
        if keywords.get(name) is not None:
            raise ValueError(
                f"{name}= is for diffusers' own loading: leave it out, or load the pipeline with diffusers"
            )
    dtype = keywords.pop("torch_dtype", None) if dtype is None else dtype
    folder = Path(locate(source, revision=revision, token=token, download=download, cache_dir=cache_dir))
    target = torch.device("cpu" if device is None else device)
    options = {"device": target, "window": window, "budget": budget, "io": io}
    parts: dict[str, Part] = {}
    modules: dict[str, Any] = {}
    for name, found in _module_classes(folder, keywords):
        checkpoint = open_checkpoint(_weights(folder / name, variant))
        module, narrowed = _empty_part(found, folder / name, checkpoint, _dtype_of(dtype, name))
        guard_moves(module, target, module.dtype, lambda: None)
        modules[name] = module
        parts[name] = Part(name, module, checkpoint, {**options, "dtype": narrowed})
    turns = Turns(parts, parse_size(memory))
    pipeline = (cls or diffusers.DiffusionPipeline).from_pretrained(str(folder), **modules, **keywords)
    pipeline.onelayer_stream = turns
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module) and not hasattr(component, "_hf_hook"):
            setattr(component, "_hf_hook", _Placed(target))  # noqa: B010
    guard_moves(pipeline, target, None, turns.close)
    for name in _MOVERS:
        refuse(pipeline, name, "Load the pipeline with diffusers for this; adapters can be fused there, and saved once")
    return pipeline


class _Placed:
    """Tells diffusers on which device a part runs whose weights are not there: pipelines ask for it by this name."""

    def __init__(self, device: torch.device) -> None:
        self.execution_device = device

    def detach_hook(self, module: Any) -> Any:
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs


def _module_classes(folder: Path, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and class of each part that has weights, and was not given by the caller."""
    index = folder / "model_index.json"
    if not index.exists():
        raise FileNotFoundError(2, "no pipeline: a folder with model_index.json is expected", str(folder))
    entries: dict[str, Any] = json.loads(index.read_text())
    for name, entry in entries.items():
        if name in given or not isinstance(entry, list) or len(cast("list[object]", entry)) != 2 or entry[0] is None:
            continue
        library, word = cast("list[str]", entry)
        if library in ("diffusers", "transformers"):
            found = getattr(importlib.import_module(library), word, None)
        else:
            found = getattr(getattr(diffusers.pipelines, library, None), word, None)
        if inspect.isclass(found) and issubclass(found, torch.nn.Module):
            yield name, found


def _weights(folder: Path, variant: str | None) -> Path:
    """The file or index of a part: that of the variant where there is one, as in diffusers."""
    for middle, last in ((f".{variant}", f".{variant}"), ("", "")) if variant else (("", ""),):
        for name in _WEIGHT_NAMES:
            for path in (folder / f"{name}{middle}.safetensors", folder / f"{name}.safetensors.index{last}.json"):
                if path.exists():
                    return path
    return folder


def _dtype_of(dtype: Any, name: str) -> torch.dtype | None:
    found = dtype
    if isinstance(dtype, Mapping):
        types = cast("Mapping[str, Any]", dtype)
        found = types.get(name, types.get("default"))
    if isinstance(found, str):
        found = getattr(torch, found, found)
    if found is not None and not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={found!r}: expected a type of torch, such as torch.bfloat16")
    return found


def _empty_part(
    cls: Any, folder: Path, checkpoint: Checkpoint, dtype: torch.dtype | None
) -> tuple[Any, torch.dtype | None]:
    """A part without weights, and the type to which its weights are narrowed."""
    chosen = dtype or stored_dtype(checkpoint) or torch.float32
    wanted: Callable[[str, torch.dtype], torch.dtype]
    if issubclass(cls, transformers.PreTrainedModel):
        module, _ = build(cls, str(folder), checkpoint, {"dtype": chosen})
        wanted = wanted_dtypes(module)
    elif hasattr(cls, "load_config") and hasattr(cls, "from_config"):
        with _default_dtype(chosen):
            module = empty(cls.from_config, cls.load_config(str(folder)))
        module.register_to_config(_name_or_path=str(folder))
        wanted = _wanted_by_diffusers(cls, chosen)
    else:
        raise ValueError(
            f"{folder.name} is a {cls.__name__}, which has no configuration: load it, and pass {folder.name}="
        )
    return module, narrowed_dtype(module, checkpoint, wanted)


def _wanted_by_diffusers(cls: Any, dtype: torch.dtype) -> Callable[[str, torch.dtype], torch.dtype]:
    """The type that diffusers gives a weight: some stay in single precision."""
    kept = set(cls._keep_in_fp32_modules or ())
    return lambda name, _: torch.float32 if kept & set(name.split(".")) else dtype


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
