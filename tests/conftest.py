"""For all tests: SIGTERM ends them as Ctrl+C does, so that no server or browser is left behind."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
