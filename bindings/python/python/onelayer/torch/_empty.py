"""Modules without weights: parameters on the meta device, buffers with their values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

_Module = TypeVar("_Module", bound=nn.Module)


def empty(model: Callable[..., _Module] | Any, *args: Any, **kwargs: Any) -> _Module:
    """Builds a module whose parameters have shapes and no memory. Buffers keep their values.

    ``model`` is a class or a function that builds the module, called with the other arguments, or a
    configuration of transformers, whose first architecture is built with the configuration's dtype.
    The module is in evaluation mode. ``generation_config.json`` is not read: set ``model.generation_config``.
    Not for several threads at once.

    >>> onelayer.torch.empty(MyModel, hidden=4096)
    >>> onelayer.torch.empty(transformers.AutoConfig.from_pretrained("org/name"))
    """
    if isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__} already: pass its class, or its configuration")
    if args and not callable(model):
        raise TypeError("a configuration takes no other positional arguments: pass the class first instead")
    with parameters_on_meta():
        made: Any = model(*args, **kwargs) if callable(model) else _of_config(model, **kwargs)
        built: _Module = made
    built.eval()
    return built


@contextmanager
def parameters_on_meta() -> Generator[None, None, None]:
    """Every parameter that a module registers inside goes to the meta device. Not for several threads at once."""
    register = nn.Module.register_parameter
    # Parameters that are registered twice stay one.
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            known = moved.get(id(parameter))
            if known is None or known[0]() is not parameter:
                # The class and the attributes of the parameter stay.
                kept: Any = type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)
                kept.__dict__.update(parameter.__dict__)
                known = moved[id(parameter)] = (weakref.ref(parameter), kept)
            module._parameters[name] = known[1]

    # For every class of modules, as long as the block lasts.
    setattr(nn.Module, "register_parameter", registered)  # noqa: B010
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def _of_config(config: Any, **kwargs: Any) -> Any:
    names = getattr(config, "architectures", None)
    if not names:
        raise TypeError(
            f"{type(config).__name__} names no architecture: pass the class instead, "
            "as in onelayer.torch.empty(LlamaForCausalLM, config)"
        )
    import transformers

    found = getattr(transformers, names[0], None)
    if found is None:
        raise TypeError(f"transformers has no class {names[0]}: pass the class instead of the configuration")
    # The public way to build one class with a dtype; its name is private in every release so far.
    return found._from_config(config, **kwargs)
