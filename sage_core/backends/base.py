"""Backend: one kernel as a value: what it takes, how exact it is, and how to get its function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..environment import Environment
from ..refusal import Refusal
from ..support import Support

Prepare = Callable[..., Callable[[], Any]]
"""``prepare([query, key, value], **keywords)`` quantizes and returns the function that attends: it takes nothing, is
called once and gives what the kernel function gives for the same arguments, bit for bit. The list is emptied, so that
each tensor is gone as soon as it is quantized."""

KernelFunction = Callable[..., Any]
"""``kernel(query, key, value, tensor_layout=..., sm_scale=..., smooth_k=..., attn_mask=...)`` -> output.

query is (batch, qo_len, num_qo_heads, head_dim) for "NHD" and (batch, num_qo_heads, qo_len, head_dim) for "HND"; the
output has query's shape, dtype and layout. ``tensor_layout`` and ``sm_scale`` are always given; ``smooth_k`` only
when the kernel's ``options`` name it, ``attn_mask`` only with a mask and only when ``options`` name it. attn_mask is
4-D and broadcasts to (batch, num_qo_heads, qo_len, kv_len).
"""


class Kernel(NamedTuple):
    """A kernel function that was found and bound: ``options`` are the optional keywords it really honours.

    Known options: "smooth_k", "attn_mask", "enable_gqa" (fewer key heads than query heads are handed over as they
    are). An option is named only when the installed function declares the parameter; whether it obeys is tried
    before first use.
    """

    function: KernelFunction
    options: frozenset[str] = frozenset()
    prepare: Prepare | None = None
    """The two halves of ``function`` for a call without attn_mask, where its package has them apart."""


class Tolerance(NamedTuple):
    """What a healthy build stays within on normal data: relative L2 and cosine against exact attention."""

    relative_l2: float
    cosine: float


@dataclass(frozen=True)
class Backend:
    """One kernel.

    ``load(environment, arch, allow_download)`` returns the bound Kernel, or a tuple of every Refusal it has. It may
    import the package; it never launches a kernel. ``package`` is the distribution that provides it (for the report;
    empty for PyTorch's own), ``exact`` that its numerics are plain attention's, and ``auto`` that an automatic choice
    may take it. ``slower_than`` names kernels that do the same with less work: where one of them may serve, an
    automatic choice does not spend time on this one.
    """

    name: str
    support: Support
    tolerance: Tolerance
    load: Callable[[Environment, str, bool], Kernel | tuple[Refusal, ...]]
    package: str = ""
    exact: bool = False
    auto: bool = True
    slower_than: tuple[str, ...] = ()
