"""Live: the last runs over all patched models of a process, and their status while they are sampled."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .stats import OUTSIDE, SCHEMA, Run

MAX_KEPT = 32
"""Runs of the process; what a run holds of a large model is about a megabyte."""
INTERVAL_S = 0.5
"""Between two messages about one run: a person reads no faster, and it leaves the sampling thread alone."""


class Record:
    """A run, and what of its model and workflow is told with it."""

    def __init__(self, run: Run, workflow_id: str | None, about: dict[str, Any]) -> None:
        self.run = run
        self.workflow_id = workflow_id
        self.about = about
        """The policy and the name of the override that was there before, as in a report."""
        self._last: dict[str, Any] | None = None
        self.said: dict[str, Any] | None = None
        """The status that was sent last."""

    @property
    def ended(self) -> bool:
        return self.run.status != "running"

    def status(self) -> dict[str, Any]:
        """What is told of the run in a few numbers and one line; stays the same once the run has ended."""
        if self._last is not None:
            return self._last
        run = self.run
        ended = self.ended  # asked once: a run that ends meanwhile is told once more
        told = {
            "schema": SCHEMA,
            "uid": run.uid,
            "workflow_id": self.workflow_id,
            "prompt_id": run.prompt_id,
            "node_id": run.node_id,
            "apply_node_id": run.apply_node_id,
            "model": run.model,
            "started": round(run.started, 3),
            "seconds": round(run.seconds, 3) if ended and run.seconds is not None else None,
            "status": run.status if ended else "running",
            "steps": run.step,
            "total_steps": run.total_steps,
            "summary": run.snapshot()["summary"] if ended else run.progress_line(),
        }
        if ended:
            self._last = told
        return told


class Live:
    """Keeps the last runs, and sends the status of those being sampled from a thread of its own.

    ``send`` gets the status of one run, at most one for each Apply node in ``interval_s``, and none that says what the
    one before said; the last one has the summary. The thread is there only while a run is, so that nothing is left to
    do for the thread that samples but to add its run.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any]], None],
        interval_s: float = INTERVAL_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._send = send
        self._interval_s = interval_s
        self._sleep = sleep
        self._kept: deque[Record] = deque(maxlen=MAX_KEPT)
        self._open: list[Record] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, run: Run, workflow_id: str | None, about: dict[str, Any]) -> None:
        """Take in a run that starts now; called on the thread that samples."""
        record = Record(run, workflow_id, about)
        with self._lock:
            self._kept.append(record)
            if run.model == OUTSIDE:  # calls without a sampler have no end to wait for
                return
            self._open.append(record)
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="SageScope status", daemon=True)
                self._thread.start()

    def newest_first(self) -> list[Record]:
        with self._lock:
            return list(reversed(self._kept))

    def find(self, uid: str) -> Record | None:
        return next((record for record in self.newest_first() if record.run.uid == uid), None)

    def _follow(self) -> None:
        while True:
            self._sleep(self._interval_s)
            with self._lock:
                records = list(self._open)
            ended = [record for record in records if record.ended]
            for record in _newest_of_each_node(records):
                status = record.status()
                if record.said != status:
                    record.said = status
                    self._send(status)
            with self._lock:
                self._open = [record for record in self._open if record not in ended]
                if not self._open:
                    self._thread = None
                    return


def _newest_of_each_node(records: list[Record]) -> list[Record]:
    """Those to be told of: a node shows one run, and two samplers of one prompt can follow each other quickly."""
    return list({record.run.apply_node_id: record for record in records}.values())
