"""One checkpoint, stream, layer and model used by eight threads at once: most telling without the interpreter's lock."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import onelayer
from checkpoints import bytes_in_file

THREADS = 8


def at_once(work: Callable[[int], None]) -> None:
    """Runs ``work(number)`` on every thread, started together. The first error is raised here."""
    barrier = threading.Barrier(THREADS)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this interpreter has a lock")
def test_the_package_needs_no_lock() -> None:
    assert not sys._is_gil_enabled(), "an import has turned the lock on"  # type: ignore[attr-defined,unused-ignore]


def test_a_checkpoint_is_streamed_by_all(layered: Path) -> None:
    checkpoint, expected = onelayer.open(layered), bytes_in_file(layered)

    def work(number: int) -> None:
        for _ in range(5):
            with checkpoint.stream(budget="8MiB", window=1) as stream:
                for layer in stream:
                    with layer:
                        assert all(tensor.tobytes() == expected[name] for name, tensor in layer.items())

    at_once(work)


def test_each_layer_of_a_stream_goes_to_one_thread(layered: Path) -> None:
    expected = bytes_in_file(layered)

    def round_of(stream: onelayer.LayerStream) -> list[str]:
        taken: list[str] = []

        def work(number: int) -> None:
            for layer in stream:
                with layer:
                    for name, tensor in layer.items():
                        assert tensor.tobytes() == expected[name]
                        taken.append(name)
                assert stream.progress[0] <= stream.progress[1] and stream.report.layers <= len(stream)

        at_once(work)
        return taken

    for _ in range(20):
        with onelayer.open(layered).stream(budget="8MiB") as stream:
            assert Counter(round_of(stream)) == Counter(list(expected))


def test_a_stream_is_closed_while_others_wait_for_it(layered: Path) -> None:
    def round_of(stream: onelayer.LayerStream) -> None:
        def work(number: int) -> None:
            try:
                for layer in stream:
                    # A thread that waits with a layer in hand would stop all.
                    layer.close()
                    if number == 0:
                        stream.close()
            except (ValueError, onelayer.CancelledError):
                return

        at_once(work)

    for _ in range(20):
        with onelayer.open(layered).stream(budget="8MiB") as stream:
            round_of(stream)
        assert stream.closed


def test_a_layer_is_closed_while_others_export_it(layered: Path) -> None:
    expected = bytes_in_file(layered)

    def use(layer: onelayer.Layer) -> None:
        def work(number: int) -> None:
            for name in expected:
                if number == 0:
                    layer.close()
                try:
                    if name in layer:
                        tensor = layer[name]
                        tensor.__dlpack__(max_version=(1, 0))
                        assert tensor.tobytes() == expected[name]
                except ValueError as error:
                    assert "closed" in str(error)

        at_once(work)

    mark = onelayer.live.snapshot()
    for _ in range(5):
        with onelayer.open(layered).stream(budget="8MiB") as stream:
            for layer in stream:
                use(layer)
    del layer
    assert not onelayer.live.snapshot().since(mark).new


def test_a_model_is_read_and_changed_by_all(layered: Path) -> None:
    expected = bytes_in_file(layered)
    model = onelayer.load(layered)

    def work(number: int) -> None:
        part = f"model.layers.{number}"
        for _ in range(20):
            model.unload(part)
            model.replace(part, layered)
            for name in expected:
                try:
                    assert model[name].tobytes() == expected[name]
                except KeyError:
                    assert name.startswith("model.layers."), "only those are ever unloaded"

    at_once(work)
    assert {name: tensor.tobytes() for name, tensor in model.items()} == expected


def test_lazy_tensors_are_read_by_all(layered: Path) -> None:
    pytest.importorskip("numpy")
    checkpoint, expected = onelayer.open(layered), bytes_in_file(layered)
    mapped = checkpoint.state_dict(framework="np", mode="mapped")
    owned = checkpoint.state_dict(framework="np")

    def work(number: int) -> None:
        for tensors in (mapped, owned):
            assert {name: tensor[...].tobytes() for name, tensor in tensors.items()} == expected

    at_once(work)
