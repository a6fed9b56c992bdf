"""Conversions and verifications from Python."""

from __future__ import annotations

import errno
import signal
import threading
from pathlib import Path

import pytest

import onelayer
from checkpoints import FIXTURES

LLAMA = FIXTURES / "llama"


def test_a_conversion_is_a_file_for_each_layer_and_verified(tmp_path: Path) -> None:
    target = tmp_path / "layers"
    seen: list[tuple[int, int]] = []
    report = onelayer.convert(LLAMA, target, verify=True, sha256=True, progress=lambda *told: seen.append(told))
    source = onelayer.open(LLAMA)
    assert report.is_complete and report.files_written == len(source.layers)
    assert report.verification is not None and report.verification.is_good
    assert seen[-1][0] == seen[-1][1] == 2 * source.nbytes
    assert "7 files" in str(report) and "no difference" in str(report)
    again = onelayer.convert(LLAMA, target, sha256=True)
    assert (again.files_written, again.files_kept) == (0, len(source.layers))
    hashes = [{name: tensor.hash() for name, tensor in onelayer.load(path).items()} for path in (LLAMA, target)]
    assert hashes[0] == hashes[1]


def test_a_changed_byte_is_a_difference_with_its_place(tmp_path: Path) -> None:
    target = tmp_path / "layers"
    onelayer.convert(LLAMA, target)
    file = sorted(target.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    report = onelayer.verify(target, LLAMA)
    assert not report.is_good
    assert any("embed_tokens" in found.place and "at its byte 65535" in found.what for found in report.differences)


def test_rules_selections_and_quantising(tmp_path: Path) -> None:
    report = onelayer.convert(
        LLAMA,
        tmp_path / "int8",
        quantise="int8",
        dtype_rules={"norm": "keep", "lm_head": "f32"},
        select=lambda tensor: "embed" not in tensor.name,
        grouping="merged",
    )
    assert report.files_written == 1 and report.quantisation[0].max_abs_error > 0
    made = onelayer.open(tmp_path / "int8")
    assert made.info("lm_head.weight").dtype == "F32"
    assert made.info("model.layers.0.mlp.up_proj.weight").dtype == "I8"
    assert "model.embed_tokens.weight" not in made
    assert made.metadata is not None and "quantise=int8" in (tmp_path / "int8/onelayer.manifest.json").read_text()


def test_parts_are_finished_by_one_of_them(tmp_path: Path) -> None:
    for number in (1, 2):
        report = onelayer.convert(LLAMA, tmp_path / "parts", part=(number, 2))
        assert not report.is_complete
    assert onelayer.convert(LLAMA, tmp_path / "parts", finish=True).is_complete
    with pytest.raises(ValueError, match=r"part=\(3, 2\)"):
        onelayer.convert(LLAMA, tmp_path / "more", part=(3, 2))


def test_refusals_name_the_python_words(tmp_path: Path) -> None:
    target = tmp_path / "layers"
    onelayer.convert(LLAMA, target)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        onelayer.convert(LLAMA, target, dtype="f16")
    assert onelayer.convert(LLAMA, target, dtype="f16", overwrite=True).is_complete
    with pytest.raises(onelayer.BudgetError):
        onelayer.convert(LLAMA, tmp_path / "small", budget=1)
    with pytest.raises(ValueError, match='grouping="layers"'):
        onelayer.convert(LLAMA, tmp_path / "other", grouping="layers")  # type: ignore[arg-type]
    with pytest.raises(OSError) as refused:
        onelayer.convert(LLAMA, "/proc/none")
    assert refused.value.errno in (errno.ENOENT, errno.ENOSPC)


def test_an_exception_of_progress_cancels_and_files_stay(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        onelayer.convert(LLAMA, tmp_path / "layers", progress=stop)
    assert onelayer.convert(LLAMA, tmp_path / "layers").is_complete
    with pytest.raises(RuntimeError, match="enough"):
        onelayer.verify(tmp_path / "layers", progress=stop)


def test_an_interrupt_ends_a_verification(tmp_path: Path) -> None:
    onelayer.convert(LLAMA, tmp_path / "layers")

    def interrupt(done: int, total: int) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        onelayer.verify(tmp_path / "layers", LLAMA, progress=interrupt)
    assert not [thread for thread in threading.enumerate() if "convert" in thread.name]
