"""Exceptions with details. The native module raises them by name."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A file violates the format, contradicts another file, or changed during the load.

    A missing path raises ``FileNotFoundError`` instead.
    """

    path: str | None
    """The file or directory."""
    tensor: str | None
    """The tensor, if the error is about one."""

    def __init__(self, message: str, *, path: object = None, tensor: str | None = None) -> None:
        super().__init__(message)
        self.path = None if path is None else str(path)
        self.tensor = tensor


class BudgetError(ValueError):
    """The budget is too small. Nothing was read."""

    required: int
    """The smallest possible budget, in bytes."""
    budget: int
    """The given budget, in bytes."""
    tensor: str | None
    """The tensor that does not fit, if the error is about one."""

    def __init__(self, message: str, *, required: int, budget: int, tensor: str | None = None) -> None:
        super().__init__(message)
        self.required = required
        self.budget = budget
        self.tensor = tensor


class StalledError(RuntimeError):
    """The caller waits for a layer while it holds as many layers as may be resident."""

    held: list[str]
    """Names of the layers held by the caller."""

    def __init__(self, message: str, *, held: list[str]) -> None:
        super().__init__(message)
        self.held = held


class CancelledError(RuntimeError):
    """The load was cancelled."""


class DeviceError(RuntimeError):
    """The device cannot be used, has too little memory, or failed."""
