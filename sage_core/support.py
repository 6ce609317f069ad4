"""What a kernel takes, as data that can be printed, compared and tested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .refusal import Refusal, RefusalCode
from .spec import AttentionSpec, MaskKind

Rule = Callable[[AttentionSpec], "Refusal | None"]

HALF_DTYPES = ("float16", "bfloat16")
NO_MASK = (MaskKind.NONE,)
EVERY_MASK = (MaskKind.NONE, MaskKind.BOOL, MaskKind.ADDITIVE)
MAX_GRID = 2**16 - 1
"""How many blocks a CUDA launch has at most in its second and third axis, where many kernels put the batch."""
MAX_OFFSET_32_BIT = 2**31 - 1
"""CUDA and Triton kernels count elements in signed 32 bits unless their source says otherwise."""


@dataclass(frozen=True)
class Support:
    """The limits of one kernel; ``None`` in a field means that it has no limit there.

    ``tensor_layouts`` are the axis orders it accepts, best first. ``sm_scale`` says that it takes a softmax scale other
    than head_dim ** -0.5. ``rules`` are for what spans two fields. Whether fewer key heads than query heads can be
    handed over is in the options of the loaded Kernel.
    """

    archs: tuple[str, ...] | None
    dtypes: tuple[str, ...] = HALF_DTYPES
    head_dims: tuple[int, ...] | None = None
    max_head_dim: int | None = None
    tensor_layouts: tuple[str, ...] = ("NHD", "HND")
    mask_kinds: tuple[MaskKind, ...] = NO_MASK
    sm_scale: bool = True
    smooth_k: bool = False
    max_batch_size: int | None = None
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
        if self.max_batch_size is not None and spec.batch_size > self.max_batch_size:
            detail = f"batch_size is {spec.batch_size}; {name} takes at most {self.max_batch_size}"
            found.append(Refusal(RefusalCode.SHAPE, detail))
        if spec.mask_kind not in self.mask_kinds:
            detail = f"attn_mask is {spec.mask_kind.value}; {name} takes {_any_of(k.value for k in self.mask_kinds)}"
            found.append(Refusal(RefusalCode.ATTN_MASK, detail))
        if not self.sm_scale and abs(spec.softmax_scale - spec.head_dim**-0.5) > 1e-6 * spec.head_dim**-0.5:
            detail = f"sm_scale is {spec.softmax_scale:.6g}; {name} takes only head_dim ** -0.5"
            found.append(Refusal(RefusalCode.SM_SCALE, detail))
        found.extend(refusal for rule in self.rules if (refusal := rule(spec)) is not None)
        return tuple(found)


def head_dim_multiples(name: str, limits: Mapping[str, int], multiple: int = 8) -> Rule:
    """A rule for a kernel that takes multiples of ``multiple`` up to a limit by arch; other archs it leaves alone."""

    def rule(spec: AttentionSpec) -> Refusal | None:
        limit = limits.get(spec.arch)
        if limit is None or (spec.head_dim <= limit and spec.head_dim % multiple == 0):
            return None
        detail = f"head_dim is {spec.head_dim}; {name} takes multiples of {multiple} up to {limit}"
        return Refusal(RefusalCode.HEAD_DIM, detail)

    return rule


def _any_of(values: Iterable[object]) -> str:
    """The values as people list them: "a", "a or b", "a, b or c"."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
