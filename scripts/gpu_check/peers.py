"""Other packages that load the same files, each load in a separate process."""

import json
import os
import pathlib
import sys

from . import cache
from .process import run

CHILD = pathlib.Path(__file__).resolve().parent / "peer_child.py"
# Peer, setting, environment. Besides the default: the fastest settings by their documentation.
WARM = (
    ("safetensors", "default", {}),
    ("transformers", "default", {}),
    ("safetensors", "pread", {}),
    ("safetensors prefetch", "8 threads", {}),
    ("fastsafetensors", "default", {}),
    ("fastsafetensors", "buffered", {"FASTSAFETENSORS_ODIRECT": "0"}),
    ("runai-model-streamer", "default", {}),
    ("runai-model-streamer", "16 threads, 1 GB", {"RUNAI_STREAMER_CONCURRENCY": "16", "RUNAI_STREAMER_MEMORY_LIMIT": "1000000000"}),
    ("instanttensor", "default", {}),
    ("instanttensor", "BUFFERED", {}),
    ("instanttensor", "MMAP", {}),
)
COLD = (("safetensors", "default", {}), ("fastsafetensors", "default", {}), ("instanttensor", "default", {}))
SMALL = (("safetensors", "default", {}), ("fastsafetensors", "default", {}), ("instanttensor", "default", {}))
NARROWED = (("safetensors, then .to(bf16)", "default", {}), ("transformers", "to bf16", {}))
PACKAGES = {
    "runai-model-streamer": "runai_model_streamer", "safetensors prefetch": "safetensors",
    "safetensors, then .to(bf16)": "safetensors",
}


class Peers:
    """The packages of this machine's Python, and loads by them."""

    def __init__(self, python, ordinal, deadline):
        self.python, self.ordinal, self.deadline = python or sys.executable, ordinal, deadline
        found = run([self.python, CHILD, "--present"], 30)
        self.versions = found.json() or {}
        self.problem = None if found.code == 0 else found.why()

    def absent(self, peer):
        """The reason why a peer is not available, or None."""
        if self.problem:
            return f"python: {self.problem}"
        for name in ("torch", PACKAGES.get(peer, peer)):
            if self.versions.get(name) is None:
                return f"absent: package {name}"
        return None

    def load(self, peer, setting, environment, folder, narrowed, limit_seconds):
        """One load: a sample, or a dict with `error`, or with `absent` if a dependency is missing."""
        files = [str(path) for path in cache.files(folder)]
        job = {"peer": peer, "setting": setting, "folder": str(folder), "files": files, "device": self.ordinal}
        env = {**os.environ, **environment, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = run([self.python, CHILD, json.dumps(job)], max(1.0, min(limit_seconds, self.deadline.left())), env)
        answer = done.json()
        if done.code != 0 or answer is None:
            return {"error": done.why()}
        if answer.get("error", "").startswith(("ImportError", "ModuleNotFoundError")):
            return {"absent": answer["error"]}
        if "error" in answer:
            return answer
        expected = sum(os.path.getsize(path) for path in files) * (0.5 if narrowed else 1.0)
        # At most headers and tied weights.
        if answer["tensors"] != answer["tensors_on_device"] or answer["bytes_on_device"] < 0.9 * expected:
            return {"error": f"{answer['bytes_on_device']} bytes of {expected:.0f} are on the device: not a whole load"}
        answer["process_seconds"] = done.seconds
        answer["system_growth_bytes"] = done.system_growth_bytes
        return answer
