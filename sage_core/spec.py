"""An attention call without its tensors: what a kernel is chosen by."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class MaskKind(str, Enum):
    """What attn_mask is: absent, boolean (True attends) or added to the scores."""

    NONE = "none"
    BOOL = "bool"
    ADDITIVE = "additive"


class AttentionSpec(NamedTuple):
    """Everything about a call except its tensors.

    Shapes follow (batch, heads, seq, head_dim); ``tensor_layout`` says which axis order memory really has, and so
    which one a kernel can be handed without a copy. ``dtype`` and ``arch`` are names ("bfloat16", "sm90"), so that
    a spec is plain data. ``max_offset`` is the largest element offset that any of query, key and value reaches, and
    ``mask_offset`` what attn_mask reaches for the query heads that share one key head.
    """

    arch: str
    dtype: str
    batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    qo_len: int
    kv_len: int
    head_dim: int
    tensor_layout: str = "NHD"
    mask_kind: MaskKind = MaskKind.NONE
    mask_dtype: str | None = None
    is_causal: bool = False
    sm_scale: float | None = None
    max_offset: int = 0
    mask_offset: int = 0

    @property
    def enable_gqa(self) -> bool:
        """Several query heads share a key head."""
        return self.num_qo_heads != self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """The factor on query times key: ``sm_scale``, or head_dim ** -0.5 when none was given."""
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale

    def without_offsets(self) -> AttentionSpec:
        """The spec that calls share whose tensors differ only in where they lie in memory."""
        return self._replace(max_offset=0, mask_offset=0)

    def describe(self) -> str:
        """A short name for logs and reports, such as ``1 x 24 x 4608 x 128 bfloat16 NHD``."""
        heads = f"{self.num_qo_heads}/{self.num_kv_heads}" if self.enable_gqa else f"{self.num_qo_heads}"
        length = f"{self.qo_len}" if self.qo_len == self.kv_len else f"{self.qo_len}->{self.kv_len}"
        mask = "" if self.mask_kind is MaskKind.NONE else f" {self.mask_kind.value} mask"
        return f"{self.batch_size} x {heads} x {length} x {self.head_dim} {self.dtype} {self.tensor_layout}{mask}"
