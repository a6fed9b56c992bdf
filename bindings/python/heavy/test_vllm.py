"""The plug-in for vLLM against the released package: how it registers, what it takes and refuses, what it hands to a model.

Real are the modules that load weights, their configuration and the plug-in machinery. Models, layers and everything that wants a
GPU is stood in for; vLLM is not started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    "ONELAYER_VLLM",
    "vllm",
    real={
        "vllm.config.load",
        "vllm.config.utils",
        "vllm.envs",
        "vllm.model_executor.model_loader",
        "vllm.model_executor.model_loader.base_loader",
        "vllm.model_executor.model_loader.default_loader",
        "vllm.model_executor.model_loader.ep_weight_filter",
        "vllm.model_executor.model_loader.weight_utils",
        "vllm.plugins",
    },
    given={
        "vllm.tracing": {"instrument": lambda **_: lambda function: function},
        "vllm.utils.cpu_resource_utils": {"get_cgroup_memory_limit": lambda: None},
        "vllm.utils.import_utils": {"PlaceholderModule": lambda name: SimpleNamespace(placeholder_attr=lambda _: None)},
        "vllm.transformers_utils.repo_utils": {"list_filtered_repo_files": lambda **_: []},
    },
)

import vllm.config as vllm_config
import vllm.distributed as vllm_distributed
from vllm import plugins
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader

SMALL = {"budget": "8MiB", "window": 2}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    """As vLLM does it, in every process."""
    plugins.load_general_plugins()


class Model:
    """Keeps what it is given, as a model copies it: nothing else of a weight stays alive."""

    def __init__(self, *parameters: str) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self._parameters = parameters

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            self.loaded[name] = tensor.clone()
        return set(self.loaded)

    def named_parameters(self) -> Iterator[tuple[str, None]]:
        return ((name, None) for name in self._parameters)

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        return iter(())


def model_config(path: Path, **other: Any) -> Any:
    defaults = {"model": str(path), "revision": None, "quantization": None, "multimodal_config": None, "is_moe": False}
    return SimpleNamespace(**{**defaults, **other})


def loaded(
    path: Path, model: Model | None = None, *, extra: dict[str, Any] | None = None, **other: Any
) -> dict[str, torch.Tensor]:
    loader = get_model_loader(LoadConfig(load_format="onelayer", model_loader_extra_config=extra or SMALL))
    model = model or Model()
    loader.load_weights(model, model_config(path, **other))
    return model.loaded


def in_files(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_the_entry_point_is_what_vllm_loads() -> None:
    from onelayer.integrations.vllm import OneLayerLoader, register

    assert engine_parts.entry_points(plugins.DEFAULT_PLUGINS_GROUP)["onelayer"].load() is register
    register()
    # Names are lower-cased by vLLM itself.
    assert type(get_model_loader(LoadConfig(load_format="OneLayer"))) is OneLayerLoader
    print(f"vLLM {VERSION}")


@pytest.mark.parametrize("name", ["llama", "llama_sharded", "gemma2", "gpt2", "qwen2_moe"])
def test_weights_are_those_of_the_files(name: str) -> None:
    assert_same(loaded(FIXTURES / name), in_files(FIXTURES / name))


def test_layers_come_in_the_order_of_the_model() -> None:
    names = list(loaded(FIXTURES / "llama_sharded"))
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert names[0] == "model.embed_tokens.weight"


def test_prefixes_and_secondary_weights() -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    model = Model()
    model.secondary_weights = (DefaultModelLoader.Source(str(FIXTURES / "gpt2"), None, prefix="second."),)  # type: ignore[attr-defined]
    second = {f"second.{name}": tensor for name, tensor in in_files(FIXTURES / "gpt2").items()}
    assert_same(loaded(FIXTURES / "llama", model), in_files(FIXTURES / "llama") | second)


def test_a_rank_reads_its_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(
        tmp_path / "model.safetensors",
        {f"model.layers.0.mlp.experts.{expert}.up_proj.weight": ("F32", (4, 4)) for expert in range(4)}
        | {"model.norm.weight": ("F32", (4,)), "model.layers.0.mlp.experts.0.up_proj.scale": ("F32", (1,))},
    )
    parallel = SimpleNamespace(
        enable_expert_parallel=True,
        enable_ep_weight_filter=True,
        enable_eplb=False,
        data_parallel_size=1,
        tensor_parallel_size=2,
        prefill_context_parallel_size=1,
        expert_placement_strategy="linear",
    )
    config = SimpleNamespace(parallel_config=parallel)
    monkeypatch.setattr(vllm_config, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(vllm_distributed, "get_tensor_model_parallel_rank", lambda: 1)
    names = set(loaded(tmp_path, is_moe=True, get_num_experts=lambda: 4))
    assert names == {
        "model.layers.0.mlp.experts.2.up_proj.weight",
        "model.layers.0.mlp.experts.3.up_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.scale",
        "model.norm.weight",
    }


def test_files_without_a_wanted_weight_are_left_alone() -> None:
    model = Model()
    model.is_unused_checkpoint_weight = lambda name: name.startswith("model.layers.0.")  # type: ignore[attr-defined]
    path = FIXTURES / "llama_sharded"
    kept = [
        file
        for file in path.glob("*.safetensors")
        if not all(name.startswith("model.layers.0.") for name in load_file(file))
    ]
    expected = {name: tensor for file in kept for name, tensor in load_file(file).items()}
    assert_same(loaded(path, model), expected)


def test_a_parameter_without_a_weight_is_told_about() -> None:
    with pytest.raises(ValueError, match=r"nowhere\.weight"):
        loaded(FIXTURES / "llama", Model("model.norm.weight", "nowhere.weight"))
    loaded(FIXTURES / "llama", Model("nowhere.weight"), extra={"enable_weights_track": False, **SMALL})


def test_pickled_checkpoints_are_left_to_vllm(tmp_path: Path) -> None:
    torch.save({"model.norm.weight": torch.arange(4.0)}, tmp_path / "pytorch_model.bin")
    assert_same(loaded(tmp_path), {"model.norm.weight": torch.arange(4.0)})


def test_options() -> None:
    def loader(**extra: Any) -> Any:
        return get_model_loader(LoadConfig(load_format="onelayer", model_loader_extra_config=extra))

    with pytest.raises(ValueError, match="budgte"):
        loader(budgte="2GiB")
    with pytest.raises(ValueError, match="2 gigs"):
        loader(budget="2 gigs")
    with pytest.raises(ValueError, match="eager"):
        get_model_loader(LoadConfig(load_format="onelayer", safetensors_load_strategy="eager"))
    with pytest.raises(ValueError, match="window=1"):
        loader(window=1)
    with pytest.raises(onelayer.BudgetError) as refused:
        loaded(FIXTURES / "llama", extra={"budget": 1024})
    assert refused.value.budget == 1024 < refused.value.required
    # The engine's own configuration is left as it was.
    config = LoadConfig(load_format="onelayer", model_loader_extra_config=dict(SMALL))
    get_model_loader(config)
    assert (config.load_format, config.model_loader_extra_config) == ("onelayer", SMALL)


def test_a_model_that_keeps_its_weights_is_told(tmp_path: Path) -> None:
    class Hoarder(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            self.loaded = dict(weights)
            return set(self.loaded)

    with pytest.raises(onelayer.StalledError):
        loaded(FIXTURES / "llama", Hoarder(), extra={"window": 2, "on_stall": 0.5})
    assert_same(
        loaded(FIXTURES / "llama", Hoarder(), extra={"window": "all"}),
        in_files(FIXTURES / "llama"),
    )


def test_memory_stays_within_the_budget_and_the_window(tmp_path: Path) -> None:
    mib = 1 << 20
    shapes = {
        f"model.layers.{layer}.{part}.weight": ("F32", (1024, 1024)) for layer in range(24) for part in ("attn", "mlp")
    }
    write_checkpoint(tmp_path / "model.safetensors", {**shapes, "model.norm.weight": ("F32", (1024,))})

    class Forgetful(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            return {name for name, tensor in weights if bool(tensor.any())}

    def growth(load_format: str, extra: dict[str, Any]) -> int:
        loader = get_model_loader(LoadConfig(load_format=load_format, model_loader_extra_config=extra))
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        loader.load_weights(Forgetful(), model_config(tmp_path))
        return status_bytes("VmHWM") - before

    growth("onelayer", SMALL)  # What is imported and started on the way.
    ours, theirs = growth("onelayer", SMALL), growth("safetensors", {})
    print(f"192 MiB in layers of 8 MiB: ours +{ours // mib} MiB, vLLM's own reader +{theirs // mib} MiB")
    # The ring, two layers, and what the library's promise leaves for threads and the allocator.
    assert ours <= (8 + 2 * 8 + 16) * mib
    # The measurement sees pages: a mapping of the file is all of it.
    assert theirs >= 150 * mib


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
