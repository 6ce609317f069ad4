"""Attention in blocks: what bounds memory, for exact attention of sampled rows and for the INT8 reference alike.

Shapes follow (batch, heads, seq, head_dim). Scores are in log2 units: (sm_scale * query . key + bias) * log2(e).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
_ELEMENTS_ON_CPU = 2**20
_ELEMENTS_ON_ACCELERATOR = 2**23


def element_limit(device: torch.device) -> int:
    """The most elements that one temporary may have, whatever the number of tokens.

    A CPU wants the tile in its cache, an accelerator wants it large enough to hide a kernel launch (32 MiB of fp32).
    """
    return _ELEMENTS_ON_CPU if device.type == "cpu" else _ELEMENTS_ON_ACCELERATOR


def heads_first(tensor: Tensor, tensor_layout: str) -> Tensor:
    """A view of shape (batch, heads, seq, head_dim) of a tensor in ``tensor_layout``, or the way back from it."""
    if tensor_layout not in ("HND", "NHD"):
        raise ValueError(f"tensor_layout is {tensor_layout!r}; it is 'HND' or 'NHD'")
    return tensor.transpose(1, 2) if tensor_layout == "NHD" else tensor


def full_mask(attn_mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """attn_mask as a view of shape (batch, num_qo_heads, qo_len, kv_len); all four are checked against each other.

    ValueError when the shapes of query, key and value do not fit or when attn_mask is not 4-D, neither bool nor
    floating, or does not broadcast.
    """
    batch_size, num_qo_heads, qo_len, head_dim = query.shape
    _, num_kv_heads, kv_len, _ = key.shape
    alike = key.shape == value.shape == (batch_size, num_kv_heads, kv_len, head_dim)
    if not alike or num_qo_heads % num_kv_heads:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ValueError(f"shapes do not fit, as (batch, heads, seq, head_dim): {shapes}")
    if attn_mask is None:
        return None
    target = (batch_size, num_qo_heads, qo_len, kv_len)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ValueError(f"attn_mask is {attn_mask.dtype}; it is bool or floating")
    if attn_mask.dim() != 4 or any(have not in (1, want) for have, want in zip(attn_mask.shape, target, strict=True)):
        raise ValueError(f"attn_mask has shape {tuple(attn_mask.shape)}; it must be 4-D and broadcast to {target}")
    return attn_mask.expand(target)


def spans(total: int, step: int) -> list[slice]:
    """``total`` positions cut into slices of ``step``, the last one shorter where it must be."""
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def blocks(
    batch_size: int, num_heads: int, num_rows: int, row_limit: int, multiple: int
) -> Iterator[tuple[slice, slice, slice]]:
    """Slices over (batch, heads, rows), each with at most ``row_limit`` rows over all its heads.

    Rows are cut at multiples of ``multiple``, and only when one head alone is over the limit. A head with fewer rows
    counts as ``multiple`` of them, so that a caller can bound its key tiles by the same limit.
    """
    row_step = multiple * max(1, min(row_limit // multiple, -(-num_rows // multiple)))
    head_step = min(num_heads, max(1, row_limit // row_step))
    batch_step = max(1, row_limit // (row_step * head_step))
    return product(spans(batch_size, batch_step), spans(num_heads, head_step), spans(num_rows, row_step))


def key_heads(heads: slice, query: Tensor, key: Tensor) -> slice | Tensor:
    """The index of the key heads that serve these query heads; grouped heads repeat, in a tile only."""
    group = query.shape[1] // key.shape[1]
    return heads if group == 1 else torch.arange(heads.start, heads.stop, device=key.device) // group


def log2_bias(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What a tile of attn_mask adds to scores.

    A finite mask stays finite, as it does in exact attention: a row masked by the lowest float alone averages value,
    a row masked by -inf alone is empty.
    """
    if attn_mask.dtype == torch.bool:
        return torch.where(attn_mask, 0.0, -torch.inf)
    bias = (attn_mask.to(dtype) * LOG2E).clamp(min=torch.finfo(dtype).min)
    return bias.masked_fill(attn_mask == -torch.inf, -torch.inf)


class RunningSoftmax:
    """softmax(scores) @ value over tiles of keys, in one pass: maximum, sum and output are corrected as tiles come.

    A row without any key it may attend to gives 0, as PyTorch's SDPA does since 2.5.
    """

    def __init__(self) -> None:
        self._maximum: Tensor | None = None
        self._total: Tensor
        self._output: Tensor

    def add(self, scores: Tensor, value: Tensor, quantize: Callable[[Tensor], Tensor] | None = None) -> None:
        """Takes in scores (..., rows, keys), which it overwrites, and value (..., keys, head_dim).

        ``quantize`` is applied to the weights before they meet value; their sum is taken from them as they were.
        """
        maximum = scores.amax(-1, keepdim=True)
        if self._maximum is not None:
            maximum = torch.maximum(maximum, self._maximum)
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)  # -inf minus -inf is no number
        weights = scores.sub_(shift).exp2_()
        total = weights.sum(-1, keepdim=True)
        output = (weights if quantize is None else quantize(weights)) @ value
        if self._maximum is not None:
            decay = torch.exp2(self._maximum - shift)
            total += self._total * decay
            output += self._output.mul_(decay)
        self._maximum, self._total, self._output = maximum, total, output

    def result(self) -> Tensor:
        """The output (..., rows, head_dim) for the keys taken in so far."""
        return self._output / self._total.masked_fill(self._total == 0, 1.0)
