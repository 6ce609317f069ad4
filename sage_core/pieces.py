"""Calls that reach past what a kernel can count, cut into pieces: attention is independent for each batch and head."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .spec import AttentionSpec

Tensors = tuple[Tensor, Tensor, Tensor]


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


def pieces(spec: AttentionSpec, max_offset: int | None) -> list[Piece]:
    """The pieces of a call for a kernel that reaches element offsets up to ``max_offset``; none where it takes all.

    Not even the smallest piece may be too large.
    """
    whole = spec.batch_size * spec.num_kv_heads * smallest(spec)
    if max_offset is None or whole - 1 <= max_offset:
        return []
    at_once = min((max_offset + 1) // smallest(spec), spec.num_kv_heads)
    shared = spec.num_qo_heads // spec.num_kv_heads
    found = []
    for entry in range(spec.batch_size):
        for first in range(0, spec.num_kv_heads, at_once):
            last = min(first + at_once, spec.num_kv_heads)
            found.append(Piece(slice(entry, entry + 1), slice(first * shared, last * shared), slice(first, last)))
    return found
