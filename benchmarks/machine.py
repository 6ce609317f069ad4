"""The device that is measured on, its clock and its memory, and what was logged meanwhile."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from contextlib import suppress

import torch


class Log(logging.Handler):
    """Keeps the first warning and counts the rest: some functions fall back to others and only log it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def take(self) -> str:
        """What was logged since the last time, in one line."""
        texts, self._texts = self._texts, []
        return f"logged {len(texts)} warnings, first: {texts[0][:300]}" if texts else ""


class Machine:
    """The device that everything runs on, its clock and its memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self.cuda else "CPU"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def run(self, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float, int]:
        """What the function gives, its seconds, and the most memory that was in use meanwhile (0 on a CPU)."""
        self.wait()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        result = function()
        self.wait()
        seconds = time.perf_counter() - start
        return result, seconds, torch.cuda.max_memory_allocated(self.device) if self.cuda else 0

    def clean(self) -> None:
        """Give back what nobody holds."""
        gc.collect()
        if self.cuda:
            with suppress(RuntimeError):  # after an illegal access all work fails; what was measured is still told
                torch.cuda.empty_cache()
