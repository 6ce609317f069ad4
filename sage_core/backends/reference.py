"""int8_reference: SageAttention's numerics in plain PyTorch, on any device; slow, never chosen automatically.

The numerics are those of SageAttention (arXiv 2410.02367) as its Triton function sageattn_qk_int8_pv_fp16_triton has
them; with pv_dtype="float8_e4m3" the product with value is that of SageAttention2 (arXiv 2411.10958) as
sageattn_qk_int8_pv_fp8_cuda has it. Where this differs from them, it is on purpose:

- key smoothing subtracts the mean in fp32 (upstream rounds mean and difference to key's dtype);
- weights times value is summed in fp32 (upstream sums a tile in fp16, or in fewer bits on fp8 tensor cores);
- the fp8 variant keeps one scale per block of 128 query and 64 key rows (upstream has one per warp or per thread, the
  sm90 kernel with tiles of 128 keys), and scales value to 448 (upstream to 2.25 when it sums in fp16);
- keys beyond kv_len weigh nothing (sageattention 1.0.6 lets a partial last tile in), attn_mask is multiplied by log2(e)
  as the scores are (the Triton function adds it as it is), and a row without any key gives 0 as in PyTorch's SDPA;
- a block of zeros has scale 0 and no division by it; a NaN anywhere in query, key or value reaches the output.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blockwise import (
    LOG2E,
    RunningSoftmax,
    blocks,
    element_limit,
    full_mask,
    heads_first,
    key_heads,
    log2_bias,
    spans,
)
from ..environment import Environment
from ..refusal import Refusal
from ..support import EVERY_MASK, HALF_DTYPES, Support
from .base import Backend, Kernel, Tolerance

QUERY_BLOCK = 128
KEY_BLOCK = 64
"""Rows that share one INT8 scale: BLKQ and BLKK of upstream's per_block_int8."""
INT8_MAX = 127.0
E4M3_MAX = 448.0
WEIGHT_SCALE = 2.0**8.807
"""The largest softmax weight in the fp8 kernels, just below E4M3_MAX: S_FP8_OFFSET in upstream's attn_utils.cuh."""


@torch.no_grad()
def int8_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    tensor_layout: str,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    attn_mask: Tensor | None = None,
    pv_dtype: str = "float16",
) -> Tensor:
    """Attention with INT8 query and key and fp16 or fp8 value; query's shape, dtype and ``tensor_layout``, contiguous.

    query is (batch, num_qo_heads, qo_len, head_dim) for "HND" and (batch, qo_len, num_qo_heads, head_dim) for "NHD";
    key and value have kv_len rows and a number of heads that divides num_qo_heads. attn_mask is bool (True attends) or
    floating (added to the scores), 4-D, and broadcasts to (batch, num_qo_heads, qo_len, kv_len). ``pv_dtype`` is
    "float16", where a value above 65,504 becomes Inf as it does in the kernels, or "float8_e4m3".

    No temporary has more elements than ``element_limit(device)`` or one (batch, heads, 1, head_dim) row, whichever is
    more: key is quantized again for every block of queries rather than kept. Integer products are exact as fp32 matrix
    products, since |sum| <= 127 * 127 * head_dim < 2**24 up to head_dim 1,040, also where TF32 is on (8 bits of 11).

    Raises ValueError for an unknown ``tensor_layout`` or ``pv_dtype`` and for shapes that do not fit.
    """
    if pv_dtype not in ("float16", "float8_e4m3"):
        raise ValueError(f"pv_dtype is {pv_dtype!r}; it is 'float16' or 'float8_e4m3'")
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    query, key, value, result = (heads_first(tensor, tensor_layout) for tensor in (query, key, value, output))
    attn_mask = full_mask(attn_mask, query, key, value)
    batch_size, num_heads, qo_len, head_dim = query.shape
    query_scale = (head_dim**-0.5 if sm_scale is None else sm_scale) * LOG2E
    key_mean = _mean_over_sequence(key) if smooth_k else None
    value_scale = _channel_scale(value) if pv_dtype == "float8_e4m3" else None

    row_limit = element_limit(query.device) // max(KEY_BLOCK, head_dim)
    for batch, heads, rows in blocks(batch_size, num_heads, qo_len, row_limit, QUERY_BLOCK):
        kv_heads = key_heads(heads, query, key)
        query_int8, query_step = _quantize_rows(query[batch, heads, rows].float() * query_scale, QUERY_BLOCK)
        softmax = RunningSoftmax()
        for keys in spans(key.shape[2], KEY_BLOCK):
            key_tile = key[batch, kv_heads, keys].float()
            if key_mean is not None:
                key_tile = key_tile - key_mean[batch, kv_heads]
            key_int8, key_step = _quantize_rows(key_tile, KEY_BLOCK)
            scores = (query_int8 @ key_int8.mT).mul_(query_step * key_step[..., :1, :])
            if attn_mask is not None:
                scores += log2_bias(attn_mask[batch, heads, rows, keys], torch.float32)
            value_tile = value[batch, kv_heads, keys]
            if value_scale is None:
                softmax.add(scores, _round_fp16(value_tile), _round_fp16)
            else:
                softmax.add(scores, _round_e4m3(value_tile / value_scale[batch, kv_heads]), _scale_and_round_e4m3)
        block = softmax.result()
        if value_scale is not None:
            block *= value_scale[batch, kv_heads] / WEIGHT_SCALE
        result[batch, heads, rows] = block
    return output


def _mean_over_sequence(key: Tensor) -> Tensor:
    """The mean of each channel in fp32, (batch, heads, 1, head_dim), without an fp32 copy of key."""
    batch_size, num_heads, kv_len, head_dim = key.shape
    step = max(1, element_limit(key.device) // (batch_size * num_heads * head_dim))
    total = torch.zeros((batch_size, num_heads, 1, head_dim), dtype=torch.float32, device=key.device)
    for keys in spans(kv_len, step):
        total += key[:, :, keys].float().sum(2, keepdim=True)
    return total / kv_len


def _channel_scale(value: Tensor) -> Tensor:
    """The step of each channel of value in e4m3, fp32 (batch, heads, 1, head_dim); 1 for a channel of zeros."""
    low, high = value.aminmax(dim=2, keepdim=True)
    scale = torch.maximum(high.float(), -low.float()) / E4M3_MAX
    return scale.masked_fill(scale == 0, 1.0)


def _quantize_rows(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Integers of -127 to 127 held in fp32, and the step of each row (..., rows, 1), one value per ``block`` rows.

    Halves round away from zero, as upstream's quant_per_block_int8_kernel has it.
    """
    count = rows.shape[-2]
    largest = pad(rows.abs().amax(-1), (0, -count % block)).unflatten(-1, (-1, block)).amax(-1)
    step = (largest / INT8_MAX).repeat_interleave(block, -1)[..., :count, None]
    scaled = rows / step.masked_fill(step == 0, 1.0)
    return scaled.add_(scaled.sign(), alpha=0.5).trunc_(), step


def _round_fp16(tensor: Tensor) -> Tensor:
    return tensor.half().float()


def _round_e4m3(tensor: Tensor) -> Tensor:
    return tensor.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _scale_and_round_e4m3(weights: Tensor) -> Tensor:
    return _round_e4m3(weights * WEIGHT_SCALE)


def _load(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
    """Always there: PyTorch is all it needs."""
    return Kernel(int8_attention, frozenset({"smooth_k", "attn_mask", "enable_gqa"}))


INT8_REFERENCE = Backend(
    name="int8_reference",
    support=Support(
        archs=None,
        dtypes=("float32", *HALF_DTYPES),
        mask_kinds=EVERY_MASK,
        smooth_k=True,
        max_offset=None,
    ),
    tolerance=Tolerance(relative_l2=0.02, cosine=0.9995),
    load=_load,
    auto=False,
)
