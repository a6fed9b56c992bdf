"""Models of transformers in one line: mapped, in memory of their own, or streamed.

>>> import onelayer.transformers
>>> model = onelayer.transformers.from_pretrained("org/name", memory="4GiB")     # streamed: 4 GiB are enough
>>> model.generate(**tokens, max_new_tokens=20)
>>> print(model.onelayer_stream.report)
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
import transformers

from ._checkpoint import Checkpoint
from ._checkpoint import open as open_checkpoint
from ._sources import locate
from .torch import StreamedForward, empty, stream_forward
from .torch._casts import narrowed_dtype, stored_dtype
from .torch._moves import guard_moves

__all__ = ["from_pretrained"]

Mode = Literal["mapped", "owned", "stream"]
_MODES = ("mapped", "owned", "stream")
# Keywords of stream_forward.
_STREAM_OPTIONS = ("keep", "window", "budget", "quantise", "io")
# Keywords of transformers that need its own way of loading.
_ONLY_MAPPED = (
    "state_dict",
    "gguf_file",
    "variant",
    "quantization_config",
    "key_mapping",
    "tp_plan",
    "distributed_config",
)


def from_pretrained(
    source: str | os.PathLike[str],
    *,
    cls: Any = None,
    memory: int | str | None = None,
    mode: Mode | None = None,
    device_map: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    download: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    subfolder: str = "",
    **keywords: Any,
) -> Any:
    """Loads a model of transformers, in evaluation mode, with its generation configuration.

    ``source`` is a folder, or ``org/name[@revision]`` of the local cache of the hub; ``download=True``
    downloads it first. ``cls`` is a model class (``transformers.LlamaForCausalLM``) or an Auto class
    (``transformers.AutoModel``). Default: the first of the configuration's ``architectures``.

    ``mode``; default: ``"stream"`` with ``memory``, ``"mapped"`` without:

    - ``"mapped"``: transformers' own ``from_pretrained``. On the CPU it maps the files, which is the fastest
      way for a model that fits: onelayer gains nothing here, and only finds the class and the folder.
    - ``"owned"``: each tensor has its own memory. The kernel cannot take it back, and a file that changes
      later changes no weight.
    - ``"stream"``: for models that do not fit. Forwards and ``generate`` run in ``memory`` bytes, as with
      ``onelayer.torch.stream_forward``, without gradients. ``model.onelayer_stream`` is the handle, with
      ``plan`` and ``report``. ``model.onelayer_stream.close()``, or a ``with`` block on it, takes the weights
      out, and so do ``model.to("meta")`` and dropping the model. ``keep``, ``window``, ``budget``, ``quantise``
      and ``io`` are those of ``stream_forward``.

    ``device_map`` is transformers' own; a stream takes one device, or ``"auto"``: the first GPU, or the CPU.
    ``dtype`` is transformers' own, too; a stream cannot widen weights. Other keywords go to transformers, as
    to its ``from_pretrained``.

    Raises ``FileNotFoundError`` for an unknown source, ``BudgetError`` if ``memory`` is too small, and
    ``ValueError`` for keywords that do not go together and models that cannot be streamed.
    """
    chosen = _mode(mode, memory, keywords)
    folder = locate(source, revision=revision, token=token, download=download, cache_dir=cache_dir)
    folder = os.path.join(folder, subfolder) if subfolder else folder
    if not os.path.isdir(folder):
        raise ValueError(f"{folder!r} is not a folder: transformers needs the configuration beside the weights")
    if chosen == "mapped":
        found = cls or _architecture(_named_architectures(folder, keywords.get("config")))
        return found.from_pretrained(folder, device_map=device_map, **keywords)
    _refuse_adapters(folder)
    options = {name: keywords.pop(name) for name in _STREAM_OPTIONS if name in keywords}
    if chosen == "owned":
        return _owned(cls, folder, device_map, keywords)
    return _streamed(cls, folder, memory, device_map, options, keywords)


def _mode(mode: str | None, memory: object, keywords: Mapping[str, Any]) -> str:
    """The mode, checked against the other keywords."""
    chosen = mode or ("mapped" if memory is None else "stream")
    if chosen not in _MODES:
        raise ValueError(f"mode={mode!r}: expected {', '.join(map(repr, _MODES))}")
    if chosen == "stream" and memory is None:
        raise ValueError("mode='stream' needs memory=, the limit of the weights, such as memory='4GiB'")
    if chosen != "stream":
        for name in ("memory", *_STREAM_OPTIONS):
            if (memory is not None) if name == "memory" else name in keywords:
                raise ValueError(f"{name}= is for streamed weights: leave it out, or choose mode='stream'")
    if chosen != "mapped":
        for name in _ONLY_MAPPED:
            if keywords.get(name) is not None:
                raise ValueError(f"{name}= is read by transformers itself: choose mode='mapped'")
    return chosen


def _config(cls: Any, folder: str, keywords: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The configuration, and the keywords that are none of it: they go to the model."""
    given = keywords.get("config")
    others = {name: value for name, value in keywords.items() if name != "config"}
    if isinstance(given, transformers.PreTrainedConfig):
        return given, others
    reader = getattr(cls, "config_class", None) or transformers.AutoConfig
    config, rest = reader.from_pretrained(folder if given is None else given, return_unused_kwargs=True, **others)
    return config, rest


def _named_architectures(folder: str, config: Any) -> list[str] | None:
    """What the configuration names, without building it: transformers will."""
    if isinstance(config, transformers.PreTrainedConfig):
        given: list[str] | None = config.architectures
        return given
    path = os.path.join(folder if config is None else str(config), "config.json")
    with open(path, encoding="utf-8") as file:
        found: list[str] | None = json.load(file).get("architectures")
    return found


def _architecture(names: list[str] | None) -> Any:
    """The class that a configuration names."""
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        named = f"names {names[0]}, which transformers has not" if names else "names no architecture"
        raise ValueError(f"the configuration {named}: pass cls=, such as cls=transformers.AutoModelForCausalLM")
    return found


def _refuse_adapters(folder: str) -> None:
    if os.path.exists(os.path.join(folder, "adapter_config.json")):
        raise ValueError(
            f"{folder!r} has an adapter: load the model that it belongs to, and add the adapter with "
            "peft.PeftModel.from_pretrained"
        )


def build(cls: Any, folder: str, checkpoint: Checkpoint, keywords: dict[str, Any]) -> tuple[Any, bool]:
    """The model without weights, and whether the caller chose its type."""
    asked = keywords.pop("torch_dtype", None)
    asked = keywords.pop("dtype", asked)
    trust = keywords.pop("trust_remote_code", None)
    keywords.pop("output_loading_info", None)
    config, rest = _config(cls, folder, {**keywords, "trust_remote_code": trust})
    rest.pop("trust_remote_code", None)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "the weights were quantised by another library: stream the original, converted once by "
            "loadcheck convert --quantise int8, or load this one with mode='mapped'"
        )
    found = cls or _architecture(getattr(config, "architectures", None))
    is_chosen = asked not in (None, "auto")
    dtype = asked if is_chosen else getattr(config, "dtype", None) or stored_dtype(checkpoint) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={asked!r}: expected 'auto' or a type of torch, such as torch.bfloat16")
    if hasattr(found, "_from_config"):
        return empty(found._from_config, config, dtype=dtype, **rest), is_chosen
    if hasattr(found, "from_config"):
        return empty(found.from_config, config, dtype=dtype, trust_remote_code=trust, **rest), is_chosen
    raise TypeError(f"cls={found!r}: expected a model class or an Auto class of transformers")


def _owned(cls: Any, folder: str, device_map: Any, keywords: dict[str, Any]) -> Any:
    checkpoint = open_checkpoint(folder)
    generation = keywords.pop("generation_config", None)
    wants_info = keywords.get("output_loading_info", False)
    # Without weights: transformers' own loader fills a new one of the same class.
    model, _ = build(cls, folder, checkpoint, keywords)
    found, info = cast(Any, type(model)).from_pretrained(
        None,
        config=model.config,
        state_dict=checkpoint.state_dict(mode="owned"),
        dtype=model.config.dtype,
        device_map=device_map,
        output_loading_info=True,
    )
    _finish(found, folder, generation)
    return (found, info) if wants_info else found


def _streamed(
    cls: Any, folder: str, memory: int | str | None, device_map: Any, options: dict[str, Any], keywords: dict[str, Any]
) -> Any:
    assert memory is not None
    device = _device(device_map)
    checkpoint = open_checkpoint(folder)
    generation = keywords.pop("generation_config", None)
    if keywords.pop("output_loading_info", False):
        raise ValueError("output_loading_info=True: a stream loads nothing yet; see model.onelayer_stream.plan")
    model, is_chosen = build(cls, folder, checkpoint, dict(keywords))
    stored = stored_dtype(checkpoint)
    if not is_chosen and stored is not None and stored.itemsize < model.config.dtype.itemsize:
        # The configuration's type would be wider than that of the files.
        model, _ = build(cls, folder, checkpoint, {**keywords, "dtype": stored})
    dtype = narrowed_dtype(model, checkpoint, wanted_dtypes(model))
    _finish(model, folder, generation)
    handle = stream_forward(model, checkpoint, memory=memory, device=device, dtype=dtype, **options)
    return attach(model, handle, device)


def attach(model: Any, handle: StreamedForward, device: torch.device) -> Any:
    """Opens a stream that lasts as long as the model."""
    handle.open_for_model()
    model.onelayer_stream = handle
    guard_moves(model, device, model.dtype, handle.close)
    return model


def wanted_dtypes(model: Any) -> Any:
    """The type that transformers gives a weight: some stay in single precision."""
    plan = model._get_dtype_plan(model.config.dtype)
    patterns = [(re.compile(re.escape(name).replace(r"\*", ".*")), dtype) for name, dtype in plan.items()]

    def wanted(name: str, dtype: torch.dtype) -> torch.dtype:
        return next((kept for pattern, kept in patterns if pattern.search(name)), dtype)

    return wanted


def _device(device_map: Any) -> torch.device:
    """The one device of a stream."""
    if isinstance(device_map, Mapping):
        places = list(cast("Mapping[str, Any]", device_map).values())
        if len(set(map(str, places))) != 1:
            raise ValueError(
                f"device_map={device_map!r}: a stream runs on one device. Name it, such as device_map='cuda:0'"
            )
        device_map = places[0]
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        device_map = "cuda:0" if torch.cuda.is_available() else "cpu"
    return torch.device("cpu" if device_map is None else device_map)


def _finish(model: Any, folder: str, given: Any) -> None:
    """The name, and the settings of ``generate``: given, from their file, or as the model has them."""
    model.config._name_or_path = model.name_or_path = folder
    if not model.can_generate():
        return
    if given is not None:
        model.generation_config = given
        return
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    except OSError:
        # Older folders have them in the model's configuration, where the model has found them.
        return
