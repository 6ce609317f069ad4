"""The current CUDA or ROCm device: kernels launch on it, whatever device their tensors are on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

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
