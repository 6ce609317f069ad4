"""PyTorch's own attention, pinned to one implementation: exact, and often what a GPU runs fastest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..environment import Environment
from ..operators import CUDA_ARCHS, FLASH_MAX_HEAD_DIM, flash_operator
from ..operators import operator as _operator
from ..refusal import Refusal, RefusalCode
from ..spec import AttentionSpec, MaskKind
from ..support import EVERY_MASK, HALF_DTYPES, MAX_GRID, Support, head_dim_multiples
from .base import Backend, Kernel, Tolerance

CUDNN_MAX_HEAD_DIM = {**dict.fromkeys(CUDA_ARCHS, 128), "sm90": 256}
"""The limit in sdp_utils.cpp; 256 on sm90 was measured on an H200 with torch 2.11 and cuDNN 9.19."""
EFFICIENT_ARCHS = CUDA_ARCHS
"""sdp_utils.cpp lets it run from sm50 on; below sm80, where it is the only one, PyTorch takes it anyway."""
EFFICIENT_HEAD_DIM_MULTIPLE = {"float32": 4}
"""minimum_gemm_alignment() in sdp_utils.cpp: 16 bytes of head_dim, which is a multiple of 8 for other dtypes."""
MAX_OFFSET = None
"""cuDNN and flash count in 64 bits: right on views that reach past 2**31 elements, measured on an H200 with torch 2.11.
The efficient implementation multiplies a head's number and its stride in 32 bits, so it keeps the usual limit."""
EXACT = Tolerance(relative_l2=0.01, cosine=0.9999)
"""0.002 measured in bf16."""

CUDNN_SCHEMA = "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
EFFICIENT_SCHEMA = "query key value attn_bias compute_log_sumexp dropout_p is_causal scale"
"""The arguments that the direct calls below rely on; under another schema the public function is called instead."""

Attention = Callable[[Tensor, Tensor, Tensor, float, "Tensor | None"], Tensor]
"""attention(query, key, value, scale, attn_mask) on (batch, heads, seq, head_dim)."""

GROUPED, MASKED = frozenset({"enable_gqa"}), frozenset({"attn_mask"})
"""What the kernels honour beyond query, key, value and scale."""


def _load_cudnn(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
    if not torch.backends.cudnn.is_available():
        return (Refusal(RefusalCode.BUILD, f"this torch {torch.__version__} was built without cuDNN"),)
    operator = _operator("_scaled_dot_product_cudnn_attention", CUDNN_SCHEMA)
    if operator is None:
        return _kernel(_pinned(SDPBackend.CUDNN_ATTENTION), GROUPED)
    return _kernel(lambda q, k, v, scale, _: operator(q, k, v, None, False, scale=scale)[0], GROUPED)


def _load_flash(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
    on_cpu = arch == "cpu"
    if not on_cpu and not torch.backends.cuda.is_flash_attention_available():
        return (Refusal(RefusalCode.BUILD, f"this torch {torch.__version__} was built without FlashAttention"),)
    operator = flash_operator(on_cpu)
    if operator is None:
        return _kernel(_pinned(SDPBackend.FLASH_ATTENTION), GROUPED)
    return _kernel(lambda q, k, v, scale, _: operator(q, k, v, scale=scale)[0], GROUPED)


def _load_efficient(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
    pinned = _pinned(SDPBackend.EFFICIENT_ATTENTION)
    operator = _operator("_scaled_dot_product_efficient_attention", EFFICIENT_SCHEMA)

    def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, attn_mask: Tensor | None) -> Tensor:
        if attn_mask is not None:  # the operator wants it expanded, padded and in query's dtype, which SDPA does
            return pinned(query, key, value, scale, attn_mask)
        output: Tensor = operator(query, key, value, None, False, scale=scale)[0]
        return output

    return _kernel(pinned if operator is None else attention, MASKED)


def _pinned(backend: SDPBackend) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, attn_mask: Tensor | None) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, attn_mask, scale=scale, enable_gqa=grouped)

    return attention


def _kernel(attention: Attention, options: frozenset[str]) -> Kernel:
    """``attention`` for both layouts; from NHD the views keep query's memory order."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        tensor_layout: str,
        sm_scale: float,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        if tensor_layout == "HND":
            return attention(query, key, value, sm_scale, attn_mask)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return attention(query, key, value, sm_scale, attn_mask).transpose(1, 2)

    return Kernel(kernel, options)


def _half_on_a_gpu(spec: AttentionSpec) -> Refusal | None:
    """PyTorch's flash operator for the CPU takes fp32 as well."""
    if spec.arch == "cpu" or spec.dtype != "float32":
        return None
    detail = "dtype is float32; sdpa: flash takes float16 or bfloat16 on a GPU"
    return Refusal(RefusalCode.DTYPE, detail)


def _efficient_head_dim(spec: AttentionSpec) -> Refusal | None:
    multiple = EFFICIENT_HEAD_DIM_MULTIPLE.get(spec.dtype, 8)
    if spec.head_dim % multiple == 0:
        return None
    detail = f"head_dim is {spec.head_dim}; sdpa: efficient takes multiples of {multiple} in {spec.dtype}"
    return Refusal(RefusalCode.HEAD_DIM, detail)


def _efficient_mask(spec: AttentionSpec) -> Refusal | None:
    """The kernel reads an additive mask in query's dtype, and PyTorch raises for another."""
    if spec.mask_kind is not MaskKind.ADDITIVE or spec.mask_dtype == spec.dtype:
        return None
    detail = f"attn_mask is {spec.mask_dtype}; sdpa: efficient takes bool or {spec.dtype}, the dtype of query"
    return Refusal(RefusalCode.ATTN_MASK, detail)


SDPA_CUDNN = Backend(
    name="sdpa: cudnn",
    support=Support(
        archs=CUDA_ARCHS,
        max_batch_size=MAX_GRID,
        max_offset=MAX_OFFSET,
        rules=(head_dim_multiples("sdpa: cudnn", CUDNN_MAX_HEAD_DIM),),
    ),
    tolerance=EXACT,
    load=_load_cudnn,
    exact=True,
)
SDPA_FLASH = Backend(
    name="sdpa: flash",
    support=Support(
        archs=(*CUDA_ARCHS, "cpu"),
        dtypes=(*HALF_DTYPES, "float32"),
        max_batch_size=MAX_GRID,
        max_offset=MAX_OFFSET,
        rules=(_half_on_a_gpu, head_dim_multiples("sdpa: flash", dict.fromkeys(CUDA_ARCHS, FLASH_MAX_HEAD_DIM))),
    ),
    tolerance=EXACT,
    load=_load_flash,
    exact=True,
)
SDPA_EFFICIENT = Backend(
    name="sdpa: efficient",
    support=Support(
        archs=EFFICIENT_ARCHS,
        dtypes=(*HALF_DTYPES, "float32"),
        mask_kinds=EVERY_MASK,
        max_batch_size=MAX_GRID,
        rules=(_efficient_head_dim, _efficient_mask),
    ),
    tolerance=EXACT,
    load=_load_efficient,
    exact=True,
)
