#!/usr/bin/env python3
"""Checks `loadcheck convert --names hf` with transformers and gguf-py.

    python scripts/check_gguf_names.py [--loadcheck target/debug/loadcheck] [--seed 1]

Needs gguf 0.19, numpy, torch and transformers 5. A tiny random model of each supported architecture
is written as GGUF by gguf-py, with the rows in the order that llama.cpp's converter gives them, in
single precision and as Q8_0. The converted directory gets the model's config.json, and transformers
loads it: every tensor and the logits have to be those of the model, bit for bit.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADS, KV_HEADS, WIDTH = 4, 2, 64
SMALL = {
    "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "vocab_size": 160, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {"n_embd": WIDTH, "n_layer": 3, "n_head": HEADS, "n_positions": 64}
# Model type of transformers, architecture of GGUF, options.
MODELS = [
    ("llama", "llama", {}),
    ("llama", "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", "llama", {"num_key_value_heads": HEADS}),
    ("mistral", "llama", {}),
    ("mistral", "llama", {"head_dim": 32}),
    ("granite", "granite", {}),
    ("smollm3", "smollm3", {}),
    ("qwen2", "qwen2", {}),
    ("qwen3", "qwen3", {"head_dim": 32}),
    ("seed_oss", "seed_oss", {"head_dim": 32}),
    ("olmo2", "olmo2", {}),
    ("cohere", "command-r", {"use_qk_norm": True}),
    ("cohere2", "cohere2", {}),
    ("phi", "phi2", {"num_key_value_heads": HEADS}),
    ("phi3", "phi3", {}),
    ("starcoder2", "starcoder2", {}),
    ("stablelm", "stablelm", {"use_qkv_bias": True}),
    ("gpt2", "gpt2", GPT),
    ("gpt_bigcode", "starcoder", GPT),
    ("mpt", "mpt", {"d_model": WIDTH, "n_heads": HEADS, "n_layers": 3}),
    ("bloom", "bloom", {"n_layer": 3, "n_head": HEADS}),
    ("gpt_neox", "gptneox", {}),
]
REFUSED = [
    ("gemma", "gemma", {"head_dim": 16}), ("gemma2", "gemma2", {"head_dim": 16}),
    ("gemma3_text", "gemma3", {"head_dim": 16}), ("nemotron", "nemotron", {}), ("falcon", "falcon", {}),
    ("olmo", "olmo", {}), ("stablelm", "stablelm", {"qk_layernorm": True}),
]  # fmt: skip
Q8_0 = GGMLQuantizationType.Q8_0


def in_pairs(rows, heads):
    """Rows of each head: first and second half alternate."""
    found = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        block = rows[head * size : (head + 1) * size]
        out = found[head * size : (head + 1) * size]
        out[0::2], out[1::2] = block[: size // 2], block[size // 2 :]
    return found


def apart(rows, heads):
    """Queries of all heads, then keys, then values."""
    size = len(rows) // heads // 3
    pieces = [[rows[(3 * head + part) * size :][:size] for head in range(heads)] for part in range(3)]
    return np.concatenate([piece for part in pieces for piece in part])


def stored(arch, name, values, heads, kv_heads):
    """The values in the order that llama.cpp's converter gives them."""
    if arch in ("llama", "granite", "smollm3"):
        if ".q_proj." in name:
            return in_pairs(values, heads)
        if ".k_proj." in name:
            return in_pairs(values, kv_heads)
    if arch in ("bloom", "gptneox") and "query_key_value" in name:
        return apart(values, heads)
    if arch == "gpt2" and values.ndim == 2 and ".h." in name:
        return np.ascontiguousarray(values.T)
    return values


def write(path, arch, model, as_blocks):
    """Writes the model as GGUF. Returns what its tensors hold then."""
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    known = get_tensor_name_map(number, 3)
    config = model.config
    heads = config.num_attention_heads if hasattr(config, "num_attention_heads") else config.n_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    writer, wanted = GGUFWriter(path, arch), {}
    writer.add_block_count(3)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        new = known.get_name(name, (".weight", ".bias")) or known.get_name(name.partition(".")[2], (".weight", ".bias"))
        if new is None:  # what llama.cpp stores in another way
            new = "blk.0.attn_q_norm.weight"
        values = tensor.to(torch.float32).numpy()
        rows = stored(arch, name, values, heads, kv_heads)
        wanted[name] = values
        if as_blocks and values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(new, quants.quantize(rows, Q8_0), raw_dtype=Q8_0)
            wanted[name] = quants.dequantize(quants.quantize(values, Q8_0), Q8_0)
        else:
            writer.add_tensor(new, rows)
        if new == "blk.0.attn_q_norm.weight" and arch == "stablelm":
            break
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wanted


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[3, 14, 15, 92, 65, 35, 8, 97]])).logits


def convert(loadcheck, source, target):
    words = [loadcheck, "convert", source, target, "--names", "hf", "--dtype", "f32", "--verify"]
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)


def has_no_way_back(model_type, arch, options, as_blocks):
    return (model_type, arch, options) in REFUSED or arch == "gpt2" and as_blocks


def check(loadcheck, folder, model_type, arch, options, as_blocks):
    """The problem, if there is one."""
    config = AutoConfig.for_model(model_type, **{**SMALL, **options})
    model = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    source, target = folder / "model.gguf", folder / "target"
    wanted = write(source, arch, model, as_blocks)
    done = convert(loadcheck, source, target)
    if has_no_way_back(model_type, arch, options, as_blocks):
        is_refused = done.returncode == 3 and "--names hf" in done.stderr and not target.exists()
        return None if is_refused else f"not refused: {done.returncode} {done.stderr}"
    if done.returncode:
        return done.stderr
    model.config.save_pretrained(target)
    words = [str(loadcheck), "verify", str(target), "--against", str(source), "--names", "hf"]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        return "verify finds a difference"
    again, notes = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, output_loading_info=True)
    if any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return str(notes)
    found = again.state_dict()
    for name, values in wanted.items():
        if found[name].numpy().tobytes() != values.tobytes():
            return f"{name} differs"
    model.load_state_dict({name: torch.from_numpy(values) for name, values in wanted.items()}, strict=False)
    model.tie_weights()
    return None if torch.equal(logits(again.eval()), logits(model)) else "the logits differ"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loadcheck", type=pathlib.Path, default=ROOT / "target/debug/loadcheck")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    failed = 0
    for model_type, arch, options in MODELS + REFUSED:
        for as_blocks in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                problem = check(given.loadcheck, pathlib.Path(folder), model_type, arch, options, as_blocks)
            failed += problem is not None
            what = f"{arch} from {model_type} {options or ''}, {'Q8_0' if as_blocks else 'F32'}"
            right = "refused" if has_no_way_back(model_type, arch, options, as_blocks) else "same"
            print(f"{what}: {problem or right}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
