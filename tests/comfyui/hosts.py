"""The ComfyUIs on this machine, and worker processes in which tests run functions inside them."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import dev

WORKER = Path(__file__).with_name("worker.py")
START_S = 180  # import of ComfyUI and the pack; about 10 s on two cores, more on a machine that never read the files
LOG_LINES = 40


class ScenarioFailed(Exception):
    """The traceback from inside ComfyUI, and the end of that process's log."""


class Worker(AbstractContextManager["Worker"]):
    """One process with one ComfyUI, on the CPU. It starts with the first run and again after a time-out or a crash."""

    def __init__(self, comfyui: Path, *, pack: bool = True, env: Mapping[str, str] | None = None) -> None:
        self._comfyui = comfyui
        self._options = [] if pack else ["--without-pack"]
        self._env = {**os.environ, "PYTHONUTF8": "1", **(env or {})}
        self._process: subprocess.Popen[str] | None = None
        self._cannot_start = ""

    def run(self, function: str, *, timeout_s: float = 120, **arguments: Any) -> Any:
        """What "module:function" of this folder returns inside ComfyUI. Arguments and result travel as JSON."""
        if self._process is None:
            self._start()
        self._requests.write(json.dumps({"function": function, "arguments": arguments}) + "\n")
        self._requests.flush()
        answer = self._answer_within(timeout_s, function)
        if "error" in answer:
            raise ScenarioFailed(f"{function}\n\n{answer['error']}\n{self._log_tail()}")
        return answer["result"]

    def close(self) -> None:
        if self._process is not None:
            self._end(self._process)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._cannot_start:
            raise ScenarioFailed(self._cannot_start)
        self._base_directory = tempfile.TemporaryDirectory(prefix="sagescope-", ignore_cleanup_errors=True)
        self._log = Path(self._base_directory.name) / "worker.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), str(self._comfyui), self._base_directory.name, *self._options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                encoding="utf-8",
            )
        self._requests = cast(IO[str], self._process.stdin)
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True)
        self._reader.start()
        try:
            self._answer_within(START_S, "start")
        except ScenarioFailed as failure:
            self._cannot_start = str(failure)  # every test of this worker would wait for the same failure
            raise

    def _answer_within(self, seconds: float, function: str) -> dict[str, Any]:
        process = cast(subprocess.Popen[str], self._process)
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            reason = f"no answer within {seconds} s"
            process.kill()
        else:
            if line:
                return cast(dict[str, Any], json.loads(line))
            reason = "the process ended"
        raise ScenarioFailed(f"{function}: {reason}\n\n{self._end(process)}")

    def _end(self, process: subprocess.Popen[str]) -> str:
        """Ends the process, by force when a closed input is not enough, and returns the end of its whole log."""
        self._requests.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join()
        log = self._log_tail()
        self._base_directory.cleanup()
        self._process = None
        return log

    def _log_tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(["Log of the process:", *lines[-LOG_LINES:]])


def _read(answers: IO[str], lines: queue.Queue[str]) -> None:
    """A pipe has no read with a time limit on every platform; a queue has. The last item is empty: the pipe closed."""
    with answers:
        for line in answers:
            lines.put(line)
    lines.put("")


class Host:
    """One ComfyUI to test in, with a worker that has the pack and one that does not."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.missing = "" if root.exists() else f"no ComfyUI in {root}; `python dev.py test` fetches it"

    @cached_property
    def version(self) -> tuple[int, ...]:
        """Compares as versions do: 0.3.75 is older than 0.30.0."""
        text = (self.root / "comfyui_version.py").read_text(encoding="utf-8")
        return tuple(map(int, re.findall(r"\d+", text.partition("__version__")[2])))

    @property
    def name(self) -> str:
        carried = {carried.root: carried.version for carried in dev.CARRIED}
        return carried.get(self.root, "COMFYUI_PATH")

    @cached_property
    def with_pack(self) -> Worker:
        return Worker(self.root)

    @cached_property
    def without_pack(self) -> Worker:
        return Worker(self.root, pack=False)

    def run(self, function: str, *, timeout_s: float = 120, **arguments: Any) -> Any:
        return self.with_pack.run(function, timeout_s=timeout_s, **arguments)

    def close(self) -> None:
        self.with_pack.close()
        self.without_pack.close()


def all_hosts() -> list[Host]:
    return [Host(root) for root in dev.comfyui_roots()]
