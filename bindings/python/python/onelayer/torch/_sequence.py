"""The streamed layers of a module, in the order in which they are called."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._checkpoint import Checkpoint
from .._errors import StalledError
from .._native import Layer, LayerStream, Report
from ._plan import ForwardPlan

# A weight that somebody keeps holds its layer: this long, until the stream says so.
_STALL_SECONDS = 10


@dataclass(frozen=True)
class Totals:
    """What streams have counted."""

    waits: Mapping[str, float]
    read_bytes: int

    def plus(self, report: Report) -> Totals:
        waits = {cause: self.waits.get(cause, 0.0) + seconds for cause, seconds in report.waits.items()}
        return Totals(waits, self.read_bytes + report.read_bytes)


class LayerSequence:
    """The streamed layers, again and again, in the order in which they are called.

    Files do not say in which order layers run. The stream begins with the order of the checkpoint. When
    another layer than the next one is called, it begins again with those that were called since the last
    call of this one: the decoder without its encoder, for example.
    """

    def __init__(self, checkpoint: Checkpoint, plan: ForwardPlan, options: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._options = options
        self._order = list(plan.streamed)
        self._position = 0
        self._called: deque[str] = deque(maxlen=4 * len(plan.streamed))
        self._before = Totals({}, 0)
        self._one_at_a_time = threading.Lock()
        self.restarts = 0
        self.waited_seconds = 0.0
        self._stream: LayerStream | None = self._start()

    def _start(self) -> LayerStream:
        window = min(self._plan.window, len(self._order))
        return self._checkpoint.stream(
            select=[key for name in self._order for key in self._plan.keys[name]],
            window=window,
            prefetch=window,
            passes="endless",
            call_order=self._order,
            on_stall=_STALL_SECONDS,
            **self._options,
        )

    def take(self, name: str) -> Layer:
        """The layer that is called now."""
        if not self._one_at_a_time.acquire(blocking=False):
            raise RuntimeError(f"layer {name!r} is called by two threads: weights are there for one forward at a time")
        try:
            return self._take(name)
        finally:
            self._one_at_a_time.release()

    def _take(self, name: str) -> Layer:
        if self._stream is None or self._order[self._position] != name:
            self._restart_at(name)
        assert self._stream is not None
        began = time.perf_counter()
        try:
            layer = next(self._stream, None)
        except StalledError as error:
            self.close()
            raise StalledError(
                f"layer {name!r} has no room: weights of {', '.join(error.held)} are still referred to after "
                "their layer returned, by a view, a hook or autograd, or the layers call each other. Keep these layers (keep=...), "
                "or make the window larger",
                held=error.held,
            ) from error
        except BaseException:
            # A stream that failed or was interrupted has ended. The next call begins a new one.
            self.close()
            raise
        self.waited_seconds += time.perf_counter() - began
        if layer is None or layer.name != name:
            self.close()
            raise RuntimeError(f"layer {name!r} is called, and the stream has {layer!r}")
        self._position = (self._position + 1) % len(self._order)
        self._called.append(name)
        return layer

    def _restart_at(self, name: str) -> None:
        if self._stream is not None:
            self.restarts += 1
        self.close()
        if name in self._called:
            called = list(self._called)
            since = len(called) - 1 - called[::-1].index(name)
            self._order = list(dict.fromkeys(called[since:]))
        else:
            at = self._plan.streamed.index(name)
            self._order = [*self._plan.streamed[at:], *self._plan.streamed[:at]]
        self._position = 0
        self._stream = self._start()

    def totals(self) -> Totals:
        return self._before if self._stream is None else self._before.plus(self._stream.report)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._before = self.totals()
            self._stream = None
