"""The README's table of speeds says what the measured files say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ratios import graph_verdicts, noise, ratio, verdicts

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = re.split(r"^## What it brings$", README, flags=re.MULTILINE)[1].split("\n## ")[0]
REPORTS = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "docs" / "measured").glob("*.json")]
MEASURED = [line for report in REPORTS for line in report["lines"]]
LINES = {
    line["title"]: (line, report)
    for report in REPORTS
    if not report.get("compile_with")  # the table is for models that are not compiled
    for line in report["lines"]
}
ENTRIES = {
    "native": "native",
    "ComfyUI's `--use-sage-attention`": "core sage",
    "ComfyUI's comfy-kitchen INT8": "core comfy-kitchen int8",
    "SageAttention for every call": "plain sageattn",
    "this pack, `auto`": "auto",
}
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("|")]
TITLES = ROWS[0][1:]


def test_the_table_has_every_line_that_was_measured() -> None:
    assert set(TITLES) == LINES.keys()


@pytest.mark.parametrize("title", TITLES)
def test_a_column_is_what_was_measured(title: str) -> None:
    line, report = LINES[title]
    column = {row[0]: row[1 + TITLES.index(title)] for row in ROWS[2:]}
    for shown, name in ENTRIES.items():
        entry = line["entries"][name]
        expected = "-" if entry["status"] == "missing" else f"{entry['ratio']['median']:.2f}"
        assert column[shown] == expected, shown
    kernels = re.findall(r"`([^`]+)`", column["what `auto` took"]) or [column["what `auto` took"]]
    assert set(kernels) == set(line["entries"]["auto"]["calls_by_kernel"]) - ({"native"} - set(kernels))
    assert column["noise"] == f"{line['noise'] * 100:.1f} %"
    environment = report["environment"]
    assert environment["devices"][0]["name"] == "NVIDIA H200"
    assert f"ComfyUI {environment['comfyui']}" in SECTION
    assert f"torch {environment['torch'].rpartition('.')[0]}" in SECTION


@pytest.mark.parametrize("line", MEASURED, ids=lambda line: line["title"])
def test_what_was_measured_follows_from_its_own_seconds_and_met_its_bars(line: dict[str, Any]) -> None:
    entries = {name: entry for name, entry in line["entries"].items() if entry["status"] == "ok"}
    native = entries["native"]["seconds"]
    for entry in entries.values():
        assert entry["ratio"] == pytest.approx(ratio(native, entry["seconds"])._asdict())
    assert line["noise"] == pytest.approx(noise(native, entries["native again"]["seconds"]))
    assert line["repeatable"]["warm_bits_equal"] is line["repeatable"]["from_disk_bits_equal"] is True
    medians = {name: entry["ratio"]["median"] for name, entry in entries.items() if name != "native again"}
    assert all(verdict.held for verdict in verdicts(medians, line["noise"]))
    if "compiled" in entries["auto"]:
        counts = (entries[name]["compiled"] for name in ("auto", "native"))
        assert all(verdict.held for verdict in graph_verdicts(*counts))
