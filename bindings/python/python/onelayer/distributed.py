"""Several processes, one read: with ``torch.distributed`` each rank reads a share of the bytes, and the tensors travel between
the ranks.

>>> for name, tensor in onelayer.distributed.tensors(onelayer.open(path), budget="256MiB"):
...     params[name].copy_(tensor)

Every rank of the group calls this with the same arguments. Each byte is read from disk once in all; on each rank the loader
stays within its budget, beside the layers of its own share in the window and the tensor that is in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._checkpoint import Checkpoint, Select, TensorInfo
from ._frameworks import to_torch, torch_dtype, torch_shape

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ._native import LayerStream, Report

# What would make other tensors, or another order of layers, on the rank that reads than the other ranks expect.
_NOT_SHARED = ("order", "dtype", "shard", "rules")

Axis = Callable[[TensorInfo], int | None]
"""Along which dimension a tensor is cut among the ranks; ``None`` for one that every rank gets whole."""


def owners(checkpoint: Checkpoint, world: int, select: Select | None = None) -> dict[str, int]:
    """Which of ``world`` ranks reads each tensor, so that each is read once in all.

    Shares are balanced, and balanced all the way through the layers. The same on every rank: names, sizes and layers decide.
    """
    if world < 1:
        raise ValueError(f"world={world}: expected at least one rank")
    names = set(checkpoint.keys()) if select is None else checkpoint._selected(select)
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
    """All tensors with their names, in the same order on every rank: an iterator.

    Each is read by one rank, which gives it to the others: whole (broadcast), or where ``axis`` names a dimension, its part to
    each (scatter), which has to be divisible by their number. ``device`` has to suit the group's backend: ``"cpu"`` for gloo, a
    CUDA device for NCCL. Other options are those of ``Checkpoint.stream``, but for ``order``, ``dtype``, ``shard`` and
    ``rules``: tensors travel as the files have them, layer by layer.

    A tensor is the caller's own, except that on the rank that read it a whole one shares the memory of its layer.
    """
    for option in _NOT_SHARED:
        if stream_options.get(option) is not None:
            raise ValueError(
                f"{option}={stream_options[option]!r}: tensors travel between ranks as the files have them"
            )
    import torch.distributed as dist

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    readers = owners(checkpoint, world, select)
    mine = [name for name, reader in readers.items() if reader == rank]
    # A rank without a share takes part all the same.
    stream = checkpoint.stream(device=device, select=mine, **stream_options) if mine else None
    return SharedTensors(checkpoint, readers, stream, _Exchange(group, rank, world, device), axis)


class SharedTensors(Iterator[tuple[str, "torch.Tensor"]]):
    """Tensors on their way between ranks. Leaving it as a context manager, or its end, ends this rank's own load."""

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
                # The rank that reads it has it: a missing one must not become memory that nobody has written.
                mine = own.pop(key) if readers[key] == exchange.rank else None
                yield key, exchange.give(info, readers[key], mine, cut)
        self.close()

    def _read(self, has_share: bool) -> dict[str, torch.Tensor]:
        """What this rank has read of the next layer. Only the tensors hold the layer."""
        if self._stream is None or not has_share:
            return {}
        with next(self._stream) as layer:
            return {name: to_torch(tensor) for name, tensor in layer.items()}

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)

    @property
    def report(self) -> Report | None:
        """What this rank itself has read; ``None`` if it had no share."""
        return None if self._stream is None else self._stream.report

    def close(self) -> None:
        """Ends this rank's own load. The others wait for it then."""
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
    """How a tensor gets from the rank that read it to all of them."""

    def __init__(self, group: ProcessGroup | None, rank: int, world: int, device: object) -> None:
        import torch

        self._group = group
        self.rank = rank
        self._world = world
        self._device = torch.device("cuda", device) if isinstance(device, int) else torch.device(str(device))

    def give(self, info: TensorInfo, owner: int, own: torch.Tensor | None, axis: int | None) -> torch.Tensor:
        """The tensor, or its part for this rank. ``own`` is there on the rank that read it."""
        shape = torch_shape(info.dtype, info.shape)
        if axis is None:
            return self._broadcast(info.dtype, shape, owner, own)
        if not -len(shape) <= axis < len(shape) or shape[axis] % self._world != 0:
            message = f"tensor {info.name!r} of shape {info.shape} cannot be cut into {self._world} along {axis}"
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
    """The same memory as bytes: not every backend knows every type."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)
