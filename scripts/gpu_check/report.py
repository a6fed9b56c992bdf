"""Writes the results so far as one JSON and one Markdown file, again after every step."""

import json
import os

from .measure import mib

MARKS = {"passed": "yes", "failed": "**NO**", "skipped": "skipped", "stand-in": "stand-in", "absent": "not in this version"}


class Report:
    """All results; `save` may be called at any time."""

    def __init__(self, folder):
        self.folder = folder
        self.found = {
            "schema": "gpu-check/1", "verdict": "unfinished", "simulated": None, "stand_in": None, "machine": {}, "tools": {},
            "correctness": [], "limits": {}, "measurements": [], "wrong_while_measuring": [], "skipped": [], "peers": {}, "data": {},
        }

    def save(self):
        self.replace("gpu-check.json", json.dumps(self.found, indent=1) + "\n")
        try:
            text = self.markdown()
        except Exception as error:  # the JSON has the figures; an error in the tables must not end the check
            self.found["table_error"] = f"{type(error).__name__}: {error}"
            text = f"The tables could not be written ({self.found['table_error']}): see gpu-check.json.\n"
        self.replace("gpu-check.md", text)
        return text

    def replace(self, name, text):
        part = self.folder / f".{name}.part"
        part.write_text(text)
        os.replace(part, self.folder / name)

    def title(self):
        found = self.found
        name = found["machine"].get("device", {}).get("name") or "no device"
        lines = [f"# GPU check, {found['machine'].get('date', '?')}: {name}", ""]
        if found["simulated"]:
            lines += ["**simulated: figures mean nothing.** The device is a simulation; only the course of the check is shown.", ""]
        if found["stand_in"]:
            lines += [f"**stand-in: device `{found['stand_in']}` took the place of a GPU.** Nothing here says anything about one.", ""]
        return lines

    def markdown(self):
        found = self.found
        lines = self.title() + [f"Verdict: **{found['verdict']}**{why(found)}.", ""]
        lines += [f"- {name}: {value}" for name, value in found["machine"].items() if name != "device"]
        lines += [f"- {name}: {value}" for name, value in found["tools"].items()]
        lines += ["", "## Correctness", "", "| step | | seen | s |", "|---|---|---|---:|"]
        for step in found["correctness"]:
            lines.append(f"| {step['name']} | {MARKS[step['outcome']]} | {cell(step['detail'])} | {step['seconds']:.1f} |")
        lines += limit_lines(found["limits"]) + measured_lines(found["measurements"])
        if found["wrong_while_measuring"]:
            lines += ["", "## Wrong while measuring", ""]
            lines += [f"- {wrong['group']}, {wrong['row']}: {cell(wrong['reason'])}" for wrong in found["wrong_while_measuring"]]
        if found["skipped"]:
            lines += ["", "## Left out", "", "| what | why |", "|---|---|"]
            lines += [f"| {skip['group']}: {skip['row']} | {cell(skip['reason'])} |" for skip in found["skipped"]]
        return "\n".join(lines) + "\n"


def why(found):
    failed = [step["name"] for step in found["correctness"] if step["outcome"] == "failed"]
    return f" ({len(failed)} correctness steps failed: {'; '.join(failed)})" if failed else ""


def cell(text):
    return str(text).replace("|", "\\|").replace("\n", " ")


def limit_lines(limits):
    """The machine's limits, with the best row of each kind marked."""
    if not limits:
        return []
    lines = ["", "## Limits of the machine", ""]
    if limits.get("error"):
        return lines + [f"Not measured: {cell(limits['error'])}"]
    lines += ["| limit | how | GB/s | least to greatest |", "|---|---|---:|---:|"]
    names = {
        "h2d": "to the device, registered", "h2d_pageable": "to the device, pageable", "d2h": "to the host, registered",
        "fill": "page cache to ring", "fill_and_copy": "both at once", "disk": "disk, cold",
    }
    for section, name in names.items():
        for row in limits.get(section, []):
            lines += [f"| {name} | {how(row)} | {text} |" for text in rates(row)]
    costs = []
    for row in limits.get("registration", []):
        if "error" not in row:
            costs.append(f"| register {mib(row['bytes'])} MiB | {row['register_seconds'] * 1e3:.2f} | {row['unregister_seconds'] * 1e3:.2f} | {row['register_seconds_per_gib'] * 1e3:.2f} per GiB |")
    for row in limits.get("allocation", []):
        if "error" not in row:
            costs.append(f"| {row['method']}, {row['count']} x {mib(row['block_bytes'])} MiB | {row['allocate_seconds'] * 1e3:.2f} | {row['free_seconds'] * 1e3:.2f} | {row['allocate_seconds_per_gb'] * 1e3:.2f} per GB |")
    if costs:
        lines += ["", "| cost | on, ms | off, ms | on, ms |", "|---|---:|---:|---:|"] + costs
    errors = [(section, row["error"]) for section, rows in limits.items() if isinstance(rows, list) for row in rows if isinstance(row, dict) and row.get("error")]
    return lines + [f"\n{section}: not measured: {cell(error)}" for section, error in errors]


def how(row):
    words = []
    for field, unit in (("chunk_bytes", "chunk"), ("ring_bytes", "ring"), ("block_bytes", "block")):
        if field in row:
            size = row[field]
            words.append(f"{unit} {size >> 10} KiB" if size < 1 << 20 else f"{unit} {size >> 20} MiB")
    words += [f"{row[field]} {field}" for field in ("streams", "threads") if field in row]
    return ", ".join(([row["io"]] if "io" in row else []) + words)


def rates(row):
    parts = [("", row)] if "gb_per_s" in row else [(f"{name} ", row[name]) for name in ("fill", "copy") if name in row]
    return [f"{name}{part['gb_per_s']:.2f} | {part['gb_per_s_min']:.2f} to {part['gb_per_s_max']:.2f}" for name, part in parts]


def measured_lines(rows):
    if not rows:
        return []
    lines = ["", "## Loads", "", "Median over interleaved rounds, least to greatest in brackets; ratio to the limit measured in the same round; memory is the greatest growth over what the process held before the load, with its context made.", ""]
    lines += ["| files and cache | loader | GB/s | of the limit | s | RSS, MiB | host, MiB | pinned, MiB | system, MiB | n |", "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for row in rows:
        if row["gb_per_s"] is None:
            lines.append(f"| {row['group']} ({row['data']}) | {row['row']} | failed: {cell(row.get('error', '?'))} | | | | | | | 0 |")
            continue
        ratio, seconds = row["ratio"], row["seconds"]
        name = f"*limit: {', '.join(row['limited_by'])}*" if row["row"] == "limit" else row["row"]
        told = [
            figure(row["gb_per_s"]), figure(ratio) if ratio else "", figure(seconds, 3) if seconds else "",
            *("" if row["row"] == "limit" else mib(row[field]) for field in ("rss_growth_bytes", "host_growth_bytes", "pinned_bytes", "system_growth_bytes")),
        ]
        lines.append(f"| {row['group']} ({row['data']}) | {name} | {' | '.join(told)} | {row['samples']} |")
    return lines


def figure(spread, digits=2):
    return f"{spread['median']:.{digits}f} ({spread['min']:.{digits}f} to {spread['max']:.{digits}f})"
