"""Modules that others loaded are given back, and whoever holds them is named."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import safetensors.torch
import torch
import transformers
from torch import nn

import onelayer
import onelayer.torch

KEPT: list[torch.Tensor] = []


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 256))


def test_what_nobody_holds_is_returned() -> None:
    model = module()
    size = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
    receipt = onelayer.torch.unload(model)
    assert receipt.is_complete and receipt.asked == size, receipt
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}
    assert onelayer.torch.unload(model).asked == 0


class Cache:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_holders_are_named() -> None:
    model = module()
    mine = model[0].weight
    receipt = onelayer.torch.unload(model)
    (holder,) = receipt.held_by
    assert holder.tensor == "0.weight" and receipt.held == 1024 * 1024 * 4
    assert "variable 'mine' of test_holders_are_named()" in holder.used_by, holder
    assert "0.weight (in variable 'mine'" in str(receipt)
    freed = weakref.ref(mine)
    del mine
    assert freed() is None, "looking for holders holds nothing"

    model = module()
    cache = Cache(model[2].bias)
    views = {"rows": model[0].weight[2:5]}
    KEPT.append(model[1].running_mean)
    receipt = onelayer.torch.unload(model)
    found = {holder.tensor: holder.used_by for holder in receipt.held_by}
    assert set(found) == {"2.bias", "0.weight", "1.running_mean"}
    assert any("attribute 'tensor' of a Cache" in user for user in found["2.bias"]), found
    assert any("entry 'rows' of a dictionary" in user for user in found["0.weight"]), found
    assert any("'KEPT' of module" in user for user in found["1.running_mean"]), found
    del cache, views
    KEPT.clear()


def test_tied_weights_count_once() -> None:
    model = module()
    model.tied = model[0]
    model.weight = model[0].weight
    size = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
    assert onelayer.torch.unload(model).returned == size
    assert model.weight is model[0].weight


def test_modules_that_list_their_weights_let_go() -> None:
    assert onelayer.torch.unload(nn.LSTM(256, 256)).held == 0


def test_pages_of_mapped_files_are_not_called_returned(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(1024, 1024), "bias": torch.ones(1024)}, path)
    model = nn.Linear(1024, 1024)
    model.load_state_dict(
        {key: tensor[...] for key, tensor in onelayer.open(path).state_dict(mode="mapped").items()}, assign=True
    )
    receipt = onelayer.torch.unload(model)
    assert receipt.held == 0 and receipt.unconfirmed > 3 << 20, receipt


def test_thirty_cycles_of_real_architectures_hold_nothing(tmp_path: Path) -> None:
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 500,
    }
    grouped = {**small, "num_key_value_heads": 2}
    made = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped)),
        "qwen2": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**grouped)),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**small)),
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=500)),
        "phi": transformers.PhiForCausalLM(transformers.PhiConfig(**small, num_key_value_heads=4)),
    }
    tokens = torch.arange(5, 13)[None]
    for name, model in made.items():
        folder = tmp_path / name
        model.save_pretrained(folder)
        kind, config = type(model), model.config

        def cycle(kind: type = kind, config: object = config, folder: Path = folder) -> None:
            model = onelayer.torch.empty(kind, config)
            with torch.no_grad(), onelayer.torch.stream_forward(model, folder, memory="9MiB", budget="8MiB") as handle:
                model(tokens)
                assert handle.report.forwards == 1
            assert onelayer.torch.unload(model).held == 0

        report = onelayer.leak(cycle, cycles=30)
        assert report.verdict == "flat", f"{name}: {report}"
        gc.collect()


def test_many_held_tensors_are_named() -> None:
    module = nn.ModuleList(nn.Linear(8, 8) for _ in range(30))
    held = list(module.parameters())
    receipt = onelayer.torch.unload(module)
    assert len(receipt.held_by) == len(held) == 60
