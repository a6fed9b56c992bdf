"""Streams: layers, exports, waiting, interrupts, freed memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

import onelayer
from checkpoints import bytes_in_file


def test_every_byte_arrives(layered: Path) -> None:
    expected = bytes_in_file(layered)
    with onelayer.open(layered).stream(budget="8MiB") as stream:
        assert len(stream) == 10
        found = {}
        for index, layer in enumerate(stream):
            assert layer.index == index
            assert isinstance(layer, Mapping)
            for name, tensor in layer.items():
                assert (tensor.name, tensor.device) == (name, "cpu")
                found[name] = tensor.tobytes()
        assert stream.progress == (len(b"".join(expected.values())),) * 2
    assert found == expected
    assert (stream.report.layers, stream.report.nbytes) == (10, stream.plan.nbytes)
    assert stream.report.budget == 8 << 20 >= stream.report.host_bytes > 0
    assert stream.report.seconds > 0
    assert "10 layers" in str(stream.report)


def test_a_layer_is_a_mapping(layered: Path) -> None:
    with onelayer.open(layered).stream() as stream:
        layer = next(stream)
        assert layer.name == "model.embed_tokens"
        assert list(layer) == list(layer.keys()) == ["model.embed_tokens.weight"]
        assert len(layer) == 1 and "model.embed_tokens.weight" in layer and 5 not in layer
        tensor = layer["model.embed_tokens.weight"]
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("F32", (64, 64), 64 * 64 * 4)
        assert layer.get("nothing") is None and layer.get("nothing", 3) == 3
        assert [value.name for value in layer.values()] == list(layer)
        with pytest.raises(KeyError):
            layer["nothing"]
        assert layer.nbytes == tensor.nbytes <= layer.resident_bytes


def test_a_closed_layer_lets_go_and_what_was_exported_stays(layered: Path) -> None:
    numpy = pytest.importorskip("numpy")
    expected = bytes_in_file(layered)
    with onelayer.open(layered).stream(window=1, on_stall=5) as stream:
        arrays = {}
        for layer in stream:
            with layer:
                tensors = dict(layer.items())
                if layer.name == "model.layers.7":
                    arrays = {name: numpy.from_dlpack(tensor) for name, tensor in tensors.items()}
                    break
            assert layer.closed
            with pytest.raises(ValueError, match="closed"):
                tensors.popitem()[1].tobytes()
    del stream, layer, tensors
    gc.collect()
    for name, array in arrays.items():
        assert array.tobytes() == expected[name]


def test_a_caller_that_hoards_is_told_what_it_holds(layered: Path) -> None:
    with onelayer.open(layered).stream(window=2, on_stall=0.2) as stream:
        held = [next(stream), next(stream)]
        with pytest.raises(onelayer.StalledError) as caught:
            next(stream)
        assert caught.value.held == [layer.name for layer in held]
    with onelayer.open(layered).stream(window="all", order="file") as stream:
        assert len(list(stream)) == 10


def test_a_stream_that_was_closed(layered: Path) -> None:
    stream = onelayer.open(layered).stream()
    layer = next(stream)
    assert not stream.closed
    stream.close()
    stream.close()
    assert stream.closed and stream.report.layers == 1
    with pytest.raises(ValueError, match="closed"):
        next(stream)
    assert len(layer["model.embed_tokens.weight"].tobytes()) == 64 * 64 * 4


def test_the_end_is_an_end(layered: Path) -> None:
    stream = onelayer.open(layered).stream()
    assert sum(1 for _ in stream) == 10
    assert next(stream, None) is None


def test_selection_and_narrowing(layered: Path) -> None:
    checkpoint = onelayer.open(layered)
    selections = [
        r"layers\.[01]\.mlp",
        ["model.layers.0.mlp.weight", "model.layers.1.mlp.weight"],
        lambda info: info.shape == (64, 128) and info.name < "model.layers.2" and ".mlp." in info.name,
    ]
    for select in selections:
        with checkpoint.stream(select=select, dtype="bf16") as stream:
            tensors = [tensor for layer in stream for tensor in layer.values()]
            assert [tensor.name for tensor in tensors] == selections[1]
            assert {(tensor.dtype, tensor.nbytes) for tensor in tensors} == {("BF16", 64 * 128 * 2)}
    with pytest.raises(KeyError, match="nothing"):
        checkpoint.stream(select=["nothing"])


def test_bytes_may_go_nowhere(layered: Path) -> None:
    with onelayer.open(layered).stream(device="none") as stream:
        for layer in stream:
            tensor = next(iter(layer.values()))
            assert tensor.device == "none"
            for refused in (tensor.__dlpack__, tensor.__dlpack_device__, tensor.tobytes, tensor.view_bytes):
                with pytest.raises(BufferError, match="none"):
                    refused()
    assert stream.report.nbytes == stream.plan.nbytes


def test_a_device_that_is_not_there_is_an_error_of_its_own(layered: Path) -> None:
    with pytest.raises(onelayer.DeviceError):
        onelayer.open(layered).stream(device="cuda:99")


def test_a_file_that_changes_is_an_error(layered: Path) -> None:
    checkpoint = onelayer.open(layered)
    os.utime(layered, ns=(1, 1))
    with pytest.raises(onelayer.CheckpointError, match="changed") as caught:
        list(checkpoint.stream(window="all"))
    assert caught.value.path == str(layered)
    layered.unlink()
    with pytest.raises(FileNotFoundError):
        list(checkpoint.stream())


def test_other_threads_run_while_one_waits(layered: Path) -> None:
    """The stream waits for its caller for a second while another thread counts."""
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0.001)

    with onelayer.open(layered).stream(window=1, on_stall=1) as stream:
        held = next(stream)
        thread = threading.Thread(target=count)
        thread.start()
        with pytest.raises(onelayer.StalledError):
            next(stream)
        stop.set()
        thread.join()
        del held
    assert counted > 50


def test_cancel_and_close_from_another_thread(layered: Path) -> None:
    for end, error in (("cancel", onelayer.CancelledError), ("close", (onelayer.CancelledError, ValueError))):
        with onelayer.open(layered).stream(window=1, on_stall=30) as stream:
            held = next(stream)
            threading.Timer(0.2, getattr(stream, end)).start()
            began = time.monotonic()
            with pytest.raises(error):
                next(stream)
            assert time.monotonic() - began < 5
            del held


def test_ctrl_c_works_during_a_wait(layered: Path) -> None:
    program = textwrap.dedent(
        f"""
        import onelayer, signal
        # The signal is ignored in processes started in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with onelayer.open({str(layered)!r}).stream(window=1, on_stall=60) as stream:
            held = next(stream)
            print("waiting", flush=True)
            try:
                next(stream)
            except KeyboardInterrupt:
                print("interrupted")
                del held
                print(next(stream).name)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    rest, _ = process.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert rest == "interrupted\nmodel.layers.0\n"
    assert process.returncode == 0


def test_threads_and_descriptors_come_back(layered: Path) -> None:
    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    checkpoint = onelayer.open(layered)
    checkpoint.stream().close()
    before = used()
    for _ in range(20):
        with checkpoint.stream() as stream:
            next(stream)
    assert used() == before
