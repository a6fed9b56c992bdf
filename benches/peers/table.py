"""Makes a table from records of single loads. Measures nothing, so that the arithmetic can be tested."""

import statistics

import rows as peers
from figure_tools import MIB

GROUPS = {
    peers.ALL: "every tensor in memory at the end",
    peers.PIECES: "one piece after the other, nothing left",
    peers.BYTES: "another thing: every byte read and dropped, no tensor is ever whole",
}


def spread(values):
    """Median, minimum and maximum; None without values."""
    if not values:
        return None
    return statistics.median(values), min(values), max(values)


def ratios(theirs, ours):
    """Seconds of a row divided by ours, for each round that has both."""
    return [theirs[number] / ours[number] for number in sorted(theirs) if number in ours and ours[number] > 0]


class Records:
    """The records, by row."""

    def __init__(self, records):
        self.records = records

    def of(self, row, kind, **wanted):
        found = [one for one in self.records if one.get("row") == row.name and one.get("kind") == kind]
        return [one for one in found if all(one.get(name) == value for name, value in wanted.items())]

    def seconds(self, row, cache):
        """Round -> seconds of successful loads."""
        return {one["round"]: one["seconds"] for one in self.of(row, "round", cache=cache) if one["outcome"] == "ok"}

    def values(self, row, cache, name):
        good = [one for one in self.of(row, "round", cache=cache) if one["outcome"] == "ok"]
        return [one[name] for one in good if one.get(name) is not None]

    def growth(self, row, name):
        """The maximum of a kind of memory over all rounds, in MiB; None if never measured."""
        found = [one["growth"][name] for one in self.of(row, "round") if one["outcome"] == "ok"]
        return max(found) / MIB if found else None

    def failure(self, row):
        """The last reason why a row has no times; None if it has some or was never tried."""
        tried = self.of(row, "round")
        if not tried or any(one["outcome"] == "ok" for one in tried):
            return None
        last = tried[-1]
        return f"{'refuses' if last['outcome'] == 'refused' else last['outcome']}: {last['reason']}"

    def ends_with(self, row, expected_bytes):
        """The kind of memory at the end, as measured, not as documented."""
        good = [one for one in self.of(row, "round") if one["outcome"] == "ok"]
        if not good:
            return "?"
        last = good[-1]
        if last["bytes"] < expected_bytes:
            return f"only {last['bytes'] / expected_bytes:.0%} of the bytes"
        if not last["held_bytes"]:
            return "nothing"
        mapped = last["mapped_bytes"] / last["bytes"]
        return "owned" if mapped < 0.01 else "mapped, touched" if mapped > 0.99 else f"{mapped:.0%} mapped, touched"

    def survival(self, row, limit_bytes):
        found = self.of(row, "survival", limit_bytes=limit_bytes)
        if not found:
            return ""
        last = found[-1]
        if last["outcome"] == "ok":
            return f"{last['seconds']:.1f} s"
        if last["outcome"] == "killed":
            return "**killed**" if last.get("stage") == "load" else "**killed** (import)"
        return "refuses" if last["outcome"] == "refused" else last["reason"] if last["outcome"] == "timeout" else "failed"


def reference(row, chosen):
    """Our row to compare with: the one with the same final memory."""
    return next((one for one in chosen if one.ours and one.keeps == row.keeps), None)


def number(value, digits=1):
    return "" if value is None else f"{value:.{digits}f}"


def of_rounds(values):
    """`1.23 (1.20-1.31)`, or only the median for a single value."""
    found = spread(values)
    if found is None:
        return ""
    middle, least, most = found
    return f"{middle:.2f}" if len(values) == 1 else f"{middle:.2f} ({least:.2f}–{most:.2f})"


def timed(records, row, chosen, cache):
    """Seconds, ratio to ours, CPU seconds."""
    ours = reference(row, chosen)
    theirs = records.seconds(row, cache)
    ratio = ratios(theirs, records.seconds(ours, cache)) if ours and ours is not row else []
    cpu = records.values(row, cache, "cpu_seconds")
    return [of_rounds(list(theirs.values())), of_rounds(ratio) or ("1" if ours is row and theirs else ""), number(statistics.median(cpu), 2) if cpu else ""]


def limit_name(limit_bytes):
    return f"{limit_bytes >> 30} GiB" if limit_bytes >= 1 << 30 else f"{limit_bytes >> 20} MiB"


def full(records, chosen, caches, limits, expected_bytes):
    """The whole table, as Markdown."""
    head = ["loader", "held at the end"]
    for cache in caches:
        head += [f"{cache}, s", "times ours", "CPU s"]
    head += ["host + MiB", "file + MiB", "RSS + MiB", "group MiB", "import s", "RSS after it, MiB"] + [f"in {limit_name(one)}" for one in limits]
    lines = ["| " + " | ".join(head) + " |", "|---" * 2 + "|---:" * (len(head) - 2) + "|"]
    for keeps, title in GROUPS.items():
        group = [row for row in chosen if row.keeps == keeps]
        if group:
            lines.append(f"| *{title}* |" + " |" * (len(head) - 1))
        for row in group:
            cells = [f"**{row.name}**" if row.ours else row.name, records.failure(row) or records.ends_with(row, expected_bytes)]
            for cache in caches:
                cells += timed(records, row, chosen, cache)
            cells += [number(records.growth(row, name), 0) for name in ("host", "file", "rss")]
            cells += before(records, row) + [records.survival(row, one) for one in limits]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def before(records, row):
    """The group's peak, seconds of imports, and memory after them."""
    tried = [one for one in records.of(row, "round") if one["outcome"] == "ok"]
    peaks = [one["group_peak_bytes"] for one in tried if one.get("group_peak_bytes")]
    imports = [one["import_seconds"] for one in tried]
    rss = [one["before"]["rss"] for one in tried]
    return [
        number(max(peaks) / MIB if peaks else None, 0),
        number(statistics.median(imports) if imports else None),
        number(max(rss) / MIB if rss else None, 0),
    ]


def compact(records, chosen, caches, limits, expected_bytes):
    """The table of docs/figures.md: its named rows and their measured memory."""
    head = ["loader", "held at the end"] + [f"{cache}, times ours" for cache in caches]
    head += ["host + MiB", "RSS + MiB"] + [f"in {limit_name(one)}" for one in limits]
    lines = ["| " + " | ".join(head) + " |", "|---" * 2 + "|---:" * (len(head) - 2) + "|"]
    for keeps, title in GROUPS.items():
        group = [row for row in chosen if row.keeps == keeps and row.in_manual]
        if group:
            lines.append(f"| *{title}* |" + " |" * (len(head) - 1))
        for row in group:
            cells = [f"**{row.name}**" if row.ours else row.name, records.failure(row) or records.ends_with(row, expected_bytes)]
            for cache in caches:
                seconds, ratio, _ = timed(records, row, chosen, cache)
                cells.append(f"1 ({seconds.split(' ')[0]} s)" if ratio == "1" else ratio or (seconds and f"{seconds} s"))
            cells += [number(records.growth(row, name), 0) for name in ("host", "rss")]
            cells += [records.survival(row, one) for one in limits]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def replace_between(text, begin, end, middle):
    """`text` with the part between the two markers replaced."""
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{begin} and {end} must each stand there once")
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{middle}{end}{tail}"
