"""The rows of the comparison: commands and their final memory."""

import dataclasses
import json
import subprocess

# The final memory of a load. Only rows of one group are compared with each other.
ALL = "all"  # every tensor in memory, at once
PIECES = "pieces"  # one tensor or layer at a time; nothing is kept
BYTES = "bytes"  # every byte is read, without whole tensors


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to load."""

    name: str
    keeps: str
    # A loader of loaders.py, or a way of examples/one_load.rs.
    loader: str = ""
    way: str = ""
    torch_copy: bool = False
    package: str = ""
    # True if in the short table of docs/figures.md.
    in_manual: bool = False

    @property
    def ours(self):
        return self.way in ("host-all", "host-1", "none")


ROWS = [
    Row("onelayer, `Loader::load` to the host", ALL, way="host-all", in_manual=True),
    Row("safetensors `load_file`", ALL, "safetensors load_file", package="safetensors", in_manual=True),
    Row("safetensors `load_file(backend=\"pread\")`", ALL, "safetensors load_file pread", package="safetensors", in_manual=True),
    Row("safetensors `safe_open`, tensors kept", ALL, "safetensors safe_open", package="safetensors"),
    Row("safetensors `safe_open`, tensors cloned", ALL, "safetensors safe_open clone", package="safetensors", in_manual=True),
    Row("safetensors `safe_open(backend=\"pread\")`, kept", ALL, "safetensors safe_open pread", package="safetensors"),
    Row("safetensors `load(bytes)` of whole files", ALL, "safetensors load bytes", package="safetensors"),
    Row("`torch.load`", ALL, "torch load", torch_copy=True, package="torch", in_manual=True),
    Row("`torch.load(mmap=True)`", ALL, "torch load mmap", torch_copy=True, package="torch", in_manual=True),
    Row("transformers `from_pretrained`", ALL, "transformers", package="transformers", in_manual=True),
    Row("accelerate `load_checkpoint_in_model`", ALL, "accelerate", package="accelerate", in_manual=True),
    Row("fastsafetensors, all files", ALL, "fastsafetensors", package="fastsafetensors", in_manual=True),
    Row("runai-model-streamer", ALL, "runai", package="runai-model-streamer", in_manual=True),
    Row("runai-model-streamer, with a limit", ALL, "runai limited", package="runai-model-streamer"),
    Row("crates safetensors + memmap2, `to_vec`", ALL, way="crate-to-vec", in_manual=True),
    Row("onelayer, stream to the host, one layer at a time", PIECES, way="host-1", in_manual=True),
    Row("safetensors `safe_open`, each tensor dropped", PIECES, "safetensors safe_open dropped", package="safetensors", in_manual=True),
    Row("safetensors `safe_open(backend=\"pread\")`, dropped", PIECES, "safetensors safe_open pread dropped", package="safetensors", in_manual=True),
    Row("fastsafetensors, file by file", PIECES, "fastsafetensors file by file", package="fastsafetensors"),
    Row("fastsafetensors `ParallelLoader`, batched", PIECES, "fastsafetensors batched", package="fastsafetensors", in_manual=True),
    Row("runai-model-streamer, with a limit, dropped", PIECES, "runai limited dropped", package="runai-model-streamer", in_manual=True),
    Row("onelayer, device `none`", BYTES, way="none", in_manual=True),
]
# Needs no packages: for the test of this program. Runs only if named.
HIDDEN = [Row("plain read", ALL, "plain read")]


def by_name(words):
    """The rows whose names contain one of the words; all without words."""
    if not words:
        return list(ROWS)
    return [row for row in ROWS + HIDDEN if any(word in row.name for word in words)]


def versions(python):
    """Package -> version in the interpreter that will load, without importing."""
    names = sorted({row.package for row in ROWS if row.package} | {"numpy"})
    program = (
        "import importlib.metadata as m, json, sys\n"
        "def version(name):\n"
        "    try: return m.version(name)\n"
        "    except m.PackageNotFoundError: return None\n"
        "print(json.dumps({name: version(name) for name in sys.argv[1:]} | {'python': sys.version.split()[0]}))"
    )
    done = subprocess.run([python, "-c", program, *names], stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)
