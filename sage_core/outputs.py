"""What a model returns: the tensors in it, and whether they are finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def all_finite(output: Any) -> torch.Tensor:
    """A bool tensor on the output's device: no NaN or Inf in any tensor of ``output``; does not wait for the device.

    Models return a tensor, or several of them in a tuple, a list or ComfyUI's NestedTensor. Something without any
    tensor counts as finite.
    """
    flags = [torch.isfinite(tensor).all() for tensor in tensors_of(output)]
    if not flags:
        return torch.tensor(True)
    return torch.stack([flag.to(flags[0].device) for flag in flags]).all()


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """The tensors that an output is made of."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        yield from tensors_of(list(output.values()))
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from tensors_of(part)
    elif isinstance(getattr(output, "tensors", None), list):  # comfy.nested_tensor.NestedTensor
        yield from tensors_of(output.tensors)
