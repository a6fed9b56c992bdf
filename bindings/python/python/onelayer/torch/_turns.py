"""Several modules that run one after the other, with the weights of each in one limit.

```text
a module without weights is called
  -> modules that were used longest ago are emptied, until the new one fits
  -> it gets what is free: all of its weights, or a stream within the rest
```
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .._checkpoint import Checkpoint
from .._errors import BudgetError
from .._sizes import human_size
from ._forward import ForwardReport, StreamedForward, stream_forward
from ._plan import ForwardPlan

# More than any model needs: the plan of a whole module.
_UNLIMITED = 1 << 62
# After so many turns of a single call each, two modules alternate: they share the memory.
_ALTERNATE_MIN = 3


@dataclass(frozen=True)
class PartReport:
    """What one part of a pipeline took so far."""

    turns: int
    """How often its weights were brought in."""
    kept: bool
    """True if the whole part was in memory at its last turn, false if it was streamed."""
    plan: ForwardPlan | None
    """The plan of its last turn; ``None`` before the first one."""
    last: ForwardReport | None
    """What the forwards of its last turn took."""


class Part:
    """A module without weights, and where they come from."""

    def __init__(self, name: str, module: nn.Module, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self.name = name
        self._module = weakref.ref(module)
        self._checkpoint = checkpoint
        self._options = dict(options)
        self._hooks: list[Any] = []
        self.handle: StreamedForward | None = None
        self.turns = 0
        self.calls = 0
        self.last: ForwardReport | None = None
        self.plan: ForwardPlan | None = None
        self.whole_bytes = _taken(self._handle(_UNLIMITED).plan)
        """Memory for all of its weights."""
        self.least_bytes = self._least()
        """The smallest memory in which it runs."""

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    @property
    def taken(self) -> int:
        """Memory that it has now."""
        return _taken(self.handle.plan) if self.handle is not None else 0

    def _least(self) -> int:
        memory = 1
        while memory < self.whole_bytes:
            try:
                self._handle(memory)
                break
            except BudgetError as error:
                # A larger limit has a larger buffer for reading.
                memory = max(error.required, memory + 1)
        return memory

    def check(self, memory: int) -> None:
        """Raises ``BudgetError`` if it cannot run in ``memory`` bytes."""
        try:
            self._handle(memory)
        except BudgetError as error:
            raise BudgetError(f"{self.name}: {error}", required=self.least_bytes, budget=memory) from None

    def _handle(self, memory: int) -> StreamedForward:
        module = self.module
        assert module is not None
        return stream_forward(module, self._checkpoint, memory=memory, **self._options)

    def open(self, memory: int) -> None:
        self.unwatch()
        handle = self._handle(memory)
        handle.open_for_model()
        self.handle, self.plan = handle, handle.plan
        self.turns += 1
        self.calls = 0

    def close(self) -> None:
        if self.handle is not None:
            self.last = self.handle.report
            self.calls = self.last.forwards
            self.handle.close()
            self.handle = None

    def watch(self, turns: Turns) -> None:
        """Calls ``turns.use`` before any module of the part runs. Some parts are called by another way than forward."""
        module = self.module
        if module is None or self._hooks:
            return
        before = partial(_before, weakref.ref(turns), self.name)
        if "torch._dynamo" in sys.modules:
            before = torch.compiler.disable(before)
        self._hooks = [
            each.register_forward_pre_hook(before, prepend=True, with_kwargs=True) for each in module.modules()
        ]

    def unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _taken(plan: ForwardPlan) -> int:
    # What is mapped as a whole counts here: the limit is that of everything at once.
    return plan.needed if plan.streamed else max(plan.needed, plan.kept_bytes + plan.mapped_bytes)


def _before(turns: weakref.ref[Turns], name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    found = turns()
    if found is None:
        return
    known = set(module._forward_pre_hooks)
    found.use(name)
    # A running call does not see the hooks that were added during it.
    for key, hook in list(module._forward_pre_hooks.items()):
        if key not in known:
            hook(module, args, kwargs)


class Turns:
    """The parts of a pipeline, whose weights share one limit. A context manager that ends them all.

    What is used longest ago is dropped first. ``print(turns)`` says what each part gets.
    """

    def __init__(self, parts: Mapping[str, Part], memory: int) -> None:
        self._parts = dict(parts)
        self._memory = memory
        self._order: list[str] = []
        self._lock = threading.RLock()
        self._is_closed = False
        self._alternated: dict[frozenset[str], int] = {}
        for part in self._parts.values():
            part.check(memory)
        for part in self._parts.values():
            part.watch(self)

    @property
    def memory(self) -> int:
        """The limit of all weights together, in bytes."""
        return self._memory

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the parts whose weights are in memory, the one used last at the end."""
        return tuple(name for name in self._order if self._parts[name].handle is not None)

    @property
    def report(self) -> dict[str, PartReport]:
        """What each part took so far, by name."""
        return dict(self._reports())

    def _reports(self) -> Iterator[tuple[str, PartReport]]:
        for name, part in self._parts.items():
            last = part.last if part.handle is None else part.handle.report
            kept = part.plan is not None and not part.plan.streamed
            yield name, PartReport(part.turns, kept, part.plan, last)

    def use(self, name: str) -> None:
        """Brings the weights of a part in, and takes out those of others as far as they have no room."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{name} has no weights: the pipeline was closed. Load it again")
            part = self._parts[name]
            if part.handle is not None:
                return
            partners = self._partners(name)
            limit = self._share(name, partners)
            wanted = min(part.whole_bytes, limit)
            for other in [each for each in self.active if each not in partners]:
                if self._taken() + wanted > self._memory:
                    self._drop(other)
            for other in partners:
                # It may have had all of the memory so far.
                if self._parts[other].taken > self._share(other, [*partners, name]):
                    self._drop(other)
            part.open(min(limit, self._memory - self._taken()))
            self._order = [*(each for each in self._order if each != name), name]

    def _taken(self) -> int:
        return sum(part.taken for part in self._parts.values())

    def _drop(self, name: str) -> None:
        part = self._parts[name]
        part.close()
        part.watch(self)

    def _partners(self, name: str) -> list[str]:
        """The parts that take turns with this one at every step, as a control net does."""
        last = self.active[-1:]
        for other in last:
            handle = self._parts[other].handle
            pair = frozenset((name, other))
            single = handle is not None and handle.report.forwards <= 1 and self._parts[name].calls == 1
            self._alternated[pair] = self._alternated.get(pair, 0) + 1 if single else 0
        found = [
            other
            for other in self._parts
            if other != name and self._alternated.get(frozenset((name, other)), 0) >= _ALTERNATE_MIN
        ]
        least = sum(self._parts[each].least_bytes for each in [name, *found])
        return found if least <= self._memory else []

    def _share(self, name: str, partners: list[str]) -> int:
        """The limit of a part beside its partners: what each needs, and the rest by size."""
        parts = [self._parts[each] for each in {name, *partners}]
        if sum(part.whole_bytes for part in parts) <= self._memory:
            return self._memory
        rest = self._memory - sum(part.least_bytes for part in parts)
        missing = sum(part.whole_bytes - part.least_bytes for part in parts)
        part = self._parts[name]
        return part.least_bytes + rest * (part.whole_bytes - part.least_bytes) // max(missing, 1)

    def close(self) -> None:
        """Takes all weights out and frees them. The pipeline cannot run any more. Harmless when repeated."""
        with self._lock:
            self._is_closed = True
            for part in self._parts.values():
                part.close()
                part.watch(self)

    def __enter__(self) -> Turns:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        lines = [f"{human_size(self._memory)} for {len(self._parts)} parts in turn"]
        for name, part in self._parts.items():
            way = "kept while it fits beside the others" if part.whole_bytes <= self._memory else "streamed"
            lines.append(f"  {name}: {human_size(part.whole_bytes)}, {way}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<onelayer stream of {', '.join(self._parts)} in {human_size(self._memory)}>"

    def __deepcopy__(self, memo: object) -> Turns:
        raise TypeError("a streamed pipeline cannot be copied: load another one")

    def __reduce__(self) -> str:
        raise TypeError("a streamed pipeline cannot be pickled: send its folder, and load it there")
