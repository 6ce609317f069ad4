"""The README's table of speeds says what the measured files say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.markdown import GIB
from benchmarks.ratios import graph_verdicts, memory_verdict, noise, ratio, verdicts

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = re.split(r"^## What it brings$", README, flags=re.MULTILINE)[1].split("\n## ")[0]
REPORTS = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "docs" / "measured").glob("*.json")]
MEASURED = [line for report in REPORTS for line in report["lines"]]
COMPILED = ", compiled"
LINES = {line["title"]: (line, report) for report in REPORTS for line in report["lines"]}
KERNELS = {
    "fused": "sageattn_qk_int8_pv_fp8_cuda_sm90 (fused quantization)",
    "cuDNN": "sdpa: cudnn",
    "efficient": "sdpa: efficient",
}
IN_GRAPH, OUTSIDE = "plain sageattn, in the graph", "plain sageattn, outside the graph"
SPEED = {
    "ComfyUI's `--use-sage-attention`": "core sage",
    "ComfyUI's comfy-kitchen INT8": "core comfy-kitchen int8",
    "SageAttention for every call": "plain sageattn",
    "SageAttention, in the graph": IN_GRAPH,
    "SageAttention, outside the graph": OUTSIDE,
    "this pack, `auto`": "auto",
}
SECONDS = {"seconds to compile: native / in the graph / `auto`": ("native", IN_GRAPH, "auto")}
PEAK = {
    "GiB: native / SageAttention / `auto`": ("native", "plain sageattn", "auto"),
    "GiB: native / in the graph / `auto`": ("native", IN_GRAPH, "auto"),
}


def rows_of_tables() -> dict[str, dict[str, str]]:
    """Each row of both tables: cells by the head of their column, under the title of its line."""
    found = {}
    for block, ending in zip(re.findall(r"(?:^\|.*\n)+", SECTION, flags=re.MULTILINE), ("", COMPILED), strict=True):
        (_, *heads), _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found |= {title + ending: dict(zip(heads, cells, strict=True)) for title, *cells in rows}
    return found


ROWS = rows_of_tables()


def test_the_tables_have_every_line_that_was_measured() -> None:
    assert ROWS.keys() == LINES.keys()


@pytest.mark.parametrize("title", ROWS)
def test_a_row_is_what_was_measured(title: str) -> None:
    line, report = LINES[title]
    cells = dict(ROWS[title])
    entries = {name: entry for name, entry in line["entries"].items() if entry["status"] == "ok"}
    expected = {}
    for head, name in SPEED.items():
        expected[head] = f"{entries[name]['ratio']['median']:.2f}" if name in entries else "-"
    for head, names in PEAK.items():
        if set(names) <= entries.keys():
            expected[head] = " / ".join(f"{entries[name]['peak_bytes'] / GIB:.2f}" for name in names)
    expected |= {"rounds": str(line["rounds"]), "noise": f"{line['noise'] * 100:.1f} %"}
    if title.endswith(COMPILED):
        for head, names in SECONDS.items():
            expected[head] = " / ".join(f"{entries[name]['compiled']['compile_s']:.0f}" for name in names)
    else:
        took = {KERNELS.get(name, name) for name in cells.pop("what `auto` took").split(", ")}
        served = set(entries["auto"]["calls_by_kernel"])
        assert took == (served - {"native"} or served)
    assert cells == {head: expected[head] for head in cells}
    assert len(cells) >= 6
    environment = report["environment"]
    assert environment["devices"][0]["name"] == "NVIDIA H200"
    assert f"ComfyUI {environment['comfyui']}" in SECTION
    assert f"torch {environment['torch'].rpartition('.')[0]}" in SECTION


def test_short_names_of_kernels_are_told() -> None:
    assert all(f"*{short}*" in SECTION and f"`{name}`" in SECTION for short, name in KERNELS.items())


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
    memory = memory_verdict(
        *(entries[name]["peak_bytes"] for name in ("native", "auto")), "compiled" in entries["auto"]
    )
    assert memory.held or memory.target
    if "compiled" in entries["auto"]:
        counts = (entries[name]["compiled"] for name in ("auto", "native"))
        assert all(verdict.held for verdict in graph_verdicts(*counts))
