"""Calls that reach past what a kernel can count, cut into pieces: attention is independent for each batch and head."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from .call import Tensors, largest_offset, last_offset
from .spec import AttentionSpec

COPIED_SHARE = 8
"""What has to be copied is copied in pieces of an eighth of the kernel's reach: where that is 32 bits, half a GiB of
each of query, key and value in 16 bits."""


class Piece(NamedTuple):
    """One batch entry and a group of key heads with the query heads that share them."""

    batch: slice
    heads: slice
    kv_heads: slice

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> Tensors:
        """The piece of query, key and value, which are (batch, heads, seq, head_dim), as views."""
        return query[self.batch, self.heads], key[self.batch, self.kv_heads], value[self.batch, self.kv_heads]

    def of_mask(self, mask: Tensor) -> Tensor:
        """The piece of an attn_mask of four axes, each full or 1."""
        batch = self.batch if mask.shape[0] > 1 else slice(None)
        heads = self.heads if mask.shape[1] > 1 else slice(None)
        return mask[batch, heads]


def smallest(spec: AttentionSpec) -> int:
    """The elements of the largest tensor in the smallest piece: one key head and the query heads that share it."""
    return spec.num_qo_heads // spec.num_kv_heads * max(spec.qo_len, spec.kv_len) * spec.head_dim


def pieces(spec: AttentionSpec, tensors: Tensors, max_offset: int | None, mask: Tensor | None = None) -> list[Piece]:
    """The pieces of a call for a kernel that reaches element offsets up to ``max_offset``; none where it is not cut.

    ``tensors`` are query, key and value as (batch, heads, seq, head_dim), ``mask`` is attn_mask of four axes. Neither
    the smallest piece of a contiguous copy nor that of the mask may be too large. As few pieces as may be, unless they
    have to be copied: then their copies are small.
    """
    whole = spec.batch_size * spec.num_kv_heads * smallest(spec)
    reached = max(spec.max_offset, whole - 1, 0 if mask is None else last_offset(mask))
    if max_offset is None or reached <= max_offset:
        return []
    found = _cut(spec, max_offset + 1)
    if any(largest_offset(tensor) > max_offset for piece in found for tensor in piece.of(*tensors)):
        found = _cut(spec, (max_offset + 1) // COPIED_SHARE)
    if mask is not None and any(last_offset(piece.of_mask(mask)) > max_offset for piece in found):
        found = _cut(spec, smallest(spec))  # heads with that many scores are worth a launch each
    return found if len(found) > 1 else []


def _cut(spec: AttentionSpec, elements: int) -> list[Piece]:
    """Pieces of one batch entry, of about equal size, and of ``elements`` at most where that is a whole key head."""
    at_once = min(max(elements // smallest(spec), 1), spec.num_kv_heads)
    groups = -(-spec.num_kv_heads // at_once)
    ends = [spec.num_kv_heads * number // groups for number in range(groups + 1)]
    shared = spec.num_qo_heads // spec.num_kv_heads
    return [
        Piece(slice(entry, entry + 1), slice(first * shared, last * shared), slice(first, last))
        for entry in range(spec.batch_size)
        for first, last in pairwise(ends)
    ]
