"""The plug-in for SGLang: ``--load-format onelayer``. The entry point ``sglang.srt.plugins`` calls `register`.

SGLang has no registry of loaders, but takes a class where it expects the name of a format. So the name is let through when
arguments are read, and becomes the class when a configuration is checked. Nothing heavy is imported before that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.configs.load_config import LoadConfig

LOAD_FORMAT = "onelayer"


@functools.cache
def register() -> None:
    """Makes the load format known. SGLang calls it in every process, before it reads arguments."""
    from sglang.srt.arg_groups.choices import add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register(
        "sglang.srt.configs.load_config.LoadConfig._verify_load_format",
        _name_becomes_class,
        HookType.AROUND,
    )


def _name_becomes_class(original: Callable[[LoadConfig], None], config: LoadConfig) -> None:
    """Runs instead of the check of a format's name: ours becomes our loader, every other is checked as before."""
    if not isinstance(config.load_format, str) or config.load_format.lower() != LOAD_FORMAT:
        return original(config)
    from .sglang_loader import OneLayerLoader

    config.load_format = OneLayerLoader
    return None
