"""Attention in fp64 and the tensors to try it on, for what is compared with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def example(qo_len: int, kv_len: int, head_dim: int = 64, heads=(4, 4), batch: int = 1, dtype=torch.float32):
    """query, key and value in HND."""
    query = normal(batch, heads[0], qo_len, head_dim, dtype=dtype, seed=1)
    key, value = (normal(batch, heads[1], kv_len, head_dim, dtype=dtype, seed=seed) for seed in (2, 3))
    return query, key, value


def exact(query, key, value, sm_scale=None, attn_mask=None) -> Tensor:
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.double()
    tensors = (tensor.double() for tensor in (query, key, value))
    return scaled_dot_product_attention(*tensors, attn_mask=attn_mask, scale=sm_scale, enable_gqa=True)
