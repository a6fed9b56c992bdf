"""The plug-in for SGLang against the released package: how it registers, what it takes and refuses, what it hands to a model.

Real are the modules that load weights, their configuration and the plug-in machinery. Models, layers and everything that wants a
GPU is stood in for; SGLang is not started.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_parts
import pytest
import torch
from safetensors.torch import load_file

import onelayer
from checkpoints import FIXTURES, write_checkpoint

VERSION = engine_parts.use(
    "ONELAYER_SGLANG",
    "sglang",
    real={
        "sglang.srt.arg_groups.choices",
        "sglang.srt.configs.load_config",
        "sglang.srt.environ",
        "sglang.srt.model_loader.loader",
        "sglang.srt.model_loader.weight_utils",
        "sglang.srt.plugins",
        "sglang.srt.plugins.hook_registry",
    },
    given={
        "orjson": {"loads": json.loads},
        "sglang.srt.utils": {"is_hip": lambda: False, "is_npu": lambda: False, "get_bool_env_var": lambda *_: False},
        "sglang.srt.utils.common": {"is_cuda_alike": lambda: False},
        "sglang.srt.runtime_context": {"get_server_args": lambda: None},
        "sglang.srt.kernel_plugins.amd.binding": {"monokernel_weights_iterator": lambda model, weights: weights},
        "sglang.srt.configs.modelopt_config": {"ModelOptConfig": lambda **_: None},
    },
)

from sglang.srt import plugins
from sglang.srt.arg_groups import choices
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

SMALL = {"budget": "8MiB", "window": 2}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    """As SGLang does it, in every process, before arguments are read."""
    plugins.load_plugins()


def load_config(extra: Any = None, **other: Any) -> Any:
    return LoadConfig(load_format="onelayer", model_loader_extra_config=SMALL if extra is None else extra, **other)


def loaded(path: Path, model: Any = None, *, config: Any = None) -> dict[str, torch.Tensor]:
    model = model or SimpleNamespace()
    model_config = SimpleNamespace(
        model_path=str(path), revision=None, hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"])
    )
    loader = get_model_loader(config or load_config())
    return {name: tensor.clone() for name, tensor in loader._get_all_weights(model_config, model)}


def in_files(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_the_entry_point_is_what_sglang_loads() -> None:
    from onelayer.integrations.sglang import register

    assert engine_parts.entry_points(plugins.GENERAL_PLUGINS_GROUP)["onelayer"].load() is register
    register()
    assert choices.LOAD_FORMAT_CHOICES.count("onelayer") == 1
    print(f"SGLang {VERSION}")


def test_the_name_becomes_the_loader() -> None:
    from onelayer.integrations.sglang_loader import OneLayerLoader

    for name in ("onelayer", "OneLayer"):
        config = LoadConfig(load_format=name, model_loader_extra_config='{"budget": "8MiB"}')
        assert type(get_model_loader(config)) is OneLayerLoader
        # A copy of a configuration is checked once more.
        assert type(get_model_loader(dataclasses.replace(config, tp_rank=1))) is OneLayerLoader


def test_other_formats_are_checked_as_before() -> None:
    for name in ("auto", "safetensors", "Mistral"):
        config = LoadConfig(load_format=name)
        assert config.load_format is LoadFormat(name.lower())
        assert type(get_model_loader(config)) is DefaultModelLoader
    with pytest.raises(ValueError, match="twolayer"):
        LoadConfig(load_format="twolayer")


@pytest.mark.parametrize("name", ["llama", "llama_sharded", "gemma2", "gpt2", "qwen2_moe"])
def test_weights_are_those_of_the_files(name: str) -> None:
    assert_same(loaded(FIXTURES / name), in_files(FIXTURES / name))


def test_layers_come_in_the_order_of_the_model() -> None:
    names = list(loaded(FIXTURES / "llama_sharded"))
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert names[0] == "model.embed_tokens.weight"


def test_prefixes_and_secondary_weights() -> None:
    second = DefaultModelLoader.Source(str(FIXTURES / "gpt2"), None, prefix="second.")
    found = loaded(FIXTURES / "llama", SimpleNamespace(secondary_weights=(second,)))
    renamed = {f"second.{name}": tensor for name, tensor in in_files(FIXTURES / "gpt2").items()}
    assert_same(found, in_files(FIXTURES / "llama") | renamed)


def test_files_that_were_found_at_startup() -> None:
    loader = get_model_loader(load_config())
    path = FIXTURES / "llama_sharded"
    model_config = SimpleNamespace(
        model_path=str(path), revision=None, hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"])
    )
    (resolved,) = loader.resolve_model_weights(model_config, SimpleNamespace())
    weights = loader._get_weights_iterator(
        resolved.source, resolved_source=resolved, startup_prefetch_started=True, startup_prefetch_active=True
    )
    assert_same({name: tensor.clone() for name, tensor in weights}, in_files(path))


def test_a_draft_model_gets_its_own_layer(tmp_path: Path) -> None:
    shapes = {f"model.mtp.layers.{layer}.weight": ("F32", (layer + 1, 2)) for layer in range(3)}
    write_checkpoint(tmp_path / "model.safetensors", {**shapes, "model.norm.weight": ("F32", (2,))})
    found = loaded(tmp_path, config=load_config(draft_model_idx=1))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "model.mtp.layers.0.weight": (2, 2),
        "model.norm.weight": (2,),
    }


def test_the_engine_finishes_what_was_loaded() -> None:
    class Model:
        def __init__(self) -> None:
            self.loaded: set[str] = set()

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.loaded = {name for name, _ in weights}

    path, model = FIXTURES / "llama", Model()
    loader = get_model_loader(load_config())
    source = DefaultModelLoader.Source(str(path), None)
    loader.load_weights_only(model, loader._get_weights_iterator(source), torch.device("cpu"))
    assert model.loaded == in_files(path).keys()


def test_pickled_checkpoints_are_left_to_sglang(tmp_path: Path) -> None:
    torch.save({"model.norm.weight": torch.arange(4.0)}, tmp_path / "pytorch_model.bin")
    assert_same(loaded(tmp_path), {"model.norm.weight": torch.arange(4.0)})


def test_options() -> None:
    with pytest.raises(ValueError, match="budgte"):
        get_model_loader(load_config({"budgte": "2GiB"}))
    with pytest.raises(ValueError, match="2 gigs"):
        get_model_loader(load_config({"budget": "2 gigs"}))
    with pytest.raises(ValueError, match="window=1"):
        get_model_loader(load_config({"window": 1}))
    with pytest.raises(onelayer.BudgetError) as refused:
        loaded(FIXTURES / "llama", config=load_config({"budget": 1024}))
    assert refused.value.budget == 1024 < refused.value.required
    # The engine's own configuration is left as it was.
    config = load_config(dict(SMALL))
    get_model_loader(config)
    assert config.model_loader_extra_config == SMALL
