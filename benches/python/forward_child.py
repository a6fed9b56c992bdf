"""Forwards of one token in a separate process, started by `forwards.py`.

    python forward_child.py WAY SOURCE FORWARDS [key=value ...]

Prints one line of JSON: seconds until the model can run, seconds of each forward, a hash of the last logits,
and the growth of memory after the imports (the kernel's high-water mark, and unreclaimable memory by samples).
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

Model = Any
Options = dict[str, str]


def config_of(source: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(source)
    config.dtype = torch.bfloat16
    return config


def architecture(source: str) -> Any:
    return getattr(transformers, config_of(source).architectures[0])


def plain(source: str, options: Options) -> tuple[Model, Any]:
    """transformers maps the file."""
    return architecture(source).from_pretrained(source, dtype=torch.bfloat16), None


def streamed(source: str, options: Options) -> tuple[Model, Any]:
    import onelayer.torch

    model = onelayer.torch.empty(config_of(source), dtype=torch.bfloat16)
    words = {key: options[key] for key in ("memory", "keep", "io", "budget", "quantise") if key in options}
    handle = onelayer.torch.stream_forward(model, source, window=int(options.get("window", 2)), **words)
    handle.__enter__()
    print(handle.plan, file=sys.stderr)
    return model, handle


def device_map(source: str, options: Options) -> tuple[Model, Any]:
    """transformers with accelerate: layers on disk. The files are safetensors, so nothing is copied."""
    folder = options["scratch"] + "/device-map"
    limit = {"cpu": options["cpu"]}
    return architecture(source).from_pretrained(
        source, dtype=torch.bfloat16, device_map="auto", max_memory=limit, offload_folder=folder
    ), None


def accelerate_disk(source: str, options: Options) -> tuple[Model, Any]:
    """accelerate: layers that do not fit are written to a folder."""
    import accelerate

    with accelerate.init_empty_weights(include_buffers=False):
        model = architecture(source)._from_config(config_of(source), dtype=torch.bfloat16)
    model.tie_weights()
    places = accelerate.infer_auto_device_map(
        model, max_memory={"cpu": options["cpu"]}, no_split_module_classes=model._no_split_modules
    )
    folder = options["scratch"] + "/accelerate"
    return accelerate.load_checkpoint_and_dispatch(
        model, source, device_map=places, offload_folder=folder, dtype=torch.bfloat16
    ), None


def group_offload(source: str, options: Options) -> tuple[Model, Any]:
    """diffusers: groups of layers are written to a folder, and read back for each forward."""
    from diffusers.hooks import apply_group_offloading

    model = architecture(source).from_pretrained(source, dtype=torch.bfloat16).eval()
    apply_group_offloading(
        model,
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        offload_to_disk_path=options["scratch"] + "/groups",
    )
    return model, None


def airllm(source: str, options: Options) -> tuple[Model, Any]:
    """AirLLM: the checkpoint is split into a file for each layer, once."""
    from airllm import AutoModel

    return AutoModel.from_pretrained(source, layer_shards_saving_path=options["scratch"] + "/airllm", device="cpu"), None


WAYS: dict[str, Callable[[str, Options], tuple[Model, Any]]] = {
    "plain": plain,
    "streamed": streamed,
    "device_map": device_map,
    "accelerate": accelerate_disk,
    "group_offload": group_offload,
    "airllm": airllm,
}


def main() -> None:
    way, source, forwards, *words = sys.argv[1:]
    options = dict(word.split("=", 1) for word in words)
    from onelayer._native import MemoryMeter

    torch.set_grad_enabled(False)
    torch.set_num_threads(int(options.get("threads", torch.get_num_threads())))
    architecture(source)
    if way == "streamed":
        import onelayer.torch  # noqa: F401
    meter = MemoryMeter()
    start = time.perf_counter()
    model, handle = WAYS[way](source, options)
    if hasattr(model, "eval"):
        model.eval()
    ready = time.perf_counter() - start
    tokens = torch.arange(5, 6)[None]
    seconds = []
    if "generate" in options:
        count = int(options["generate"])
        start = time.perf_counter()
        found = model.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        seconds.append((time.perf_counter() - start) / count)
        logits = found
    else:
        for _ in range(int(forwards)):
            start = time.perf_counter()
            logits = model(tokens, use_cache=False).logits
            seconds.append(time.perf_counter() - start)
    digest = hashlib.sha256(logits.float().contiguous().numpy().tobytes()).hexdigest()[:16]
    done: dict[str, Any] = {"ready": ready, "forwards": seconds, "logits": digest}
    if handle is not None:
        report = handle.report
        done |= {
            "needed_bytes": handle.plan.needed,
            "streamed_bytes": report.streamed_bytes,
            "waited": report.waited_seconds,
            "bound": report.bound,
        }
        handle.close()
    (host, _), (rss, _), _ = meter.finish()
    print(json.dumps(done | {"host_growth_bytes": host, "rss_growth_bytes": rss}))


if __name__ == "__main__":
    main()
