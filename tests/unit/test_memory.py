"""The peak of a run is its own, also where runs overlap, and only CUDA devices have one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sage_core.memory import MIB, PeakMemory
from sage_core.stats import Stats
from tests.unit.conftest import FakeComfy, fake_backend, make_dispatcher

GPU = torch.device("cuda", 0)


class Allocator:
    """PyTorch's statistics of two devices: a peak that a reset brings down to what is allocated now."""

    def __init__(self) -> None:
        self.now = {0: 0, 1: 0}
        self.peak = {0: 0, 1: 0}

    def use(self, mib: int, device: int = 0) -> None:
        self.now[device] = mib * MIB
        self.peak[device] = max(self.peak[device], self.now[device])

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak[device.index] = self.now[device.index]

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak[device.index]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, getattr(allocator, name))
    return allocator


def test_the_peak_is_that_of_the_time_between_start_and_stop(allocator: Allocator) -> None:
    allocator.use(900)
    allocator.use(100)
    meter = PeakMemory(GPU)
    assert meter.mib() == 100
    allocator.use(300)
    allocator.use(200)
    assert meter.mib() == 300
    meter.stop()
    allocator.use(800)
    assert meter.mib() == 300


def test_meters_that_overlap_do_not_take_each_others_peak_away(allocator: Allocator) -> None:
    outer = PeakMemory(GPU)
    allocator.use(500)
    allocator.use(100)
    inner = PeakMemory(GPU)
    other = PeakMemory(torch.device("cuda", 1))
    allocator.use(50, device=1)
    allocator.use(200)
    inner.stop()
    other.stop()
    allocator.use(400)
    outer.stop()
    assert (outer.mib(), inner.mib(), other.mib()) == (500, 200, 50)


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("mps")])
def test_a_device_without_cuda_has_no_peak_and_is_not_asked(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "max_memory_allocated")
    monkeypatch.delattr(torch.cuda, "reset_peak_memory_stats")
    meter = PeakMemory(device)
    meter.stop()
    assert meter.mib() is None


def test_a_run_says_what_its_device_held_at_most(allocator: Allocator) -> None:
    comfy = FakeComfy(make_dispatcher(fake_backend()), lambda attention, options: allocator.use(300))
    comfy.load_device = GPU
    allocator.use(700)
    allocator.use(100)
    comfy.sample()
    allocator.use(900)
    assert comfy.run()["vram_peak_mib"] == 300
    assert Stats().open("p", "1").snapshot()["vram_peak_mib"] is None
