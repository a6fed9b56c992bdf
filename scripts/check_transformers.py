#!/usr/bin/env python3
"""Converts checkpoints and loads source and target with transformers: all tensors must be bit-identical.

    python3 scripts/check_transformers.py [FOLDER ...] [--program target/release/loadcheck] [--made]

FOLDERs are checkpoints of transformers, by default those of fixtures/checkpoints. `--made` adds small models
with random weights: tied and untied, sharded, with experts, encoder-decoder, vision, and a pipeline if
diffusers is installed. The interpreter needs torch, transformers and safetensors. Nothing is downloaded,
and no plug-in is used. Exit code 1 if anything differs.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")

import safetensors  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The conversions of each checkpoint: flags, and whether tied weights may be missing in the files.
WAYS = {
    "per layer": [],
    "experts per file": ["--experts", "per-file"],
    "shards of 200 kB": ["--max-shard-size", "200kB"],
    "tied weights once": ["--drop-duplicates"],
    "merged": ["--merge"],
    "merged shards": ["--merge", "--max-shard-size", "300kB"],
}


def convert(program, source, target, flags):
    words = [program, "convert", source, target, "-q", *flags]
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: exit {done.returncode}\n{done.stdout}")


def load(folder):
    """The model of the configuration, and the messages about keys from loading it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model, told = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    return model, {name: sorted(map(str, keys)) for name, keys in told.items() if keys}


def raw(tensor):
    """The bytes of a tensor of any type and shape."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def compare(ours, theirs):
    """The names that differ between two state dictionaries."""
    wrong = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        left, right = ours[name], theirs[name]
        if left.dtype != right.dtype or left.shape != right.shape or not torch.equal(raw(left), raw(right)):
            wrong.append(name)
    return wrong


def check(program, source, folder):
    """Converts and compares in every way. Returns the number of failures."""
    expected, told = load(source)
    failed = 0
    for way, flags in WAYS.items():
        target = folder / f"{source.name}-{way.replace(' ', '-')}"
        convert(program, source, target, flags)
        found, also_told = load(target)
        wrong = compare(found.state_dict(), expected.state_dict())
        if told != also_told:
            wrong.append(f"what loading tells: {also_told} instead of {told}")
        files = len(list(target.glob("*.safetensors")))
        verdict = "bit-equal" if not wrong else f"DIFFERS in {wrong[:5]}"
        print(f"{source.name}, {way}: {len(expected.state_dict())} tensors from {files} files {verdict}", flush=True)
        failed += bool(wrong)
    return failed


def made(folder):
    """Small random models of architectures that name, tie and stack their tensors differently."""
    torch.manual_seed(1)
    small = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=199)
    models = {
        "llama-tied": transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, tie_word_embeddings=True)),
        "llama-untied": transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).to(torch.float16),
        "mixtral": transformers.MixtralForCausalLM(transformers.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=3)),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**small)),
        "t5": transformers.T5ForConditionalGeneration(transformers.T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=199)),
        "vit": transformers.ViTForImageClassification(transformers.ViTConfig(**{k: v for k, v in small.items() if k != "vocab_size"}, image_size=32, patch_size=8)),
        "mamba": transformers.MambaForCausalLM(transformers.MambaConfig(hidden_size=64, num_hidden_layers=3, vocab_size=199, state_size=8)),
    }
    for name, model in models.items():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder / name, max_shard_size="100kB" if name in ("llama-untied", "t5") else "1GB")
    return [folder / name for name in models]


def check_pipeline(program, folder):
    """A pipeline of diffusers with two models and a scheduler."""
    try:
        import diffusers
    except ImportError:
        print("SKIPPED the pipeline: diffusers is not installed")
        return 0
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    decoder = diffusers.VQModel(block_out_channels=(8,), norm_num_groups=4, latent_channels=3, num_vq_embeddings=16)
    source, target = folder / "pipeline", folder / "pipeline-per-layer"
    diffusers.LDMPipeline(vqvae=decoder, unet=unet, scheduler=diffusers.DDIMScheduler()).save_pretrained(source)
    convert(program, source, target, [])
    left, right = (diffusers.DiffusionPipeline.from_pretrained(path) for path in (source, target))
    wrong = [f"{part}.{name}" for part in ("unet", "vqvae") for name in compare(getattr(right, part).state_dict(), getattr(left, part).state_dict())]
    if left.scheduler.config != right.scheduler.config:
        wrong.append("the scheduler's configuration")
    files = len(list(target.rglob("*.safetensors")))
    print(f"pipeline, per layer: two models from {files} files {'bit-equal' if not wrong else f'DIFFERS in {wrong[:5]}'}", flush=True)
    return bool(wrong)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "target/release/loadcheck")
    parser.add_argument("--made", action="store_true")
    args = parser.parse_args()
    program = args.program.resolve()
    print(f"transformers {transformers.__version__}, safetensors {safetensors.__version__}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        sources = args.folders or sorted(path for path in (ROOT / "fixtures/checkpoints").iterdir() if path.is_dir())
        if args.made:
            sources += made(folder)
        failed = sum(check(program, source, folder) for source in sources)
        if args.made:
            failed += check_pipeline(program, folder)
    print(f"{len(sources)} checkpoints in {len(WAYS)} ways: {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
