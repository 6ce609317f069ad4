"""A lock file that keeps the processes of one machine apart."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK_SECONDS = 1.0
"""The longest wait for another process; it holds the lock for the few milliseconds that a write takes."""
LOCK_POLL_SECONDS = 0.02
"""Between two looks at a lock that is held: as long as a write, so that a second look mostly succeeds."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file against other threads and processes; TimeoutError when another holds it for too long.

    The system drops the lock of a process that dies, so none is ever stale. The empty file stays: removing it would
    let two processes lock two files of one name.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(handle):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another process holds {path} for more than {LOCK_SECONDS:g} s")
            time.sleep(LOCK_POLL_SECONDS)
        try:
            yield
        finally:
            _unlock(handle)
    finally:
        os.close(handle)


if sys.platform == "win32":

    def _try_lock(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def _unlock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)

else:

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_UN)
