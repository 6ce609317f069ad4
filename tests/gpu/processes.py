"""Scenarios inside ComfyUI, each in a process of its own, since ComfyUI reads its options once: while it is imported.

This file is both ends: the tests ask ``Processes``, and each process runs ``main``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import comfyui

LIMIT_S = 180
"""Most take 5 to 15 s; the first use of a kernel may compile it."""
LOG_LINES = 40
IMPORTED_AHEAD = ("torch._dynamo", "transformers", "torchsde", "torchvision", "scipy.integrate")
"""What ComfyUI imports that takes long and leaves the GPU alone."""


class Scenario(NamedTuple):
    """A function, as "module:name" of this folder, and how its ComfyUI is started.

    ``needs_gpu`` says why it means nothing on a CPU.
    """

    function: str
    options: tuple[str, ...] = ()
    dynamic_vram: bool = False
    needs_gpu: str = ""

    @property
    def title(self) -> str:
        function = self.function.partition(":")[2]
        return " ".join([function, *(["with dynamic VRAM"] if self.dynamic_vram else []), *self.options])


class Missing(Exception):
    """What this ComfyUI or this machine does not have for a scenario."""


class ScenarioFailed(Exception):
    """The traceback from inside ComfyUI, and the end of that process's log."""


class Processes(AbstractContextManager["Processes"]):
    """Runs scenarios one at a time. While one runs the next one's process is there, and imports what it can."""

    def __init__(self, root: Path, scenarios: Iterable[Scenario], *, cpu: bool) -> None:
        self._root = root
        self._cpu = cpu
        self._to_come = list(dict.fromkeys(scenarios))
        self._ahead: dict[Scenario, Process] = {}
        self._found: dict[Scenario, dict[str, Any]] = {}
        self.seconds: dict[Scenario, float] = {}
        """How long each scenario took, whatever came of it."""

    def run(self, scenario: Scenario) -> dict[str, Any]:
        """What the scenario found; once, also when several tests ask. Raises Missing or ScenarioFailed."""
        if scenario in self._found:
            return self._found[scenario]
        self._to_come = [other for other in self._to_come if other != scenario]
        start = time.perf_counter()
        process = self._ahead.pop(scenario, None) or Process(self._root, scenario, self._cpu)
        try:
            if self._to_come and not self._ahead:
                self._ahead[self._to_come[0]] = Process(self._root, self._to_come[0], self._cpu)
            self._found[scenario] = process.run()
        finally:
            process.end()
            self.seconds[scenario] = time.perf_counter() - start
        return self._found[scenario]

    def __exit__(self, *_: object) -> None:
        for process in self._ahead.values():
            process.end()


class Process:
    """One process, which waits for ``run`` before it touches ComfyUI or the GPU."""

    def __init__(self, root: Path, scenario: Scenario, cpu: bool) -> None:
        self._name = scenario.function
        self._folder = tempfile.TemporaryDirectory(prefix="sagescope-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name) / "log"
        self._result = Path(self._folder.name) / "result.json"
        request = {"root": str(root), "folder": self._folder.name, "cpu": cpu, **scenario._asdict()}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "utf8", "-m", "tests.gpu.processes", json.dumps(request)],
                cwd=comfyui.ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def run(self) -> dict[str, Any]:
        try:
            self._process.communicate(b"run\n", timeout=LIMIT_S)
            reason = f"the process ended with {self._process.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"no result within {LIMIT_S} s"
        answer = json.loads(self._result.read_text(encoding="utf-8")) if self._result.exists() else {"error": reason}
        if "missing" in answer:
            raise Missing(answer["missing"])
        if "error" in answer:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise ScenarioFailed("\n".join([self._name, answer["error"], "Log of the process:", *lines[-LOG_LINES:]]))
        return dict(answer["result"])

    def end(self) -> None:
        """Without ``run`` the process has done nothing yet, and after it the process is done or too late."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()


def main() -> None:
    request = json.loads(sys.argv[1])
    folder = Path(request["folder"])
    try:
        _start_comfyui(Path(request["root"]), folder, request["cpu"], request["options"])
        if request["dynamic_vram"]:
            _prepare_dynamic_vram()
        for name in IMPORTED_AHEAD:
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                importlib.import_module(name)
        if not sys.stdin.readline():
            return  # the tests ended before it was this one's turn
        inside = importlib.import_module("tests.gpu.inside")
        inside.start(folder / "measurements.json", dynamic_vram=request["dynamic_vram"])
        module, _, function = request["function"].partition(":")
        answer = {"result": getattr(importlib.import_module(f"tests.gpu.{module}"), function)()}
    except Missing as missing:
        answer = {"missing": str(missing)}
    except Exception:
        answer = {"error": traceback.format_exc()}
    text = json.dumps(answer)
    (folder / "result.json").write_text(text, encoding="utf-8")


def _start_comfyui(root: Path, folder: Path, cpu: bool, options: list[str]) -> None:
    try:
        comfyui.start(root, folder, cpu=cpu, options=options)
    except SystemExit:  # argparse has said why in the log
        raise Missing(f"this ComfyUI has no option {' '.join(options)}") from None


def _prepare_dynamic_vram() -> None:
    """The first half of what ComfyUI's main.py does, before PyTorch is imported."""
    from comfy import cli_args

    if not hasattr(cli_args, "enables_dynamic_vram"):
        raise Missing("this ComfyUI has no dynamic VRAM")
    control = importlib.import_module("comfy_aimdo.control")
    if not control.init():
        raise Missing("comfy-aimdo does not load here")


if __name__ == "__main__":
    importlib.import_module("tests.gpu.processes").main()  # by the name that the scenarios import it by
