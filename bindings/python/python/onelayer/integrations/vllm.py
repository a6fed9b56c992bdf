"""The plug-in for vLLM: ``--load-format onelayer``. The entry point ``vllm.general_plugins`` calls `register`.

It extends vLLM's default loader, which finds and downloads files, skips weights that a rank does not
need, and counts loaded weights. Only reading safetensors files is replaced; vLLM reads all other files.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.weight_utils import (
    filter_mm_encoder_only_safetensors_files,
    filter_safetensors_files_by_weight_name,
)

from ._weights import split_options, weights

if TYPE_CHECKING:
    import torch
    from vllm.config.load import LoadConfig

LOAD_FORMAT = "onelayer"


class OneLayerLoader(DefaultModelLoader):
    """vLLM's default loader, but safetensors files are read through a ring of fixed size."""

    counter_before_loading_weights: float

    def __init__(self, load_config: LoadConfig) -> None:
        """Takes our options from ``model_loader_extra_config``.

        Raises ``ValueError`` for an unknown option, and for a load strategy of vLLM's own readers.
        """
        strategy = load_config.safetensors_load_strategy
        if strategy not in (None, "lazy", "torchao"):
            raise ValueError(
                f"safetensors_load_strategy={strategy!r} is a strategy of vLLM's own readers, not of load format {LOAD_FORMAT}"
            )
        self._options, rest = split_options(load_config.model_loader_extra_config)
        as_base = copy.copy(load_config)
        # The base class finds the files as usual.
        as_base.load_format = "auto"
        as_base.model_loader_extra_config = rest
        super().__init__(as_base)

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        folder, files, use_safetensors, index_file = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        # Pickled checkpoints, and those of torchao, whose tensors are joined from several.
        if not use_safetensors or self.load_config.safetensors_load_strategy == "torchao":
            return super()._get_weights_iterator(source)
        if self._encoder_only_lm_prefixes is not None:
            files = filter_mm_encoder_only_safetensors_files(
                files,
                folder,
                index_file,
                self._encoder_only_lm_prefixes,
                weights_mapper=self._encoder_only_weights_mapper,
            )
            if not files:
                raise RuntimeError(f"{source.model_or_path}: no file contains only encoder weights")
        if source.is_unused_weight is not None:
            files = filter_safetensors_files_by_weight_name(files, source.is_unused_weight)
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        return self._read(files, source.prefix)

    def _read(self, files: list[str], prefix: str) -> Generator[tuple[str, torch.Tensor], None, None]:
        def skips(name: str) -> bool:
            return should_skip_weight(name, self.local_expert_ids)

        for name, tensor in weights(files, self._options, skips=skips):
            yield prefix + name, tensor


@functools.cache
def register() -> None:
    """Registers the load format. vLLM calls it in every process, maybe several times."""
    from vllm.model_executor.model_loader import register_model_loader

    register_model_loader(LOAD_FORMAT)(OneLayerLoader)
