"""The help pages name what the nodes offer."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from sage_core import COMPARE_CHOICES, KERNEL_CHOICES, SMOOTH_K_CHOICES, TOLERANCES, UNAVAILABLE_CHOICES, Policy

WEB = Path(__file__).parents[2] / "web"
DOCS = WEB / "docs"
APPLY = (DOCS / "ApplySageAttention.md").read_text(encoding="utf-8")
REPORT = (DOCS / "AttentionBackendReport.md").read_text(encoding="utf-8")
TRANSLATIONS = sorted(DOCS.glob("*/*.md"))
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
    for page in (REPORT, *(path.read_text(encoding="utf-8") for path in DOCS.glob("AttentionBackendReport/*.md"))):
        assert f"**{title}**" in page


def test_nothing_is_loaded_from_elsewhere_or_drawn_as_markup() -> None:
    for file in [*WEB.glob("*.js"), *WEB.glob("*.css")]:
        # the name of SVG, which nothing is loaded from
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not [word for word in ("http://", "https://", "innerHTML", "insertAdjacentHTML") if word in text], file


def test_pages_are_translated_where_the_nodes_are() -> None:
    languages = {path.name for path in (WEB.parent / "locales").iterdir()} - {"en"}
    translated = {path.relative_to(DOCS).as_posix() for path in TRANSLATIONS}
    assert translated == {f"{page.stem}/{language}.md" for page in DOCS.glob("*.md") for language in languages}


@pytest.mark.parametrize("path", TRANSLATIONS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_translation_has_the_parts_names_and_numbers_of_the_english_page(path: Path) -> None:
    translated = path.read_text(encoding="utf-8")
    english = (DOCS / f"{path.parent.name}.md").read_text(encoding="utf-8")

    def found(pattern: str, text: str) -> list[str]:
        return re.findall(pattern, text, flags=re.MULTILINE)

    assert found(r"^(#+|-) ", translated) == found(r"^(#+|-) ", english)
    assert set(found(r"`[^`]+`", translated)) == set(found(r"`[^`]+`", english))
    assert set(found(r"\d+(?:\.\d+)?", english)) <= set(found(r"\d+(?:\.\d+)?", translated))
    shown_in_english = r"\*+([A-Z][A-Za-z' ]+)\*+"
    assert set(found(shown_in_english, translated)) <= set(found(shown_in_english, " ".join(english.split())))


def test_pictures_are_there_and_those_of_the_readme() -> None:
    """ComfyUI serves web/ only, and shows a path as one from the folder of the English pages, in every language."""
    for page in DOCS.rglob("*.md"):
        (picture,) = re.findall(r"!\[.+\]\((\S+)\)", page.read_text(encoding="utf-8"))
        shown = WEB.parent / "docs" / picture
        assert (DOCS / picture).read_bytes() == shown.read_bytes(), f"copy {shown} to {DOCS / picture}"
