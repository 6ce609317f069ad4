"""The table of a run: what is counted, what counts as worst, and the file that it is written to."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from sage_core import BACKENDS, Session
from sage_core.environment import Device, Environment
from tests.gpu.conftest import NOTES, SESSION, TABLE, WRITE_TO, Table, pytest_terminal_summary

KERNEL = "sdpa: flash"


def filled() -> Table:
    table = Table()
    row = table.rows[KERNEL]
    for case, error in (("small", 0.001), ("large", 0.003), ("medium", 0.002)):
        row.add(case, error)
    row.refuse(["no masks", "no such dtype"])
    row.refuse(["no masks"])
    row.failed = 4
    return table


def test_a_row_counts_calls_and_keeps_the_worst():
    (line,) = [line for line in filled().lines() if line.startswith(f"| {KERNEL} |")]
    assert line == f"| {KERNEL} | 3 | 2 | 4 | 0.0030 | 0.01 | large |"


@pytest.mark.parametrize("error", [math.inf, math.nan])
def test_what_is_not_finite_is_the_worst(error):
    row = filled().rows[KERNEL]
    row.add("black", error)
    assert row.worst_case == "black"


def test_reasons_are_told_once_with_their_calls():
    assert filled().reasons() == [f"- {KERNEL}: no masks (2 calls)", f"- {KERNEL}: no such dtype"]


class Reporter:
    def __init__(self):
        self.text = ""

    def section(self, title):
        self.text += title

    write = section


def summary(table, path, monkeypatch, notes=()):
    if path is None:
        monkeypatch.delenv(WRITE_TO, raising=False)
    else:
        monkeypatch.setenv(WRITE_TO, str(path))
    session = Session(BACKENDS, Environment(devices=(Device(0, "sm90", "a GPU"),), torch_version="9.9"))
    reporter = Reporter()
    pytest_terminal_summary(reporter, SimpleNamespace(stash={TABLE: table, SESSION: session, NOTES: notes}))
    return reporter.text


def test_a_run_prints_its_table_and_writes_it_where_it_is_told(tmp_path, monkeypatch):
    path = tmp_path / "kernels.md"
    printed = summary(filled(), path, monkeypatch)
    written = path.read_text(encoding="utf-8")
    for text in (printed, written):
        assert "a GPU (sm90); torch 9.9" in text
        assert all(f"| {backend.name} |" in text for backend in BACKENDS)
    assert "no masks (2 calls)" in written


def test_nothing_is_printed_when_no_kernel_was_tried(tmp_path, monkeypatch):
    path = tmp_path / "kernels.md"
    assert summary(Table(), path, monkeypatch) == ""
    assert not path.exists()
    assert summary(filled(), None, monkeypatch) != ""
    assert not path.exists()


def test_what_tests_noted_is_printed_with_the_machine_also_without_a_table(monkeypatch):
    printed = summary(Table(), None, monkeypatch, ["peak: 1 MiB", "peak: 2 MiB"])
    assert "a GPU (sm90); torch 9.9" in printed
    assert "peak: 1 MiB\npeak: 2 MiB\n" in printed
    assert KERNEL not in printed
