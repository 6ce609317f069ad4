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


def waiter(tensor: torch.Tensor) -> Callable[[], object]:
    """The function that waits for all work on the tensor's device; on a CPU there is nothing to wait for."""
    device = tensor.device
    if device.type == "cpu":
        return lambda: None
    synchronize = getattr(torch, device.type).synchronize
    return partial(synchronize, device) if device.type == "cuda" else synchronize
