"""The kernels to try for a call, best first: what may serve it is timed on the call's own tensors, once per spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from .backends.base import Backend
from .call import AttentionCall
from .checking import CHECK
from .failure import explain, naming
from .policy import AUTO, Policy
from .ranking import NO_CHECK, rank
from .refusal import Refusal, RefusalCode
from .selection import ANY_KERNEL, NATIVE, Use, Verdict, judge
from .serving import looker, server
from .session import Session
from .spec import AttentionSpec
from .support import MAX_OFFSET_32_BIT
from .timing import Function, Timing, time_candidates

MIN_SCORES = 512 * 512
"""Query times key tokens from which kernels are timed: below, a call takes less than its launch on any GPU."""
HOST_BOUND_MS = 0.5
"""A forward whose native attention calls are shorter than this on the device is taken to be limited by the host, which
issues some ten launches for each, until it was measured: an SDXL-sized one on a big GPU is, with 0.2 ms a call, a
FLUX-sized one with 0.8 is not."""
DEVICE_BOUND_MS = 2.0
"""From here the device limits the forward on any machine: a host that took as long for one block would be broken."""

Switches = tuple["bool | None", ...]
"""Values of smooth_k; None for a kernel without the switch."""
Found = dict[str, "Timing | Refusal"]
"""By the name that a use is timed under."""


class Candidates(NamedTuple):
    """The names of the kernels to try, best first, each with the values of smooth_k that are worth their time; why not
    the others that were looked at; what was measured; and what was taken to limit the forward, where that decides."""

    switches: Mapping[str, Switches]
    verdicts: tuple[Verdict, ...] = ()
    times: Mapping[str, Timing] = MappingProxyType({})
    host_bound: bool | None = None


class CandidateFinder:
    """Finds the candidates of one patched model's calls."""

    def __init__(self, policy: Policy, session: Session) -> None:
        self.policy = policy
        self.session = session
        self.no_room: dict[str, Found] = {}
        """By call: what memory was too short for in this run, when it was tried or timed."""

    def begin_run(self) -> bool:
        """Give what memory was too short for in the last run another chance; True when there was something."""
        had, self.no_room = bool(self.no_room), {}
        return had

    def find(
        self,
        call: AttentionCall,
        spec: AttentionSpec,
        native: Callable[[], object],
        native_name: str,
        host_bound: bool | None,
    ) -> Candidates:
        """The candidates; see ``Planner.plan`` for the arguments."""
        if self.policy.kernel != AUTO:
            return Candidates({self.policy.kernel: self._switches()})
        starting_order = self.session.order.get(spec.arch, ())
        if not starting_order:
            return Candidates({})
        if spec.qo_len * spec.kv_len < MIN_SCORES:
            detail = f"{spec.qo_len} x {spec.kv_len} tokens are too few for a kernel to save time"
            return Candidates({}, (Verdict(ANY_KERNEL, (Refusal(RefusalCode.NOT_WORTHWHILE, detail),)),))
        variants = self._variants(call, spec)
        found = self._times(call, spec, variants, native, native_name)
        times = {name: timing for name, timing in found.items() if isinstance(timing, Timing)}
        decides = NATIVE in times and not is_long(times)
        if host_bound is None or not decides:
            host_bound = decides and times[NATIVE].device_ms < HOST_BOUND_MS
        exact = {name for name, use in variants.items() if use.backend.exact}
        check = NO_CHECK if times.keys() <= {NATIVE, *exact} else self._check(call, spec)
        ranking = rank(found, exact, NATIVE, host_bound, check=check)
        switches: dict[str, Switches] = {}
        for name in ranking.order[: ranking.order.index(NATIVE)]:
            kernel = variants[name].backend.name
            switches[kernel] = (*switches.get(kernel, ()), variants[name].smooth_k)
        verdicts = [Verdict(name, (refusal,)) for name, refusal in ranking.refusals.items()]
        for preference in starting_order:
            if preference.kernel not in found:  # what was expected to win and is not to be had
                judged = self._judge(self.session.backend(preference.kernel), call, spec)
                verdicts += [Verdict(preference.kernel, judged)] if not isinstance(judged, Use) else []
        return Candidates(switches, tuple(verdicts), times, host_bound if decides else None)

    def _times(
        self,
        call: AttentionCall,
        spec: AttentionSpec,
        variants: Mapping[str, Use],
        native: Callable[[], object],
        native_name: str,
    ) -> Found:
        """The time of every variant, measured once per spec on the call's own tensors, or why there is none.

        What failed is not in what is remembered, nor what was not to be had: once such a kernel may serve, all are
        measured again. What is remembered of a kernel that cannot be had now is left out, so that it keeps no slower
        one from serving.
        """
        device = call.query.device
        key = f"{self.session.device_name(device)}: {native_name}: {spec.without_offsets()!r}"
        known, failed = self._remembered(key), dict(self.no_room.get(key, {}))
        failed |= self._try(
            {name: use for name, use in variants.items() if name not in {**known, **failed}}, spec, device
        )
        if NATIVE not in known or variants.keys() - known.keys() - failed.keys():
            failed |= self._try({name: use for name, use in variants.items() if name not in failed}, spec, device)
            to_time = {name: use for name, use in variants.items() if name not in failed}
            known = {**known, **self._measure(key, to_time, call, spec, native)}
        found = {**known, **failed}
        if short := {name: entry for name, entry in found.items() if _is_short_memory(entry)}:
            self.no_room[key] = short
        return {name: entry for name, entry in found.items() if name == NATIVE or name in variants}

    def _try(self, variants: Mapping[str, Use], spec: AttentionSpec, device: torch.device) -> dict[str, Refusal]:
        """What the small example says against the variants; one that raises is not called again with smoothing."""
        failed: dict[str, Refusal] = {}
        raised: dict[str, Refusal] = {}
        for name, use in variants.items():
            kernel = use.backend.name
            refusal = raised.get(kernel) or self.session.trial(use, spec, device)
            if refusal is not None:
                failed[name] = refusal
            if refusal is not None and refusal.code is not RefusalCode.TRIAL:
                raised[kernel] = refusal
        return failed

    def _measure(
        self,
        key: str,
        variants: Mapping[str, Use],
        call: AttentionCall,
        spec: AttentionSpec,
        native: Callable[[], object],
    ) -> Found:
        device = call.query.device
        raised: dict[str, Refusal] = {}
        functions: dict[str, Function] = {NATIVE: native}
        for name, use in variants.items():
            function = partial(server(use, call, spec), *call[:3], call.mask)
            functions[name] = partial(_until_it_refuses, function, use.backend.name, raised)
        with naming(", ".join(functions)):
            measured = time_candidates(functions, NATIVE, self.session.stopwatch(device))
        for kernel, refusal in raised.items():
            self.session.after_failure(kernel, device, refusal)
        # what another choice of smooth_k had measured stays
        kept = self.session.measurements.get("kernels", key) or {}
        for name, timing in measured.items():
            kept.pop(name, None)
            if isinstance(timing, Timing):
                kept[name] = timing._asdict()
                if name != NATIVE:
                    self.session.succeeded(variants[name].backend.name, device)
            elif timing.code is RefusalCode.NOT_WORTHWHILE:
                kept[name] = timing.detail
        self.session.measurements.put("kernels", key, kept)
        return measured

    def _check(self, call: AttentionCall, spec: AttentionSpec) -> Timing:
        """What the check of an output takes, measured once per spec; nothing where nothing is checked."""
        if self.policy.tolerance is None:
            return NO_CHECK
        device = call.query.device
        # beyond 32 bits it may be made in another way
        far = spec.max_offset > MAX_OFFSET_32_BIT
        key = f"{self.session.device_name(device)}: {spec.without_offsets()!r}{' beyond 32 bits' if far else ''}"
        known = Timing.from_json(self.session.measurements.get("checks", key))
        if known is not None:
            return known
        heads = (spec.batch_size, spec.num_qo_heads, spec.qo_len, spec.head_dim)
        joined = (spec.batch_size, spec.qo_len, spec.num_qo_heads * spec.head_dim)
        # any output will do: a number that fills its shape
        output = call.query.new_zeros(()).expand(heads if call.skip_output_reshape else joined)
        look = looker(call, spec)

        def check() -> object:
            try:
                return look(*call[:3], call.mask)(output)
            except Exception as error:  # memory may be too short for it
                return explain(error, CHECK)

        measured = time_candidates({CHECK: check}, CHECK, self.session.stopwatch(device))[CHECK]
        if isinstance(measured, Refusal):
            return NO_CHECK
        self.session.measurements.put("checks", key, measured._asdict())
        return measured

    def _remembered(self, key: str) -> Found:
        """What was measured before, as far as it makes sense: the file can be edited by hand."""
        known: Found = {}
        for name, value in (self.session.measurements.get("kernels", key) or {}).items():
            timing = Timing.from_json(value)
            if timing is not None:
                known[name] = timing
            elif name != NATIVE and isinstance(value, str):
                known[name] = Refusal(RefusalCode.NOT_WORTHWHILE, value)
        return known

    def _variants(self, call: AttentionCall, spec: AttentionSpec) -> dict[str, Use]:
        """The uses that an automatic choice may make of the kernels, by the name each is timed under."""
        uses: dict[str, Use] = {}
        for backend in self.session.backends:
            judged = self._judge(backend, call, spec) if backend.auto else ()
            if isinstance(judged, Use):
                uses[backend.name] = judged
        variants = {}
        for judged in uses.values():
            better = [uses[name] for name in judged.backend.slower_than if name in uses]
            if all(self.session.trial(use, spec, call.query.device) for use in better):
                for smooth_k in self._switches() if judged.smooth_k is not None else (None,):
                    use = judged._replace(smooth_k=smooth_k)
                    variants[use.timed_as] = use
        return variants

    def _switches(self) -> Switches:
        if self.policy.smooth_k == "auto" and self.policy.tolerance is not None:
            return (False, True)  # the check of the site tells which is better
        return (self.policy.smooth_k == "on",)

    def _judge(self, backend: Backend, call: AttentionCall, spec: AttentionSpec) -> Use | tuple[Refusal, ...]:
        """``judge`` up to what can be known without running the kernel."""
        device, download = call.query.device, self.policy.allow_hub_download
        load = partial(self.session.load, device=device, allow_download=download)
        return judge(spec, backend, self.policy, load, trial=lambda use: use)


def is_long(times: Mapping[str, Timing]) -> bool:
    """Whether native attention of a call takes so long that the device limits the forward, whatever the host does."""
    return NATIVE in times and times[NATIVE].device_ms >= DEVICE_BOUND_MS


def _is_short_memory(entry: Timing | Refusal) -> bool:
    return isinstance(entry, Refusal) and entry.code is RefusalCode.OUT_OF_MEMORY


def _until_it_refuses(function: Function, kernel: str, raised: dict[str, Refusal]) -> object:
    """The function's output; once a use of the kernel raised, that refusal in place of another call."""
    if kernel in raised:
        return raised[kernel]
    output = function()
    if isinstance(output, Refusal):
        raised[kernel] = output
    return output
