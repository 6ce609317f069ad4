"""Every kernel that the pack knows."""

from __future__ import annotations

from .base import Backend
from .comfy_kitchen import COMFY_KITCHEN_INT8
from .flash_attention import FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4
from .hub import HUB_AITER, HUB_FLASH_ATTN_2, HUB_FLASH_ATTN_3, HUB_SAGE_ATTENTION, HUB_SAGE_BLACKWELL
from .reference import INT8_REFERENCE
from .sageattention import (
    SAGEATTN_1,
    SAGEATTN_FP8,
    SAGEATTN_FP8_FUSED,
    SAGEATTN_FP8_SM90,
    SAGEATTN_FP8_SM90_FUSED,
    SAGEATTN_FP16,
    SAGEATTN_FP16_TRITON,
)
from .sageattn3 import SAGEATTN3_BLACKWELL
from .sdpa import SDPA_CUDNN, SDPA_EFFICIENT, SDPA_FLASH
from .starting_order import STARTING_ORDER, Preference

__all__ = ["BACKENDS", "STARTING_ORDER", "Backend", "Preference"]

BACKENDS: tuple[Backend, ...] = (
    SAGEATTN_FP8_SM90,
    SAGEATTN_FP8_SM90_FUSED,
    SAGEATTN_FP8,
    SAGEATTN_FP8_FUSED,
    SAGEATTN_FP16,
    SAGEATTN_FP16_TRITON,
    SAGEATTN_1,
    SAGEATTN3_BLACKWELL,
    COMFY_KITCHEN_INT8,
    HUB_SAGE_ATTENTION,
    HUB_SAGE_BLACKWELL,
    HUB_AITER,
    SDPA_CUDNN,
    SDPA_FLASH,
    SDPA_EFFICIENT,
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    FLASH_ATTN_4,
    HUB_FLASH_ATTN_2,
    HUB_FLASH_ATTN_3,
    INT8_REFERENCE,
)
"""In the order in which the node offers them; saved workflows hold the names, so none is ever renamed."""
