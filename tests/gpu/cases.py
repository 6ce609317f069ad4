"""The calls that every kernel is tried on, as a table: each differs from the first in what its name says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Case:
    """One attention call.

    ``heads`` are query and key heads. ``layout`` is the axis order in which ComfyUI hands the tensors over: "NHD" as
    (batch, length, heads * head_dim), "HND" as (batch, heads, length, head_dim). ``memory`` is what lies behind them:
    "own" is a contiguous tensor each, "fused" one tensor that a projection to query, key and value made, "transposed"
    the other axis order. ``key_offset`` is the same for all keys; attention does not depend on it, quantization does.
    """

    name: str
    dtype: torch.dtype = torch.bfloat16
    batch: int = 2
    heads: tuple[int, int] = (4, 4)
    lengths: tuple[int, int] = (384, 384)
    head_dim: int = 128
    layout: str = "NHD"
    memory: str = "own"
    mask: str | None = None
    sm_scale: float | None = None
    smooth_k: str = "auto"
    key_offset: float = 0.0
    stream: bool = False
    device: int = 0
    gpu_only: bool = False


BASE = Case("plain")
OTHER_DTYPES = (torch.float16, torch.float32)
HEAD_DIMS = (40, 64, 72, 80, 96, 120, 128, 160, 192, 256)
LENGTHS = (1, 2, 31, 63, 64, 65, 97, 127, 128, 129, 191, 193, 255, 256, 257, 509, 1_021)
"""Around the tiles of 64 and 128 rows, and primes."""
CROSS = ((384, 1), (384, 77), (77, 384), (1, 384), (257, 129), (509, 256), (256, 509))
GROUPED = ((4, 1), (4, 2), (6, 2), (21, 7))
SCALES = (0.03, 0.1)
"""The bounds are for scores of the usual size: larger ones make each error of a quantized score count for more."""
VIEWS = (("NHD", "fused"), ("HND", "own"), ("HND", "fused"), ("HND", "transposed"))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CASES: tuple[Case, ...] = (
    BASE,
    *(replace(BASE, name=_name(dtype), dtype=dtype) for dtype in OTHER_DTYPES),
    *(replace(BASE, name=f"{layout} {memory}", layout=layout, memory=memory) for layout, memory in VIEWS),
    *(
        replace(BASE, name=f"head_dim {head_dim} {layout} {memory}", head_dim=head_dim, layout=layout, memory=memory)
        for head_dim in HEAD_DIMS
        for layout, memory in (("NHD", "own"), ("HND", "fused"))
    ),
    *(replace(BASE, name=f"length {length}", lengths=(length, length)) for length in LENGTHS),
    *(replace(BASE, name=f"length {length} head_dim 64", lengths=(length, length), head_dim=64) for length in LENGTHS),
    *(replace(BASE, name=f"lengths {lengths[0]} and {lengths[1]}", lengths=lengths) for lengths in CROSS),
    *(
        replace(BASE, name=f"{heads[0]} heads on {heads[1]} {layout}", heads=heads, layout=layout)
        for heads in GROUPED
        for layout in ("NHD", "HND")
    ),
    *(replace(BASE, name=f"sm_scale {scale}", sm_scale=scale) for scale in SCALES),
    *(replace(BASE, name=f"sm_scale {scale} head_dim 64", sm_scale=scale, head_dim=64) for scale in SCALES),
    *(replace(BASE, name=f"{mask} mask", mask=mask) for mask in ("bool", "additive")),
    replace(BASE, name="additive mask on 77 keys", mask="additive", lengths=(257, 77)),
    replace(BASE, name="smooth_k off", smooth_k="off"),
    replace(BASE, name="smooth_k on", smooth_k="on"),
    replace(BASE, name="smooth_k on, keys share an offset", smooth_k="on", key_offset=2.0),
    replace(BASE, name="smooth_k on, HND fused", smooth_k="on", layout="HND", memory="fused"),
    replace(BASE, name="smooth_k on, partial tile", smooth_k="on", lengths=(257, 257)),
    replace(BASE, name="one picture, one head", batch=1, heads=(1, 1)),
    replace(BASE, name="a stream of its own", stream=True, gpu_only=True),
    replace(BASE, name="a stream of its own, HND fused", stream=True, layout="HND", memory="fused", gpu_only=True),
    replace(BASE, name="the second device", device=1, gpu_only=True),
    replace(BASE, name="length 8209", batch=1, heads=(2, 2), lengths=(8_209, 8_209), gpu_only=True),
)
