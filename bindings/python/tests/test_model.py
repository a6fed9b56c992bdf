"""Resident models: what leaves, what comes back, and who holds it. Measuring, leaks, and the list of allocations."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import threading
from pathlib import Path

import pytest

import onelayer
from checkpoints import bytes_in_file, write_checkpoint


def pages(mebibytes: int) -> mmap.mmap:
    """Memory of its own: the heap may have room from before."""
    found = mmap.mmap(-1, mebibytes << 20)
    for _ in range(mebibytes):
        found.write(b"x" * (1 << 20))
    return found


def test_a_model_is_what_is_in_the_file(layered: Path) -> None:
    expected = bytes_in_file(layered)
    with onelayer.load(layered, budget="8MiB") as model:
        assert {name: tensor.tobytes() for name, tensor in model.items()} == expected
        assert len(model) == len(expected) and "nothing" not in model
        assert list(model.layers)[:2] == ["model.embed_tokens", "model.layers.0"]
        assert model.resident_bytes == sum(model.layers.values()) > 0
        assert model.report.layers == len(model.layers) and "10 layers" in str(model.report)
        with pytest.raises(KeyError, match="nothing"):
            model["nothing"]
    assert model.resident_bytes == 0 and not model.layers


def test_what_is_unloaded_is_returned_and_what_is_held_is_named(layered: Path) -> None:
    model = onelayer.load(layered)
    before = model.resident_bytes
    receipt = model.unload("model.layers.0")
    assert receipt.is_complete and receipt.asked == before - model.resident_bytes > 0
    assert str(receipt).endswith("returned")
    held = model["model.layers.1.mlp.weight"]
    assert [holder.tensor for holder in model.holders] == ["model.layers.1.mlp.weight"]
    receipt = model.unload("model.layers")
    assert not receipt.is_complete
    assert receipt.held_by == (onelayer.Holder("model.layers.1", "model.layers.1.mlp.weight", 1),)
    assert receipt.asked == receipt.returned + receipt.held
    assert "held by model.layers.1.mlp.weight" in str(receipt)
    assert held.tobytes() == bytes_in_file(layered)["model.layers.1.mlp.weight"]
    assert onelayer.live.snapshot().nbytes >= receipt.held
    assert model.unload("model.layers").asked == 0
    with pytest.raises(KeyError, match="layerz"):
        model.unload("model.layerz")
    with pytest.raises(KeyError):
        model["model.layers.0.mlp.weight"]


def test_layers_are_parked_restored_and_replaced(layered: Path, tmp_path: Path) -> None:
    expected = bytes_in_file(layered)
    model = onelayer.load(layered)
    receipt = model.park("model.layers", folder=tmp_path)
    assert receipt.parked == receipt.returned == model.parked_bytes > 0
    assert not list(tmp_path.glob(".*")) and "model.layers.3" not in model.layers
    with model.scope("model.layers.3"):
        assert model["model.layers.3.mlp.weight"].tobytes() == expected["model.layers.3.mlp.weight"]
    assert "model.layers.3" not in model.layers
    assert model.restore() > 0 and model.parked_bytes == 0
    assert model["model.layers.4.mlp.weight"].tobytes() == expected["model.layers.4.mlp.weight"]
    model.replace("model.layers.3", layered)
    assert model["model.layers.3.mlp.weight"].tobytes() == expected["model.layers.3.mlp.weight"]
    other = write_checkpoint(tmp_path / "other.safetensors", {"model.layers.3.mlp.weight": ("F32", (2, 2))})
    with pytest.raises((RuntimeError, KeyError), match="layers"):
        model.replace("model.layers.3", other)
    assert model["model.layers.3.mlp.weight"].tobytes() == expected["model.layers.3.mlp.weight"]


def test_a_scope_ends_with_an_error_too(layered: Path) -> None:
    model = onelayer.load(layered)
    with pytest.raises(ZeroDivisionError), model.scope("model.layers"):
        raise ZeroDivisionError
    assert all(not layer.startswith("model.layers") for layer in model.layers)


def test_an_interrupt_ends_a_load(layered: Path) -> None:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        mark = onelayer.live.snapshot()
        for _ in range(20):
            with pytest.raises(KeyboardInterrupt):
                # Inside, since it may come before the next line.
                threading.Timer(0.0005, os.kill, (os.getpid(), signal.SIGINT)).start()
                while True:
                    onelayer.load(layered).close()
        gc.collect()
        assert not onelayer.live.snapshot().since(mark), str(onelayer.live.snapshot())
    finally:
        signal.signal(signal.SIGINT, previous)


def test_spare_memory_goes_from_one_load_to_the_next(layered: Path) -> None:
    expected = bytes_in_file(layered)
    size = onelayer.load(layered).resident_bytes
    with onelayer.SpareMemory("64MiB") as spare:
        for _ in range(3):
            with onelayer.load(layered, spare=spare) as model:
                assert spare.nbytes == 0
                assert {name: tensor.tobytes() for name, tensor in model.items()} == expected
                receipt = model.unload()
            assert (receipt.reused, receipt.returned, spare.nbytes) == (size, 0, size)
        streamed = dict(onelayer.open(layered).tensors(framework="np", window="all", spare=spare))
        assert spare.nbytes == 0
        del streamed
        gc.collect()
        assert spare.nbytes == size and "idle" in repr(spare)
    assert spare.nbytes == 0
    small = onelayer.SpareMemory(1)
    assert onelayer.load(layered, spare=small).unload().returned == size


def test_allocations_are_listed(layered: Path) -> None:
    mark = onelayer.live.snapshot()
    model = onelayer.load(layered)
    found = onelayer.live.snapshot().since(mark)
    assert {one.layer for one in found.new} == set(model.layers)
    assert {(one.memory, one.used_for) for one in found.new} == {("cpu", "layer")}
    assert "+ " in str(found) and "layer model.embed_tokens" in str(found)
    tensor = model["model.layers.0.mlp.weight"]
    taken = [held for one in onelayer.live.snapshot().allocations for held in one.tensors if held.owners]
    assert [held.name for held in taken] == [tensor.name]
    del model, tensor
    gc.collect()
    assert str(onelayer.live.snapshot().since(mark)) == "no difference"


def test_a_block_is_measured(tmp_path: Path) -> None:
    with onelayer.measure() as m:
        with pytest.raises(RuntimeError, match="after the `with` block"):
            _ = m.seconds
        kept = pages(8)
        pages(24).close()
    assert m.unreclaimable_growth is not None and m.rss_growth is not None and m.kept_growth is not None
    assert 31 << 20 <= m.rss_growth <= 40 << 20
    assert 8 << 20 <= m.unreclaimable_growth <= 48 << 20
    assert 8 << 20 <= m.kept_growth <= 16 << 20
    assert m.vram_growth is None and m.seconds > 0 and m.timeline[0]["host_bytes"]
    m.html(tmp_path / "memory.html")
    page = (tmp_path / "memory.html").read_text()
    assert "<svg" in page and "unreclaimable" in page and "MiB" in repr(m)
    del kept


def test_leaks_are_told_from_what_is_flat(layered: Path) -> None:
    held: list[mmap.mmap] = []
    report = onelayer.leak(lambda: held.append(pages(1)), cycles=12)
    assert report.verdict == "leak" and 0.9 < report.bytes_per_cycle / (1 << 20) < 1.2
    assert str(report).startswith("leak: memory grows by 1.0 MiB a cycle")
    report = onelayer.leak(lambda: onelayer.load(layered).close(), cycles=20)
    assert report.verdict == "flat" and len(report.points) == 20, report
    with pytest.raises(ValueError, match="8 or more"):
        onelayer.leak(lambda: None, cycles=3)
