"""A real ComfyUI server with the pack in custom_nodes, and a client that queues prompts as a browser does."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
PACKS = {"ComfyUI-SageScope": ROOT, "stand_ins": Path(__file__).with_name("stand_ins")}
START_S = 300
LOG_LINES = 60
# Proxies are for the world outside; this server is on this machine.
OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class ServerFailed(Exception):
    """The server did not come up, or a pack was not loaded; carries the end of its log."""


class PromptFailed(Exception):
    """The server refused a prompt, or a node of it raised."""


@dataclass
class Finished:
    """A prompt that ran: what its output nodes showed, by node id, and the nodes that did not have to run."""

    prompt_id: str
    outputs: dict[str, Any] = field(default_factory=dict)
    cached: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)


class Server(AbstractContextManager["Server"]):
    """Up inside its with block; models, inputs and outputs lie in `base_directory`, which goes when it ends."""

    def __init__(self, comfyui: Path, *, cpu: bool = True, port: int = 0, options: Sequence[str] = ()) -> None:
        self._comfyui = comfyui
        self._port = port or _free_port()
        self._options = [*(["--cpu"] if cpu else []), *options]
        self.address = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Server:
        self._folder = tempfile.TemporaryDirectory(prefix="sagescope-", ignore_cleanup_errors=True)
        self.base_directory = Path(self._folder.name)
        for name, source in PACKS.items():
            _link(source, self.base_directory / "custom_nodes" / name)
        self._log = self.base_directory / "server.log"
        interrupted: list[int] = []
        handlers = {
            number: signal.signal(number, lambda number, _: interrupted.append(number))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "main.py", *self._arguments()],
                    cwd=self._comfyui,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUTF8": "1"},
                )
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        try:
            for number in interrupted:  # an exception inside Popen would leave a process that nobody knows of
                signal.raise_signal(number)
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def run(self, graph: dict[str, Any], *, timeout_s: float = 300) -> Finished:
        """Queues a graph in API format and waits until it is done; raises PromptFailed when it does not get there."""
        try:
            return asyncio.run(asyncio.wait_for(self._run(graph), timeout_s))
        except asyncio.TimeoutError:
            raise PromptFailed(f"not done within {timeout_s} s\n{self._log_tail()}") from None

    def get(self, path: str) -> Any:
        with OPEN(f"{self.address}{path}", timeout=30) as response:
            return json.load(response)

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _arguments(self) -> list[str]:
        return [
            *("--port", str(self._port), "--base-directory", str(self.base_directory), "--disable-auto-launch"),
            *("--disable-api-nodes", "--disable-all-custom-nodes", "--whitelist-custom-nodes", *PACKS),
            *("--database-url", "sqlite:///:memory:"),  # servers side by side would wait for one file's lock
            *self._options,
        ]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None:
                raise ServerFailed(f"ComfyUI ended with exit code {self._process.returncode}\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"ComfyUI did not answer within {START_S} s\n{self._log_tail()}")
            time.sleep(0.1)
        if "IMPORT FAILED" in self.log():
            raise ServerFailed(f"ComfyUI could not load a custom node pack\n{self._log_tail()}")

    def _answers(self) -> bool:
        try:
            self.get("/system_stats")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def _log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-LOG_LINES:])

    async def _run(self, graph: dict[str, Any]) -> Finished:
        client = uuid.uuid4().hex
        async with (
            aiohttp.ClientSession(self.address) as session,
            session.ws_connect(f"/ws?clientId={client}", max_msg_size=0) as messages,
        ):
            async with session.post("/prompt", json={"prompt": graph, "client_id": client}) as response:
                answer = await response.json()
                if response.status != 200:
                    raise PromptFailed(json.dumps(answer, indent=1))
            finished = Finished(answer["prompt_id"])
            async for message in messages:
                if message.type == aiohttp.WSMsgType.TEXT and self._is_last(json.loads(message.data), finished):
                    return finished
        raise PromptFailed(f"the server closed the connection\n{self._log_tail()}")

    def _is_last(self, event: dict[str, Any], finished: Finished) -> bool:
        """Keeps what a message says about this prompt; true when it is the prompt's last."""
        kind, data = event["type"], event["data"]
        if data.get("prompt_id") != finished.prompt_id:
            return False
        finished.events.append(event)
        if kind == "execution_error":
            raise PromptFailed(f"{data['node_type']}: {data['exception_message']}\n{''.join(data['traceback'])}")
        if kind == "execution_cached":
            finished.cached = data["nodes"]
        if kind == "executed":
            finished.outputs[data["node"]] = data["output"]
        return bool(kind == "executing" and data["node"] is None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.symlink_to(source, target_is_directory=True)
    except OSError:  # Windows allows links to administrators and in developer mode only
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks"))
