"""Planner: from a call whose like was not seen before to a Plan: judged, tried, measured, checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .call import AttentionCall
from .candidates import CandidateFinder, Candidates, Switches
from .checking import SMOOTHING_GAIN, SiteAccuracy, site_norms
from .device import is_capturing
from .failure import explain
from .policy import NATIVE_ONLY, Policy
from .refusal import Refusal, RefusalCode
from .selection import ANY_KERNEL, NATIVE, Plan, Use, Verdict, select
from .serving import looker, misfit, releaser, server
from .session import Session
from .spec import AttentionSpec

logger = logging.getLogger("sagescope")

MAX_LOGGED = 1_000
"""Lines about new plans that one model may write."""
FAILURES = (RefusalCode.KERNEL_ERROR, RefusalCode.FILE_ERROR, RefusalCode.OUT_OF_MEMORY)
"""What a kernel that was called can raise."""
CAPTURED = Refusal(
    RefusalCode.STREAM_CAPTURE,
    "a CUDA graph is being captured and the call had no plan before: kernels cannot be timed or checked now",
)


class Planner:
    """Makes the plans of one patched model; holds what it was told to do and what it has logged, and no tensor."""

    def __init__(self, policy: Policy, session: Session) -> None:
        self.policy = policy
        self.session = session
        self.finder = CandidateFinder(policy, session)
        self._logged: set[tuple[Any, ...]] = set()

    def plan(
        self,
        call: AttentionCall,
        reason: Refusal | None,
        native: Callable[[], object],
        native_name: str,
        banned: Sequence[Verdict] = (),
        host_bound: bool | None = None,
    ) -> Plan:
        """The plan for calls like ``call`` at its site.

        ``native`` runs the call natively, to be timed; what was measured beside another is not taken for it, so it
        has a name. ``reason`` keeps the whole call native. ``banned`` are kernels that failed at this site before, and
        why. ``host_bound`` is what was found to limit the forward, None before that was measured.
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
        if is_capturing(device):
            return Plan(NATIVE, spec, block, (Verdict(ANY_KERNEL, (CAPTURED,)),), once=CAPTURED)
        found = self.finder.find(call, spec, native, native_name, host_bound)
        out = {verdict.kernel for verdict in banned}
        use, looked_at = select(
            spec,
            [self.session.backend(name) for name in found.switches if name not in out],
            self.policy,
            load=partial(self.session.load, device=device, allow_download=self.policy.allow_hub_download),
            trial=lambda use: self._admit(use, found.switches[use.backend.name], call, spec),
        )
        verdicts = (*found.verdicts, *banned, *looked_at)
        if not verdicts:
            detail = f"this device is {spec.arch}; no kernel is known to be faster than native there"
            verdicts = (Verdict(ANY_KERNEL, (Refusal(RefusalCode.ARCH, detail),)),)
        self._log_once(spec, use, verdicts)
        plan = Plan(
            NATIVE,
            spec,
            block,
            verdicts,
            times=found.times,
            host_bound=found.host_bound,
            once=_passing(found, looked_at),
        )
        if use is None:
            return plan
        look = None if use.backend.exact or self.policy.tolerance is None else looker(call, spec)
        serve, release = server(use, call, spec), releaser(use, call, spec)
        return replace(plan, kernel=use.backend.name, use=use, serve=serve, release=release, look=look)

    def _admit(self, use: Use, switches: Switches, call: AttentionCall, spec: AttentionSpec) -> Use | Refusal:
        """The use as it may serve this site, or why it may not: the small example first, then the site's own tensors.

        ``switches`` are the values of smooth_k that are worth their time; True is kept where it makes the error at the
        site clearly smaller.
        """
        best: Use | Refusal | None = None
        for smooth_k in switches if use.smooth_k is not None else (None,):
            tried = self._check(use._replace(smooth_k=smooth_k), call, spec)
            if isinstance(tried, Refusal) and tried.code is RefusalCode.OUT_OF_MEMORY and isinstance(best, Use):
                break  # smoothing needs a copy of key; without it there is room
            if isinstance(tried, Refusal) and tried.code in FAILURES:
                return tried  # it is not called again
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
        name, device = use.backend.name, call.query.device
        output = server(use, call, spec)(call.query, call.key, call.value, call.mask)
        if not isinstance(output, Refusal):
            output = misfit(name, output, call.query) or output
        if isinstance(output, Refusal):
            return self.session.after_failure(name, device, output)
        if self.session.failing:
            self.session.succeeded(name, device)
        try:
            accuracy = SiteAccuracy.from_norms(site_norms(call, spec, output).tolist())
        except Exception as error:  # the kernel's own error can come out here, and memory can run out
            return self.session.after_failure(name, device, explain(error, name))
        if not accuracy.within(tolerance):
            return accuracy.refusal(name, tolerance)
        return use._replace(accuracy=accuracy)

    def _log_once(self, spec: AttentionSpec, use: Use | None, verdicts: tuple[Verdict, ...]) -> None:
        entry = (spec, use.backend.name if use else NATIVE)
        if entry in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(entry)
        reasons = "; ".join(refusal.detail for verdict in verdicts for refusal in verdict.refusals)
        logger.info("SageScope: %s -> %s%s", spec.describe(), entry[1], f" ({reasons})" if reasons else "")


def _passing(found: Candidates, looked_at: Sequence[Verdict]) -> Refusal | None:
    """What kept a kernel away and may be over at the next call. Memory that was short for a measurement is not: the
    others serve in this run."""
    while_timed = [refusal for verdict in found.verdicts for refusal in verdict.refusals]
    while_checked = [refusal for verdict in looked_at for refusal in verdict.refusals]
    passing = [refusal for refusal in while_checked if refusal.code is RefusalCode.OUT_OF_MEMORY]
    passing += [refusal for refusal in (*while_checked, *while_timed) if refusal.code is RefusalCode.FILE_ERROR]
    return passing[0] if passing else None


def _gains(smoothed: Use, plain: Use) -> bool:
    if smoothed.accuracy is None or plain.accuracy is None:
        return False
    error = smoothed.accuracy.worst_head_relative_l2
    return error < SMOOTHING_GAIN * plain.accuracy.worst_head_relative_l2


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
