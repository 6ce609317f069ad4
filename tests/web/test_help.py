"""The help pages name what the nodes offer."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from sage_core import COMPARE_CHOICES, KERNEL_CHOICES, SMOOTH_K_CHOICES, TOLERANCES, UNAVAILABLE_CHOICES, Policy

WEB = Path(__file__).parents[2] / "web"
APPLY = (WEB / "docs" / "ApplySageAttention.md").read_text(encoding="utf-8")
REPORT = (WEB / "docs" / "AttentionBackendReport.md").read_text(encoding="utf-8")
WIDGETS = [name for name in inspect.signature(Policy.from_widgets).parameters if name != "kernels"]


@pytest.mark.parametrize(
    "name",
    [
        *("model", *WIDGETS, *KERNEL_CHOICES, *SMOOTH_K_CHOICES),
        *(*UNAVAILABLE_CHOICES, *TOLERANCES, *COMPARE_CHOICES),
    ],
)
def test_apply_page_names_every_input_and_choice(name: str) -> None:
    assert f"`{name}`" in APPLY


@pytest.mark.parametrize("name", ["model", "after", "report", "json"])
def test_report_page_names_every_input_and_output(name: str) -> None:
    assert f"`{name}`" in REPORT


@pytest.mark.parametrize("title", ["Why not", "Shapes", "Sites", "What happened", "Machine"])
def test_report_page_explains_every_part_of_the_report(title: str) -> None:
    source = (WEB.parent / "sage_core" / "report.py").read_text(encoding="utf-8")
    assert title in source
    assert f"**{title}**" in REPORT


def test_nothing_is_loaded_from_elsewhere_or_drawn_as_markup() -> None:
    for file in [*WEB.glob("*.js"), *WEB.glob("*.css")]:
        text = file.read_text(encoding="utf-8")
        assert not [word for word in ("http://", "https://", "innerHTML", "insertAdjacentHTML") if word in text], file
