"""One load in a separate process, started by `figures.py`.

    python child.py WAY SOURCE [key=value ...]

Prints one line of JSON: seconds and bytes; with `memory=yes` also memory growth after the imports: the
kernel's high-water mark, reset after the imports, and unreclaimable memory, sampled every 5 ms (which costs
time).
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def touch(tensors: Any) -> int:
    """Reads every byte and returns their number."""
    import torch

    total = 0
    for tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        whole = flat[: flat.numel() // 8 * 8].view(torch.int64)
        whole.sum()
        flat[whole.numel() * 8 :].sum()
        total += flat.numel()
    return total


def stream(source: str, options: dict[str, str]) -> tuple[int, Any]:
    import onelayer

    load = onelayer.open(source).stream(
        device=options["device"], budget=options["budget"], window=int(options.get("window", 2))
    )
    with load:
        for layer in load:
            layer.close()
    return load.report.nbytes, None


def load_file(source: str, options: dict[str, str]) -> tuple[int, Any]:
    if options["by"] == "onelayer":
        from onelayer.safetensors import load_file as load

        kept = load(source, backend=options["backend"])
    elif options["backend"] == "mmap":
        from safetensors.torch import load_file as load_theirs

        kept = load_theirs(source)
    else:
        from safetensors import safe_open

        with safe_open(source, framework="pt", backend="pread") as file:
            kept = {name: file.get_tensor(name) for name in file.offset_keys()}
    if options.get("touch", "yes") == "yes":
        return touch(kept.values()), kept
    return sum(tensor.numel() * tensor.element_size() for tensor in kept.values()), kept


def owned(source: str, options: dict[str, str]) -> tuple[int, Any]:
    """All tensors, in memory that no file backs; or, by `touched`, mapped, with every byte read."""
    if options["by"] == "stream":
        import onelayer

        kept = dict(onelayer.open(source).tensors(window="all"))
    elif options["by"] == "load_file":
        from onelayer.safetensors import load_file as load

        kept = load(source, backend="pread")
    elif options["by"] == "touched":
        from safetensors.torch import load_file as load_theirs

        kept = load_theirs(source)
        return touch(kept.values()), kept
    else:
        from safetensors import safe_open

        with safe_open(source, framework="pt") as file:
            kept = {name: file.get_tensor(name).clone() for name in file.offset_keys()}
    return sum(tensor.numel() * tensor.element_size() for tensor in kept.values()), kept


def transformers(source: str, options: dict[str, str]) -> tuple[int, Any]:
    import transformers as library

    config = library.AutoConfig.from_pretrained(source)
    architecture = getattr(library, config.architectures[0])
    if options["by"] == "transformers":
        model = architecture.from_pretrained(source)
    else:
        import onelayer

        weights = onelayer.open(source).state_dict(mode=options["mode"])
        model = architecture.from_pretrained(None, config=config, state_dict=weights)
    return touch(model.state_dict().values()), model


WAYS: dict[str, Callable[[str, dict[str, str]], tuple[int, Any]]] = {
    "stream": stream,
    "load_file": load_file,
    "owned": owned,
    "transformers": transformers,
}
IMPORTS = {
    "stream": ["onelayer"],
    "load_file": ["torch", "safetensors.torch", "onelayer.safetensors"],
    "owned": ["torch", "safetensors.torch", "onelayer.safetensors"],
    "transformers": ["torch", "transformers", "onelayer"],
}


def main() -> None:
    way, source, *words = sys.argv[1:]
    options = dict(word.split("=", 1) for word in words)
    for module in IMPORTS[way]:
        __import__(module)
    if way == "transformers":
        import transformers as library

        # This class has further imports.
        getattr(library, library.AutoConfig.from_pretrained(source).architectures[0])
    from onelayer._native import MemoryMeter

    meter = MemoryMeter() if options.get("memory") == "yes" else None
    start = time.perf_counter()
    nbytes, kept = WAYS[way](source, options)
    done = {"seconds": time.perf_counter() - start, "bytes": nbytes}
    if meter:
        (host, _), (rss, _), _ = meter.finish()
        done |= {"host_growth_bytes": host, "rss_growth_bytes": rss}
    print(json.dumps(done))
    del kept


if __name__ == "__main__":
    main()
