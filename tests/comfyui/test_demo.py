"""The demo as a command: what it is told wrongly is said before the server starts, and the server ends with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import comfyui_server
import dev
from demo import free_port

SCRIPT = Path(__file__).with_name("demo.py")
COMFYUI = dev.comfyui_roots()[0]


def demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(COMFYUI), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def refused(*arguments: str) -> str:
    """What is said about wrong arguments; no server is started for them."""
    process = demo(*arguments)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    return err


def test_a_kernel_that_does_not_exist_is_refused_with_those_that_do() -> None:
    said = refused("--kernel", "nonsense")
    assert "nonsense" in said
    assert "int8_reference" in said


def test_a_port_that_is_taken_or_none_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"{port} cannot be used" in refused("--port", str(port))
    assert "70000 cannot be used" in refused("--port", "70000")


@pytest.mark.skipif(os.name == "nt", reason="on Windows such a port is free as it is")
def test_a_port_whose_last_connections_are_still_closing_is_taken() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client.connect(("127.0.0.1", port))
        server.accept()[0].close()  # the side that closes first waits for late packets
    assert free_port(str(port)) == port


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handling of SIGINT, which is ignored where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_while_the_server_is_started_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = subprocess.Popen

    def interrupted(*_: object, **__: object) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(comfyui_server.subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), comfyui_server.Server(COMFYUI):
        pass
    left = started[0].poll() is None
    started[0].kill()
    assert not left
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_server_starts_ends_both(number: signal.Signals) -> None:
    if not COMFYUI.exists():
        pytest.skip(f"no ComfyUI in {COMFYUI}; `python dev.py test` fetches it")
    process = demo()
    assert process.stdout is not None
    assert "Starting ComfyUI" in process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines() == ["Ended before it was done"]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # the group of the demo: nothing of it is left
