"""The table that a run of this folder prints, and writes where SAGESCOPE_KERNEL_TABLE names a file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from sage_core import BACKENDS, Session

WRITE_TO = "SAGESCOPE_KERNEL_TABLE"


@dataclass
class Row:
    """What was found about one kernel."""

    served: int = 0
    refused: int = 0
    failed: int = 0
    worst: float = 0.0
    worst_case: str = "-"
    bound: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, case: str, relative_l2: float) -> None:
        self.served += 1
        if not relative_l2 <= self.worst:
            self.worst, self.worst_case = relative_l2, case

    def refuse(self, details: Iterable[str]) -> None:
        self.refused += 1
        self.reasons.update(details)


class Table:
    """One row per kernel, in the order in which the node offers them."""

    def __init__(self) -> None:
        self.rows = {backend.name: Row(bound=backend.tolerance.relative_l2) for backend in BACKENDS}

    def lines(self) -> list[str]:
        head = "| kernel | calls served | calls refused | failed | worst relative L2 | bound | at |"
        rows = [
            f"| {name} | {row.served} | {row.refused} | {row.failed} "
            f"| {f'{row.worst:.4f}' if row.served else '-'} | {row.bound:g} | {row.worst_case} |"
            for name, row in self.rows.items()
        ]
        return [head, "|---|---|---|---|---|---|---|", *rows]

    def reasons(self) -> list[str]:
        return [
            f"- {name}: {detail}" + (f" ({calls} calls)" if calls > 1 else "")
            for name, row in self.rows.items()
            for detail, calls in row.reasons.most_common()
        ]


TABLE = pytest.StashKey[Table]()
SESSION = pytest.StashKey[Session]()
NOTES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = Table()
    config.stash[SESSION] = Session(BACKENDS)
    config.stash[NOTES] = []


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On a CPU, threads that share calls this small wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Session:
    return request.config.stash[SESSION]


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Table:
    return request.config.stash[TABLE]


@pytest.fixture(scope="session")
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """note(text): a line for the end of the run, also when the test fails."""
    return request.config.stash[NOTES].append


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Failures are in the table too: a run that is written down says what went wrong in it."""
    report = yield
    backend = getattr(item, "callspec", None) and item.callspec.params.get("backend")
    if report.when == "call" and report.failed and backend is not None:
        item.config.stash[TABLE].rows[backend.name].failed += 1
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash[NOTES]:
        terminalreporter.section("inside ComfyUI")
        terminalreporter.write("\n".join([machine(config.stash[SESSION]), "", *config.stash[NOTES], ""]) + "\n")
    table = config.stash[TABLE]
    if not any(row.served or row.failed or row.refused for row in table.rows.values()):
        return
    terminalreporter.section("every kernel against exact attention")
    terminalreporter.write("\n".join([machine(config.stash[SESSION]), "", *table.lines(), ""]) + "\n")
    if os.environ.get(WRITE_TO):
        Path(os.environ[WRITE_TO]).write_text(document(table, config.stash[SESSION]), encoding="utf-8")
        terminalreporter.write(f"written to {os.environ[WRITE_TO]}\n")


def machine(session: Session) -> str:
    snapshot = session.snapshot()
    devices = ", ".join(f"{device['name']} ({device['arch']})" for device in snapshot["devices"]) or "CPU"
    packages = [
        f"{package['name']} {package['version']} (build {package['build']})"
        for package in snapshot["packages"]
        if package["version"]
    ]
    versions = [f"torch {snapshot['torch']}", f"CUDA {snapshot['cuda']}", f"driver {snapshot['driver']}", *packages]
    return f"{devices}; {', '.join(versions)}, Python {snapshot['python']}, {snapshot['platform']}"


def document(table: Table, session: Session) -> str:
    """The Markdown file of a run."""
    return "\n".join(
        [
            "# Kernels on hardware",
            "",
            "Written by a run of `tests/gpu` with the environment variable "
            f"`{WRITE_TO}`; `tests/gpu/cases.py` is the list of the calls.",
            "",
            f"Machine: {machine(session)}.",
            "",
            "Each call goes through the pack's own path, from ComfyUI's arguments to the output, twice. The error is "
            "relative L2 against attention in fp64 on the same tensors, the worst over all calls. A call counts as "
            "failed when the error is above the bound, when query, key or value changed, when the second output "
            "differs from the first, or when the kernel raised.",
            "",
            *table.lines(),
            "",
            "Why calls were refused:",
            "",
            *table.reasons(),
            "",
        ]
    )
