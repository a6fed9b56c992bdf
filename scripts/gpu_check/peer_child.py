"""One load by another package, in a separate process that measures itself. Prints one JSON object.

    python3 peer_child.py '{"peer": "safetensors", "setting": "default", "folder": DIR, "files": [...], "device": 0}'

The context is created and the package imported before the clock starts. The clock stops when every tensor is
on the device and the device is idle. Memory is the growth during the load: the kernel's high-water mark of
RSS, reset at the start, and sampled anonymous and page-locked memory.
"""

import importlib.util
import json
import sys
import threading
import time


def status():
    with open("/proc/self/status") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    names = {"rss_bytes": "VmRSS", "peak_rss_bytes": "VmHWM", "anon_bytes": "RssAnon", "shared_bytes": "RssShmem", "pinned_bytes": "VmPin", "locked_bytes": "VmLck"}
    return {ours: int(fields.get(theirs, "0 kB").split()[0]) * 1024 for ours, theirs in names.items()}


class Sampler(threading.Thread):
    """The maximum of each field, sampled every 5 ms."""

    def __init__(self):
        super().__init__(daemon=True)
        self.ended, self.highest = threading.Event(), status()

    def run(self):
        while not self.ended.wait(0.005):
            for name, value in status().items():
                self.highest[name] = max(self.highest[name], value)


def by_safetensors(job, torch):
    from safetensors.torch import load_file

    found = {}
    options = {} if job["setting"] == "default" else {"backend": "pread"}
    for path in job["files"]:
        found.update(load_file(path, device=f"cuda:{job['device']}", **options))
    return found, None


def by_safetensors_prefetch(job, torch):
    from safetensors import safe_open

    if not hasattr(safe_open, "prefetch"):
        raise ImportError("this safetensors has no prefetch")
    found, kept = {}, []
    for path in job["files"]:
        file = safe_open(path, framework="pt", device=f"cuda:{job['device']}")
        file.prefetch(threads=8)
        kept.append(file)
        found.update({name: file.get_tensor(name) for name in file.keys()})
    return found, kept


def by_safetensors_narrowed(job, torch):
    found = {}
    from safetensors.torch import load_file

    for path in job["files"]:
        loaded = load_file(path, device=f"cuda:{job['device']}")
        for name in list(loaded):
            found[name] = loaded.pop(name).to(torch.bfloat16)
    return found, None


def by_transformers(job, torch):
    from transformers import AutoModelForCausalLM

    kind = torch.bfloat16 if job["setting"] == "to bf16" else "auto"
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=kind, device_map={"": job["device"]}, local_files_only=True)
    return dict(model.state_dict()), model


def by_fastsafetensors(job, torch):
    from fastsafetensors import fastsafe_open

    file = fastsafe_open(job["files"], device=f"cuda:{job['device']}", nogds=True)
    file = file.__enter__()
    return {name: file.get_tensor(name) for name in file.keys()}, file


def by_runai(job, torch):
    from runai_model_streamer import SafetensorsStreamer

    found = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(job["files"])
        for name, tensor in streamer.get_tensors():
            found[name] = tensor.to(f"cuda:{job['device']}")
    return found, None


def by_instanttensor(job, torch):
    from instanttensor import safe_open

    options = {} if job["setting"] == "default" else {"backend": job["setting"]}
    file = safe_open(job["files"], framework="pt", device=job["device"], **options).__enter__()
    return dict(file.tensors()), file


LOADERS = {
    "safetensors": ("safetensors", by_safetensors),
    "safetensors prefetch": ("safetensors", by_safetensors_prefetch),
    "safetensors, then .to(bf16)": ("safetensors", by_safetensors_narrowed),
    "transformers": ("transformers", by_transformers),
    "fastsafetensors": ("fastsafetensors", by_fastsafetensors),
    "runai-model-streamer": ("runai_model_streamer", by_runai),
    "instanttensor": ("instanttensor", by_instanttensor),
}


def present():
    """The installed packages, without importing them."""
    names = {"torch"} | {package for package, _ in LOADERS.values()}
    versions = {}
    for name in sorted(names):
        if importlib.util.find_spec(name) is None:
            versions[name] = None
            continue
        from importlib import metadata

        try:
            versions[name] = metadata.version(name.replace("_", "-"))
        except metadata.PackageNotFoundError:
            versions[name] = "of unknown version"
    return versions


def load(job):
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    package, loader = LOADERS[job["peer"]]
    __import__(package)
    if package == "safetensors":
        import safetensors.torch  # noqa: F401
    if package == "transformers":
        from transformers import AutoModelForCausalLM  # noqa: F401
    torch.cuda.set_device(job["device"])
    torch.ones(1 << 20, device="cuda").sum().item()
    torch.cuda.synchronize()
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        reset = True
    except OSError:
        reset = False
    base, sampler = status(), Sampler()
    free_before, _ = torch.cuda.mem_get_info()
    sampler.start()
    start = time.perf_counter()
    found, kept = loader(job, torch)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    sampler.ended.set()
    sampler.join()
    end = status()
    on_device = {name: tensor for name, tensor in found.items() if tensor.is_cuda}
    # Tied weights share memory under two names.
    pieces = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in on_device.values()}
    highest = sampler.highest
    return {
        "seconds": seconds,
        "tensors": len(found),
        "tensors_on_device": len(on_device),
        "bytes_on_device": sum(pieces.values()),
        "rss_growth_bytes": (end["peak_rss_bytes"] if reset else highest["rss_bytes"]) - base["rss_bytes"],
        "host_growth_bytes": highest["anon_bytes"] + highest["shared_bytes"] - base["anon_bytes"] - base["shared_bytes"],
        "pinned_bytes": max(highest["pinned_bytes"] - base["pinned_bytes"], highest["locked_bytes"] - base["locked_bytes"]),
        "baseline_rss_bytes": base["rss_bytes"],
        "vram_growth_bytes": free_before - torch.cuda.mem_get_info()[0],
        "kept": type(kept).__name__,
    }


def main():
    if sys.argv[1] == "--present":
        print(json.dumps(present()))
        return
    try:
        answer = load(json.loads(sys.argv[1]))
    except Exception as error:  # any exception of a package is its result
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
