"""Which kernels are tried first on which GPU, until they have been measured there."""

from __future__ import annotations

from typing import NamedTuple

from .hub import HUB_AITER, HUB_SAGE_ATTENTION
from .sageattention import (
    SAGEATTN_1,
    SAGEATTN_FP8,
    SAGEATTN_FP8_FUSED,
    SAGEATTN_FP8_SM90,
    SAGEATTN_FP8_SM90_FUSED,
    SAGEATTN_FP16,
    SAGEATTN_FP16_TRITON,
)
from .sdpa import SDPA_CUDNN


class Preference(NamedTuple):
    """A kernel's place in the order of an arch: from which length and for which head_dims (None: any) it is expected
    to be faster than native attention."""

    kernel: str
    min_qo_len: int = 0
    head_dims: tuple[int, ...] | None = None


LONG = 10_000
"""Where int8 QK with fp8 PV overtakes exact attention on an H200: between 4,608 tokens (slower) and 16,896."""
IMAGE = 4_000
"""Just under 4,096 tokens, an image of 1024 x 1024: the shortest sequence with a measured or published gain."""

STARTING_ORDER: dict[str, tuple[Preference, ...]] = {
    # Measured on an H200 (docs/measured): fp8 1.4 to 1.5 times native from 16,896 tokens; at 4,608 cuDNN and fp8
    # behind fused quantization 1.12; nothing gains at D 64.
    "sm90": (
        Preference(SAGEATTN_FP8_SM90_FUSED.name, IMAGE, (128,)),
        Preference(SAGEATTN_FP8_SM90.name, LONG, (128,)),
        Preference(HUB_SAGE_ATTENTION.name, LONG, (128,)),
        Preference(SDPA_CUDNN.name, IMAGE, (128,)),
    ),
    # The choice of upstream's sageattn() on this arch; its benchmarks on an A100.
    "sm80": (Preference(SAGEATTN_FP16.name, LONG), Preference(HUB_SAGE_ATTENTION.name, LONG)),
    # The choice of upstream's sageattn() on this arch; its benchmarks on an RTX 3090.
    "sm86": (Preference(SAGEATTN_FP16_TRITON.name, IMAGE), Preference(SAGEATTN_1.name, IMAGE)),
    # The choice of upstream's sageattn(); InvokeAI measured 3 to 13 % per 1024 x 1024 image on an RTX 4090.
    "sm89": (
        Preference(SAGEATTN_FP8_FUSED.name, IMAGE),
        Preference(SAGEATTN_FP8.name, IMAGE),
        Preference(HUB_SAGE_ATTENTION.name, IMAGE),
        Preference(SAGEATTN_1.name, IMAGE),
    ),
    # The choice of upstream's sageattn() on this arch; its benchmarks on an RTX 5090.
    "sm120": (Preference(SAGEATTN_FP8_FUSED.name, IMAGE), Preference(SAGEATTN_FP8.name, IMAGE)),
    # The choice of upstream's sageattn() on this arch.
    "sm121": (Preference(SAGEATTN_FP8_FUSED.name, IMAGE), Preference(SAGEATTN_FP8.name, IMAGE)),
    # diffusers measured 1.39 times native per video transformer call on a Radeon AI PRO R9700.
    "gfx1201": (Preference(HUB_AITER.name, LONG, (128,)),),
}
"""By arch: where auto leaves native attention at all, and what it loads before a run. What serves is measured; the
limits say what is expected to win, for people who choose what to install."""
