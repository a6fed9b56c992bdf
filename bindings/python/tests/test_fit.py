"""What fits where, and loads by device maps."""

from __future__ import annotations

import pytest

import onelayer
from checkpoints import FIXTURES

LLAMA = FIXTURES / "llama"


def test_layers_go_to_gpus_first_then_host_then_disk() -> None:
    checkpoint = onelayer.open(LLAMA)
    fit = checkpoint.fit(vram=["300KiB"], host="64.1MiB")
    assert {layer.tier for layer in fit.layers} == {0, "cpu", "disk"}
    assert not fit.is_all_on_gpus and fit.computes_on == 0
    assert fit.device_map == checkpoint.device_map(vram=["300KiB"], host="64.1MiB")
    assert sum(use.weight_bytes for use in fit.tiers) == fit.weight_bytes == checkpoint.nbytes
    assert all(use.needed_bytes <= (use.limit_bytes or use.needed_bytes) for use in fit.tiers)
    assert "GPU 0" in str(fit)


def test_room_for_a_context_is_kept() -> None:
    checkpoint = onelayer.open(LLAMA)
    fit = checkpoint.fit(vram="1MiB", context=256, batch=2, kv_dtype="bfloat16")
    assert fit.cache_bytes and fit.activation_bytes and fit.largest_context and fit.largest_batch
    assert checkpoint.fit(precision="int4").weight_bytes < checkpoint.fit(precision="bf16").weight_bytes
    with pytest.raises(onelayer.BudgetError, match="shorter context"):
        checkpoint.fit(host="1MiB")
    with pytest.raises(ValueError, match='kv_dtype="int3"'):
        checkpoint.fit(kv_dtype="int3")


def test_maps_are_checked() -> None:
    checkpoint = onelayer.open(LLAMA)
    assert checkpoint.fit(device_map={"": "cpu"}).device_map["lm_head"] == "cpu"
    with pytest.raises(ValueError, match="have no place"):
        checkpoint.fit(device_map={"model.layers": "cpu"})
    with pytest.raises(ValueError, match="is split"):
        checkpoint.fit(device_map={"model.layers.0.mlp": "disk", "": "cpu"})


def test_a_model_by_a_map_reads_the_disk_on_demand() -> None:
    whole = onelayer.load(LLAMA)
    model = onelayer.load(LLAMA, device_map={"model.layers": "cpu", "": "disk"}, budget="8MiB")
    assert set(model) == set(whole) and len(model) == len(whole)
    assert set(model.layers.values()) == {"cpu"}
    name = "model.layers.1.mlp.up_proj.weight"
    resident = model[name]
    assert isinstance(resident, onelayer.Tensor) and resident.hash() == whole[name].hash()
    assert isinstance(model["lm_head.weight"], onelayer.LazyTensor)
    assert [tier for tier, _ in model.reports] == ["cpu"]
    receipt = model.unload("model.layers.1")
    assert receipt.held_by[0].tensor == name
    del resident
    assert not model.holders
    with pytest.raises(KeyError):
        model["nothing"]
    model.close()
    assert model.resident_bytes == 0
    with pytest.raises(ValueError, match="device map"):
        onelayer.load(LLAMA, device_map={"nothing": "cpu"})
