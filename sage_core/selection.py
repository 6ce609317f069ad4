"""select(): a spec and the kernels in order of preference -> the one to use, and a verdict on each before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .backends.base import Backend, Kernel
from .checking import SiteAccuracy
from .pieces import smallest
from .policy import Policy
from .refusal import Refusal, RefusalCode
from .spec import AttentionSpec, MaskKind
from .timing import Timing

NATIVE = "native"
ANY_KERNEL = "any kernel"
"""Stands for the kernel in a reason that is none of a kernel's own limits."""


class Use(NamedTuple):
    """A kernel and how it is called for one spec."""

    backend: Backend
    kernel: Kernel
    layout: str
    expand_kv: bool
    smooth_k: bool | None
    """Whether key is smoothed; None for a kernel without the switch."""
    accuracy: SiteAccuracy | None = None
    """What the check at the site found; None where nothing is checked."""

    @property
    def timed_as(self) -> str:
        """The name among what is measured: a pass over key costs time, so smoothing is measured apart."""
        return f"{self.backend.name} with smooth_k" if self.smooth_k else self.backend.name

    def keywords(self, spec: AttentionSpec) -> dict[str, Any]:
        """The keywords of the kernel function, attn_mask apart."""
        keywords: dict[str, Any] = {"tensor_layout": self.layout, "sm_scale": spec.softmax_scale}
        if self.smooth_k is not None:
            keywords["smooth_k"] = self.smooth_k
        return keywords


class Verdict(NamedTuple):
    """What was found about one kernel for one spec; no refusals means accepted."""

    kernel: str
    refusals: tuple[Refusal, ...]


@dataclass(eq=False, frozen=True)
class Plan:
    """For a (site, spec): the chosen kernel and the evidence. Compared and hashed by identity: one plan, one entry."""

    kernel: str
    spec: AttentionSpec | None
    block: str | None
    verdicts: tuple[Verdict, ...] = ()
    use: Use | None = None
    serve: Callable[..., Any] | None = None
    """ComfyUI's (query, key, value, mask) -> output, or the Refusal of a kernel that raised; None for native."""

    release: Callable[..., Any] | None = None
    """``serve`` for ComfyUI's containers, which it empties; None where the kernel keeps its tensors to the end."""

    look: Callable[..., Any] | None = None
    """(query, key, value, mask) -> the function that makes an output into errors on the device, and holds none of them:
    for a later check; None for exact kernels."""

    times: Mapping[str, Timing] = field(default_factory=dict)
    """What a call like this costs with each kernel that was measured."""

    host_bound: bool | None = None
    """What was taken to limit the forward where that decides between kernels; None where it does not."""

    once: Refusal | None = None
    """Why the plan holds for its call only and the next is planned anew: what kept a kernel away may pass."""

    @property
    def quantized(self) -> bool:
        return self.use is not None and not self.use.backend.exact

    def reasons(self) -> Iterator[tuple[str, Refusal]]:
        """(kernel, refusal) for all that kept the kernels before the chosen one from serving."""
        for verdict in self.verdicts:
            for refusal in verdict.refusals:
                yield verdict.kernel, refusal


Load = Callable[[Backend], "Kernel | tuple[Refusal, ...]"]
Trial = Callable[[Use], "Use | Refusal"]
"""Runs the kernel before it serves: the use as it may serve, smoothing decided, or why it may not."""


def select(
    spec: AttentionSpec,
    candidates: Iterable[Backend],
    policy: Policy,
    load: Load,
    trial: Trial,
) -> tuple[Use | None, tuple[Verdict, ...]]:
    """The first candidate that nothing speaks against, and the verdict on every candidate looked at.

    ``load`` is asked only for a backend whose declared limits accept the spec, ``trial`` only for one that loads, so
    that nothing is imported or run for a kernel that could not serve the call anyway.
    """
    verdicts: list[Verdict] = []
    for backend in candidates:
        judged = judge(spec, backend, policy, load, trial)
        if isinstance(judged, Use):
            return judged, (*verdicts, Verdict(backend.name, ()))
        verdicts.append(Verdict(backend.name, judged))
    return None, tuple(verdicts)


def judge(
    spec: AttentionSpec,
    backend: Backend,
    policy: Policy,
    load: Load,
    trial: Trial,
) -> Use | tuple[Refusal, ...]:
    """How the backend may serve the spec, or every reason why it may not."""
    support = backend.support
    refusals = list(support.refusals(spec, backend.name))
    explicit_smoothing = policy.smooth_k != "auto" and not backend.exact
    if explicit_smoothing and not support.smooth_k:
        detail = f"smooth_k is '{policy.smooth_k}'; {backend.name} has no such switch"
        refusals.append(Refusal(RefusalCode.SMOOTH_K, detail))
    if (too_large := _too_large(spec, backend)) is not None:
        refusals.append(too_large)
    if refusals:
        return tuple(refusals)
    kernel = load(backend)
    if not isinstance(kernel, Kernel):
        return kernel
    if spec.mask_kind is not MaskKind.NONE and "attn_mask" not in kernel.options:
        refusals.append(Refusal(RefusalCode.ATTN_MASK, f"the installed {backend.name} declares no attn_mask"))
    if explicit_smoothing and "smooth_k" not in kernel.options:
        refusals.append(Refusal(RefusalCode.SMOOTH_K, f"the installed {backend.name} declares no smooth_k"))
    if refusals:
        return tuple(refusals)
    use = Use(
        backend=backend,
        kernel=kernel,
        layout=support.tensor_layouts[0],
        expand_kv=spec.enable_gqa and "enable_gqa" not in kernel.options,
        # "auto" starts without smoothing: where it helps, the check of the site finds out
        smooth_k=policy.smooth_k == "on" if "smooth_k" in kernel.options else None,
    )
    tried = trial(use)
    return tried if isinstance(tried, Use) else (tried,)


def _too_large(spec: AttentionSpec, backend: Backend) -> Refusal | None:
    """Why the smallest piece of the call, even as a contiguous copy, or of attn_mask is beyond the kernel's reach."""
    limit = backend.support.max_offset
    if limit is None:
        return None
    if smallest(spec) - 1 > limit:
        detail = f"a head of this call has {smallest(spec)} elements; {backend.name} reaches {limit + 1}"
        return Refusal(RefusalCode.OFFSET, detail)
    if spec.mask_offset > limit:
        detail = f"attn_mask of a head spans {spec.mask_offset + 1} elements; {backend.name} reaches {limit + 1}"
        return Refusal(RefusalCode.OFFSET, detail)
    return None
