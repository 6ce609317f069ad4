"""AttentionCall: from ComfyUI's arguments to query, key, value and back, and what of them a decision rests on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled, strided

from .refusal import Refusal, RefusalCode
from .spec import AttentionSpec, MaskKind

KNOWN_ARGUMENTS = frozenset(
    ("scale", "enable_gqa", "low_precision_attention", "transformer_options", "_inside_attn_wrapper")
)
"""Keywords, beyond the common ones, whose meaning is known: the first three are obeyed, the others change nothing."""

CallKey = tuple[Any, ...]


def decision_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **extra: Any,
) -> CallKey | None:
    """Everything that a decision about a call rests on, cheap to build and to hash; calls with equal keys are alike.

    None for tensors that have no plain shape and strides; raises TypeError for arguments that ComfyUI's attention
    functions do not have. A key outlives the call, so no tensor is in it.
    """
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
        return None
    if not query.layout is key.layout is value.layout is strided:
        return None
    if mask is not None and (type(mask) is not Tensor or mask.layout is not strided):
        return None
    scale = extra.get("scale")
    try:
        return (
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            query.dtype,
            key.dtype,
            value.dtype,
            query.device,
            key.device,
            value.device,
            heads,
            attn_precision,
            skip_reshape,
            skip_output_reshape,
            mask if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.device),
            tuple(extra),
            scale if scale is None or isinstance(scale, (int, float)) else type(scale),
            not extra.get("enable_gqa"),
            extra.get("low_precision_attention") is False,
            is_grad_enabled()
            and (
                query.requires_grad
                or key.requires_grad
                or value.requires_grad
                or (mask is not None and mask.requires_grad)
            ),
            # the kinds of devices that most calls are on need no way round an exception
            is_autocast_enabled("cuda")
            if query.is_cuda
            else is_autocast_enabled("cpu")
            if query.is_cpu
            else _autocast(query.device.type),
        )
    except RuntimeError:  # nested tensors have no shape
        return None


class AttentionCall(NamedTuple):
    """The arguments of one call as ComfyUI names them; it lives as long as the call.

    query, key and value are (batch, heads, seq, head_dim) with ``skip_reshape`` and (batch, seq, heads * head_dim)
    without; ``extra`` holds every other keyword.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    heads: int
    mask: Tensor | None
    attn_precision: torch.dtype | None
    skip_reshape: bool
    skip_output_reshape: bool
    extra: dict[str, Any]

    @classmethod
    def from_comfy(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **extra: Any,
    ) -> AttentionCall:
        """The call behind the positional and keyword arguments of ComfyUI's attention functions."""
        return cls(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, extra)

    def read(self, arch: str) -> tuple[AttentionSpec | None, tuple[Refusal, ...]]:
        """The spec, and every reason why no kernel may take the call whatever it supports.

        The spec is None when the shapes do not fit together; there is at least one refusal then.
        """
        refusals = list(self._forbidden())
        query, key, value = self.query, self.key, self.value
        if len({query.device, key.device, value.device}) > 1:
            refusals.append(Refusal(RefusalCode.MALFORMED_CALL, "query, key and value are on different devices"))
        if len({query.dtype, key.dtype, value.dtype}) > 1:
            dtypes = f"{_name(query.dtype)}, {_name(key.dtype)} and {_name(value.dtype)}"
            refusals.append(Refusal(RefusalCode.DTYPE, f"query, key and value are {dtypes}; kernels take one dtype"))
        shapes = self._shapes()
        if isinstance(shapes, Refusal):
            return None, (*refusals, shapes)
        scale = self.extra.get("scale")
        spec = AttentionSpec(
            arch=arch,
            dtype=_name(query.dtype),
            batch_size=shapes.batch_size,
            num_qo_heads=self.heads,
            num_kv_heads=shapes.num_kv_heads,
            qo_len=shapes.qo_len,
            kv_len=shapes.kv_len,
            head_dim=shapes.head_dim,
            tensor_layout=self._memory_layout(),
            sm_scale=float(scale) if isinstance(scale, (int, float)) and math.isfinite(scale) else None,
            max_offset=max(largest_offset(tensor) for tensor in (query, key, value)),
        )
        if self.mask is not None:
            kind = MaskKind.BOOL if self.mask.dtype is torch.bool else MaskKind.ADDITIVE
            spec = spec._replace(mask_kind=kind, mask_dtype=_name(self.mask.dtype))
            if unfit := self._mask_refusals(spec):
                return spec, (*refusals, *unfit)
            shared = spec.num_qo_heads // spec.num_kv_heads
            spec = spec._replace(mask_offset=last_offset(four_axes(self.mask)[:1, :shared]))
        return spec, tuple(refusals)

    def _forbidden(self) -> list[Refusal]:
        """What the arguments and the state around the call forbid."""
        found = []
        unknown = sorted(set(self.extra) - KNOWN_ARGUMENTS)
        if unknown:
            detail = f"ComfyUI passed {', '.join(unknown)}, which no kernel is known to honour"
            found.append(Refusal(RefusalCode.UNKNOWN_ARGUMENT, detail))
        scale = self.extra.get("scale")
        if scale is not None and not isinstance(scale, (int, float)):
            detail = f"scale is a {type(scale).__name__}; kernels take a number"
            found.append(Refusal(RefusalCode.SM_SCALE, detail))
        elif scale is not None and not math.isfinite(scale):
            found.append(Refusal(RefusalCode.SM_SCALE, f"scale is {scale}; kernels take a finite number"))
        if self.extra.get("low_precision_attention") is False:
            detail = "the model passed low_precision_attention=False"
            found.append(Refusal(RefusalCode.LOW_PRECISION_FORBIDDEN, detail))
        if self.attn_precision is torch.float32:
            found.append(Refusal(RefusalCode.ATTN_PRECISION, "the model asks for attn_precision float32"))
        tensors = (self.query, self.key, self.value, self.mask)
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
            found.append(Refusal(RefusalCode.GRADIENT, "gradients are needed; kernels are inference only"))
        device = self.query.device.type
        if (autocast := _autocast(device)) is None:
            found.append(Refusal(RefusalCode.TENSOR_TYPE, f"query is on {device}, where no kernel can run"))
        elif autocast:
            found.append(Refusal(RefusalCode.AUTOCAST, "autocast is active around the call"))
        return found

    def _shapes(self) -> _Shapes | Refusal:
        """The sizes of the call, or why they do not fit together."""
        query, key, value = self.query.shape, self.key.shape, self.value.shape
        received = f"query {list(query)}, key {list(key)}, value {list(value)} with {self.heads} heads"
        axes = 4 if self.skip_reshape else 3
        if not (len(query) == len(key) == len(value) == axes and self.heads > 0):
            return Refusal(RefusalCode.MALFORMED_CALL, f"{received}; expected {axes} axes each")
        if self.skip_reshape:
            batch_size, num_qo_heads, qo_len, head_dim = query
            num_kv_heads, kv_len = key[1], key[2]
            fits = num_qo_heads == self.heads and key[3] == head_dim and key == value and key[0] == batch_size
        else:
            batch_size, qo_len, width = query
            head_dim = width // self.heads
            kv_len = key[1]
            num_kv_heads = key[2] // head_dim if head_dim else 0
            fits = head_dim * self.heads == width and key == value and key[0] == batch_size
            fits = fits and num_kv_heads * head_dim == key[2]
        if not fits:
            return Refusal(RefusalCode.MALFORMED_CALL, f"{received} do not fit together")
        if 0 in (batch_size, qo_len, kv_len, num_kv_heads, head_dim):
            return Refusal(RefusalCode.SHAPE, f"{received} has an empty axis")
        grouped = num_kv_heads != self.heads
        if grouped and (not self.extra.get("enable_gqa") or self.heads % num_kv_heads):
            return Refusal(RefusalCode.MALFORMED_CALL, f"{received}: {num_kv_heads} key heads without enable_gqa")
        return _Shapes(batch_size, num_kv_heads, qo_len, kv_len, head_dim)

    def _memory_layout(self) -> str:
        """The axis order that memory has: head_dim innermost, then heads ("NHD") or the sequence ("HND")."""
        if not self.skip_reshape:
            return "NHD"
        _, head_stride, seq_stride, _ = self.query.stride()
        return "NHD" if head_stride <= seq_stride else "HND"

    def _mask_refusals(self, spec: AttentionSpec) -> list[Refusal]:
        """Why attn_mask cannot be handed on: another device, no broadcast, or two possible meanings."""
        assert self.mask is not None
        shape = list(self.mask.shape)
        target = (spec.batch_size, spec.num_qo_heads, spec.qo_len, spec.kv_len)
        if not _is_mask_dtype(self.mask):
            return [Refusal(RefusalCode.ATTN_MASK, f"attn_mask is {spec.mask_dtype}; expected bool or floating point")]
        if self.mask.device != self.query.device:
            return [Refusal(RefusalCode.ATTN_MASK, f"attn_mask is on {self.mask.device}, query on {self.query.device}")]
        if not 2 <= self.mask.ndim <= 4:
            return [Refusal(RefusalCode.ATTN_MASK, f"attn_mask has shape {shape}; expected 2, 3 or 4 axes")]
        if self.mask.ndim == 2 and self.mask.dtype is torch.bool and 1 < shape[0] == spec.batch_size:
            # ComfyUI's attention functions differ: one row per sample for some, one row per query for others
            return [Refusal(RefusalCode.ATTN_MASK, f"attn_mask {shape} may mean one row per sample or per query")]
        expanded = four_axes(self.mask).shape
        if any(have not in (1, want) for have, want in zip(expanded, target, strict=True)):
            return [Refusal(RefusalCode.ATTN_MASK, f"attn_mask {shape} does not broadcast to {list(target)}")]
        return []


class _Shapes(NamedTuple):
    batch_size: int
    num_kv_heads: int
    qo_len: int
    kv_len: int
    head_dim: int


Tensors = tuple[Tensor, Tensor, Tensor]


def shaping(
    call: AttentionCall, spec: AttentionSpec, layout: str, expand_kv: bool, max_offset: int | None
) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensors], Callable[[Tensor], Tensor]]:
    """How query, key and value of calls like ``call`` reach a kernel, and how its output goes back to ComfyUI.

    ``layout`` is the axis order that the kernel is handed. Views wherever memory allows: only a strided head_dim or an
    element offset past ``max_offset`` makes a copy, and ``expand_kv`` repeats key and value heads to query's number.
    The two functions run on every call, so all that can be decided is decided here.
    """
    split = not call.skip_reshape
    query_shape = (spec.batch_size, spec.qo_len, spec.num_qo_heads, spec.head_dim)
    kv_shape = (spec.batch_size, spec.kv_len, spec.num_kv_heads, spec.head_dim)
    transpose_in = call.skip_reshape == (layout == "NHD")
    transpose_out = call.skip_output_reshape != (layout == "HND")
    flatten_out = not call.skip_output_reshape
    head_axis = 1 if layout == "HND" else 2
    repeats = spec.num_qo_heads // spec.num_kv_heads if expand_kv else 1
    copy = [
        tensor.stride(-1) != 1 or (max_offset is not None and largest_offset(tensor) > max_offset)
        for tensor in (call.query, call.key, call.value)
    ]
    any_copy = any(copy)

    def to_kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensors:
        if split:
            query, key, value = query.view(*query_shape), key.view(*kv_shape), value.view(*kv_shape)
        if transpose_in:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if repeats > 1:
            key = key.repeat_interleave(repeats, dim=head_axis)
            value = value.repeat_interleave(repeats, dim=head_axis)
        if any_copy:
            query = query.contiguous() if copy[0] else query
            key = key.contiguous() if copy[1] else key
            value = value.contiguous() if copy[2] else value
        return query, key, value

    def from_kernel(output: Tensor) -> Tensor:
        if transpose_out:
            output = output.transpose(1, 2)
        return output.flatten(2) if flatten_out else output

    return to_kernel, from_kernel


def four_axes(mask: Tensor) -> Tensor:
    """attn_mask of 2, 3 or 4 axes as (batch, heads, qo_len, kv_len), each axis full or 1."""
    if mask.ndim == 2:
        return mask[None, None]
    return mask[:, None] if mask.ndim == 3 else mask


def _is_mask_dtype(mask: Tensor) -> bool:
    return mask.dtype is torch.bool or mask.dtype.is_floating_point


def largest_offset(tensor: Tensor) -> int:
    """The largest element offset that indexing the tensor, or a contiguous copy of its shape, reaches."""
    return max(last_offset(tensor), tensor.numel() - 1)


def last_offset(tensor: Tensor) -> int:
    """The element offset of the tensor's last element from its first."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _autocast(device: str) -> bool | None:
    """Whether autocast is active; None for a kind of device that PyTorch has none for, such as ``meta``."""
    try:
        return is_autocast_enabled(device)
    except RuntimeError:
        return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Native = Callable[..., Tensor]
"""What ComfyUI would have run: called with the untouched arguments."""
