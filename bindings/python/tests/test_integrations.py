"""The shared code of the engine plug-ins, without an engine or torch. `heavy` tests with engines."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import onelayer
from checkpoints import FIXTURES, write_checkpoint
from onelayer.integrations._weights import _checkpoints, split_options


def test_options_are_taken_out_of_the_configuration() -> None:
    configured = {"budget": "2GiB", "window": "all", "num_threads": 4}
    assert split_options(configured) == ({"budget": 2 << 30, "window": "all"}, {"num_threads": 4})
    assert configured["budget"] == "2GiB"
    assert split_options(None) == ({}, {})


@pytest.mark.parametrize(
    ("configured", "told"),
    [({"budget": "2 gigs"}, "2 gigs"), ({"window": 1}, "window=1"), ("budget=2GiB", "expected a mapping")],
)
def test_what_cannot_work_is_refused(configured: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        split_options(configured)


def test_all_files_of_a_directory_are_one_checkpoint() -> None:
    files = sorted(str(file) for file in (FIXTURES / "llama_sharded").glob("*.safetensors"))
    (whole,) = _checkpoints(files[::-1])
    assert sorted(whole.files) == files
    # A part of the files: separate checkpoints, in the given order.
    some = [files[2], files[0]]
    assert [checkpoint.files for checkpoint in _checkpoints(some)] == [[file] for file in some]


def test_files_that_an_index_leaves_out_are_read_one_by_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_checkpoint(tmp_path / f"{name}.safetensors", {f"{name}.weight": ("F32", (2,))})
    index = {"weight_map": {"a.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = [str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    assert [checkpoint.keys() for checkpoint in _checkpoints(files)] == [["a.weight"], ["b.weight"]]


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    shutil.copytree(FIXTURES / "llama_sharded", blobs)
    snapshot.mkdir()
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    (whole,) = _checkpoints([str(file) for file in snapshot.glob("*.safetensors")])
    assert len(whole) == len(onelayer.open(FIXTURES / "llama_sharded"))


def test_a_file_that_is_broken_is_told_about(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(onelayer.CheckpointError, match=r"model\.safetensors"):
        list(_checkpoints([str(tmp_path / "model.safetensors")]))


def test_engines_find_the_plug_ins_and_the_package_imports_none_of_them() -> None:
    for group, module in [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")]:
        (point,) = (point for point in entry_points(group=group) if point.dist and point.dist.name == "onelayer")
        assert (point.name, point.value) == ("onelayer", f"onelayer.integrations.{module}:register")
    program = "import onelayer, sys; assert not any('integrations' in name for name in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
