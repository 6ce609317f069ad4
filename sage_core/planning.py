"""Planner: from a call whose like was not seen before to a Plan: judged, tried, measured, checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from .backends import Preference
from .backends.base import Backend, Kernel
from .call import AttentionCall, four_axes, shaping
from .checking import SMOOTHING_GAIN, SiteAccuracy, site_norms
from .failure import explain, naming
from .policy import AUTO, NATIVE_ONLY, Policy
from .ranking import rank
from .refusal import Refusal, RefusalCode
from .selection import ANY_KERNEL, NATIVE, Plan, Use, Verdict, judge, select
from .session import Session
from .spec import AttentionSpec
from .timing import Timing, time_candidates

logger = logging.getLogger("sagescope")

MIN_SCORES = 512 * 512
"""Query times key tokens from which kernels are timed: below, a call takes less than its launch on any GPU."""
HOST_BOUND_MS = 0.5
"""A forward whose native attention calls are shorter than this on the device may be limited by the host, which issues
some ten launches for each: an SDXL-sized one on a big GPU is, with 0.2 ms a call, a FLUX-sized one with 0.8 is not."""
MAX_LOGGED = 1_000
"""Lines about new plans that one model may write."""


Candidate = tuple[Backend, "Preference | None"]


class Planner:
    """Makes the plans of one patched model; holds what it was told to do and what it has logged, and no tensor."""

    def __init__(self, policy: Policy, session: Session) -> None:
        self.policy = policy
        self.session = session
        self._logged: set[tuple[Any, ...]] = set()

    def plan(
        self,
        call: AttentionCall,
        reason: Refusal | None,
        native: Callable[[], object],
        native_name: str,
        banned: Sequence[Verdict] = (),
    ) -> Plan:
        """The plan for calls like ``call`` at its site.

        ``native`` runs the call natively, to be timed; what was measured beside another is not taken for it, so it
        has a name. ``reason`` keeps the whole call native. ``banned`` are kernels
        that failed at this site before, and why.
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
        candidates, verdicts, times = self._candidates(call, spec, native, native_name)
        out = {verdict.kernel for verdict in banned}
        use, looked_at = select(
            spec,
            [(backend, preference) for backend, preference in candidates if backend.name not in out],
            self.policy,
            load=lambda backend: self._load(backend, device),
            trial=lambda use: self._admit(use, call, spec),
        )
        verdicts = (*verdicts, *banned, *looked_at)
        if not verdicts:
            detail = f"this device is {spec.arch}; no kernel is known to be faster than native there"
            verdicts = (Verdict(ANY_KERNEL, (Refusal(RefusalCode.ARCH, detail),)),)
        self._log_once(spec, use, verdicts)
        if use is None:
            return Plan(NATIVE, spec, block, verdicts, times=times)
        look = None if use.backend.exact or self.policy.tolerance is None else _looker(call, spec)
        return Plan(use.backend.name, spec, block, verdicts, use, _server(use, call, spec), look, times)

    def _load(self, backend: Backend, device: torch.device) -> Kernel | tuple[Refusal, ...]:
        return self.session.load(backend, device, self.policy.allow_hub_download)

    def _candidates(
        self, call: AttentionCall, spec: AttentionSpec, native: Callable[[], object], native_name: str
    ) -> tuple[list[Candidate], tuple[Verdict, ...], dict[str, Timing]]:
        """The kernels to try, best first, why not the others that were looked at, and what was measured."""
        if self.policy.kernel != AUTO:
            return [(self.session.backend(self.policy.kernel), None)], (), {}
        starting_order = self.session.order.get(spec.arch, ())
        if not starting_order:
            return [], (), {}
        if spec.qo_len * spec.kv_len < MIN_SCORES:
            detail = f"{spec.qo_len} x {spec.kv_len} tokens are too few for a kernel to save time"
            return [], (Verdict(ANY_KERNEL, (Refusal(RefusalCode.NOT_WORTHWHILE, detail),)),), {}
        found = self._timings(call, spec, native, native_name)
        # a kernel that was fast once but cannot be had now must not keep a slower one from serving
        found = {name: entry for name, entry in found.items() if name == NATIVE or self._to_be_had(name, call, spec)}
        times = {name: timing for name, timing in found.items() if isinstance(timing, Timing)}
        exact = {backend.name for backend in self.session.backends if backend.exact}
        ranking = rank(found, exact, NATIVE, host_bound=times[NATIVE].device_ms < HOST_BOUND_MS)
        faster = ranking.order[: ranking.order.index(NATIVE)]
        dropped = [Verdict(name, (refusal,)) for name, refusal in ranking.refusals.items()]
        absent = [preference.kernel for preference in starting_order if preference.kernel not in found]
        for name in absent:
            judged = self._judge(self.session.backend(name), call, spec)
            dropped += [Verdict(name, judged)] if not isinstance(judged, Use) else []
        return [(self.session.backend(name), None) for name in faster], tuple(dropped), times

    def _timings(
        self, call: AttentionCall, spec: AttentionSpec, native: Callable[[], object], native_name: str
    ) -> dict[str, Timing | Refusal]:
        """The time of every kernel that may serve the call, measured once per spec on the call's own tensors.

        What failed then is not in what is remembered, nor what was not to be had: once such a kernel may serve, all
        are measured again.
        """
        device = call.query.device
        key = f"{self.session.device_name(device)}: {native_name}: {spec._replace(max_offset=0)!r}"
        known = self._remembered(key)
        if NATIVE in known and not self._usable(call, spec, but=known):
            return known
        functions = {NATIVE: native, **self._usable(call, spec)}
        with naming(", ".join(functions)):
            found = time_candidates(functions, NATIVE, self.session.stopwatch(device))
        kept: dict[str, object] = {}
        for name, timing in found.items():
            if isinstance(timing, Timing):
                kept[name] = timing._asdict()
            elif timing.code is RefusalCode.NOT_WORTHWHILE:
                kept[name] = timing.detail
            else:
                self.session.after_failure(name, device, timing)
        self.session.measurements.put("kernels", key, kept)
        return found

    def _remembered(self, key: str) -> dict[str, Timing | Refusal]:
        """What was measured before, as far as it makes sense: the file can be edited, and kernels come and go."""
        known: dict[str, Timing | Refusal] = {}
        names = {NATIVE, *(backend.name for backend in self.session.backends)}
        for name, value in (self.session.measurements.get("kernels", key) or {}).items():
            timing = Timing.from_json(value)
            if name in names and timing is not None:
                known[name] = timing
            elif name in names and name != NATIVE and isinstance(value, str):
                known[name] = Refusal(RefusalCode.NOT_WORTHWHILE, value)
        return known

    def _usable(
        self, call: AttentionCall, spec: AttentionSpec, but: Collection[str] = ()
    ) -> dict[str, Callable[[], object]]:
        """The kernels that an automatic choice may take for the call, as functions to time."""
        functions: dict[str, Callable[[], object]] = {}
        for backend in self.session.backends:
            judged = self._judge(backend, call, spec) if backend.auto and backend.name not in but else ()
            if isinstance(judged, Use):
                functions[backend.name] = partial(_server(judged, call, spec), *call[:3], call.mask)
        return functions

    def _judge(
        self, backend: Backend, call: AttentionCall, spec: AttentionSpec, try_it: bool = True
    ) -> Use | tuple[Refusal, ...]:
        """``judge`` up to the small example, which only ``try_it`` runs; the site's own tensors come once the kernel is
        chosen.
        """
        device = call.query.device
        return judge(
            spec,
            backend,
            None,
            self.policy,
            load=lambda backend: self._load(backend, device),
            trial=lambda use: (self.session.trial(use, spec, device) if try_it else None) or use,
        )

    def _to_be_had(self, name: str, call: AttentionCall, spec: AttentionSpec) -> bool:
        return isinstance(self._judge(self.session.backend(name), call, spec, try_it=False), Use)

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
            if isinstance(tried, Refusal) and tried.code in (RefusalCode.KERNEL_ERROR, RefusalCode.OUT_OF_MEMORY):
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
        output = _server(use, call, spec)(call.query, call.key, call.value, call.mask)
        if isinstance(output, Refusal):
            return self.session.after_failure(name, device, output)
        if output.dtype != call.query.dtype or output.numel() != call.query.numel():
            detail = f"{name} returned {list(output.shape)} {output.dtype} for query {list(call.query.shape)}"
            return self.session.after_failure(name, device, Refusal(RefusalCode.KERNEL_ERROR, detail))
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
            # on_device_of says the same, at a cost that each call would pay
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
        return site_norms(again, spec, output, exact=False)

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
