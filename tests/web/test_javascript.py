"""The unit tests of web/, run by node's own test runner."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("*.test.mjs"))
NODE = shutil.which("node")
OLDEST = 20


def node_version() -> int:
    if NODE is None:
        return 0
    shown = subprocess.run([NODE, "--version"], capture_output=True, text=True, timeout=30).stdout
    version = re.match(r"v(\d+)", shown)
    return int(version[1]) if version else 0


@pytest.mark.skipif(node_version() < OLDEST, reason=f"needs node {OLDEST} or newer, found {NODE or 'none'}")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_javascript(file: Path) -> None:
    done = subprocess.run([str(NODE), "--test", file], capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
