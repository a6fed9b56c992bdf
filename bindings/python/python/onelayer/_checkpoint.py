"""Checkpoints: their tensors and layers, and the loads that they start."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from . import _native
from ._frameworks import float_name
from ._lazy import LazyTensor, Mode, StateDict, converter, reader_for
from ._sizes import optional_size
from ._sources import locate

if TYPE_CHECKING:
    from ._native import LayerStream, Plan

Select = str | Collection[str] | Callable[["TensorInfo"], bool]
"""A regular expression to search in names, a collection of names, or a predicate on each tensor."""


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

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens a file, a directory, an index or a pipeline; reads headers only.

        Raises ``FileNotFoundError`` for a missing file and ``CheckpointError`` for an invalid one.
        """
        self._native = _native.NativeCheckpoint(os.fspath(path))
        self._path = os.fspath(path)

    @property
    def path(self) -> str:
        """The opened path."""
        return self._path

    def keys(self) -> list[str]:
        """Names of all tensors, in file order."""
        return self._native.names()

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
        return [LayerInfo(name, nbytes, tuple(keys), stack) for name, stack, nbytes, keys in self._native.layers()]

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
        return self._native.plan(self._options(**stream_options))

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
          divide common architectures. ``rules`` take precedence: a regular expression for names, and the
          dimension to divide, or ``None`` for tensors that every rank loads whole.
        - ``io``: ``"auto"``, ``"buffered"``, ``"direct"``, ``"mmap"`` or ``"uring"``; ``readers``: reads in flight.
        - ``read_through``: holes of up to this many bytes are read through. Default: 64 KiB.
        - ``device_reserve``: device memory that must stay free. Default: 64 MiB.
        - ``on_stall``: seconds until a caller that holds the whole window gets a ``StalledError``.

        Raises ``BudgetError`` if the budget is too small, and ``DeviceError`` if the device cannot be used.
        """
        return self._native.stream(self._options(**stream_options))

    def tensors(self, *, framework: Literal["pt", "np"] = "pt", **stream_options: Any) -> Iterator[tuple[str, Any]]:
        """Yields all tensors with their names, as torch tensors or numpy arrays.

        They share the memory of their layer, which is freed with the last of them. Options as for ``stream``.
        """
        convert = converter(framework)
        with self.stream(**stream_options) as stream:
            for layer in stream:
                with layer:
                    leases = [(name, convert(tensor)) for name, tensor in layer.items()]
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
        selected = None if select is None else self._selected(select)
        names = [name for name in self.keys() if selected is None or name in selected]
        described = ((name, self._native.describe(name)) for name in names)
        return StateDict(
            {name: LazyTensor(reader, name, dtype, tuple(shape)) for name, (dtype, shape, _, _) in described}
        )

    def _options(
        self,
        *,
        device: object = "cpu",
        budget: int | str | None = None,
        device_budget: int | str | None = None,
        window: int | Literal["all"] | None = None,
        prefetch: int | None = None,
        select: Select | None = None,
        order: str = "execution",
        io: str | None = None,
        readers: int | None = None,
        dtype: object = None,
        passes: int | Literal["endless"] | None = None,
        keep: Collection[str] | Literal["outside"] | None = None,
        call_order: Collection[str] | None = None,
        quantise: str | None = None,
        quantise_only: Select | None = None,
        read_through: int | str | None = None,
        device_reserve: int | str | None = None,
        shard: tuple[int, int] | None = None,
        rules: Mapping[str, int | None] | None = None,
        on_stall: float | None = None,
    ) -> dict[str, Any]:
        if rules and shard is None:
            raise ValueError("rules divide tensors among ranks: shard=(rank, world) is missing")
        return {
            "target": _target(device),
            "budget": optional_size(budget),
            "device_budget": optional_size(device_budget),
            "window": _window(window),
            "prefetch": prefetch,
            "select": None if select is None else self._selected(select),
            "order": order,
            "io": io,
            "readers": readers,
            "dtype": None if dtype is None else float_name(dtype),
            "passes": _passes(passes),
            "keep": self._kept(keep),
            "call_order": None if call_order is None else list(call_order),
            "quantise": quantise,
            "quantise_only": None if quantise_only is None else self._selected(quantise_only),
            "read_through": optional_size(read_through),
            "device_reserve": optional_size(device_reserve),
            "shard": shard,
            "cuts": self._cuts(rules or {}),
            "stall_seconds": None if on_stall is None else float(on_stall),
        }

    def _kept(self, keep: Collection[str] | str | None) -> list[str] | None:
        if keep == "outside":
            return [layer.name for layer in self.layers if layer.stack is None]
        if isinstance(keep, str):
            raise ValueError(f"keep={keep!r}: expected names of layers, or 'outside'")
        return None if keep is None else list(keep)

    def _cuts(self, rules: Mapping[str, int | None]) -> dict[str, int | None]:
        """The dimension for each name, from the first rule that matches it."""
        patterns = [(re.compile(pattern), axis) for pattern, axis in rules.items()]
        matches = ((name, axis) for name in self.keys() for pattern, axis in reversed(patterns) if pattern.search(name))
        return dict(matches)

    def _selected(self, select: Select) -> set[str]:
        if isinstance(select, str):
            pattern = re.compile(select)
            return {name for name in self.keys() if pattern.search(name)}
        if callable(select):
            return {name for name in self.keys() if select(self.info(name))}
        names = set(select)
        for name in names:
            if name not in self:
                raise KeyError(name)
        return names

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
) -> Checkpoint:
    """Opens a checkpoint: a file, a directory, an index, a pipeline, or ``org/name[@revision]``.

    A name is looked up in the local cache of the Hugging Face hub. With ``download=True`` the package
    ``huggingface_hub`` downloads it first, with ``token``, unless ``offline`` is true.
    """
    path = locate(
        source,
        revision=revision,
        token=token,
        offline=offline,
        download=download,
        cache_dir=cache_dir,
    )
    return Checkpoint(path)


def _target(device: object) -> str:
    """The native name of a device."""
    if isinstance(device, int) and not isinstance(device, bool):
        return f"cuda:{device}"
    name = str(device)
    return {"cpu": "host", "cpu:0": "host", "cuda": "cuda:0"}.get(name, name)


def _passes(passes: int | str | None) -> int | None:
    """Zero stands for without end."""
    if passes == "endless":
        return 0
    if passes is None or (isinstance(passes, int) and passes > 0):
        return passes
    raise ValueError(f"passes={passes!r}: expected a number of passes, or 'endless'")


def _window(window: int | str | None) -> int | None:
    if window == "all":
        return 0
    if window is None or (isinstance(window, int) and window > 0):
        return window
    raise ValueError(f"window={window!r}: expected a number of layers, or 'all'")
