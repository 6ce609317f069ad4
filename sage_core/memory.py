"""PeakMemory: the most memory that PyTorch had allocated on a device while something ran."""

from __future__ import annotations

import threading
from typing import ClassVar

import torch

MIB = 2**20


class PeakMemory:
    """Counts from its making until ``stop``; knows nothing (None) where the device is no CUDA or ROCm device.

    PyTorch keeps one peak per device for the whole process, and a second run can be told from a larger first one only
    by a reset. So it is reset here when a run starts. ComfyUI does not notice: its memory management reads what is
    allocated now, never a peak. Another tool that reads the peak sees it since the latest run began. Meters that
    overlap keep for each other what a reset would lose.
    """

    _open: ClassVar[list[PeakMemory]] = []
    _lock = threading.Lock()

    def __init__(self, device: torch.device | None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._bytes = 0
        if self._device is None:
            return
        with self._lock:
            self._read_all()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._open.append(self)

    def mib(self) -> float | None:
        if self._device is None:
            return None
        with self._lock:
            self._read_all()
        return round(self._bytes / MIB, 1)

    def stop(self) -> None:
        with self._lock:
            self._read_all()
            if self in self._open:
                self._open.remove(self)

    def _read_all(self) -> None:
        for meter in self._open:
            meter._bytes = max(meter._bytes, torch.cuda.max_memory_allocated(meter._device))
