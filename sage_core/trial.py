"""A small known example that every kernel computes once, with the features of a call, before it serves such calls."""

from __future__ import annotations

import math

import torch

from .accuracy import compare, exact_attention
from .device import on_device
from .failure import explain
from .refusal import Refusal, RefusalCode
from .selection import Use
from .spec import AttentionSpec, MaskKind

TRIAL_LENGTH = 256
"""Tokens of the example, plus what the call's length leaves over at tiles of 128, so that partial tiles show."""


def trial_spec(spec: AttentionSpec) -> AttentionSpec:
    """A small spec with the features of ``spec``: dtype, head_dim, mask kind, grouped heads, scale, partial tiles."""
    num_kv_heads = min(spec.num_kv_heads, 2)
    return spec.without_offsets()._replace(
        batch_size=min(spec.batch_size, 2),
        num_qo_heads=num_kv_heads * (spec.num_qo_heads // spec.num_kv_heads),
        num_kv_heads=num_kv_heads,
        qo_len=_trial_length(spec.qo_len),
        kv_len=_trial_length(spec.kv_len),
    )


def try_kernel(use: Use, spec: AttentionSpec, device: torch.device) -> Refusal | None:
    """Why the kernel may not serve calls with the features of ``spec``; None when its result is right.

    Right means: query's shape, dtype and device, finite, within the backend's tolerance of exact attention in fp32
    (relative L2 and cosine on normal data), query, key, value and attn_mask unchanged, and so is the output after
    another call.
    """
    try:
        return _try(use, trial_spec(spec), device)
    except Exception as error:  # whatever a package may raise, or memory that runs out: the graph still runs
        return explain(error, use.backend.name)


def _try(use: Use, small: AttentionSpec, device: torch.device) -> Refusal | None:
    query, key, value, mask = _example(small, device, use)
    handed = {"query": query, "key": key, "value": value} | ({} if mask is None else {"attn_mask": mask})
    given = {role: tensor.clone() for role, tensor in handed.items()}
    keywords = use.keywords(small)
    if mask is not None:
        keywords["attn_mask"] = mask
    with on_device(query.device):
        output = use.kernel.function(query, key, value, **keywords)
        failed = _judge(use, small, output, handed, given)
        if failed is not None:
            return failed
        before = output.clone()
        use.kernel.function(query, key, -value, **keywords)
    if not torch.equal(output, before):
        return _failed(f"{use.backend.name} wrote its next output over the one before")
    return None


def _judge(
    use: Use, spec: AttentionSpec, output: object, handed: dict[str, torch.Tensor], given: dict[str, torch.Tensor]
) -> Refusal | None:
    query = handed["query"]
    name = use.backend.name
    if not isinstance(output, torch.Tensor):
        return _failed(f"{name} returned a {type(output).__name__}; expected a tensor")
    if (output.shape, output.dtype, output.device) != (query.shape, query.dtype, query.device):
        received = f"{list(output.shape)} {output.dtype} on {output.device}"
        return _failed(f"{name} returned {received}; expected {list(query.shape)} {query.dtype} on {query.device}")
    for role, tensor in handed.items():
        if not torch.equal(tensor, given[role]):
            return _failed(f"{name} changed the caller's {role} in place")
    reference = exact_attention(
        **given,
        tensor_layout=use.layout,
        sm_scale=spec.softmax_scale,
        dtype=torch.float32,
    )
    accuracy = compare(output, reference)
    tolerance = use.backend.tolerance
    if not accuracy.finite:
        return _failed(f"{name} returned NaN or Inf for a normal example")
    if not (accuracy.relative_l2 <= tolerance.relative_l2 and accuracy.cosine >= tolerance.cosine):
        what = _features(spec)
        return _failed(
            f"{name} is off by relative L2 {accuracy.relative_l2:.3f} on a small example{what}; "
            f"a healthy build stays within {tolerance.relative_l2:g}"
        )
    return None


def _failed(detail: str) -> Refusal:
    return Refusal(RefusalCode.TRIAL, detail)


def _features(spec: AttentionSpec) -> str:
    found = []
    if spec.mask_kind is not MaskKind.NONE:
        found.append(f"a {spec.mask_kind.value} attn_mask")
    if spec.enable_gqa:
        found.append(f"{spec.num_qo_heads} query heads on {spec.num_kv_heads} key heads")
    if spec.sm_scale is not None:
        found.append(f"sm_scale {spec.sm_scale:g}")
    found.append(f"head_dim {spec.head_dim} and kv_len {spec.kv_len}")
    return " with " + ", ".join(found)


def _trial_length(length: int) -> int:
    return min(length, TRIAL_LENGTH + length % 128)


def _example(
    spec: AttentionSpec, device: torch.device, use: Use
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Normal key, value and scores, and a mask that blocks a third of the pairs; the same numbers on every device.

    The generator is our own: drawing from the global one would change the pictures of the graph.
    """
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, spec.dtype)

    def draw(heads: int, length: int) -> torch.Tensor:
        shape = (spec.batch_size, length, heads, spec.head_dim)
        tensor = torch.randn(shape, generator=generator).to(device, dtype)
        return tensor if use.layout == "NHD" else tensor.transpose(1, 2).contiguous()

    kv_heads = spec.num_qo_heads if use.expand_kv else spec.num_kv_heads
    # scores of one size whatever sm_scale is: sharper ones make every quantized kernel less exact
    sharpness = spec.softmax_scale * spec.head_dim**0.5
    query = draw(spec.num_qo_heads, spec.qo_len) / (sharpness or 1.0)
    key = draw(kv_heads, spec.kv_len)
    value = draw(kv_heads, spec.kv_len)
    if spec.mask_kind is MaskKind.NONE:
        return query, key, value, None
    allowed = torch.rand((spec.batch_size, 1, spec.qo_len, spec.kv_len), generator=generator) > 1 / 3
    allowed[..., 0] = True
    if spec.mask_kind is MaskKind.BOOL:
        return query, key, value, allowed.to(device)
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf)
    return query, key, value, mask.to(device, getattr(torch, spec.mask_dtype or spec.dtype))
