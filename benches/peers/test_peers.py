"""Tests of the table's arithmetic, and of measuring processes that hold memory or crash. Standard library only.

    cd benches/peers && python3 -m unittest
"""

import pathlib
import sys
import unittest
from unittest import mock

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent), str(pathlib.Path(__file__).resolve().parent.parent)]

import rows as peers  # noqa: E402
import table  # noqa: E402
import watch  # noqa: E402

MIB = 1 << 20
OURS = peers.Row("ours", peers.ALL, way="host-all", in_manual=True)
THEIRS = peers.Row("theirs", peers.ALL, "some loader", in_manual=True)
DROPS = peers.Row("drops", peers.PIECES, "some loader", in_manual=True)


def record(row, number, seconds, cache="cold", **fields):
    base = {
        "row": row.name, "kind": "round", "cache": cache, "round": number, "outcome": "ok", "seconds": seconds, "cpu_seconds": 1.0,
        "bytes": 100, "held_bytes": 100, "mapped_bytes": 0, "import_seconds": 0.5, "group_peak_bytes": 9 * MIB,
        "before": {"rss": 2 * MIB}, "growth": {"host": 3 * MIB, "file": 0, "rss": 4 * MIB},
    }
    return base | fields


def failed(row, number, outcome, reason):
    return {"row": row.name, "kind": "round", "cache": "cold", "round": number, "outcome": outcome, "reason": reason}


def survived(row, outcome, **fields):
    return {"row": row.name, "kind": "survival", "limit_bytes": 128 * MIB, "outcome": outcome, **fields}


def line(text, name):
    return next(one for one in text.splitlines() if name in one.split("|")[1])


class TableTest(unittest.TestCase):
    def test_ratios_are_taken_within_rounds(self):
        # The machine was twice as slow in the second round, for both; in the third, ours is missing.
        self.assertEqual(table.ratios({0: 3.0, 1: 6.0, 2: 9.0}, {0: 1.0, 1: 2.0}), [3.0, 3.0])

    def test_medians_and_spreads(self):
        self.assertEqual(table.spread([3.0, 1.0, 2.0]), (2.0, 1.0, 3.0))
        self.assertIsNone(table.spread([]))
        self.assertEqual(table.of_rounds([3.0, 1.0, 2.0]), "2.00 (1.00–3.00)")
        self.assertEqual(table.of_rounds([3.0]), "3.00")

    def test_a_row_is_compared_with_ours_of_its_group(self):
        records = table.Records([record(OURS, 0, 1.0), record(THEIRS, 0, 2.5), record(DROPS, 0, 2.0, held_bytes=0)])
        text = table.full(records, [OURS, THEIRS, DROPS], ["cold"], [], 100)
        self.assertEqual(line(text, "theirs").split("|")[4].strip(), "2.50")
        self.assertEqual(line(text, "ours").split("|")[4].strip(), "1")
        # No row of ours keeps nothing, so there is no ratio.
        self.assertEqual(line(text, "drops").split("|")[4].strip(), "")

    def test_what_is_held_is_what_was_found(self):
        mapped = record(THEIRS, 0, 1.0, mapped_bytes=100)
        half = record(THEIRS, 0, 1.0, mapped_bytes=50)
        short = record(THEIRS, 0, 1.0, bytes=40, held_bytes=40)
        wanted = [(mapped, "mapped, touched"), (half, "50% mapped, touched"), (short, "only 40% of the bytes"), (record(THEIRS, 0, 1.0), "owned")]
        for one, words in wanted:
            self.assertEqual(table.Records([one]).ends_with(THEIRS, 100), words)

    def test_memory_is_the_most_of_all_rounds(self):
        most = record(THEIRS, 1, 1.0, growth={"host": 7 * MIB, "file": 0, "rss": 4 * MIB})
        self.assertEqual(table.Records([record(THEIRS, 0, 1.0), most]).growth(THEIRS, "host"), 7.0)

    def test_a_refusal_keeps_its_row_and_says_why(self):
        records = table.Records([failed(THEIRS, 0, "refused", "no GPU"), record(OURS, 0, 1.0)])
        for make in (table.full, table.compact):
            self.assertIn("refuses: no GPU", line(make(records, [OURS, THEIRS], ["cold"], [], 100), "theirs"))

    def test_a_kill_tells_where_it_came(self):
        cases = [({"stage": "load"}, "**killed**"), ({"stage": "import"}, "**killed** (import)")]
        for fields, words in cases:
            records = table.Records([survived(THEIRS, "killed", **fields)])
            self.assertEqual(records.survival(THEIRS, 128 * MIB), words)
        self.assertEqual(table.Records([survived(THEIRS, "ok", seconds=2.04)]).survival(THEIRS, 128 * MIB), "2.0 s")
        self.assertEqual(table.Records([]).survival(THEIRS, 128 * MIB), "")

    def test_every_line_has_as_many_cells(self):
        records = table.Records([record(OURS, 0, 1.0), record(THEIRS, 0, 2.5), survived(OURS, "ok", seconds=1.0)])
        for make in (table.full, table.compact):
            text = make(records, [OURS, THEIRS, DROPS], ["cold", "warm"], [128 * MIB, 1 << 30], 100)
            self.assertEqual(len({one.count("|") for one in text.splitlines()}), 1, text)

    def test_markers_are_replaced_between_and_must_be_there(self):
        self.assertEqual(table.replace_between("a<b>old</b>c", "<b>", "</b>", "new\n"), "a<b>\nnew\n</b>c")
        with self.assertRaisesRegex(ValueError, "each stand there once"):
            table.replace_between("nothing", "<b>", "</b>", "new")


# Has the protocol of child.py; its imports take 32 MiB and half a second.
CHILD = """
import json, sys, time
def say(**fields): print(json.dumps(fields), flush=True)
before = bytearray(b'1') * (32 << 20)
while time.process_time() < 0.5: pass
say(ready=True, import_seconds=0.25)
sys.stdin.readline()
%s
say(done=True, seconds=0.5, bytes=7, mapped_bytes=0, held_bytes=7)
sys.stdin.readline()
"""


def child(body, **options):
    return watch.measure([sys.executable, "-c", CHILD % body], **options)


class WatchTest(unittest.TestCase):
    def test_memory_and_time_of_the_load_alone(self):
        found = child("held = bytearray(b'1') * (64 << 20)\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass")
        self.assertEqual((found["outcome"], found["seconds"], found["bytes"]), ("ok", 0.5, 7))
        for name in ("host", "rss"):
            self.assertTrue(60 < found["growth"][name] / MIB < 80, found)
        self.assertGreater(found["before"]["anon"], 30 * MIB)
        self.assertTrue(0.15 < found["cpu_seconds"] < 0.5, found)

    def test_memory_that_was_given_back_before_the_end_counts(self):
        # Between two samples.
        with mock.patch.object(watch, "INTERVAL_SECONDS", 60.0):
            found = child("held = bytearray(b'1') * (64 << 20)\ndel held")
        self.assertLess(found["growth"]["host"], 32 * MIB)
        self.assertGreater(found["growth"]["rss"], 60 * MIB)

    def test_a_refusal_is_no_failure(self):
        found = child("say(refused='needs a GPU')\nsys.exit()")
        self.assertEqual((found["outcome"], found["reason"]), ("refused", "needs a GPU"))

    def test_a_crash_is_told_with_its_last_line(self):
        found = child("raise ValueError('broken')")
        self.assertEqual(found["outcome"], "failed")
        self.assertIn("broken", found["reason"])

    def test_a_load_that_hangs_is_ended(self):
        found = child("time.sleep(60)", limit_seconds=1.0)
        self.assertEqual(found["outcome"], "timeout")

    def test_a_group_kills_and_says_so(self):
        try:
            watch.Cage(64 * MIB).remove()
        except OSError as error:
            self.skipTest(f"no memory group can be made here ({error})")
        found = child("held = bytearray(b'1') * (256 << 20)", limit_bytes=64 * MIB)
        self.assertEqual((found["outcome"], found["stage"]), ("killed", "load"), found)
        # The imports alone are too large.
        found = child("pass", limit_bytes=16 * MIB)
        self.assertEqual((found["outcome"], found["stage"]), ("killed", "import"), found)


if __name__ == "__main__":
    unittest.main()
