"""The unit tests of web/, run by node's own test runner, and rules that keep its files readable and safe to load."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WEB = TESTS.parents[1] / "web"
SHIPPED = sorted(WEB.glob("*.js"))
FILES = sorted(TESTS.glob("*.test.mjs"))
NODE = shutil.which("node")
OLDEST = 20
FORBIDDEN = {
    r"\bvar\b": "let and const keep to their block",
    r"[^=!]==[^=]|!=[^=]": "compare with === and !==",
    r"\bconsole\.(?!warn\b)": "left from debugging",
    r"\bdebugger\b": "left from debugging",
    r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser)\b": "no name is read as markup",
    r"\beval\(|\bnew Function\b|\bimport\(": "no text is run as code",
    r"\bsetInterval\(": "nothing runs while nobody looks",
}
AT_LOAD = re.compile(r"(import|export|const|let|class|function|async function|app\.registerExtension)\b|[\s/}\])*]")
"""How a line without indentation may begin: ComfyUI loads every file, and only an extension may do a thing then."""


def node_version() -> int:
    if NODE is None:
        return 0
    shown = subprocess.run([NODE, "--version"], capture_output=True, text=True, timeout=30).stdout
    version = re.match(r"v(\d+)", shown)
    return int(version[1]) if version else 0


needs_node = pytest.mark.skipif(node_version() < OLDEST, reason=f"needs node {OLDEST} or newer, found {NODE or 'none'}")


def named(file: Path) -> str:
    return file.name


def code_of(source: str) -> str:
    """The source without its comments."""
    return re.sub(r"/\*.*?\*/|(?<![:\"'`])//[^\n]*", "", source, flags=re.DOTALL)


def broken_rules(source: str) -> list[str]:
    code = code_of(source)
    found = [why for pattern, why in FORBIDDEN.items() if re.search(pattern, code)]
    found += [
        f"line {number} is longer than 120" for number, line in enumerate(source.split("\n"), 1) if len(line) > 120
    ]
    found += [f"at load: {line}" for line in code.split("\n") if line and not AT_LOAD.match(line)]
    names = re.findall(r"^import \{ ([^}]+) \}|^import \* as (\w+)", code, flags=re.MULTILINE)
    names += re.findall(r"^(?:async )?(?:const|function|class) (\w+)()", code, flags=re.MULTILINE)
    for name in re.findall(r"\w+", " ".join(map(" ".join, names))):
        if len(re.findall(rf"\b{name}\b", code)) < 2:
            found.append(f"{name} is not used")
    return found


@needs_node
@pytest.mark.parametrize("file", FILES, ids=named)
def test_javascript(file: Path) -> None:
    done = subprocess.run([str(NODE), "--test", file], capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_node
@pytest.mark.parametrize("file", SHIPPED, ids=named)
def test_every_file_is_a_module_that_can_be_read(file: Path) -> None:
    command = [str(NODE), "--input-type=module", "--check", "-"]
    done = subprocess.run(
        command, input=file.read_text(encoding="utf-8"), capture_output=True, encoding="utf-8", timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", SHIPPED, ids=named)
def test_every_file_keeps_to_the_rules(file: Path) -> None:
    assert not broken_rules(file.read_text(encoding="utf-8"))


def test_everything_that_a_file_exports_is_used_elsewhere() -> None:
    sources = {file: code_of(file.read_text(encoding="utf-8")) for file in [*SHIPPED, *FILES]}
    for file in SHIPPED:
        for name in re.findall(r"^export (?:async )?(?:const|function|class) (\w+)", sources[file], flags=re.MULTILINE):
            users = [other for other, code in sources.items() if other != file and re.search(rf"\b{name}\b", code)]
            assert users, f"{name} of {file.name}"


@pytest.mark.parametrize(
    "source",
    [
        "var a = 1;",
        "export const isOne = (a) => a == 1;",
        "export const isNot = (a) => a != 1;",
        "export function f(a) {\n  a.innerHTML = '';\n}",
        "export const f = (a) => eval(a);",
        "document.title = 'a';",
        "import { create } from './dom.js';",
        "import * as show from './numbers.js';",
        "function f() {}",
        f"export const a = '{'a' * 120}';",
    ],
)
def test_the_rules_find_what_they_look_for(source: str) -> None:
    assert broken_rules(source)


def test_the_rules_leave_code_that_is_fine() -> None:
    source = "// var a\nimport { create } from './dom.js';\n\nexport const a = (b) => b === 1 && create('https://a');\n"
    assert code_of(source).count("create") == 2
    assert not broken_rules(source)
