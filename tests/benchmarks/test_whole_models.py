"""The benchmark of whole models, as a command of its own, with tiny models inside each real ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.lines import LINES
from hosts import Host, all_hosts
from tests.benchmarks.command import measure

OWN = {"native", "native again", "native (observe only)", "auto", "int8_reference"}
"""What runs on a CPU."""
PEERS = {"core sage", "core comfy-kitchen int8", "plain sageattn"}


NEWER = {"minimax-h3-5s", "minimax-h3-15s"}
"""Lines whose models ComfyUI has since 0.30."""


@pytest.fixture(scope="module", params=all_hosts(), ids=lambda host: host.name)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run's output and its JSON, from one process for each ComfyUI."""
    host: Host = request.param
    text, report = measure(host, tmp_path_factory.mktemp("out"), "--lines", "all")
    assert [line["name"] for line in report["lines"]] == list(LINES)
    missing = {line["name"] for line in report["lines"] if line["status"] == "missing"}
    assert missing == (NEWER if host.version < (0, 30) else set())
    assert ("this ComfyUI has no MiniMaxH3" in text) is bool(missing)
    report["lines"] = [line for line in report["lines"] if line["name"] not in missing]
    return {"text": text, "report": report, "host": host}


def test_every_line_is_measured(done: dict[str, Any]) -> None:
    for line in done["report"]["lines"]:
        assert line["status"] == "ok", line
        assert line["rounds"] == 2
        assert line["noise"] >= 0
        assert not line["judged"]


def test_every_entry_that_can_run_on_a_cpu_does(done: dict[str, Any]) -> None:
    for line in done["report"]["lines"]:
        assert set(line["entries"]) == OWN | PEERS
        for name in OWN:
            entry = line["entries"][name]
            assert entry["status"] == "ok", (line["name"], name, entry)
            assert len(entry["seconds"]) == 2
            assert 0 < entry["ratio"]["low"] <= entry["ratio"]["median"] <= entry["ratio"]["high"]
        for name in PEERS:
            entry = line["entries"][name]
            # on a CPU the kernels of others are absent, raise, or log that they fell back to native
            assert entry.get("error") or "fall" in entry["warnings"] or "instead" in entry["warnings"], (name, entry)


def test_kernels_serve_and_errors_are_those_of_kernels(done: dict[str, Any]) -> None:
    for line in done["report"]["lines"]:
        entries = line["entries"]
        assert entries["native"]["calls_by_kernel"] == {}
        assert set(entries["native (observe only)"]["calls_by_kernel"]) == {"native"}
        assert entries["int8_reference"]["calls_by_kernel"]["int8_reference"] > 0
        assert entries["native again"]["relative_l2"] == entries["auto"]["relative_l2"] == 0
        assert 0 < entries["int8_reference"]["relative_l2"] < 0.02, line["name"]


def test_the_first_run_the_next_and_one_after_a_restart_are_the_same(done: dict[str, Any]) -> None:
    for line in done["report"]["lines"]:
        repeatable = line["repeatable"]
        assert repeatable["warm_bits_equal"]
        assert repeatable["from_disk_bits_equal"]
        assert repeatable["cold_over_warm"] == pytest.approx(repeatable["cold_s"] / repeatable["warm_s"])


def test_grouped_heads_reach_the_kernels_as_such(done: dict[str, Any]) -> None:
    (line,) = [line for line in done["report"]["lines"] if line["name"] == "omnigen2-1024"]
    grouped = done["host"].version >= (0, 30)  # older ones repeat the key heads themselves
    assert ("4/2" in line["longest_call"]) is grouped


def test_machine_and_versions_are_in_the_file_and_in_the_block_to_paste(done: dict[str, Any]) -> None:
    environment = done["report"]["environment"]
    version = ".".join(map(str, done["host"].version))
    assert environment["comfyui"] == version
    block = done["text"].partition("Paste from here:")[2]
    for part in (f"ComfyUI {version}", f"torch {environment['torch']}", "tiny models: no measurement"):
        assert part in block
    rows = [row for row in block.splitlines() if row.startswith("|")]
    assert {row.count("|") for row in rows} == {len(done["report"]["lines"]) + 2}
    assert len(rows) == 2 + len(OWN | PEERS) + 2
    assert "MISSED" not in done["text"]
