"""The current CUDA or ROCm device: kernels launch on it, whatever device their tensors are on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

_NOTHING: AbstractContextManager[None] = nullcontext()


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which the tensor's device is the current one; afterwards the caller's is current again.

    Costs nothing but the question when the device is current already, as it is on a machine with one GPU.
    """
    device = tensor.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


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
