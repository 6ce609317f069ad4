"""What a kernel takes, as data that can be printed, compared and tested."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .refusal import Refusal, RefusalCode
from .spec import AttentionSpec, MaskKind

Rule = Callable[[AttentionSpec], "Refusal | None"]

HALF_DTYPES = ("float16", "bfloat16")
NO_MASK = (MaskKind.NONE,)
EVERY_MASK = (MaskKind.NONE, MaskKind.BOOL, MaskKind.ADDITIVE)
MAX_OFFSET_32_BIT = 2**31 - 1
"""CUDA and Triton kernels count elements in signed 32 bits unless their source says otherwise."""


@dataclass(frozen=True)
class Support:
    """The limits of one kernel; ``None`` in a field means that it has no limit there.

    ``tensor_layouts`` are the axis orders it accepts, best first. ``enable_gqa`` says that it takes fewer key heads
    than query heads by itself; the caller expands key and value otherwise. ``sm_scale`` says that it takes a softmax
    scale other than head_dim ** -0.5. ``rules`` are for what spans two fields.
    """

    archs: tuple[str, ...] | None
    dtypes: tuple[str, ...] = HALF_DTYPES
    head_dims: tuple[int, ...] | None = None
    max_head_dim: int | None = None
    tensor_layouts: tuple[str, ...] = ("NHD", "HND")
    mask_kinds: tuple[MaskKind, ...] = NO_MASK
    enable_gqa: bool = False
    sm_scale: bool = True
    smooth_k: bool = False
    max_offset: int | None = MAX_OFFSET_32_BIT
    rules: tuple[Rule, ...] = ()

    def refusals(self, spec: AttentionSpec, name: str) -> tuple[Refusal, ...]:
        """Every reason why ``name`` cannot serve ``spec``; empty when it can.

        Grouped heads and large offsets are not refused here: the caller may expand or copy, which it judges itself.
        """
        found = []
        if self.archs is not None and spec.arch not in self.archs:
            found.append(Refusal(RefusalCode.ARCH, f"this device is {spec.arch}; {name} is for {_any_of(self.archs)}"))
        if spec.dtype not in self.dtypes:
            found.append(Refusal(RefusalCode.DTYPE, f"dtype is {spec.dtype}; {name} takes {_any_of(self.dtypes)}"))
        if self.head_dims is not None and spec.head_dim not in self.head_dims:
            detail = f"head_dim is {spec.head_dim}; {name} takes {_any_of(self.head_dims)}"
            found.append(Refusal(RefusalCode.HEAD_DIM, detail))
        if self.max_head_dim is not None and spec.head_dim > self.max_head_dim:
            detail = f"head_dim is {spec.head_dim}; {name} takes at most {self.max_head_dim}"
            found.append(Refusal(RefusalCode.HEAD_DIM, detail))
        if spec.mask_kind not in self.mask_kinds:
            detail = f"attn_mask is {spec.mask_kind.value}; {name} takes {_any_of(k.value for k in self.mask_kinds)}"
            found.append(Refusal(RefusalCode.ATTN_MASK, detail))
        if not self.sm_scale and abs(spec.softmax_scale - spec.head_dim**-0.5) > 1e-6 * spec.head_dim**-0.5:
            detail = f"sm_scale is {spec.softmax_scale:.6g}; {name} takes only head_dim ** -0.5"
            found.append(Refusal(RefusalCode.SM_SCALE, detail))
        found.extend(refusal for rule in self.rules if (refusal := rule(spec)) is not None)
        return tuple(found)


def _any_of(values: Iterable[object]) -> str:
    """The values as people list them: "a", "a or b", "a, b or c"."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
