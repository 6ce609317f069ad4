"""PyTorch's attention operators, for what its public function does not give: less host time, and sums of weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

CUDA_ARCHS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "sm121")
"""sdp_utils.cpp lets cuDNN and flash run from sm80 to sm121."""
FLASH_MAX_HEAD_DIM = 256
"""Flash raises above: "at most 256"."""
FLASH = "_scaled_dot_product_flash_attention"
FLASH_SCHEMA = "query key value dropout_p is_causal return_debug_mask scale"
FLASH_CPU_SCHEMA = "query key value dropout_p is_causal attn_mask scale"
"""The arguments that direct calls rely on."""


def operator(name: str, schema: str) -> Any:
    """The ATen operator ``name``, which costs half the host time of the public function; None when it is another."""
    found = getattr(getattr(torch.ops.aten, name, None), "default", None)
    if found is None or [argument.name for argument in found._schema.arguments] != schema.split():
        return None
    return found


@cache
def flash_operator(on_cpu: bool) -> Any:
    """(query, key, value, dropout_p, is_causal, scale=...) -> (output, logsumexp, ...); all are (batch, heads, seq,
    head_dim), and logsumexp has no last axis.

    None where this torch was built without it, as it is for Windows.
    """
    if on_cpu:
        return operator(f"{FLASH}_for_cpu", FLASH_CPU_SCHEMA)
    return operator(FLASH, FLASH_SCHEMA) if torch.backends.cuda.is_flash_attention_available() else None
