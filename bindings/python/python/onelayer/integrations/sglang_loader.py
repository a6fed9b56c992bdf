"""The loader of the plug-in for SGLang. A separate file, because it imports SGLang's loaders.

It extends SGLang's default loader, which finds and downloads files and creates the model. Only reading
safetensors files is replaced; SGLang reads all other files.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors

from ._weights import split_options, weights

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.load_config import LoadConfig

_INDEX_FILE = "model.safetensors.index.json"


class OneLayerLoader(DefaultModelLoader):
    """SGLang's default loader, but safetensors files are read through a ring of fixed size."""

    counter_before_loading_weights: float

    def __init__(self, load_config: LoadConfig) -> None:
        """Takes our options from ``model_loader_extra_config``. The base class refuses unknown ones."""
        self._options, rest = split_options(load_config.model_loader_extra_config)
        as_base = copy.copy(load_config)
        # The base class finds the files as usual.
        as_base.load_format = LoadFormat.AUTO
        as_base.model_loader_extra_config = rest
        super().__init__(as_base)

    def _get_weights_iterator(
        self,
        source: DefaultModelLoader.Source,
        *,
        resolved_source: DefaultModelLoader.ResolvedSource | None = None,
        **of_startup: Any,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if resolved_source is None:
            files, use_safetensors = self._files(source)
        else:
            files, use_safetensors = list(resolved_source.weight_files), resolved_source.use_safetensors
        if not use_safetensors:
            return super()._get_weights_iterator(source, resolved_source=resolved_source, **of_startup)
        found = weights(files, self._options)
        draft_model = self.load_config.draft_model_idx
        if draft_model is not None:
            return self._filter_mtp_weights(found, source.prefix, draft_model)
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        return ((source.prefix + name, tensor) for name, tensor in found)

    def _files(self, source: DefaultModelLoader.Source) -> tuple[list[str], bool]:
        """The files of a source, and whether they are safetensors files."""
        folder, files, use_safetensors = self._prepare_weights(
            source.model_or_path,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if use_safetensors and source.model_config is not None:
            files = maybe_add_mtp_safetensors(files, folder, _INDEX_FILE, source.model_config.hf_config)
        return files, use_safetensors
