"""The current CUDA or ROCm device: kernels launch on it, whatever device their tensors are on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch

_NOTHING: AbstractContextManager[None] = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which the device is the current one; afterwards the caller's is current again.

    Costs nothing but the question when the device is current already, as it is on a machine with one GPU.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


class BeingCaptured(RuntimeError):
    """A CUDA graph is being captured, in which the call cannot take part."""


def on_default_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in order with the caller's work, for packages that launch on the device's default stream whatever
    stream is current: called beside it they read tensors before they are written.

    Raises BeingCaptured while a CUDA graph is captured on the current stream: the default one cannot be part of it.
    """

    @wraps(function)
    def ordered(query: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        current = torch.cuda.current_stream(query.device) if query.is_cuda else None
        if current is None or current.cuda_stream == 0:
            return function(query, *args, **keywords)
        if torch.cuda.is_current_stream_capturing():
            raise BeingCaptured("it launches on the default stream, which cannot be part of a CUDA graph")
        default = torch.cuda.default_stream(query.device)
        default.wait_stream(current)
        with torch.cuda.stream(default):
            output = function(query, *args, **keywords)
        current.wait_stream(default)
        if isinstance(output, torch.Tensor) and output.is_cuda:
            output.record_stream(current)  # or its memory is given away while the caller still reads
        return output

    return ordered


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the device's current stream: what is launched there runs later, so that
    nothing can be read or timed, and waiting for it breaks the capture."""
    if device.type != "cuda":
        return False
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()


def waiter(tensor: torch.Tensor) -> Callable[[], object] | None:
    """The function that waits for all work on the tensor's device; None for a CPU, where a call is its own work."""
    device = tensor.device
    if device.type == "cpu":
        return None
    synchronize = getattr(torch, device.type).synchronize
    return partial(synchronize, device) if device.type == "cuda" else synchronize


class RandomState:
    """The state of PyTorch's random generators: a forward that is run again must draw what it drew before, and the
    forwards after it what they would have drawn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._repeats = False
        self._host = torch.get_rng_state()
        self._accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore_before_repeat(self) -> None:
        """Called before each time; the first is left alone, as other threads may have drawn since."""
        if not self._repeats:
            self._repeats = True
            return
        torch.set_rng_state(self._host)
        if self._accelerator is not None:
            torch.cuda.set_rng_state(self._accelerator, self._device)
