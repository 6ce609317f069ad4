"""The check of a kernel on a site's own tensors: sampled query rows against exact attention.

The norms are computed on the device and read later, so that a check inside a forward waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .accuracy import exact_attention, sample_rows
from .call import AttentionCall, four_axes
from .operators import CUDA_ARCHS, FLASH_MAX_HEAD_DIM, flash_operator
from .refusal import Refusal, RefusalCode
from .spec import AttentionSpec, MaskKind
from .support import HALF_DTYPES, MAX_OFFSET_32_BIT

CHECK = "the check"
"""Stands for the kernel in what a check raised."""
BLOCKS_AT_ONCE = 256
"""Thread blocks that fill a large GPU."""
KEYS_IN_A_PART = 1_024
SMOOTHING_GAIN = 0.9
"""Key smoothing costs a pass over key, so with it the error must fall below this share of the error without it."""


class SiteAccuracy(NamedTuple):
    """Errors of a kernel at one site against exact attention over the sampled rows: relative L2 over all heads and of
    the worst (batch, head), and cosine over all. NaN where a tensor was not finite."""

    relative_l2: float
    worst_head_relative_l2: float
    cosine: float

    @classmethod
    def from_norms(cls, norms: Sequence[float]) -> SiteAccuracy:
        """The accuracy that ``site_norms`` stands for, once its numbers have come from the device."""
        if not all(map(math.isfinite, norms)):
            return cls(math.nan, math.nan, math.nan)
        heads = len(norms) // 3
        errors, references, outputs = norms[:heads], norms[heads : 2 * heads], norms[2 * heads :]
        error, reference, output = (math.hypot(*each) for each in (errors, references, outputs))
        # |a - b|^2 = |a|^2 + |b|^2 - 2 a.b; divided by the norms one by one, as their squares can overflow
        cosine = float(error == 0)
        if reference and output:
            cosine = (reference / output + output / reference - error / reference * (error / output)) / 2
        return cls(_ratio(error, reference), max(map(_ratio, errors, references)), cosine)

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


def site_norms(call: AttentionCall, spec: AttentionSpec, output: Tensor, exact: bool = True) -> Tensor:
    """What SiteAccuracy is made from, as one row on the call's device; does not wait for the device.

    The 2-norm over the sampled rows of each (batch, head): of the error, then of the reference, then of the output,
    and so three numbers per head. ``output`` is what ComfyUI would be given. ``exact`` computes the reference in fp32;
    without it PyTorch's attention in the call's own dtype is the reference, a few times faster and off by 0.002 in
    bf16. Which of its kernels that is, PyTorch decides, and some count in 32 bits: beyond those it is not asked.
    """
    return site_check(call, spec, exact)(output)


def site_check(call: AttentionCall, spec: AttentionSpec, exact: bool) -> Callable[[Tensor], Tensor]:
    """``site_norms`` up to the output: the function takes it, and holds none of query, key, value and mask."""
    rows, split = _rows(spec.qo_len).to(call.query.device, non_blocking=True), call.skip_output_reshape
    reference = _reference(call, spec, rows, exact)

    def norms_of(output: Tensor) -> Tensor:
        sampled = _heads_first(output, spec.head_dim, split).index_select(2, rows).float()
        # few launches, as a forward has a check at each site; in fp64, where no square overflows or vanishes
        columns = torch.stack((sampled - reference, reference, sampled))
        dtype = torch.float32 if columns.device.type == "mps" else torch.float64
        norms: Tensor = torch.linalg.vector_norm(columns, dim=(-2, -1), dtype=dtype)
        return norms.flatten()

    return norms_of


def _reference(call: AttentionCall, spec: AttentionSpec, rows: Tensor, exact: bool) -> Tensor:
    """Attention of the sampled rows of query, in fp32: (batch, heads, rows, head_dim)."""
    query, key, value = (_heads_first(tensor, spec.head_dim, call.skip_reshape) for tensor in call[:3])
    mask = None if call.mask is None else _one_of_each(four_axes(call.mask))
    # flash counts in 64 bits; what PyTorch chooses among may not
    in_parts = (parts := _parts(spec)) > 1 and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    if in_parts and not exact:
        return _in_parts(query.index_select(2, rows), key, value, spec.softmax_scale, parts)
    reached = spec.max_offset
    if mask is not None:
        reached = max(reached, mask[:, :, : len(rows)].numel() - 1)
    if exact or reached > MAX_OFFSET_32_BIT:
        return exact_attention(query, key, value, "HND", spec.softmax_scale, mask, rows)
    if mask is not None and mask.shape[2] > 1:
        mask = mask.index_select(2, rows)
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(query.dtype)  # PyTorch's attention adds no other dtype
    return scaled_dot_product_attention(
        query.index_select(2, rows),
        key,
        value,
        attn_mask=mask,
        scale=spec.softmax_scale,
        enable_gqa=spec.enable_gqa,
    ).float()


def _parts(spec: AttentionSpec) -> int:
    """In how many parts of the keys the sampled rows of a call attend; 1 where it is left to PyTorch as a whole.

    A flash kernel has one thread block for all of a head's sampled rows, which goes through the keys one tile after the
    other: most of the device is idle, for as long as each wave of a whole call takes.
    """
    is_plain = spec.mask_kind is MaskKind.NONE and not spec.enable_gqa
    on_cpu = spec.arch == "cpu"
    takes = spec.arch in CUDA_ARCHS and spec.dtype in HALF_DTYPES
    takes = takes and spec.head_dim % 8 == 0 and spec.head_dim <= FLASH_MAX_HEAD_DIM
    if not (is_plain and (takes or on_cpu)) or flash_operator(on_cpu) is None:
        return 1
    wanted = -(-BLOCKS_AT_ONCE // (spec.batch_size * spec.num_qo_heads))
    return max(min(wanted, spec.kv_len // KEYS_IN_A_PART), 1)


def _in_parts(query: Tensor, key: Tensor, value: Tensor, sm_scale: float, parts: int) -> Tensor:
    """Attention of a few rows of query, in fp32: each part of the keys apart, put together by their sums of weights."""
    length = key.shape[2] // parts
    end = parts * length
    found = []
    for entry in range(query.shape[0]):
        rows = query[entry, None].expand(parts, -1, -1, -1)
        keys, values = (tensor[entry, :, :end].unflatten(1, (parts, length)).transpose(0, 1) for tensor in (key, value))
        outputs, sums = _flash(rows, keys, values, sm_scale)
        if end < key.shape[2]:
            rest = _flash(query[entry, None], key[entry, None, :, end:], value[entry, None, :, end:], sm_scale)
            outputs, sums = torch.cat((outputs, rest[0])), torch.cat((sums, rest[1]))
        found.append((torch.softmax(sums.float(), 0).unsqueeze(-1) * outputs.float()).sum(0))
    return torch.stack(found)


def _flash(query: Tensor, key: Tensor, value: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention with the logarithms of the sums of weights, which its public function keeps back."""
    output, sums = flash_operator(query.is_cpu)(query, key, value, 0.0, False, scale=sm_scale)[:2]
    return output, sums


def _one_of_each(mask: Tensor) -> Tensor:
    """The mask without repetitions along batch, heads and rows: taking rows out of it would write them all down."""
    for axis in range(3):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return mask


def _ratio(error: float, size: float) -> float:
    """The relative L2: 0 for no error, infinite where only the reference is zero."""
    if error == 0:
        return 0.0
    return error / size if size else math.inf


def _heads_first(tensor: Tensor, head_dim: int, split: bool) -> Tensor:
    return tensor if split else tensor.unflatten(-1, (-1, head_dim)).transpose(1, 2)


@lru_cache(maxsize=64)
def _rows(qo_len: int) -> Tensor:
    """The sampled rows on the host: kept on the device they would outlive every model. The copy for a check is small
    enough that CUDA takes it along without a wait."""
    return sample_rows(qo_len)
