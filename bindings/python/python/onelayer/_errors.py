"""Exceptions that say what they are about. The native half raises them by name."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A file breaks the format, contradicts another one, or changed under the load.

    A path that leads to nothing is a ``FileNotFoundError`` instead.
    """

    path: str | None
    """The file or directory."""
    tensor: str | None
    """The tensor, if it is the fault of one."""

    def __init__(self, message: str, *, path: object = None, tensor: str | None = None) -> None:
        super().__init__(message)
        self.path = None if path is None else str(path)
        self.tensor = tensor


class BudgetError(ValueError):
    """A budget that cannot work. Nothing was read."""

    required: int
    """What would be needed, in bytes."""
    budget: int
    """What was allowed, in bytes."""
    tensor: str | None
    """The tensor that does not fit, if it is the fault of one."""

    def __init__(self, message: str, *, required: int, budget: int, tensor: str | None = None) -> None:
        super().__init__(message)
        self.required = required
        self.budget = budget
        self.tensor = tensor


class StalledError(RuntimeError):
    """The caller holds all that may be resident and waits for more."""

    held: list[str]
    """Names of the layers that the caller holds."""

    def __init__(self, message: str, *, held: list[str]) -> None:
        super().__init__(message)
        self.held = held


class CancelledError(RuntimeError):
    """The load was cancelled."""


class DeviceError(RuntimeError):
    """The device cannot be used, has too little memory, or failed."""
