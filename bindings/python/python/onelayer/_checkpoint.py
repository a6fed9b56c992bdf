"""Checkpoints: their tensors and layers, and the loads that they start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from . import _native
from ._fit import Fit, Tier, fit
from ._lazy import LazyTensor, Mode, StateDict, converter, reader_for
from ._options import LayerMap, Select, layer_map_text, opening, selected_names, stream_options_of
from ._sizes import optional_size
from ._sources import locate

if TYPE_CHECKING:
    from ._native import LayerStream, Plan


@dataclass(frozen=True)
class TensorInfo:
    """The description of a tensor in its file."""

    name: str
    dtype: str
    """As spelled in the file: ``BF16``, ``F8_E4M3``, ..."""
    shape: tuple[int, ...]
    nbytes: int
    path: str
    """The file that contains it."""


@dataclass(frozen=True)
class LayerInfo:
    """A layer before it is loaded."""

    name: str
    nbytes: int
    keys: tuple[str, ...]
    """Names of its tensors, in file order."""
    stack: str | None = None
    """The stack of alike layers that it belongs to, such as ``model.layers``; ``None`` outside stacks."""


class Checkpoint:
    """A checked description of a checkpoint, without its tensor data. May be shared by threads."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        header_bytes_max: int | str | None = None,
        allow_opaque_dtypes: bool = False,
        prefix: str | None = None,
        names: str | None = None,
    ) -> None:
        """Opens a file (safetensors, PyTorch or GGUF), a directory, an index or a pipeline; reads headers only.

        - ``header_bytes_max``: the longest header or index that is accepted. Default: 100 MB, as in safetensors.
        - ``allow_opaque_dtypes``: accepts tensors of types that safetensors does not know.
        - ``prefix``: the dictionary of a PyTorch file to read, such as ``"ema"``; ``""`` for the whole file.
          By default a training checkpoint is read as its weights (``state_dict``, ``model``, ...).
        - ``names``: ``"hf"`` gives the tensors of a GGUF file the names and the order of rows that the model has
          in transformers. Other formats keep their names.

        Raises ``FileNotFoundError`` for a missing file and ``CheckpointError`` for an invalid one.
        """
        self._opening = opening(header_bytes_max, allow_opaque_dtypes, prefix, names)
        self._native = _native.NativeCheckpoint(os.fspath(path), self._opening)
        self._path = os.fspath(path)

    @property
    def path(self) -> str:
        """The opened path."""
        return self._path

    def keys(self) -> list[str]:
        """Names of all tensors, in file order, and then the further names of tied weights."""
        return self._native.names()

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Further names of tied weights, each with the tensor whose bytes it shares. Only PyTorch files have them."""
        return dict(self._native.aliases())

    def __len__(self) -> int:
        return len(self._native)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._native

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def info(self, name: str) -> TensorInfo:
        """Describes a tensor. Raises ``KeyError`` if there is none of that name."""
        dtype, shape, nbytes, path = self._native.describe(name)
        return TensorInfo(name, dtype, tuple(shape), nbytes, os.fspath(path))

    @cached_property
    def layers(self) -> list[LayerInfo]:
        """The layers, in execution order."""
        return self.layers_by(None)

    def layers_by(self, layer_map: LayerMap | None) -> list[LayerInfo]:
        """The layers as a layer map groups them; see ``stream``."""
        parts = self._native.layers(layer_map_text(layer_map))
        return [LayerInfo(name, nbytes, tuple(keys), stack) for name, stack, nbytes, keys in parts]

    @property
    def nbytes(self) -> int:
        """Total size of all tensors, in bytes."""
        return self._native.nbytes

    @property
    def files(self) -> list[str]:
        """The files with the tensors."""
        return [os.fspath(path) for path, _ in self._native.files()]

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the headers; if files disagree, that of the first file."""
        merged: dict[str, str] = {}
        for _, entries in self._native.files():
            for key, value in entries:
                merged.setdefault(key, value)
        return merged

    @property
    def notes(self) -> list[str]:
        """Decisions made while opening, such as which of two sets of files is used."""
        return self._native.notes

    @cached_property
    def min_budget(self) -> int:
        """The smallest host budget that a stream to the CPU accepts, in bytes."""
        return self.plan().min_budget

    def plan(self, **stream_options: Any) -> Plan:
        """The plan of ``stream`` with these options: every term of its memory. Reads no tensor.

        The device need not exist. Raises ``BudgetError`` if the budget is too small.
        """
        return self._native.plan(stream_options_of(self, **stream_options))

    def fit(self, **options: Any) -> Fit:
        """Which layer fits where: on GPUs, the host or the disk. Reads headers and ``config.json`` only.

        Options, all by keyword:

        - ``vram``: memory that layers may use on each GPU, such as ``["24GiB", "24GiB"]``; ``host``: host memory for
          the rest, without a limit by default, ``budget`` of the load (64 MiB) included. What is left goes to the disk.
        - ``context``, ``batch``: tokens of a sequence and sequences at once, to keep room for caches and
          intermediate results. Default: no room. ``kv_dtype``: type of the cache, ``"bf16"`` by default.
        - ``dtype``, ``quantise``: weights as a load with these options has them; or ``precision``: ``"bf16"``,
          ``"fp8"``, ``"int8"``, ``"int4"``, computed.
        - ``device_map``: checks this map instead of making one. ``layer_map``: as for ``stream``.

        Raises ``BudgetError`` if the memory is too small, and ``ValueError`` for a map that does not fit the checkpoint.
        """
        return fit(self, **options)

    def device_map(self, **options: Any) -> dict[str, Tier]:
        """The device map of ``fit`` with these options, for accelerate, transformers and ``onelayer.load``."""
        return fit(self, **options).device_map

    def stream(self, **stream_options: Any) -> LayerStream:
        """Streams the layers, in execution order.

        Options, all by keyword:

        - ``device``: ``"cpu"``, ``"cuda:0"``, a ``torch.device``, or ``"none"`` to read and drop.
        - ``budget``: maximum host memory besides the layers, such as ``"512MiB"``. Default: 64 MiB.
        - ``device_budget``: maximum bytes of resident layers.
        - ``window``: maximum number of resident layers, or ``"all"``. Default: 2, the current and the next.
        - ``prefetch``: layers read ahead. Default: 2.
        - ``passes``: how often the layers come, or ``"endless"``. Default: once. The window's memory is
          allocated once, and the next pass is read ahead while this one is used.
        - ``keep``: names of layers that stay resident from the first pass to the last, or
          ``"outside"`` for those outside stacks. They come on top of the window.
        - ``call_order``: names of all layers, in the order in which they are wanted.
        - ``select``: a regular expression, names, or a predicate on ``TensorInfo``.
        - ``order``: ``"execution"``, or with ``window="all"`` also ``"file"``.
        - ``dtype``: ``"bf16"``, ``"f16"`` or ``"f32"`` (or a ``torch.dtype``): wider floats are cast to it while
          loading.
        - ``quantise``: ``"int8"``, ``"fp8"``, ``"int4"`` (``-g32``, ``-g64``, ``-g128``): weights of stacks
          arrive quantised, with their scales as ``NAME_scale``. ``quantise_only`` selects other tensors,
          like ``select``.
        - ``shard``: ``(rank, world)``: reads only this rank's part of each tensor, divided as engines
          divide common architectures. ``rules`` take precedence: a regular expression for names, and a
          ``Split``, or the dimension to divide, or ``None`` for tensors that every rank loads whole.
        - ``share``: ``(rank, world)``: reads only this rank's share of the tensors, each of them whole.
        - ``layer_map``: overrides how tensors are grouped into layers: the path of a TOML file, or its
          contents as a dictionary: ``{"groups": {"head": ["model.norm", "lm_head"]}}``.
        - ``hash``: hashes tensors while they are loaded, also with ``device="none"``: ``tensor.hash()``.
        - ``on_layer``, ``on_pass``: called with the ``LayerTimes`` of each layer once it was freed, and with
          the ``PassTimes`` of each pass. They run in the thread that takes the layers, when it asks for the next
          one and when it closes the stream. An exception ends the loop over the stream.
        - ``io``: ``"auto"``, ``"buffered"``, ``"direct"``, ``"mmap"`` or ``"uring"``; ``readers``: reads in flight.
        - ``read_through``: holes of up to this many bytes are read through. Default: 64 KiB.
        - ``device_reserve``: device memory that must stay free. Default: 64 MiB.
        - ``spare``: a ``SpareMemory`` that layers on the CPU take their memory from, with ``window="all"``.
        - ``on_stall``: seconds until a caller that holds the whole window gets a ``StalledError``.

        Raises ``BudgetError`` if the budget is too small, and ``DeviceError`` if the device cannot be used.
        """
        return self._native.stream(stream_options_of(self, **stream_options))

    def tensors(self, *, framework: Literal["pt", "np"] = "pt", **stream_options: Any) -> Iterator[tuple[str, Any]]:
        """Yields all tensors with their names, as torch tensors or numpy arrays.

        They share the memory of their layer, which is freed with the last of them. Options as for ``stream``.
        With ``window="all"``, files are read from front to back, which is faster than layer by layer.
        """
        if stream_options.get("window") == "all" and "passes" not in stream_options:
            stream_options.setdefault("order", "file")
        convert = converter(framework)
        select = stream_options.get("select")
        wanted = None if select is None or not self.aliases else selected_names(self, select)
        with self.stream(**stream_options) as stream:
            for layer in stream:
                with layer:
                    names = [name for name in layer if wanted is None or name not in self.aliases or name in wanted]
                    leases = [(name, convert(layer[name])) for name in names]
                # Now only the exports hold the layer; drop each reference as it is yielded.
                leases.reverse()
                while leases:
                    yield leases.pop()

    def state_dict(
        self,
        *,
        device: object = "cpu",
        framework: Literal["pt", "np"] = "pt",
        mode: Mode = "owned",
        budget: int | str | None = None,
        select: Select | None = None,
    ) -> StateDict:
        """All tensors by name, read lazily. For ``from_pretrained(None, state_dict=...)`` of transformers.

        Indexing reads a tensor; ``tensor[...]`` reads it whole. Threads may read at the same time. Options:

        - ``device``: device of torch tensors. Other devices than the CPU get tensors in pieces, so that
          the host never holds a whole one.
        - ``mode``: ``"owned"`` copies tensors to memory that they own. ``"mapped"`` (CPU only) gives views
          of a private, copy-on-write mapping: unwritten pages stay in the page cache and are reclaimable.
          If a mapped file is truncated, the process is killed.
        - ``budget``: maximum host memory besides the tensors, for up to four readers at once.
        - ``select``: as for ``stream``.
        """
        reader = reader_for(self, framework=framework, device=device, mode=mode, budget=optional_size(budget))
        selected = None if select is None else selected_names(self, select)
        names = [name for name in self.keys() if selected is None or name in selected]
        described = ((name, self._native.describe(name)) for name in names)
        return StateDict(
            {name: LazyTensor(reader, name, dtype, tuple(shape)) for name, (dtype, shape, _, _) in described}
        )

    def __repr__(self) -> str:
        return f"<onelayer.Checkpoint {self._path!r}: {len(self)} tensors, {self.nbytes} bytes>"


def open(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    offline: bool | None = None,
    download: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    header_bytes_max: int | str | None = None,
    allow_opaque_dtypes: bool = False,
    prefix: str | None = None,
    names: str | None = None,
) -> Checkpoint:
    """Opens a checkpoint: a file, a directory, an index, a pipeline, or ``org/name[@revision]``.

    A name is looked up in the local cache of the Hugging Face hub. With ``download=True`` the package
    ``huggingface_hub`` downloads it first, with ``token``, unless ``offline`` is true.
    The last four options are those of ``Checkpoint``.
    """
    path = locate(
        source,
        revision=revision,
        token=token,
        offline=offline,
        download=download,
        cache_dir=cache_dir,
    )
    return Checkpoint(
        path,
        header_bytes_max=header_bytes_max,
        allow_opaque_dtypes=allow_opaque_dtypes,
        prefix=prefix,
        names=names,
    )
