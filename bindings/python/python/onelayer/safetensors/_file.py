"""One file, opened as ``safetensors.safe_open`` opens it."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from .._checkpoint import Checkpoint
from .._errors import CheckpointError
from .._lazy import LazyTensor, Loads, loads_for


def _their_error() -> type[Exception]:
    """safetensors' own exception, if that is installed."""
    try:
        import safetensors
    except ImportError:
        return Exception
    found: type[Exception] = safetensors.SafetensorError
    return found


_MODES = {"mmap": "mapped", "pread": "owned"}


class SafetensorError(CheckpointError, _their_error()):  # type: ignore[misc]
    """What is wrong with a file. Also one of safetensors' own, if that is installed."""


class safe_open:  # noqa: N801 - the name that it takes the place of
    """Opens a file lazily: reads its header, and tensors when they are asked for.

    ``framework`` is ``"pt"`` or ``"np"``, ``device`` a device of torch. ``backend="pread"`` gives tensors memory of their own,
    ``"mmap"`` views of a private, copy-on-write mapping.
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
        # A mapping has nothing to give to a device: it is read there.
        on_host = str(device) in ("cpu", "cpu:0")
        mode = _MODES[backend] if on_host else "owned"
        self._open_loads: Loads | None = loads_for(
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
        # Tensors that were read, and views of a mapping, have owners of their own.
        self._open_loads = None

    @property
    def _loads(self) -> Loads:
        if self._open_loads is None:
            raise SafetensorError(f"{self._checkpoint.path}: the file was closed", path=self._checkpoint.path)
        return self._open_loads

    def keys(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self.offset_keys())

    def offset_keys(self) -> list[str]:
        """Names of all tensors, in the order of their bytes."""
        _ = self._loads
        return self._checkpoint.keys()

    def metadata(self) -> dict[str, str] | None:
        """The free text of the header, if there is any."""
        _ = self._loads
        return self._checkpoint.metadata or None

    def get_tensor(self, name: str) -> Any:
        """A whole tensor."""
        loads = self._loads
        self._check(name)
        return loads.whole(name)

    def get_tensors(self) -> dict[str, Any]:
        """All tensors, in the order of their bytes."""
        loads = self._loads
        loads.expect_all()
        return {name: loads.whole(name) for name in self._checkpoint}

    def get_slice(self, name: str) -> LazyTensor:
        """A tensor that is read when it is indexed, and only as much of it."""
        loads = self._loads
        self._check(name)
        info = self._checkpoint.info(name)
        return LazyTensor(loads, name, info.dtype, info.shape)

    def _check(self, name: str) -> None:
        if name not in self._checkpoint:
            path = self._checkpoint.path
            raise SafetensorError(f"{path}: the file does not contain tensor {name!r}", path=path, tensor=name)


def load_all(filename: str | os.PathLike[str], framework: str, device: object, backend: str) -> dict[str, Any]:
    """Every tensor of a file."""
    with safe_open(filename, framework, device, backend=backend) as file:
        return file.get_tensors()
