"""The pytest marker ``loadcheck``: passes, fails, and fails if it cannot measure."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

pytest_plugins = ["pytester"]

TAKES_48_MIB = """
    import time

    import pytest

    @pytest.mark.loadcheck({limits})
    def test_takes_48_mib():
        memory = bytearray(48 << 20)
        memory[::4096] = b"1" * len(memory[::4096])
        # Samples come every 5 ms.
        time.sleep(0.1)
        assert memory
"""


# pytest finds the plug-in of an installed package itself.
IS_INSTALLED = any(found.value == "onelayer.pytest_plugin" for found in entry_points(group="pytest11"))
PLUGIN = () if IS_INSTALLED else ("-p", "onelayer.pytest_plugin")


def run(pytester: pytest.Pytester, limits: str) -> pytest.RunResult:
    pytester.makepyfile(TAKES_48_MIB.format(limits=limits))
    # In a separate process, so that memory of other tests does not count.
    return pytester.runpytest_subprocess(*PLUGIN)


@pytest.mark.parametrize("limit", ["max_host", "max_rss"])
def test_within_and_over_the_limit(pytester: pytest.Pytester, limit: str) -> None:
    run(pytester, f"{limit}='64MiB'").assert_outcomes(passed=1)
    over = run(pytester, f"{limit}='40MiB'")
    over.assert_outcomes(failed=1)
    over.stdout.fnmatch_lines([f"*memory grew by * bytes, {limit} is {40 << 20}*"])


def test_what_cannot_be_measured_fails(pytester: pytest.Pytester) -> None:
    result = run(pytester, "max_host='1GiB', max_vram='1GiB', device=99")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*device memory cannot be measured here: *"])


@pytest.mark.parametrize("limits", ["", "'1GiB'", "max_ram='1GiB'", "max_host='lots'"])
def test_a_marker_that_limits_nothing_fails(pytester: pytest.Pytester, limits: str) -> None:
    run(pytester, limits).assert_outcomes(failed=1)


def test_a_test_that_fails_by_itself_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.loadcheck(max_host="1GiB")
        def test_fails():
            assert 1 == 2

        def test_without_it():
            pass
        """
    )
    result = pytester.runpytest_subprocess(*PLUGIN, "--strict-markers")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2*"])
