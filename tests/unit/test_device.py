"""A function that launches on the default stream, called on another one: who waits for whom, and when.

The streams are stand-ins that note what is asked of them, as CUDA's would be on a machine with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_core.device import BeingCaptured, on_default_stream


class Stream:
    def __init__(self, machine: Machine, name: str, cuda_stream: int) -> None:
        self.machine, self.name, self.cuda_stream = machine, name, cuda_stream

    def wait_stream(self, other: Stream) -> None:
        self.machine.noted.append(f"{self.name} waits for {other.name}")


class Machine:
    """torch.cuda's streams, and what was done with them in order."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.default = Stream(self, "default", 0)
        self.side = Stream(self, "side", 7)
        self.current = self.default
        self.capturing = False

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def default_stream(self, device: torch.device) -> Stream:
        return self.default

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def function(self, query: Tensor, *args: Any, **keywords: Any) -> Tensor:
        self.noted.append(f"called on {self.current.name} with {args} and {keywords}")
        return OnGpu(self)


class OnGpu(Tensor):
    """A tensor that says it is on a GPU, and to which stream its memory was given."""

    is_cuda = property(lambda self: True)

    def __new__(cls, machine: Machine) -> OnGpu:
        return torch.zeros(1).as_subclass(cls)

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def record_stream(self, stream: Stream) -> None:
        self.machine.noted.append(f"output kept for {stream.name}")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    for name in ("current_stream", "default_stream", "is_current_stream_capturing", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(machine, name))
    return machine


CALLED_ON_DEFAULT = "called on default with (2,) and {'sm_scale': 0.5}"


def test_on_the_default_stream_it_is_called_directly(machine):
    output = on_default_stream(machine.function)(OnGpu(machine), 2, sm_scale=0.5)
    assert isinstance(output, OnGpu)
    assert machine.noted == [CALLED_ON_DEFAULT]


def test_on_another_stream_each_waits_for_the_other_and_the_output_is_kept(machine):
    machine.current = machine.side
    output = on_default_stream(machine.function)(OnGpu(machine), 2, sm_scale=0.5)
    assert isinstance(output, OnGpu)
    assert machine.noted == [
        "default waits for side",
        CALLED_ON_DEFAULT,
        "side waits for default",
        "output kept for side",
    ]
    assert machine.current is machine.side


def test_a_function_that_returns_no_tensor_has_none_to_keep(machine):
    """The compiled functions write into what they are handed."""
    machine.current = machine.side
    assert on_default_stream(lambda query: None)(OnGpu(machine)) is None
    assert machine.noted == ["default waits for side", "side waits for default"]


def test_an_error_leaves_the_callers_stream_current(machine):
    machine.current = machine.side
    with pytest.raises(ZeroDivisionError):
        on_default_stream(lambda query: 1 / 0)(OnGpu(machine))
    assert machine.current is machine.side


def test_a_capture_is_left_alone(machine):
    machine.current, machine.capturing = machine.side, True
    with pytest.raises(BeingCaptured, match="CUDA graph"):
        on_default_stream(machine.function)(OnGpu(machine))
    assert machine.noted == []


def test_a_cpu_has_no_streams(monkeypatch):
    def no_gpu(*args: Any) -> None:
        raise AssertionError("CUDA was asked")

    for name in ("current_stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, no_gpu)
    query = torch.zeros(1)
    assert on_default_stream(lambda query, factor: query + factor)(query, factor=2).item() == 2
