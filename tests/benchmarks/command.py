"""python -m benchmarks.whole_models in a process of its own, on tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hosts import Host

ROOT = Path(__file__).resolve().parents[2]


def measure(host: Host, folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What it prints and the JSON that it writes into the folder; skips where this ComfyUI is missing."""
    if host.missing:
        pytest.skip(host.missing)
    out = folder / "whole_models.json"
    command = [sys.executable, "-m", "benchmarks.whole_models", "--tiny", *options]
    finished = subprocess.run(
        [*command, "--out", str(out), "--comfyui", str(host.root)],
        cwd=ROOT,
        env={**os.environ, "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=400,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout, json.loads(out.read_text(encoding="utf-8"))
