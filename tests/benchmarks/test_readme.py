"""benchmarks/README.md names what there is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from benchmarks.lines import LINES
from benchmarks.whole_models import parse
from tests.gpu.conftest import WRITE_TO

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
OF_COMFYUI = {"--use-sage-attention", "--use-ck-attention"}


def test_every_script_is_in_the_table():
    named = set(re.findall(r"python -m (benchmarks\.\w+)", README))
    assert all(importlib.util.find_spec(name) for name in named)
    scripts = {
        f"benchmarks.{path.stem}"
        for path in (ROOT / "benchmarks").glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert named == scripts


def test_options_and_lines_that_are_named_exist(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    helped = capsys.readouterr().out
    options = set(re.findall(r"--[a-z][a-z-]*", README)) - OF_COMFYUI
    assert options == set(re.findall(r"--[a-z][a-z-]*", helped))
    examples = re.findall(r"--lines ([\w,-]+)", README)
    assert examples
    assert {name for example in examples for name in example.split(",")} <= {*LINES, "all"}


def test_files_and_the_variable_that_are_named_exist():
    files = re.findall(r"`((?:benchmarks|tests)/[\w./]+)`", README)
    assert len(files) >= 2
    assert all((ROOT / file).exists() for file in files)
    assert f"`{WRITE_TO}`" in README
    assert "Paste from here:" in (ROOT / "benchmarks" / "markdown.py").read_text(encoding="utf-8")
