"""Planner: from a call whose like was not seen before to a Plan: judged, tried, measured, checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .backends import Preference
from .backends.base import Backend
from .call import AttentionCall, four_axes, shaping
from .checking import SMOOTHING_GAIN, SiteAccuracy, site_errors
from .failure import explain
from .policy import AUTO, NATIVE_ONLY, Policy
from .refusal import Refusal, RefusalCode
from .selection import ANY_KERNEL, NATIVE, Plan, Use, Verdict, select
from .session import Session
from .spec import AttentionSpec

logger = logging.getLogger("sagescope")

MAX_LOGGED = 1_000
"""Lines about new plans that one model may write."""


class Planner:
    """Makes the plans of one patched model; holds what it was told to do and what it has logged, and no tensor."""

    def __init__(self, policy: Policy, session: Session) -> None:
        self.policy = policy
        self.session = session
        self._logged: set[tuple[Any, ...]] = set()

    def plan(self, call: AttentionCall, reason: Refusal | None, banned: Sequence[Verdict] = ()) -> Plan:
        """The plan for calls like ``call`` at its site.

        ``reason`` keeps the whole call native. ``banned`` are kernels that failed at this site before, and why.
        """
        device = call.query.device
        spec, refusals = call.read(self.session.environment.arch_of(device))
        block = describe_block(call.extra)
        if reason is not None:
            refusals = (reason,)
        if self.policy.kernel == NATIVE_ONLY:
            refusals = (Refusal(RefusalCode.OBSERVE_ONLY, f"kernel is '{NATIVE_ONLY}'"),)
        if spec is None or refusals:
            return Plan(NATIVE, spec, block, (Verdict(ANY_KERNEL, refusals),))
        out = {verdict.kernel for verdict in banned}
        use, verdicts = select(
            spec,
            ((backend, preference) for backend, preference in self._candidates(spec) if backend.name not in out),
            self.policy,
            load=lambda backend: self.session.load(backend, device, self.policy.allow_hub_download),
            trial=lambda use: self._admit(use, call, spec),
        )
        verdicts = (*banned, *verdicts)
        if not verdicts:
            detail = f"this device is {spec.arch}; no kernel is known to be faster than native there"
            verdicts = (Verdict(ANY_KERNEL, (Refusal(RefusalCode.ARCH, detail),)),)
        self._log_once(spec, use, verdicts)
        if use is None:
            return Plan(NATIVE, spec, block, verdicts)
        look = None if use.backend.exact or self.policy.tolerance is None else _looker(call, spec)
        return Plan(use.backend.name, spec, block, verdicts, use, _server(use, call, spec), look)

    def _candidates(self, spec: AttentionSpec) -> Iterator[tuple[Backend, Preference | None]]:
        if self.policy.kernel != AUTO:
            yield self.session.backend(self.policy.kernel), None
            return
        for preference in self.session.order.get(spec.arch, ()):
            yield self.session.backend(preference.kernel), preference

    def _admit(self, use: Use, call: AttentionCall, spec: AttentionSpec) -> Use | Refusal:
        """The use as it may serve this site, or why it may not: the small example first, then the site's own tensors.

        With smooth_k on "auto", smoothing is kept where it makes the error at the site clearly smaller.
        """
        switches = [use.smooth_k]
        if use.smooth_k is not None and self.policy.smooth_k == "auto" and self.policy.tolerance is not None:
            switches = [False, True]
        best: Use | Refusal | None = None
        for smooth_k in switches:
            tried = self._check(use._replace(smooth_k=smooth_k), call, spec)
            if best is None or isinstance(best, Refusal) or (isinstance(tried, Use) and _gains(tried, best)):
                best = tried
        assert best is not None
        return best

    def _check(self, use: Use, call: AttentionCall, spec: AttentionSpec) -> Use | Refusal:
        failed = self.session.trial(use, spec, call.query.device)
        if failed is not None:
            return failed
        tolerance = self.policy.tolerance
        if use.backend.exact or tolerance is None:
            return use
        output = _server(use, call, spec)(call.query, call.key, call.value, call.mask)
        if isinstance(output, Refusal):
            return self.session.after_failure(use.backend.name, call.query.device, output)
        accuracy = SiteAccuracy(*site_errors(call, spec, output).tolist())
        if not accuracy.within(tolerance):
            return accuracy.refusal(use.backend.name, tolerance)
        return use._replace(accuracy=accuracy)

    def _log_once(self, spec: AttentionSpec, use: Use | None, verdicts: tuple[Verdict, ...]) -> None:
        entry = (spec, use.backend.name if use else NATIVE)
        if entry in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(entry)
        reasons = "; ".join(refusal.detail for verdict in verdicts for refusal in verdict.refusals)
        logger.info("SageScope: %s -> %s%s", spec.describe(), entry[1], f" ({reasons})" if reasons else "")


def _gains(smoothed: Use, plain: Use) -> bool:
    if smoothed.accuracy is None or plain.accuracy is None:
        return False
    error = smoothed.accuracy.worst_head_relative_l2
    return error < SMOOTHING_GAIN * plain.accuracy.worst_head_relative_l2


def _server(use: Use, call: AttentionCall, spec: AttentionSpec) -> Callable[..., torch.Tensor | Refusal]:
    """The function that serves calls like ``call`` with ``use``: views in, kernel, view out."""
    to_kernel, from_kernel = shaping(call, spec, use.layout, use.expand_kv, use.backend.support.max_offset)
    function, keywords, name = use.kernel.function, use.keywords(spec), use.backend.name
    index = call.query.device.index if call.query.is_cuda else None

    def serve(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Any:
        try:
            query, key, value = to_kernel(query, key, value)
            given = keywords if mask is None else {**keywords, "attn_mask": four_axes(mask)}
            if index is None or index == torch.cuda.current_device():
                return from_kernel(function(query, key, value, **given))
            with torch.cuda.device(index):
                return from_kernel(function(query, key, value, **given))
        except Exception as error:  # whatever a kernel package may raise, the picture goes on
            return explain(error, name)

    return serve


def _looker(call: AttentionCall, spec: AttentionSpec) -> Callable[..., torch.Tensor]:
    """The function that checks an output of calls like ``call`` in the middle of a run."""
    flags = {"skip_reshape": call.skip_reshape, "skip_output_reshape": call.skip_output_reshape}
    heads = call.heads

    def look(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, output: torch.Tensor
    ) -> torch.Tensor:
        again = AttentionCall.from_comfy(query, key, value, heads, mask, None, **flags)
        return site_errors(again, spec, output, exact=False)

    return look


def block_key(keywords: dict[str, Any]) -> tuple[Any, ...] | None:
    """What the model says about the block that a call is in; None when it says nothing."""
    options = keywords.get("transformer_options") or {}
    block = (options.get("block"), options.get("block_type"), options.get("block_index"))
    return None if block == (None, None, None) else block


def describe_block(keywords: dict[str, Any]) -> str | None:
    """The block as people name it: "double 3", "input 4, 0", "block 5"."""
    key = block_key(keywords)
    if key is None:
        return None
    block, block_type, index = key
    if isinstance(block, tuple):
        return " ".join(map(str, block)) + ("" if index is None else f", {index}")
    return f"{block_type or 'block'} {index}"
