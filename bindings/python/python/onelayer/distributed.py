"""Loads with several processes: each rank of ``torch.distributed`` reads a share of the bytes and sends
its tensors to the other ranks.

>>> for name, tensor in onelayer.distributed.tensors(onelayer.open(path), budget="256MiB"):
...     params[name].copy_(tensor)

Every rank of the group calls this with the same arguments. Each byte is read from disk only once. On
each rank the loader stays within its budget, besides the window of its own layers and the current
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._checkpoint import Checkpoint, TensorInfo
from ._frameworks import to_torch, torch_dtype, torch_shape
from ._options import Select, selected_tensors

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ._native import LayerStream, Report

# Options that would change tensors or their order on one rank, but not on the others.
_NOT_SHARED = ("order", "dtype", "shard", "rules")

Axis = Callable[[TensorInfo], int | None]
"""The dimension to divide among the ranks; ``None``: every rank gets the whole tensor."""


def owners(checkpoint: Checkpoint, world: int, select: Select | None = None) -> dict[str, int]:
    """Assigns each tensor to the one of ``world`` ranks that reads it.

    Shares are balanced, within every stretch of layers. The result is the same on every rank, since it
    depends only on names, sizes and layers.
    """
    if world < 1:
        raise ValueError(f"world={world}: expected at least one rank")
    names = (
        set(checkpoint.keys()) - checkpoint.aliases.keys() if select is None else selected_tensors(checkpoint, select)
    )
    return dict(checkpoint._native.owners(world, names))


def tensors(
    checkpoint: Checkpoint,
    *,
    group: ProcessGroup | None = None,
    device: object = "cpu",
    axis: Axis | None = None,
    select: Select | None = None,
    **stream_options: Any,
) -> SharedTensors:
    """Iterates over all tensors with their names, in the same order on every rank.

    One rank reads each tensor and sends it to the others: whole (broadcast), or divided along the
    dimension given by ``axis`` (scatter), whose length must be divisible by the number of ranks.
    ``device`` must suit the group's backend: ``"cpu"`` for gloo, a CUDA device for NCCL. Other options as
    for ``Checkpoint.stream``, without ``order``, ``dtype``, ``shard`` and ``rules``: tensors are sent as
    they are in the files, layer by layer.

    The caller owns each tensor, except that a whole tensor on the rank that read it shares the memory of
    its layer.
    """
    for option in _NOT_SHARED:
        if stream_options.get(option) is not None:
            raise ValueError(
                f"{option}={stream_options[option]!r}: tensors are sent between ranks as they are in the files"
            )
    import torch.distributed as dist

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    readers = owners(checkpoint, world, select)
    mine = [name for name, reader in readers.items() if reader == rank]
    # A rank without a share takes part, too.
    stream = checkpoint.stream(device=device, select=mine, **stream_options) if mine else None
    return SharedTensors(checkpoint, readers, stream, _Exchange(group, rank, world, device), axis)


class SharedTensors(Iterator[tuple[str, "torch.Tensor"]]):
    """Iterator of shared tensors. Its end, or leaving it as a context manager, ends this rank's load."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        readers: dict[str, int],
        stream: LayerStream | None,
        exchange: _Exchange,
        axis: Axis | None,
    ) -> None:
        self._stream = stream
        self._tensors = self._all(checkpoint, readers, exchange, axis)

    def _all(
        self, checkpoint: Checkpoint, readers: dict[str, int], exchange: _Exchange, axis: Axis | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for layer in checkpoint.layers:
            keys = [key for key in layer.keys if key in readers]
            own = self._read(any(readers[key] == exchange.rank for key in keys))
            for key in keys:
                info = checkpoint.info(key)
                cut = None if axis is None else axis(info)
                # The reading rank must have the tensor; otherwise it would send uninitialised memory.
                mine = own.pop(key) if readers[key] == exchange.rank else None
                yield key, exchange.give(info, readers[key], mine, cut)
        self.close()

    def _read(self, has_share: bool) -> dict[str, torch.Tensor]:
        """This rank's tensors of the next layer. Only they hold the layer."""
        if self._stream is None or not has_share:
            return {}
        with next(self._stream) as layer:
            return {name: to_torch(tensor) for name, tensor in layer.items()}

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)

    @property
    def report(self) -> Report | None:
        """The report of this rank's own load; ``None`` if it had no share."""
        return None if self._stream is None else self._stream.report

    def close(self) -> None:
        """Ends this rank's load. Other ranks would then wait for it."""
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> SharedTensors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Exchange:
    """Sends tensors from the rank that read them to all ranks."""

    def __init__(self, group: ProcessGroup | None, rank: int, world: int, device: object) -> None:
        import torch

        self._group = group
        self.rank = rank
        self._world = world
        self._device = torch.device("cuda", device) if isinstance(device, int) else torch.device(str(device))

    def give(self, info: TensorInfo, owner: int, own: torch.Tensor | None, axis: int | None) -> torch.Tensor:
        """The tensor, or its part for this rank. ``own`` is set on the rank that read it."""
        shape = torch_shape(info.dtype, info.shape)
        if axis is None:
            return self._broadcast(info.dtype, shape, owner, own)
        if not -len(shape) <= axis < len(shape) or shape[axis] % self._world != 0:
            message = f"tensor {info.name!r} of shape {info.shape} cannot be divided into {self._world} along dimension {axis}"
            raise ValueError(message)
        return self._scatter(info.dtype, shape, owner, own, axis)

    def _broadcast(self, dtype: str, shape: tuple[int, ...], owner: int, own: torch.Tensor | None) -> torch.Tensor:
        import torch.distributed as dist

        whole = self._empty(dtype, shape) if own is None else own
        if whole.numel() > 0:
            dist.broadcast(_bytes(whole), self._global(owner), group=self._group)
        return whole

    def _scatter(
        self, dtype: str, shape: tuple[int, ...], owner: int, own: torch.Tensor | None, axis: int
    ) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        part_shape = list(shape)
        part_shape[axis] //= self._world
        part = self._empty(dtype, tuple(part_shape))
        parts = None
        if own is not None:
            parts = [_bytes(cut.contiguous()) for cut in torch.chunk(own, self._world, dim=axis)]
        if part.numel() > 0:
            dist.scatter(_bytes(part), parts, self._global(owner), group=self._group)
        return part

    def _empty(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        return torch.empty(shape, dtype=torch_dtype(dtype), device=self._device)

    def _global(self, rank: int) -> int:
        import torch.distributed as dist

        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, since not every backend supports every type."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)
