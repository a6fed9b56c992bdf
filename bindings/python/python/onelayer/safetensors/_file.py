"""``safe_open`` with the interface of the package ``safetensors``."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from .._checkpoint import Checkpoint
from .._errors import CheckpointError
from .._lazy import LazyTensor, TensorReader, reader_for


def _their_error() -> type[Exception]:
    """The exception of the package ``safetensors``, if it is installed."""
    try:
        import safetensors
    except ImportError:
        return Exception
    found: type[Exception] = safetensors.SafetensorError
    return found


_MODES = {"mmap": "mapped", "pread": "owned"}


class SafetensorError(CheckpointError, _their_error()):  # type: ignore[misc]
    """An invalid file. Also a ``safetensors.SafetensorError`` if that package is installed."""


class safe_open:  # noqa: N801 - the name in safetensors
    """Opens a file lazily: reads its header now, and tensors on request.

    ``framework`` is ``"pt"`` or ``"np"``, ``device`` a torch device. With ``backend="pread"`` tensors own
    their memory; ``"mmap"`` gives views of a private, copy-on-write mapping.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str,
        device: object = "cpu",
        *,
        backend: str = "pread",
    ) -> None:
        if backend not in _MODES:
            raise ValueError(f"backend={backend!r}: expected 'pread' or 'mmap'")
        path = os.fspath(filename)
        if os.path.isdir(path):
            raise IsADirectoryError(21, "a directory, not a file", path)
        try:
            self._checkpoint = Checkpoint(path)
        except CheckpointError as error:
            raise SafetensorError(str(error), path=error.path, tensor=error.tensor) from None
        # Mappings are only for the CPU; other devices read.
        on_host = str(device) in ("cpu", "cpu:0")
        mode = _MODES[backend] if on_host else "owned"
        self._open_reader: TensorReader | None = reader_for(
            self._checkpoint, framework=framework, device=device, mode=mode, budget=None
        )

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Tensors already read, and views of the mapping, keep their memory alive.
        self._open_reader = None

    @property
    def _reader(self) -> TensorReader:
        if self._open_reader is None:
            raise SafetensorError(f"{self._checkpoint.path}: the file was closed", path=self._checkpoint.path)
        return self._open_reader

    def keys(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self.offset_keys())

    def offset_keys(self) -> list[str]:
        """Names of all tensors, in the order of their bytes."""
        _ = self._reader
        return self._checkpoint.keys()

    def metadata(self) -> dict[str, str] | None:
        """The metadata of the header, if there is any."""
        _ = self._reader
        return self._checkpoint.metadata or None

    def get_tensor(self, name: str) -> Any:
        """A whole tensor."""
        reader = self._reader
        self._check(name)
        return reader.whole(name)

    def get_tensors(self) -> dict[str, Any]:
        """All tensors, in the order of their bytes."""
        reader = self._reader
        reader.expect_all()
        return reader.all_of(self._checkpoint.keys())

    def get_slice(self, name: str) -> LazyTensor:
        """A lazy tensor: indexing reads only the indexed part."""
        reader = self._reader
        self._check(name)
        info = self._checkpoint.info(name)
        return LazyTensor(reader, name, info.dtype, info.shape)

    def _check(self, name: str) -> None:
        if name not in self._checkpoint:
            path = self._checkpoint.path
            raise SafetensorError(f"{path}: the file does not contain tensor {name!r}", path=path, tensor=name)


def load_all(filename: str | os.PathLike[str], framework: str, device: object, backend: str) -> dict[str, Any]:
    """Every tensor of a file."""
    with safe_open(filename, framework, device, backend=backend) as file:
        return file.get_tensors()
