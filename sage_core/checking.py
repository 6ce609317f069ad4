"""The check of a kernel on a site's own tensors: sampled query rows against exact attention.

The errors are computed on the device and read later, so that a check inside a forward waits for nothing.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .accuracy import exact_attention, sample_rows
from .call import AttentionCall, four_axes
from .refusal import Refusal, RefusalCode
from .spec import AttentionSpec

SMOOTHING_GAIN = 0.9
"""Key smoothing costs a pass over key, so with it the error must fall below this share of the error without it."""


class SiteAccuracy(NamedTuple):
    """Errors of a kernel at one site against exact attention over the sampled rows: relative L2 over all heads and of
    the worst (batch, head), and cosine over all. NaN where a tensor was not finite."""

    relative_l2: float
    worst_head_relative_l2: float
    cosine: float

    def within(self, tolerance: float) -> bool:
        """The worst head is within the tolerance; NaN is not."""
        return self.worst_head_relative_l2 <= tolerance

    def refusal(self, kernel: str, tolerance: float) -> Refusal:
        if math.isnan(self.worst_head_relative_l2):
            return Refusal(RefusalCode.NOT_FINITE, f"{kernel} met or made NaN or Inf at this site")
        detail = (
            f"{kernel} is off by relative L2 {self.worst_head_relative_l2:.3f} in its worst head at this site; "
            f"tolerance is {tolerance:g}"
        )
        return Refusal(RefusalCode.ACCURACY, detail)


def site_errors(call: AttentionCall, spec: AttentionSpec, output: Tensor, exact: bool = True) -> Tensor:
    """The three numbers of SiteAccuracy as a tensor on the call's device; does not wait for the device.

    ``output`` is what ComfyUI would be given. ``exact`` computes the reference in fp32; without it PyTorch's attention
    in the call's own dtype is the reference, a few times faster and off by 0.002 in bf16.
    """
    query, key, value = (_heads_first(tensor, spec.head_dim, call.skip_reshape) for tensor in call[:3])
    output = _heads_first(output, spec.head_dim, call.skip_output_reshape)
    rows = _rows(spec.qo_len, query.device)
    mask = None if call.mask is None else four_axes(call.mask)
    if exact:
        reference = exact_attention(query, key, value, "HND", spec.softmax_scale, mask, rows)
    else:
        if mask is not None and mask.shape[2] > 1:
            mask = mask.index_select(2, rows)
        if mask is not None and mask.dtype is not torch.bool:
            mask = mask.to(query.dtype)  # PyTorch's attention adds no other dtype
        reference = scaled_dot_product_attention(
            query.index_select(2, rows),
            key,
            value,
            attn_mask=mask,
            scale=spec.softmax_scale,
            enable_gqa=spec.enable_gqa,
        ).float()
    return _errors(output.index_select(2, rows).float(), reference)


def _errors(output: Tensor, reference: Tensor) -> Tensor:
    peak = reference.abs().amax()
    unit = torch.where(peak > 0, peak, torch.ones_like(peak))  # squares of numbers near 1 cannot overflow
    output, reference = output / unit, reference / unit
    per_head = (2, 3)
    error2 = (output - reference).square().sum(per_head)
    reference2 = reference.square().sum(per_head)
    worst = _ratio(error2, reference2).amax()
    norms = (output.square().sum() * reference2.sum()).sqrt()
    cosine = torch.where(norms > 0, (output * reference).sum() / norms, (error2.sum() == 0).float())
    return torch.stack([_ratio(error2.sum(), reference2.sum()), worst, cosine])


def _ratio(error2: Tensor, reference2: Tensor) -> Tensor:
    """The relative L2 from two sums of squares: 0 for no error, infinite where only the reference is zero."""
    return torch.where(error2 == 0, torch.zeros_like(error2), error2 / reference2).sqrt()


def _heads_first(tensor: Tensor, head_dim: int, split: bool) -> Tensor:
    return tensor if split else tensor.unflatten(-1, (-1, head_dim)).transpose(1, 2)


@lru_cache(maxsize=64)
def _rows(qo_len: int, device: torch.device) -> Tensor:
    """The sampled rows on the device: a copy from the host for each check would wait for the device."""
    return sample_rows(qo_len).to(device)
