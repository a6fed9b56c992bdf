"""Forwards of modules whose weights come from a checkpoint just in time.

```text
forward pre-hook of a layer -> its weights are put into the module
layer runs                     meanwhile the loader reads the next layers
forward hook of the layer   -> weights are taken out, their memory goes to the next layer
```

The loader passes over the streamed layers without end, so the first layers of the next forward are read
while the caller does something else.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn

from .._checkpoint import Checkpoint
from .._checkpoint import open as open_checkpoint
from .._frameworks import float_name, torch_dtype
from .._native import Layer
from .._sizes import human_size, optional_size, parse_size
from ._names import Names, Slot, match
from ._plan import ForwardPlan, Keep, make_plan
from ._quantised import DecodedLayer, QuantisedWeight, find_quantised
from ._sequence import LayerSequence, Totals

# Waits below this share of the time are not the limit.
_BOUND_MIN = 0.1
# Above this share, layers run so quickly that a second one in the window gains little.
_NARROWER_MIN = 0.7


def stream_forward(
    model: nn.Module,
    source: str | os.PathLike[str] | Checkpoint,
    *,
    memory: int | str,
    device: Any = None,
    keep: Keep = "auto",
    window: int = 2,
    budget: int | str | None = None,
    dtype: Any = None,
    quantise: str | None = None,
    io: str | None = None,
) -> StreamedForward:
    """Runs ``model`` with the weights of ``source`` in ``memory`` bytes. Use it in a ``with`` statement.

    The model is built without weights, by ``onelayer.torch.empty``. Its forwards work as always, under
    ``torch.no_grad()`` or ``torch.inference_mode()``, one at a time. After the ``with`` block it is empty
    again.

    - ``memory``: limit of the weights and of reading them: layers that stay, a window of streamed layers,
      decoded weights, and ``budget``. Mapped embeddings are in the page cache and do not count. Activations,
      caches, buffers and adapters are the caller's, on top.
    - ``device``: of the weights. Default: the CPU. Buffers and adapters are moved there.
    - ``keep``: the layers of stacks that stay: ``"auto"``, as many as fit; ``"none"``; or their names. What
      is outside stacks always stays. With ``"auto"`` on the CPU, a model that fits whole is mapped instead
      of copied, unless ``dtype`` or quantised weights change it. Embeddings that nothing else uses are
      mapped, too.
    - ``window``: streamed layers in memory at once. A limit too small for it gets fewer.
    - ``budget``: host memory for reading. Default: 64 MiB, or less within a small limit.
    - ``dtype``: wider floats are narrowed to it; others keep the type of the file. Weights that
      ``loadcheck convert`` has quantised are decoded just in time to the type of the other floats.
    - ``quantise``: ``"int8"``, ``"fp8"`` or ``"int4"`` (``-g32``, ``-g64``, ``-g128``): weights of stacks are
      quantised while they are read, and decoded when their layer runs. So two to four times as many layers
      stay. What is streamed is read whole all the same: convert the files for that.
    - ``io``: as in ``Checkpoint.stream``.

    Raises ``BudgetError`` if the smallest window does not fit, and ``ValueError`` if names or shapes of
    model and checkpoint do not fit together, or if the model has weights already.
    """
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window={window!r}: expected a number of layers")
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    target = torch.device("cpu" if device is None else device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", 0)
    names = match(model, checkpoint.keys(), checkpoint.aliases)
    _check_empty(names)
    if dtype is not None and float_name(dtype) not in ("bf16", "f16", "f32"):
        raise ValueError(f"dtype={dtype!r}: expected bf16, f16 or f32; without it, weights keep the type of the file")
    narrowed = None if dtype is None else torch_dtype(float_name(dtype).upper())
    quantised = find_quantised(checkpoint, names.slots, narrowed, quantise)
    _check_shapes(checkpoint, names, quantised)
    options = {"dtype": dtype, "quantise": quantise, "io": io}
    plan = make_plan(
        model,
        checkpoint,
        names,
        quantised,
        memory=parse_size(memory),
        budget=optional_size(budget),
        keep=keep,
        window=window,
        options={"device": target, **options},
    )
    return StreamedForward(model, checkpoint, names, quantised, plan, target, options)


def _check_empty(names: Names) -> None:
    """Weights that are there already would stay, on top of the limit."""
    for slots in names.slots.values():
        held = slots[0].get()
        if isinstance(held, nn.Parameter) and held.device.type != "meta":
            raise ValueError(
                f"parameter {slots[0].path!r} has memory already: build the module with onelayer.torch.empty, "
                "or give its memory back with onelayer.torch.unload"
            )


def _check_shapes(checkpoint: Checkpoint, names: Names, quantised: Mapping[str, QuantisedWeight]) -> None:
    for key, slots in names.slots.items():
        wanted = slots[0].get()
        if wanted is None or key in quantised:
            continue
        stored = checkpoint.info(key).shape
        if tuple(wanted.shape) != stored:
            raise ValueError(f"tensor {key!r} has shape {list(stored)}, the module expects {list(wanted.shape)}")


@dataclass(frozen=True)
class ForwardReport:
    """What forwards took so far. ``str(report)`` says what limits them, and what would help."""

    forwards: int
    seconds: float
    """Time in calls of the module itself; on a GPU, without work that is queued."""
    waited_seconds: float
    """Time in which they waited for weights."""
    decoding_seconds: float
    """Time in which quantised weights were decoded."""
    streamed_bytes: int
    """Bytes that one forward reads, as in the plan."""
    read_bytes: int
    """Bytes read for streamed layers so far, those read ahead included."""
    restarts: int
    """How often layers were called in another order than that of the stream."""
    bound: str
    """What limits forwards: ``disk`` (reading), ``fill`` (copying and casting on the host), ``link`` (copying to
    the device), ``decoding`` (quantised weights) or ``compute`` (the module's own work)."""
    plan: ForwardPlan

    @property
    def advice(self) -> str:
        """What would make forwards faster."""
        if self.restarts > self.forwards:
            return "layers are called in an order that changes: keep more of them"
        if self.bound in ("disk", "fill") and self.plan.streamed:
            narrower = "window=1 leaves room for one more, or " if self._is_narrower_better() else ""
            return (
                f"{narrower}more memory keeps more layers: {human_size(self.streamed_bytes)} are read at each forward"
            )
        if self.bound == "link":
            return "more device memory, to keep more layers; or quantised weights"
        if self.bound == "decoding":
            return "weights that are not quantised, if the disk has time to spare"
        return "nothing to gain from loading: the module's own work takes the time"

    def _is_narrower_better(self) -> bool:
        """True if layers run so quickly that reading the next one meanwhile gains little."""
        return self.plan.window > 1 and self.waited_seconds > _NARROWER_MIN * self.seconds

    def __str__(self) -> str:
        each = self.seconds / self.forwards if self.forwards else 0.0
        waited = self.waited_seconds / self.seconds if self.seconds else 0.0
        return (
            f"{self.forwards} forwards, {each:.2f} s each, {waited:.0%} of it waiting; "
            f"limited by {self.bound}; {self.advice}"
        )


# Modules inside a `with` block.
_STREAMED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class StreamedForward:
    """A module whose weights are there while ``with`` lasts. Made by ``stream_forward``."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        names: Names,
        quantised: Mapping[str, QuantisedWeight],
        plan: ForwardPlan,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        self._model_reference = weakref.ref(model)
        self._model: nn.Module | None = model
        self.plan = plan
        self._checkpoint = checkpoint
        self._names = names
        self._quantised = quantised
        self._device = device
        self._options = dict(options, device=device, budget=plan.budget or None)
        self._hooks: list[Any] = []
        self._layers: list[_LayerHooks] = []
        self._stream: LayerSequence | None = None
        self._restored: list[tuple[Slot, torch.Tensor]] = []
        self._clock = _Clock(self._take_out)
        self._is_open = False
        self._is_for_model = False
        self._finalizer: weakref.finalize[..., nn.Module] | None = None

    @property
    def model(self) -> nn.Module:
        """The module."""
        model = self._model_reference()
        if model is None:
            raise RuntimeError("the module is gone, and its stream with it: keep a reference to the module")
        return model

    def open_for_model(self) -> None:
        """Opens the handle until the module is dropped. ``close`` and a ``with`` block end it sooner."""
        # The module refers to the handle: without a way back it is freed with its last user.
        self._model = None
        self.__enter__()
        self._is_for_model = True
        self._finalizer = weakref.finalize(self.model, _close_with_model, weakref.ref(self))

    def __enter__(self) -> StreamedForward:
        if self._is_open and self._is_for_model:
            return self
        if self.model in _STREAMED:
            raise RuntimeError("the module is streamed already: one `with` at a time")
        _STREAMED.add(self.model)
        self._is_open = True
        self._clock, self._stream = _Clock(self._take_out), None
        try:
            self._fill()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Takes all weights out of the module and frees them. Harmless when repeated."""
        if not self._is_open:
            return
        try:
            if self._finalizer is not None:
                self._finalizer.detach()
            for hook in self._hooks:
                hook.remove()
            self._take_out()
            if self._stream is not None:
                self._stream.close()
        finally:
            for slot, tensor in self._restored:
                slot.put(tensor)
            self._hooks, self._layers, self._restored = [], [], []
            self._is_open = False
            model = self._model_reference()
            if model is not None:
                _STREAMED.discard(model)

    def _take_out(self) -> None:
        """Empties layers that are filled, as an interrupt leaves them."""
        for layer in self._layers:
            layer.empty()

    @property
    def report(self) -> ForwardReport:
        """What forwards took so far."""
        clock = self._clock
        stream = self._stream
        totals = Totals({}, 0) if stream is None else stream.totals()
        waits = {cause: totals.waits.get(cause, 0.0) for cause in ("disk", "fill", "link")}
        waited = 0.0 if stream is None else stream.waited_seconds
        bound = "compute"
        if waited > _BOUND_MIN * clock.seconds:
            bound = max(waits, key=lambda cause: waits[cause])
        elif clock.decoding_seconds > clock.seconds / 2:
            bound = "decoding"
        return ForwardReport(
            forwards=clock.forwards,
            seconds=clock.seconds,
            waited_seconds=waited,
            decoding_seconds=clock.decoding_seconds,
            streamed_bytes=self.plan.streamed_bytes,
            read_bytes=totals.read_bytes,
            restarts=0 if stream is None else stream.restarts,
            bound=bound,
            plan=self.plan,
        )

    def __repr__(self) -> str:
        return f"<onelayer.torch.StreamedForward of {type(self._model_reference()).__name__}: {self.plan}>"

    def __deepcopy__(self, memo: object) -> StreamedForward:
        raise TypeError("a streamed module cannot be copied: build and stream another one")

    def __reduce__(self) -> str:
        raise TypeError("a streamed module cannot be pickled: send its folder, and stream it there")

    def _fill(self) -> None:
        """Brings what stays, and hooks the layers that come just in time."""
        slots = [slot for places in self._names.slots.values() for slot in places]
        self._restored = [(slot, tensor) for slot in slots if (tensor := slot.get()) is not None]
        self._move_others({id(tensor) for _, tensor in self._restored})
        if self.plan.mapped:
            for key, lazy in self._checkpoint.state_dict(mode="mapped", select=self.plan.mapped).items():
                self._put(key, lazy[...])
        self._hook(self._fill_kept())

    def _fill_kept(self) -> dict[str, torch.Tensor]:
        """Reads the layers that stay. Returns the tensors of quantised weights, which stay as stored."""
        scales = {weight.scale for weight in self._quantised.values()}
        select = [key for name in self.plan.kept for key in self.plan.keys[name]]
        select += [key for keys in self.plan.parts.values() for key in keys]
        stored: dict[str, torch.Tensor] = {}
        if not select:
            return stored
        for key, tensor in self._checkpoint.tensors(select=select, window="all", order="file", **self._options):
            if key in self._quantised or key in scales:
                stored[key] = tensor
            else:
                self._put(key, tensor)
        for name in self.plan.kept:
            for key in self.plan.keys[name]:
                if key in self._quantised and name not in self.plan.stacked:
                    weight = self._quantised[key]
                    decoded = weight.empty(self._device)
                    weight.decode(stored.pop(key), stored.pop(weight.scale), decoded)
                    self._put(key, decoded)
        return stored

    def _put(self, key: str, tensor: torch.Tensor) -> None:
        for slot in self._names.slots[key]:
            slot.put(tensor)

    def _move_others(self, of_checkpoint: set[int]) -> None:
        """Buffers and adapters that have values go to the device of the weights."""
        for module in self.model.modules():
            for leaf, tensor in [*module._buffers.items(), *module._parameters.items()]:
                if tensor is None or tensor.device.type == "meta" or tensor.device == self._device:
                    continue
                if id(tensor) not in of_checkpoint:
                    slot = Slot(module, leaf)
                    self._restored.append((slot, tensor))
                    with torch.inference_mode(False):
                        slot.put(tensor.detach().to(self._device))

    def _hook(self, stored: Mapping[str, torch.Tensor]) -> None:
        decoder = DecodedLayer(self._device)
        if self.plan.streamed:
            self._stream = stream = LayerSequence(self._checkpoint, self.plan, self._options)
            for name in self.plan.streamed:
                self._hook_layer(name, self.plan.keys[name], _Streamed(name, stream), decoder)
        for name in self.plan.kept:
            weights = [key for key in self.plan.keys[name] if key in self._quantised]
            if weights and name in self.plan.stacked:
                self._hook_layer(name, weights, _Stored(stored), decoder)
        self._hook_module(self.model, self._clock.begin, self._clock.end)

    def _hook_layer(
        self, name: str, keys: Collection[str], weights: _Streamed | _Stored, decoder: DecodedLayer
    ) -> None:
        slots = {key: self._names.slots[key] for key in keys if key in self._names.slots}
        quantised = {key: self._quantised[key] for key in keys if key in self._quantised}
        hooks = _LayerHooks(name, slots, quantised, weights, decoder, self._clock)
        self._layers.append(hooks)
        module = self.model.get_submodule(self._names.module_path(name) or "")
        self._hook_module(module, hooks.put_in, hooks.take_out)

    def _hook_module(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Calls ``before`` ahead of every other hook, and ``after`` even if the module fails."""
        if "torch._dynamo" in sys.modules:
            # Compiled code breaks off here instead of looking into it.
            before, after = torch.compiler.disable(before), torch.compiler.disable(after)
        self._hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._hooks.append(module.register_forward_hook(after, always_call=True))


def _close_with_model(reference: weakref.ref[StreamedForward]) -> None:
    handle = reference()
    if handle is not None:
        handle.close()


class _Clock:
    """Counts forwards and their time. Refuses two at once."""

    def __init__(self, recover: Callable[[], None]) -> None:
        self._recover = recover
        self.forwards = 0
        self.seconds = self.decoding_seconds = 0.0
        self._began: float | None = None
        self._thread = 0

    def begin(self, module: nn.Module, *_: Any) -> None:
        if self._began is not None and self._thread != threading.get_ident() and _is_alive(self._thread):
            raise RuntimeError(
                f"{type(module).__name__} runs in another thread: weights are there for one forward at a time"
            )
        if self._began is not None:
            # The last forward was interrupted: hooks do not run then.
            self._recover()
        self._began, self._thread = time.perf_counter(), threading.get_ident()

    def end(self, *_: Any) -> None:
        if self._began is not None and self._thread == threading.get_ident():
            self.forwards += 1
            self.seconds += time.perf_counter() - self._began
            self._began = None


class _Streamed:
    """Where the weights of a streamed layer come from."""

    def __init__(self, name: str, stream: LayerSequence) -> None:
        self._name = name
        self._stream = stream
        self._layer: Layer | None = None

    def take(self) -> None:
        self._layer = self._stream.take(self._name)

    def __getitem__(self, key: str) -> torch.Tensor:
        assert self._layer is not None
        return torch.from_dlpack(self._layer[key])

    def release(self) -> None:
        if self._layer is not None:
            self._layer.close()
            self._layer = None


class _Stored:
    """Where the quantised weights of a layer that stays come from."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def take(self) -> None: ...

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def release(self) -> None: ...


class _LayerHooks:
    """Puts the weights of one layer into its module when it is called, and takes them out when it returns."""

    def __init__(
        self,
        name: str,
        slots: Mapping[str, tuple[Slot, ...]],
        quantised: Mapping[str, QuantisedWeight],
        weights: _Streamed | _Stored,
        decoder: DecodedLayer,
        clock: _Clock,
    ) -> None:
        self._name = name
        self._slots = slots
        self._quantised = quantised
        self._weights = weights
        self._decoder = decoder
        self._clock = clock
        self._empty = [(slot, slot.get()) for places in slots.values() for slot in places]
        self._is_filled = threading.Lock()
        self._refused: set[int] = set()
        self._thread = 0

    def put_in(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and (_wants_gradients((args, kwargs)) or _has_trainable(module)):
            self._refused.add(threading.get_ident())
            raise RuntimeError(
                f"layer {self._name!r}: gradients need the weights after the forward, when they are gone. "
                "Use torch.no_grad() or torch.inference_mode()"
            )
        if self._was_interrupted(module):
            self.empty()
        if not self._is_filled.acquire(blocking=False):
            self._refused.add(threading.get_ident())
            raise RuntimeError(
                f"layer {self._name!r} is called while it runs: weights are there for one forward at a time"
            )
        self._thread = threading.get_ident()
        try:
            self._fill()
        except BaseException:
            self.empty()
            raise

    def _was_interrupted(self, module: nn.Module) -> bool:
        """True if the weights are from a call that has ended without its hooks, by Ctrl-C."""
        if not self._is_filled.locked():
            return False
        if self._thread != threading.get_ident():
            return not _is_alive(self._thread)
        frame, running = sys._getframe(), 0
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:
                running += 1
        return running < 2

    def _fill(self) -> None:
        self._weights.take()
        began = time.perf_counter()
        decoded = self._decoder.decode(self._quantised, self._weights.__getitem__) if self._quantised else {}
        self._clock.decoding_seconds += time.perf_counter() - began
        for key, slots in self._slots.items():
            tensor = decoded[key] if key in decoded else self._weights[key]
            for slot in slots:
                slot.put(tensor)

    def take_out(self, *_: Any) -> None:
        """After the layer, also if it failed. A call that was refused takes nothing out."""
        if threading.get_ident() in self._refused:
            self._refused.discard(threading.get_ident())
        else:
            self.empty()

    def empty(self) -> None:
        """Takes the weights out, if they are there."""
        if self._is_filled.locked():
            for slot, tensor in self._empty:
                if tensor is not None:
                    slot.put(tensor)
            self._weights.release()
            if self._quantised:
                self._decoder.release()
            self._is_filled.release()


def _is_alive(thread: int) -> bool:
    return any(found.ident == thread for found in threading.enumerate())


def _has_trainable(module: nn.Module) -> bool:
    """True if a parameter with memory wants gradients: an adapter's."""
    return any(parameter.requires_grad and parameter.device.type != "meta" for parameter in module.parameters())


def _wants_gradients(value: Any) -> bool:
    """True if a tensor among arguments wants gradients."""
    if isinstance(value, torch.Tensor):
        return bool(value.requires_grad)
    if isinstance(value, Mapping):
        return any(map(_wants_gradients, cast("Mapping[object, object]", value).values()))
    return isinstance(value, (tuple, list)) and any(map(_wants_gradients, cast("Collection[Any]", value)))
