"""PyTorch's own attention, pinned to one implementation: exact, and often what a GPU runs fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..environment import Environment
from ..refusal import Refusal, RefusalCode
from ..spec import AttentionSpec
from ..support import HALF_DTYPES, Support
from .base import Backend, Kernel, Tolerance

CUDA_ARCHS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "sm121")
"""sdp_utils.cpp lets both implementations run from sm80 to sm121."""
MAX_HEAD_DIM = {"sdpa: flash": 256, "sdpa: cudnn": 128}
"""Flash raises above 256 ("at most 256"); cuDNN's limit before Hopper is 128."""
MAX_HEAD_DIM_SM90 = {"sdpa: flash": 256, "sdpa: cudnn": 256}
"""Measured on an H200 with torch 2.11 and cuDNN 9.19."""
HEAD_DIM_MULTIPLE = 8
"""Both operators refuse other head_dims on a GPU: "must be a multiple of 8"."""
MAX_OFFSET = None
"""Both count in 64 bits: right on views that reach past 2**31 elements, measured on an H200 with torch 2.11."""
EXACT = Tolerance(relative_l2=0.01, cosine=0.9999)
"""0.002 measured in bf16."""

CUDNN_SCHEMA = "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
FLASH_SCHEMA = "query key value dropout_p is_causal return_debug_mask scale"
FLASH_CPU_SCHEMA = "query key value dropout_p is_causal attn_mask scale"
"""The arguments that the direct calls below rely on; under another schema the public function is called instead."""

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""attention(query, key, value, scale) on (batch, heads, seq, head_dim); its output has query's strides."""


def _load_cudnn(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
    if not torch.backends.cudnn.is_available():
        return (Refusal(RefusalCode.BUILD, f"this torch {torch.__version__} was built without cuDNN"),)
    operator = _operator("_scaled_dot_product_cudnn_attention", CUDNN_SCHEMA)
    if operator is None:
        return _kernel(_pinned(SDPBackend.CUDNN_ATTENTION))
    return _kernel(lambda query, key, value, scale: operator(query, key, value, None, False, scale=scale)[0])


def _load_flash(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
    on_cpu = arch == "cpu"
    if not on_cpu and not torch.backends.cuda.is_flash_attention_available():
        return (Refusal(RefusalCode.BUILD, f"this torch {torch.__version__} was built without FlashAttention"),)
    name = "_scaled_dot_product_flash_attention" + ("_for_cpu" if on_cpu else "")
    operator = _operator(name, FLASH_CPU_SCHEMA if on_cpu else FLASH_SCHEMA)
    if operator is None:
        return _kernel(_pinned(SDPBackend.FLASH_ATTENTION))
    return _kernel(lambda query, key, value, scale: operator(query, key, value, scale=scale)[0])


def _operator(name: str, schema: str) -> Any:
    """The ATen operator ``name``, which costs half the host time of the public function; None when it is another."""
    operator = getattr(getattr(torch.ops.aten, name, None), "default", None)
    if operator is None or [argument.name for argument in operator._schema.arguments] != schema.split():
        return None
    return operator


def _pinned(backend: SDPBackend) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)

    return attention


def _kernel(attention: Attention) -> Kernel:
    """``attention`` for both layouts; from NHD the views keep query's memory order and so does the output."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, *, tensor_layout: str, sm_scale: float) -> Tensor:
        if tensor_layout == "HND":
            return attention(query, key, value, sm_scale)
        return attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), sm_scale).transpose(1, 2)

    return Kernel(kernel, frozenset({"enable_gqa"}))


def _gpu_limits(name: str) -> Callable[[AttentionSpec], Refusal | None]:
    """A rule for what only holds on a GPU: PyTorch's CPU operator takes any head_dim, and fp32."""

    def rule(spec: AttentionSpec) -> Refusal | None:
        if spec.arch == "cpu":
            return None
        if spec.dtype == "float32":
            return Refusal(RefusalCode.DTYPE, f"dtype is float32; {name} takes float16 or bfloat16 on a GPU")
        limit = (MAX_HEAD_DIM_SM90 if spec.arch == "sm90" else MAX_HEAD_DIM)[name]
        if spec.head_dim <= limit and spec.head_dim % HEAD_DIM_MULTIPLE == 0:
            return None
        detail = f"head_dim is {spec.head_dim}; {name} takes multiples of {HEAD_DIM_MULTIPLE} up to {limit}"
        return Refusal(RefusalCode.HEAD_DIM, detail)

    return rule


SDPA_CUDNN = Backend(
    name="sdpa: cudnn",
    support=Support(archs=CUDA_ARCHS, enable_gqa=True, max_offset=MAX_OFFSET, rules=(_gpu_limits("sdpa: cudnn"),)),
    tolerance=EXACT,
    load=_load_cudnn,
    exact=True,
)
SDPA_FLASH = Backend(
    name="sdpa: flash",
    support=Support(
        archs=(*CUDA_ARCHS, "cpu"),
        dtypes=(*HALF_DTYPES, "float32"),
        enable_gqa=True,
        max_offset=MAX_OFFSET,
        rules=(_gpu_limits("sdpa: flash"),),
    ),
    tolerance=EXACT,
    load=_load_flash,
    exact=True,
)
