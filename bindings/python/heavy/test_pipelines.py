"""Pipelines of diffusers in one limit: the same images, parts that are kept, streamed or dropped in turn."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import onelayer

diffusers = pytest.importorskip("diffusers")
pipelines = pytest.importorskip("onelayer.diffusers")

MIB = 1 << 20


def tokenizer(folder: Path) -> Any:
    """Of letters."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(97 + index) for index in range(26)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)


def clip(width: int, layers: int = 5) -> Any:
    config = transformers.CLIPTextConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=4,
        num_hidden_layers=layers,
        vocab_size=100,
        max_position_embeddings=16,
        bos_token_id=52,
        eos_token_id=53,
        pad_token_id=53,
    )
    return transformers.CLIPTextModel(config)


def image_coder(**options: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=[32, 32],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
        norm_num_groups=8,
        **options,
    )


def unet() -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(64, 128),
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def scheduler() -> Any:
    return diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)


def stable_diffusion(folder: Path) -> Any:
    pipeline = diffusers.StableDiffusionPipeline(
        unet=unet(),
        vae=image_coder(),
        text_encoder=clip(64),
        tokenizer=tokenizer(folder / "letters"),
        scheduler=scheduler(),
        safety_checker=None,
        feature_extractor=None,
    )
    pipeline.save_pretrained(folder)
    return diffusers.StableDiffusionPipeline


def control_net(folder: Path) -> Any:
    denoiser = unet()
    pipeline = diffusers.StableDiffusionControlNetPipeline(
        unet=denoiser,
        controlnet=diffusers.ControlNetModel.from_unet(denoiser, conditioning_embedding_out_channels=(16, 32)),
        vae=image_coder(),
        text_encoder=clip(64),
        tokenizer=tokenizer(folder / "letters"),
        scheduler=scheduler(),
        safety_checker=None,
        feature_extractor=None,
    )
    # A new control net changes nothing: its last layers are zero.
    for parameter in pipeline.controlnet.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    pipeline.save_pretrained(folder)
    return diffusers.StableDiffusionControlNetPipeline


def flux(folder: Path, heads: int = 4, singles: int = 4, width: int = 64, layers: int = 4) -> Any:
    """A transformer of two kinds of layers, and two text encoders."""
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=singles,
        attention_head_dim=64,
        num_attention_heads=heads,
        joint_attention_dim=width,
        pooled_projection_dim=64,
        axes_dims_rope=(16, 24, 24),
        guidance_embeds=True,
    )
    text = transformers.T5Config(
        d_model=width, d_ff=4 * width, d_kv=64, num_heads=width // 64, num_layers=layers, vocab_size=100
    )
    letters = tokenizer(folder / "letters")
    pipeline = diffusers.FluxPipeline(
        transformer=transformer,
        vae=image_coder(shift_factor=0.1),
        text_encoder=clip(64),
        tokenizer=letters,
        text_encoder_2=transformers.T5EncoderModel(text),
        tokenizer_2=letters,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    pipeline.save_pretrained(folder)
    return diffusers.FluxPipeline


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(3)
    yield


def draw(pipeline: Any, **options: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    settings = {"num_inference_steps": 3, "output_type": "pt", "height": 32, "width": 32, **options}
    found: torch.Tensor = pipeline("a lake", generator=torch.Generator().manual_seed(1), **settings).images
    assert torch.isfinite(found).all() and found.std() > 0
    return found


def sizes(pipeline: Any) -> dict[str, int]:
    return {
        name: sum(parameter.nbytes for parameter in module.parameters())
        for name, module in pipeline.components.items()
        if isinstance(module, torch.nn.Module)
    }


def least(folder: Path, **options: Any) -> int:
    """The smallest memory, as refusals name it, of one part after the other."""
    memory = 1
    while True:
        try:
            pipelines.from_pretrained(folder, memory=memory, **options)
            return memory
        except onelayer.BudgetError as error:
            assert (folder / str(error).split(":")[0]).is_dir() and error.required > memory
            memory = error.required


MADE: dict[str, Callable[[Path], Any]] = {"stable diffusion": stable_diffusion, "flux": flux}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_are_those_of_the_plain_pipeline(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain = MADE[name](tmp_path).from_pretrained(tmp_path, torch_dtype=dtype)
    expected = draw(plain)
    smallest = least(tmp_path, dtype=dtype)
    for memory in (1 << 30, smallest + 4 * MIB, smallest):
        pipeline = pipelines.from_pretrained(tmp_path, memory=memory, dtype=dtype)
        assert type(pipeline) is type(plain)
        for _ in range(2):
            assert torch.equal(draw(pipeline), expected)
        report = pipeline.onelayer_stream.report
        assert set(report) == set(sizes(plain))
        if memory == 1 << 30:
            assert all((each.turns, each.kept) == (1, True) for each in report.values())
        else:
            assert any(each.turns == 2 for each in report.values())


def test_what_does_not_fit_is_streamed_and_the_others_are_dropped(tmp_path: Path) -> None:
    plain = stable_diffusion(tmp_path).from_pretrained(tmp_path)
    pipeline = pipelines.from_pretrained(tmp_path, memory=least(tmp_path))
    turns = pipeline.onelayer_stream
    assert turns.active == () and all(part.device.type == "meta" for part in plain_parts(pipeline))
    assert torch.equal(draw(pipeline), draw(plain))
    report = turns.report
    assert not report["unet"].kept and report["unet"].plan.streamed
    assert report["vae"].kept and report["text_encoder"].kept
    # A unet that is streamed has all of the memory.
    assert "text_encoder" not in turns.active and "unet" not in turns.active
    assert "unet" in str(turns) and "streamed" in str(turns)


def plain_parts(pipeline: Any) -> list[torch.nn.Module]:
    return [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]


def test_parts_that_alternate_share_the_memory(tmp_path: Path) -> None:
    plain = control_net(tmp_path).from_pretrained(tmp_path)
    image = torch.rand(1, 3, 32, 32)
    expected = draw(plain, image=image, num_inference_steps=8)
    pipeline = pipelines.from_pretrained(tmp_path, memory=2 * least(tmp_path))
    assert torch.equal(draw(pipeline, image=image, num_inference_steps=8), expected)
    report = pipeline.onelayer_stream.report
    # Without sharing each step would bring both in again.
    assert report["unet"].turns < 8 and report["controlnet"].turns < 8
    assert torch.equal(draw(pipeline, image=image, num_inference_steps=8), expected)


def test_the_peak_is_bounded(tmp_path: Path) -> None:
    """560 MB of weights in 176 MiB, while two images are made."""
    plain = flux(tmp_path, heads=12, singles=7, width=512, layers=18).from_pretrained(tmp_path)
    total = sum(sizes(plain).values())
    assert total > 530 * MIB
    # Few words, so that activations are small.
    expected = draw(plain, max_sequence_length=16)
    del plain
    gc.collect()
    memory = 176 * MIB
    with onelayer.measure() as measured:
        pipeline = pipelines.from_pretrained(tmp_path, memory=memory)
        for _ in range(2):
            found = draw(pipeline, max_sequence_length=16)
    assert torch.equal(found, expected)
    report = pipeline.onelayer_stream.report
    assert not report["transformer"].kept and not report["text_encoder_2"].kept
    print(pipeline.onelayer_stream, measured, report["transformer"].plan)
    assert measured.unreclaimable_growth is not None and measured.rss_growth is not None
    # Activations of a small image are on top.
    assert measured.unreclaimable_growth <= memory + 16 * MIB
    assert measured.rss_growth <= memory + 16 * MIB


def test_dropping_the_pipeline_frees_it(tmp_path: Path) -> None:
    stable_diffusion(tmp_path)
    pipeline = pipelines.from_pretrained(tmp_path, memory=least(tmp_path))
    draw(pipeline)
    held = [
        weakref.ref(parameter)
        for part in plain_parts(pipeline)
        for parameter in part.parameters()
        if parameter.device.type != "meta"
    ]
    threads = threading.active_count()
    assert held
    gc.collect()
    gc.disable()
    try:
        del pipeline
        assert not any(reference() is not None for reference in held)
    finally:
        gc.enable()
    assert threading.active_count() <= threads


def test_the_holder_of_a_text_encoder_is_named(tmp_path: Path) -> None:
    """A pipeline that diffusers has loaded: somebody keeps one parameter of the unloaded text encoder."""
    pipeline = stable_diffusion(tmp_path).from_pretrained(tmp_path, low_cpu_mem_usage=False)
    with torch.no_grad():
        for parameter in pipeline.text_encoder.parameters():
            # Mapped weights belong to the page cache: these belong to the process.
            parameter.data = parameter.data.clone()
    del parameter
    embeds = pipeline.text_encoder.get_input_embeddings().weight
    (name,) = [name for name, parameter in pipeline.text_encoder.named_parameters() if parameter is embeds]
    receipt = onelayer.torch.unload(pipeline.text_encoder)
    (holder,) = receipt.held_by
    assert holder.tensor == name
    assert any("variable 'embeds'" in user for user in holder.used_by), holder
    assert receipt.held == embeds.numel() * embeds.element_size() and receipt.returned > 0
    freed = weakref.ref(embeds)
    del embeds
    assert freed() is None, "freed when the holder goes"
    assert onelayer.torch.unload(pipeline.text_encoder).asked == 0


def test_a_closed_pipeline_says_so(tmp_path: Path) -> None:
    stable_diffusion(tmp_path)
    with pipelines.from_pretrained(tmp_path, memory="64MiB").onelayer_stream as turns:
        assert turns.memory == 64 * MIB
    pipeline = pipelines.from_pretrained(tmp_path, memory="64MiB")
    draw(pipeline)
    pipeline.onelayer_stream.close()
    assert all(parameter.device.type == "meta" for part in plain_parts(pipeline) for parameter in part.parameters())
    with pytest.raises(RuntimeError, match="closed"):
        draw(pipeline)


def test_parts_that_are_given_stay_as_they_are(tmp_path: Path) -> None:
    plain = stable_diffusion(tmp_path).from_pretrained(tmp_path)
    pipeline = pipelines.from_pretrained(tmp_path, memory="64MiB", vae=plain.vae)
    assert pipeline.vae is plain.vae and set(pipeline.onelayer_stream.report) == {"unet", "text_encoder"}
    assert torch.equal(draw(pipeline), draw(plain))


def test_a_variant(tmp_path: Path) -> None:
    plain = stable_diffusion(tmp_path).from_pretrained(tmp_path)
    plain.to(torch.float16).save_pretrained(tmp_path, variant="fp16", safe_serialization=True)
    pipeline = pipelines.from_pretrained(tmp_path, memory="64MiB", variant="fp16")
    assert {part.dtype for part in plain_parts(pipeline)} == {torch.float16}
    assert torch.equal(
        draw(pipeline),
        draw(diffusers.DiffusionPipeline.from_pretrained(tmp_path, torch_dtype=torch.float16, variant="fp16")),
    )


def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    stable_diffusion(tmp_path)
    with pytest.raises(onelayer.BudgetError, match="unet: memory of"):
        pipelines.from_pretrained(tmp_path, memory="8MiB")
    with pytest.raises(FileNotFoundError, match="model_index"):
        pipelines.from_pretrained(tmp_path / "unet", memory="64MiB")
    with pytest.raises(ValueError, match="device_map"):
        pipelines.from_pretrained(tmp_path, memory="64MiB", device_map="balanced")
    pipeline = pipelines.from_pretrained(tmp_path, memory="64MiB")
    assert pipeline.to("cpu") is pipeline
    with pytest.raises(RuntimeError, match="streamed weights"):
        pipeline.to("cuda")
    for move in (lambda: pipeline.to(torch.float16), lambda: pipeline.vae.to(torch.float16), pipeline.unet.half):
        with pytest.raises(RuntimeError, match="dtype="):
            move()
    draw(pipeline)
    with pytest.raises(RuntimeError, match="enable_model_cpu_offload"):
        pipeline.enable_model_cpu_offload()
    assert pipeline.to("meta").onelayer_stream.active == ()
