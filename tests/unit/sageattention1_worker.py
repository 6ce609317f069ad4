"""Runs the real sageattention 1.0.6 on the CPU, in Triton's interpreter, and prints what it does as JSON.

A process of its own, since triton reads TRITON_INTERPRET once, when it is imported.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from sageattention import sageattn
from torch import Tensor

from sage_core.backends.reference import int8_attention
from sage_core.backends.sageattention import SAGEATTN_1
from sage_core.environment import Environment

CASES = [
    # qo_len, kv_len, head_dim, heads, key heads, layout, dtype
    (64, 77, 64, 1, 1, "HND", "float16"),
    (64, 77, 128, 1, 1, "NHD", "float16"),
    (64, 200, 64, 1, 1, "NHD", "float16"),
    (64, 200, 128, 1, 1, "HND", "bfloat16"),
    (150, 128, 64, 1, 1, "HND", "float16"),
    (77, 64, 96, 1, 1, "HND", "float16"),
    (64, 128, 128, 4, 2, "NHD", "bfloat16"),
]
KEY_OFFSET = 3.0
"""Shared by all keys, per channel, so that smoothing has something to subtract."""


class SaysCuda(Tensor):
    """A CPU tensor that answers the entry function's assertion."""

    is_cuda = property(lambda self: True)


def example(qo_len, kv_len, head_dim, heads, kv_heads, layout, dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int, length: int) -> Tensor:
        tensor = torch.randn(1, length, count, head_dim, generator=generator)
        return tensor if layout == "NHD" else tensor.transpose(1, 2).contiguous()

    query, key, value = draw(heads, qo_len), draw(kv_heads, kv_len), draw(kv_heads, kv_len)
    key += KEY_OFFSET * torch.randn(head_dim, generator=generator)
    return [tensor.to(getattr(torch, dtype)) for tensor in (query, key, value)]


def exact(query: Tensor, key: Tensor, value: Tensor, layout: str, sm_scale: float) -> Tensor:
    if layout == "NHD":
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.double().repeat_interleave(groups, 1) for tensor in (key, value))
    output = torch.softmax(query.double() @ key.mT * sm_scale, -1) @ value
    return output.transpose(1, 2) if layout == "NHD" else output


def relative_l2(output: Tensor, expected: Tensor) -> float:
    output, expected = (tensor.as_subclass(Tensor).double() for tensor in (output, expected))
    return ((output - expected).norm() / expected.norm()).item()


def plain_equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.as_subclass(Tensor), other.as_subclass(Tensor))


def main() -> None:
    kernel = SAGEATTN_1.load(Environment(), "sm86", False)
    results = []
    for case in CASES:
        tensors = example(*case)
        layout, sm_scale = case[5], 1.2 * case[2] ** -0.5
        expected = exact(*tensors, layout, sm_scale)
        for smooth_k in (False, True):
            keywords = {"tensor_layout": layout, "sm_scale": sm_scale, "smooth_k": smooth_k}
            direct_q, direct_k, direct_v = (tensor.clone().as_subclass(SaysCuda) for tensor in tensors)
            direct = sageattn(direct_q, direct_k, direct_v, **keywords)
            query, key, value = (tensor.clone().as_subclass(SaysCuda) for tensor in tensors)
            through_us = kernel.function(query, key, value, **keywords)
            results.append(
                {
                    "case": case,
                    "smooth_k": smooth_k,
                    "error": relative_l2(direct, expected),
                    "from_reference": relative_l2(int8_attention(*tensors, **keywords), direct),
                    "direct_changed_key": (direct_k - tensors[1]).abs().max().item(),
                    "we_changed_nothing": all(map(plain_equal, (query, key, value), tensors)),
                    "same_bits": plain_equal(direct, through_us),
                    "layout_and_dtype_kept": through_us.shape == query.shape and through_us.dtype == query.dtype,
                }
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
