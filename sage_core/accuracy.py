"""Accuracy: how far an output is from exact attention, and exact attention itself for sampled query rows."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .blockwise import LOG2E, RunningSoftmax, blocks, element_limit, full_mask, heads_first, key_heads, log2_bias, spans

_ROWS_PER_HEAD = 128
_KEYS_PER_TILE = 512
"""Heads are taken together while a tile keeps this many keys, so that few rows of many heads make few launches."""


class Accuracy(NamedTuple):
    """The distance of an output from its reference; a perfect one has every error 0 and cosine 1.

    ``relative_l2`` is |output - reference| / |reference| in the 2-norm over all elements, ``relative_l1`` the same in
    the 1-norm; ``rmse`` and ``max_abs`` are in the tensors' own units. ``worst_head_relative_l2`` is the largest
    relative_l2 of one head, None when no head axis was given. ``finite`` says that every element of both is; where it
    is False every error is inf and cosine is -1, so that no comparison takes a NaN for a good result.
    """

    relative_l2: float
    cosine: float
    relative_l1: float
    rmse: float
    max_abs: float
    worst_head_relative_l2: float | None = None
    finite: bool = True


@torch.no_grad()
def compare(output: Tensor, reference: Tensor, head_axis: int | None = None) -> Accuracy:
    """The Accuracy of ``output``, computed in fp64; waits for the device once.

    Against a reference of zeros, an output of zeros is perfect and any other has relative errors inf and cosine 0.
    ``head_axis`` is the axis of both that counts heads. Raises ValueError when shapes differ or nothing is there.
    """
    if output.shape != reference.shape or output.numel() == 0:
        raise ValueError(f"cannot compare an output of shape {tuple(output.shape)} with {tuple(reference.shape)}")
    output, reference = (_fp64_rows(tensor, head_axis) for tensor in (output.to(reference.device), reference))
    peak = torch.maximum(output.abs().amax(), reference.abs().amax())
    unit = peak.masked_fill(peak == 0, 1.0)  # squares of numbers of at most 1 cannot overflow
    output, reference = output / unit, reference / unit
    difference = output - reference
    columns = (
        difference.square(),
        reference.square(),
        output.square(),
        output * reference,
        difference.abs(),
        reference.abs(),
    )
    sums = torch.stack([column.sum(1) for column in columns])
    *flat, largest, scale = torch.cat([sums.flatten(), torch.stack([difference.abs().amax(), unit])]).tolist()
    if not math.isfinite(scale):
        worst = None if head_axis is None else math.inf
        return Accuracy(math.inf, -1.0, math.inf, math.inf, math.inf, worst, finite=False)

    heads = len(flat) // len(columns)
    by_head = [flat[start : start + heads] for start in range(0, len(flat), heads)]
    error2, reference2, output2, dot, error1, reference1 = (math.fsum(values) for values in by_head)
    return Accuracy(
        relative_l2=math.sqrt(_ratio(error2, reference2)),
        cosine=_cosine(dot, output2, reference2),
        relative_l1=_ratio(error1, reference1),
        rmse=math.sqrt(error2 / difference.numel()) * scale,
        max_abs=largest * scale,
        worst_head_relative_l2=None if head_axis is None else math.sqrt(max(map(_ratio, by_head[0], by_head[1]))),
    )


def _fp64_rows(tensor: Tensor, head_axis: int | None) -> Tensor:
    """(heads, elements of a head) in fp64, one row without a head axis; on the CPU where a device has no fp64."""
    tensor = (tensor.cpu() if tensor.device.type == "mps" else tensor).double()
    heads = tensor[None] if head_axis is None else tensor.movedim(head_axis, 0)
    return heads.reshape(len(heads), -1)


def _ratio(error: float, size: float) -> float:
    if error == 0:
        return 0.0
    return error / size if size else math.inf


def _cosine(dot: float, output2: float, reference2: float) -> float:
    if output2 == reference2 == 0:
        return 1.0
    norms = math.sqrt(output2) * math.sqrt(reference2)
    return max(-1.0, min(1.0, dot / norms)) if norms else 0.0


@torch.no_grad()
def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensor_layout: str,
    sm_scale: float | None = None,
    attn_mask: Tensor | None = None,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Plain attention of the query ``rows`` against all keys, computed and returned in ``dtype`` (fp32 or fp64).

    Shapes, ``tensor_layout`` and attn_mask (of all rows, not only the sampled ones) are those of
    ``backends.reference.int8_attention``; the output has len(rows) rows, all of them when ``rows`` is None. ``rows`` is
    1-D int64 on any device. No temporary has more than ``element_limit(device)`` elements, whatever the number of
    tokens. Where TF32 is on for fp32, weights have 11 bits, which stays below the rounding of a bf16 output.

    Raises ValueError for an unknown ``tensor_layout`` and for shapes that do not fit.
    """
    query, key, value = (heads_first(tensor, tensor_layout) for tensor in (query, key, value))
    attn_mask = full_mask(attn_mask, query, key, value)
    batch_size, num_heads, qo_len, head_dim = query.shape
    scale = (head_dim**-0.5 if sm_scale is None else sm_scale) * LOG2E
    rows = torch.arange(qo_len, device=query.device) if rows is None else rows.to(query.device)
    shape = (batch_size, num_heads, len(rows)) if tensor_layout == "HND" else (batch_size, len(rows), num_heads)
    output = torch.empty((*shape, head_dim), dtype=dtype, device=query.device)
    result = heads_first(output, tensor_layout)

    limit = element_limit(query.device)
    row_limit = limit // max(_KEYS_PER_TILE, head_dim)
    for batch, heads, chunk in blocks(batch_size, num_heads, len(rows), row_limit, _ROWS_PER_HEAD):
        kv_heads = key_heads(heads, query, key)
        query_block = query[batch, heads, rows[chunk]].to(dtype) * scale
        batches, head_count, row_count, _ = query_block.shape
        per_key = batches * head_count * max(row_count, head_dim)
        softmax = RunningSoftmax()
        for keys in spans(key.shape[2], max(1, limit // per_key)):
            scores = query_block @ key[batch, kv_heads, keys].to(dtype).mT
            if attn_mask is not None:
                scores += log2_bias(attn_mask[batch, heads, rows[chunk], keys], dtype)
            softmax.add(scores, value[batch, kv_heads, keys].to(dtype))
        result[batch, heads, chunk] = softmax.result().to(dtype)
    return output


def sample_rows(qo_len: int, count: int = 128, tile: int = 128) -> Tensor:
    """At most ``count`` rows of ``qo_len``, as sorted int64: first, last, start of the last tile, the rest spread out.

    The spread has one row per equal stretch, at a place in it that follows the golden ratio: equal distances would
    meet the same column of an image, or the same place in a tile, again and again. ``tile`` is the kernel's rows per
    block: its last, often partial one is where kernels go wrong. Raises ValueError below 1 row and below a count of 4.
    """
    if qo_len < 1 or count < 4:
        raise ValueError(f"qo_len is {qo_len} and count is {count}; they are at least 1 and 4")
    if qo_len <= count:
        return torch.arange(qo_len)
    ends = {0, (qo_len - 1) // tile * tile, qo_len - 1}
    edges = [number * qo_len // (count - len(ends)) for number in range(count - len(ends) + 1)]
    spread = {low + int(number * 0.618034 % 1 * (high - low)) for number, (low, high) in enumerate(pairwise(edges))}
    return torch.tensor(sorted(ends | spread))
