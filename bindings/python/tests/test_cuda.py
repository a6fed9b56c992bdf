"""The CUDA device on the simulated driver of `testing/cuda-sim`. Tests nothing that needs a real GPU.

`ONELAYER_CUDA_SIM` names the built library, as scripts/python-check sets it. Programs that are to see it run in processes of their
own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import bytes_in_file

SIMULATED = os.environ.get("ONELAYER_CUDA_SIM")
pytestmark = pytest.mark.skipif(SIMULATED is None, reason="ONELAYER_CUDA_SIM names no simulated CUDA driver")
# The file names of the driver and of NVML.
NAMES = ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so", "libnvidia-ml.so.1")

Run = Callable[..., tuple[str, dict[str, str]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs Python on the simulated driver; returns the output and the driver's final report."""
    folder = tmp_path / "driver"
    folder.mkdir()
    assert SIMULATED is not None
    first = folder / NAMES[0]
    first.write_bytes(Path(SIMULATED).read_bytes())
    for name in NAMES[1:]:
        (folder / name).hardlink_to(first)

    def run(*words: str, status: int = 0, **settings: str) -> tuple[str, dict[str, str]]:
        report = tmp_path / "report"
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "CUDA_SIM_REPORT": str(report)}
        environment |= {f"CUDA_SIM_{name}": value for name, value in settings.items()}
        command = [sys.executable, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stdout + done.stderr
        lines = report.read_text().splitlines() if report.exists() else []
        return done.stdout, dict(line.split(" ", 1) for line in lines)

    return run


def program(text: str, path: Path) -> tuple[str, str]:
    head = f"import onelayer\ncheckpoint = onelayer.open({str(path)!r})\n"
    return "-c", head + textwrap.dedent(text)


def assert_clean(report: dict[str, str]) -> None:
    assert "simulated" in report["driver.name"]
    assert report["violations.total"] == "0", report
    assert {key: value for key, value in report.items() if key.startswith("leaks.") and value != "0"} == {}


@pytest.mark.parametrize("mode", ["lazy", "thread", "eager"])
def test_every_byte_arrives(run: Run, layered: Path, mode: str) -> None:
    text = """
        import numpy
        with checkpoint.stream(device="cuda:0", budget="8MiB") as stream:
            for layer in stream:
                with layer:
                    for name, tensor in layer.items():
                        assert tensor.device == "cuda:0" and tensor.__dlpack_device__() == (2, 0)
                        copy = numpy.from_dlpack(tensor, device="cpu")
                        assert copy.tobytes() == tensor.tobytes()
                        print(name, tensor.tobytes().hex())
    """
    output, report = run(*program(text, layered), MODE=mode)
    found = {name: bytes.fromhex(data) for name, data in (line.split() for line in output.splitlines())}
    assert found == bytes_in_file(layered)
    assert_clean(report)


def test_the_consumers_stream_waits(run: Run, layered: Path) -> None:
    """An export for a stream queues a wait there and returns; an export without one waits."""
    text = """
        with checkpoint.stream(device="cuda", window=4) as stream:
            layer = next(stream)
            tensor = next(iter(layer.values()))
            capsules = [tensor.__dlpack__(max_version=(1, 0), stream={stream}) for _ in range(100)]
            del capsules, tensor
            layer.close()
    """
    waits = {}
    for stream in ("None", "-1", "1"):
        _, report = run(*program(text.format(stream=stream), layered), MODE="lazy")
        assert_clean(report)
        waits[stream] = int(report.get("calls.cuStreamWaitEvent", "0"))
    # None is the legacy default stream; -1 requests no wait. The load itself queues a few waits.
    for stream in ("None", "1"):
        assert abs(waits[stream] - waits["-1"] - 100) <= 10


def test_refusals_are_buffer_errors(run: Run, layered: Path) -> None:
    text = """
        with checkpoint.stream(device="cuda:0") as stream:
            tensor = next(iter(next(stream).values()))
            wrong = [
                {"stream": 0}, {"stream": -2}, {"stream": "fast"}, {"copy": True}, {"dl_device": (2, 1)},
                {"dl_device": (1, 0), "copy": False},
            ]
            for arguments in wrong:
                try:
                    tensor.__dlpack__(max_version=(1, 0), **arguments)
                except BufferError as error:
                    print(error)
            try:
                tensor.view_bytes()
            except BufferError as error:
                print(error)
    """
    output, _ = run(*program(text, layered))
    assert len(output.splitlines()) == 7


def test_exit_with_live_tensors(run: Run, layered: Path) -> None:
    text = """
        import sys
        stream = checkpoint.stream(device="cuda:0", window=4)
        sys.kept = [tensor.__dlpack__(max_version=(1, 0)) for tensor in next(stream).values()]
        sys.layer = next(stream)
        print("exit")
    """
    output, report = run(*program(text, layered))
    assert output == "exit\n"
    assert report.get("violations.total", "0") == "0"


def test_too_little_memory_is_told_before_anything_is_read(run: Run, layered: Path) -> None:
    text = """
        try:
            checkpoint.stream(device="cuda:0", window="all")
        except onelayer.DeviceError as error:
            print(error)
        try:
            checkpoint.stream(device="cuda:1")
        except onelayer.DeviceError as error:
            print(error)
    """
    output, _ = run(*program(text, layered), MEM=str((65 << 20) + (256 << 10)), CONTEXT=str(1 << 20))
    first, second = output.splitlines()
    assert "the layers need" in first
    assert "no CUDA device 1" in second


def test_the_marker_measures_the_device(run: Run, layered: Path, tmp_path: Path) -> None:
    test = tmp_path / "test_device.py"
    test.write_text(
        textwrap.dedent(
            f"""
            import onelayer, pytest, time

            def keep_all():
                kept = list(onelayer.open({str(layered)!r}).stream(device="cuda:0", window="all"))
                # Memory of a device is sampled.
                time.sleep(0.2)
                return kept

            @pytest.mark.loadcheck(max_vram="64MiB")
            def test_within():
                assert len(keep_all()) == 10

            @pytest.mark.loadcheck(max_vram="256KiB")
            def test_over():
                assert len(keep_all()) == 10
            """
        )
    )
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(test))
    plugin = () if is_installed() else ("-p", "onelayer.pytest_plugin")
    output, _ = run(*words, *plugin, status=1)
    assert "1 failed, 1 passed" in output
    assert "device memory grew by" in output and f"max_vram is {256 << 10}" in output


def is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(found.value == "onelayer.pytest_plugin" for found in entry_points(group="pytest11"))
