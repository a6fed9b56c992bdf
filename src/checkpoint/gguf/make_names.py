#!/usr/bin/env python3
"""Writes names.txt: for each architecture of GGUF files, its names and those of transformers.

    python src/checkpoint/gguf/make_names.py          (needs gguf 0.19, torch, transformers 5)

gguf-py maps many names to one. So the way back is taken from a model of each architecture: every
name of its `state_dict` is mapped, and no two may become the same. Models are made without memory.
"""
import re
from pathlib import Path

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4}
BIASES = {"attention_bias": True, "mlp_bias": True}
# Their output head is always the embedding: gguf-py has no name for it.
ALWAYS_TIED = {"cohere", "cohere2"}
# Architecture of GGUF: model types of transformers, with what gives them the most tensors.
MODELS = {
    "llama": [("llama", BIASES), ("mistral", {})],
    "granite": [("granite", BIASES)],
    "smollm3": [("smollm3", BIASES)],
    "qwen2": [("qwen2", {})],
    "qwen3": [("qwen3", {"attention_bias": True})],
    "seed_oss": [("seed_oss", {"attention_out_bias": True})],
    "olmo2": [("olmo2", {"attention_bias": True})],
    "command-r": [("cohere", {"use_qk_norm": True})],
    "cohere2": [("cohere2", {})],
    "phi2": [("phi", {})],
    "phi3": [("phi3", {})],
    "starcoder2": [("starcoder2", {})],
    "stablelm": [("stablelm", {"use_qkv_bias": True})],
    "gpt2": [("gpt2", GPT)],
    "starcoder": [("gpt_bigcode", GPT)],
    "mpt": [("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2})],
    "bloom": [("bloom", {"n_layer": 2, "n_head": 4})],
    "gptneox": [("gpt_neox", {})],
}
# What llama.cpp's converter does to the rows of these tensors.
HEADS = {"blk.{n}.attn_q": "heads", "blk.{n}.attn_k": "kv_heads"}
TURNED = dict.fromkeys(
    ["blk.{n}.attn_qkv", "blk.{n}.attn_output", "blk.{n}.ffn_up", "blk.{n}.ffn_down"], "turned"
)
ORDERS = {
    "llama": HEADS, "granite": HEADS, "smollm3": HEADS, "gpt2": TURNED,
    "bloom": {"blk.{n}.attn_qkv": "qkv"}, "gptneox": {"blk.{n}.attn_qkv": "qkv"},
}
SUFFIXES = (".weight", ".bias")


def names_of(model_type: str, options: dict) -> list[str]:
    config = AutoConfig.for_model(model_type, **{**SMALL, **options})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return list(model.state_dict())


def base(name: str) -> str:
    """The name without suffix, and `{n}` in place of the first number."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return re.sub(r"(?<=\.)\d+(?=\.)", "{n}", name, count=1)


def table(arch: str) -> dict[str, str]:
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    known = gguf.get_tensor_name_map(number, SMALL["num_hidden_layers"])
    found: dict[str, str] = {}
    for model_type, options in MODELS[arch]:
        for name in names_of(model_type, options):
            if name == "lm_head.weight" and model_type in ALWAYS_TIED:
                continue
            # llama.cpp takes the models of some architectures without their prefix.
            mapped = known.get_name(name, SUFFIXES) or known.get_name(name.partition(".")[2], SUFFIXES)
            assert mapped, f"{arch}: gguf-py has no name for {name}"
            assert mapped[len(mapped.rpartition(".")[0]):] == name[len(name.rpartition(".")[0]):], name
            before = found.setdefault(base(mapped), base(name))
            assert before == base(name), f"{arch}: {before} and {name} are both {mapped}"
    assert len(set(found.values())) == len(found), arch
    return found


def main() -> None:
    sections: dict[str, list[str]] = {}
    for arch in MODELS:
        orders = ORDERS.get(arch, {})
        names = table(arch)
        assert set(orders) <= set(names), arch
        lines = [f"{name} {found} {orders.get(name, '')}".rstrip() for name, found in names.items()]
        sections.setdefault("\n".join(lines), []).append(arch)
    text = "# Written by make_names.py.\n"
    for lines, archs in sections.items():
        text += f"\n[{' '.join(archs)}]\n{lines}\n"
    Path(__file__).with_name("names.txt").write_text(text)


if __name__ == "__main__":
    main()
