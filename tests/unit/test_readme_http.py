"""What README says of the routes, the messages and the JSON is what there is."""

from __future__ import annotations

import re
from pathlib import Path

from sage_core.live import INTERVAL_S, MAX_KEPT, Record
from sage_core.stats import Run
from tests.unit.test_readme import quoted, section, tables

ROOT = Path(__file__).resolve().parents[2]
TEXT = section("The status line, settings and HTTP")
ROUTES, FIELDS = tables(TEXT)


def test_every_route_is_there_and_no_other() -> None:
    source = (ROOT / "nodes" / "routes.py").read_text(encoding="utf-8")
    offered = re.findall(r'routes\.(get|post)\("([^"]+)"\)', source)
    assert [quoted(row[0])[0] for row in ROUTES] == [f"{method.upper()} {path}" for method, path in offered]


def test_every_level_of_the_log_is_named() -> None:
    source = (ROOT / "nodes" / "routes.py").read_text(encoding="utf-8")
    levels = re.findall(r'"(\w+)": logging\.', source)
    assert len(levels) == 3
    assert all(f'"{level}"' in ROUTES[-1][1] and f"`{level}`" in TEXT for level in levels)


def test_every_field_of_a_run_is_there_and_no_other() -> None:
    documented = [name for row in FIELDS for name in quoted(row[0])]
    assert sorted(documented) == sorted(Run(1, None, None).snapshot())


def test_every_field_of_a_message_is_there_and_no_other() -> None:
    paragraph = TEXT.split("Their fields are")[1].split("\n\n")[0]
    assert sorted(quoted(paragraph)) == sorted(Record(Run(1, None, None), None, {}).status())


def test_numbers_are_those_of_the_code() -> None:
    assert f"at most {MAX_KEPT}." in ROUTES[0][1]
    assert INTERVAL_S == 0.5
    assert TEXT.count("twice a second") + " ".join(TEXT.split()).count("two a second") == 2


def test_the_settings_are_named_as_on_the_page() -> None:
    source = (ROOT / "web" / "settings.js").read_text(encoding="utf-8")
    names = re.findall(r'^ +name: "([^"]+)"', source, flags=re.MULTILINE)
    assert len(names) == 4  # the extension's own first
    assert all(f"*{name}*" in TEXT for name in names[1:])
    assert all(f"*{label}*" in TEXT for label in re.findall(r'label: "([^"]+)", icon', source))
