"""The compared loaders, one function each, called as in their documentation.

A loader has two parts. `prepare` imports its packages, which is reported separately. `load` takes the job
(folder, files, copies in torch's format) and returns the tensors and their owners. Loaders that return one
tensor at a time touch each before they drop it, and return the number of bytes.

No setting is slow on purpose. If a package has two ways that differ in the final memory, both are rows.
"""

import os

PAGE = 4096
# The limit for loaders that have one.
SMALL_LIMIT_BYTES, LIMIT_BYTES = 600_000_000, 2_000_000_000


def limit_of(job):
    """The limit for loaders that have one: at least the largest tensor."""
    return SMALL_LIMIT_BYTES if job["largest_tensor_bytes"] < SMALL_LIMIT_BYTES else LIMIT_BYTES


class Refused(Exception):
    """The loader does not support this here; the table shows the reason."""


def touch(tensor):
    """Reads one byte of every page of a tensor, so that mapped pages become resident. Returns its size."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return 0
    import torch

    raw = flat.view(torch.uint8)
    raw[::PAGE].max()
    raw[-1].item()
    return raw.numel()


# --- safetensors


def import_safetensors():
    import safetensors.torch
    import torch  # noqa: F401


def load_file(job, **options):
    from safetensors.torch import load_file

    found = {}
    for path in job["files"]:
        found.update(load_file(path, **options))
    return found, None


def load_file_pread(job):
    return load_file(job, backend="pread")


def safe_open_kept(job, copy=None, **options):
    from safetensors import safe_open

    found, kept = {}, []
    for path in job["files"]:
        file = safe_open(path, framework="pt", **options)
        kept.append(file)
        for name in file.keys():
            tensor = file.get_tensor(name)
            found[name] = tensor.clone() if copy else tensor
    return found, kept


def safe_open_clone(job):
    return safe_open_kept(job, copy=True)


def safe_open_pread(job):
    return safe_open_kept(job, backend="pread")


def safe_open_dropped(job, **options):
    from safetensors import safe_open

    seen = 0
    for path in job["files"]:
        with safe_open(path, framework="pt", **options) as file:
            for name in file.keys():
                seen += touch(file.get_tensor(name))
    return seen, None


def safe_open_pread_dropped(job):
    return safe_open_dropped(job, backend="pread")


def load_bytes(job):
    from safetensors.torch import load

    found = {}
    for path in job["files"]:
        with open(path, "rb") as file:
            found.update(load(file.read()))
    return found, None


# --- torch


def import_torch():
    import torch  # noqa: F401


def torch_load(job, mmap=False):
    import torch

    if not job.get("torch_files"):
        raise Refused(job.get("torch_absent") or "no copy in torch's format was made")
    found = {}
    for path in job["torch_files"]:
        found.update(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
    return found, None


def torch_load_mmap(job):
    return torch_load(job, mmap=True)


# --- transformers and accelerate


def import_transformers():
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401


def transformers_model(job):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.bfloat16, local_files_only=True)
    return dict(model.named_parameters()), model


def import_accelerate():
    import accelerate  # noqa: F401

    import_transformers()


def accelerate_model(job):
    import torch
    from accelerate import init_empty_weights, load_checkpoint_in_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(job["folder"], local_files_only=True)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    index = os.path.join(job["folder"], "model.safetensors.index.json")
    load_checkpoint_in_model(model, index if os.path.exists(index) else job["files"][0], device_map={"": "cpu"}, dtype=torch.bfloat16)
    return dict(model.named_parameters()), model


# --- fastsafetensors


def import_fastsafetensors():
    import fastsafetensors  # noqa: F401
    import torch  # noqa: F401


def fastsafetensors_all(job):
    from fastsafetensors import fastsafe_open

    file = fastsafe_open(job["files"], device="cpu", nogds=True).__enter__()
    return {name: file.get_tensor(name) for name in file.keys()}, file


def fastsafetensors_files(job):
    from fastsafetensors import fastsafe_open

    seen = 0
    for path in job["files"]:
        with fastsafe_open([path], device="cpu", nogds=True) as file:
            for name in file.keys():
                seen += touch(file.get_tensor(name))
    return seen, None


def fastsafetensors_batches(job):
    from fastsafetensors import ParallelLoader

    loader = ParallelLoader(
        pg=None, hf_weights_files=job["files"], device="cpu", nogds=True, use_tqdm_on_load=False,
        max_batch_bytes=limit_of(job),
    )
    seen = sum(touch(tensor) for _, tensor in loader.iterate_weights())
    loader.close()
    return seen, None


# --- runai-model-streamer


def import_runai():
    import torch  # noqa: F401
    from runai_model_streamer import SafetensorsStreamer  # noqa: F401


def runai_kept(job):
    from runai_model_streamer import SafetensorsStreamer

    found = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(job["files"])
        for name, tensor in streamer.get_tensors():
            found[name] = tensor
    return found, None


def runai_limited(job):
    os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = str(limit_of(job))
    return runai_kept(job)


def runai_dropped(job):
    from runai_model_streamer import SafetensorsStreamer

    os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = str(limit_of(job))
    seen = 0
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(job["files"], owned=False)
        for _, tensor in streamer.get_tensors():
            seen += touch(tensor)
    return seen, None


# --- without any package: for the test, which has only the standard library


def import_nothing():
    pass


def plain_read(job):
    """Reads every file into memory, without tensors, to test this program without any package."""
    kept = []
    for path in job["files"]:
        with open(path, "rb") as file:
            kept.append(file.read())
    return sum(len(block) for block in kept), kept


LOADERS = {
    "safetensors load_file": (import_safetensors, load_file),
    "safetensors load_file pread": (import_safetensors, load_file_pread),
    "safetensors safe_open": (import_safetensors, safe_open_kept),
    "safetensors safe_open clone": (import_safetensors, safe_open_clone),
    "safetensors safe_open pread": (import_safetensors, safe_open_pread),
    "safetensors safe_open dropped": (import_safetensors, safe_open_dropped),
    "safetensors safe_open pread dropped": (import_safetensors, safe_open_pread_dropped),
    "safetensors load bytes": (import_safetensors, load_bytes),
    "torch load": (import_torch, torch_load),
    "torch load mmap": (import_torch, torch_load_mmap),
    "transformers": (import_transformers, transformers_model),
    "accelerate": (import_accelerate, accelerate_model),
    "fastsafetensors": (import_fastsafetensors, fastsafetensors_all),
    "fastsafetensors file by file": (import_fastsafetensors, fastsafetensors_files),
    "fastsafetensors batched": (import_fastsafetensors, fastsafetensors_batches),
    "runai": (import_runai, runai_kept),
    "runai limited": (import_runai, runai_limited),
    "runai limited dropped": (import_runai, runai_dropped),
    "plain read": (import_nothing, plain_read),
}
