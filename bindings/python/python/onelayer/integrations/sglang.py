"""The plug-in for SGLang: ``--load-format onelayer``. The entry point ``sglang.srt.plugins`` calls `register`.

SGLang has no registry of loaders, but accepts a class instead of a format name. So this plug-in allows the
name in arguments and replaces it by the class when a configuration is checked. SGLang's loaders are
imported only then.
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
    """Registers the load format. SGLang calls it in every process, before it parses arguments."""
    from sglang.srt.arg_groups.choices import add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register(
        "sglang.srt.configs.load_config.LoadConfig._verify_load_format",
        _name_becomes_class,
        HookType.AROUND,
    )


def _name_becomes_class(original: Callable[[LoadConfig], None], config: LoadConfig) -> None:
    """Wraps SGLang's check of a format name: replaces ours by our loader, checks others as before."""
    if not isinstance(config.load_format, str) or config.load_format.lower() != LOAD_FORMAT:
        return original(config)
    from .sglang_loader import OneLayerLoader

    config.load_format = OneLayerLoader
    return None
