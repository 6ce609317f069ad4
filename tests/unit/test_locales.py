"""The texts of every language say the same as the English ones, in a form that ComfyUI's page can read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOCALES = ROOT / "locales"
FILES = ("main.json", "nodeDefs.json", "settings.json", "commands.json")
LANGUAGES = sorted(path.name for path in LOCALES.iterdir())
OTHERS = [language for language in LANGUAGES if language != "en"]
QUOTED = re.compile(r"(?<!\w)'([^']+)'(?!\w)")
OWN_NAME = {("ApplySageAttention", "inputs", "kernel", "name")}
"""What practitioners of Chinese write in English, too."""


def load(language: str, file: str) -> Any:
    return json.loads((LOCALES / language / file).read_text(encoding="utf-8"))


def texts(data: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(data, str):
        yield place, data
    else:
        for key, value in data.items():
            yield from texts(value, (*place, key))


def all_texts(language: str) -> dict[tuple[str, ...], str]:
    return {place: text for file in FILES for place, text in texts(load(language, file), (file,))}


def in_page(pattern: str) -> list[tuple[str, ...]]:
    """What a pattern finds in the scripts, constants by their value."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "web").glob("*.js")))
    constants = dict(re.findall(r'^const (\w+) = "([^"]*)"', source, flags=re.MULTILINE))
    found = re.findall(pattern, source)
    return [tuple(constants.get(part, part.strip('"')) for part in entry) for entry in found]


def test_these_languages_are_there() -> None:
    assert {"en", "zh", "ja"} <= set(LANGUAGES)
    for language in LANGUAGES:
        assert sorted(path.name for path in (LOCALES / language).iterdir()) == sorted(FILES)


@pytest.mark.parametrize("language", OTHERS)
def test_nothing_is_missing_or_added(language: str) -> None:
    assert all_texts(language).keys() == all_texts("en").keys()


@pytest.mark.parametrize("language", LANGUAGES)
def test_nothing_has_a_meaning_to_the_page(language: str) -> None:
    """Newer pages show tooltips as they are and older ones read placeholders in them: no escape suits both."""
    assert not [text for text in all_texts(language).values() if re.search(r"[{}@|$%]", text)]


@pytest.mark.parametrize("language", OTHERS)
def test_numbers_and_quoted_values_are_those_of_the_english_text(language: str) -> None:
    translated = all_texts(language)
    for place, text in all_texts("en").items():
        for pattern in (re.compile(r"\d+(?:\.\d+)?"), QUOTED):
            assert sorted(pattern.findall(translated[place])) == sorted(pattern.findall(text)), place


@pytest.mark.parametrize("language", OTHERS)
def test_everything_is_translated_and_an_input_still_shows_its_id(language: str) -> None:
    """The report, and what people write about it, call inputs by their ids."""
    for place, text in all_texts(language).items():
        if place[1:] not in OWN_NAME and place[-2:] not in {("0", "name"), ("2", "name")}:
            assert re.search(r"[\u3040-\u30ff\u4e00-\u9fff]", text), place
        if place[-1] == "name" and "inputs" in place and place[-2] != "model":
            assert place[-2] in text


def test_settings_are_those_of_the_page() -> None:
    settings = in_page(r'\bid: ([\w."]+),\s+name: ("[^"]+"),\s+category: [^\n]+\s+tooltip: ("[^"]+")')
    assert load("en", "settings.json") == {
        id_.replace(".", "_"): {"name": name, "tooltip": tooltip} for id_, name, tooltip in settings
    }


def test_commands_are_those_of_the_page() -> None:
    commands = in_page(r'\bid: ([\w."]+), label: ("[^"]+")')
    assert load("en", "commands.json") == {id_.replace(".", "_"): {"label": label} for id_, label in commands}
