"""Which of the kernels that were timed are worth it, and in which order they are tried."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from .refusal import Refusal, RefusalCode
from .timing import Timing

MARGIN = 0.03
"""How much less than the best exact kernel a quantized one must cost: no quality is given away for noise."""
NOISE = 0.01
"""Two measurements of one kernel differ by this much; within it the baseline wins, which takes no way through us."""
CHECKED_SHARE = 4 / 20
"""Calls of a quantized kernel that are checked, in a run of twenty steps: those of four of them."""
DISPATCH_MS = 0.005
"""What a call costs the host to reach a kernel other than the baseline; benchmarks/overhead.py holds it below this."""


NO_CHECK = Timing(0.0, 0.0)


class Ranking(NamedTuple):
    """The kernels to try, in order, and why not each of the others."""

    order: tuple[str, ...]
    refusals: dict[str, Refusal]


def rank(
    found: Mapping[str, Timing | Refusal],
    exact: Collection[str],
    baseline: str,
    host_bound: bool,
    margin: float = MARGIN,
    check: Timing = NO_CHECK,
) -> Ranking:
    """The kernels that beat what an exact one offers, the best first, and the baseline as the last resort.

    Where the device limits the forward, a call costs the longer of its two times. Where the host does, it costs host
    time, and a kernel that takes longer on the device does not win. An exact kernel has to cost less than the baseline
    by more than NOISE, a quantized one less than the best exact kernel by more than ``margin``; what its checks take,
    ``check`` each, counts as its own.
    """
    timings = {name: timing for name, timing in found.items() if not isinstance(timing, Refusal)}
    costs = _Costs(timings, baseline, host_bound, {*exact, baseline}, check)
    others = sorted(timings.keys() - {baseline}, key=lambda name: (costs.of(name), name))
    refusals = {name: refusal for name, refusal in found.items() if isinstance(refusal, Refusal) and name != baseline}

    def winners(names: list[str], rival: str, needed: float) -> list[str]:
        against = {name: costs.against(name, rival, needed) for name in names}
        refusals.update({name: refusal for name, refusal in against.items() if refusal is not None})
        return [name for name in names if against[name] is None]

    served_exactly = [*winners([name for name in others if name in exact], baseline, NOISE), baseline]
    quantized = winners([name for name in others if name not in exact], served_exactly[0], margin)
    return Ranking((*quantized, *served_exactly), refusals)


class _Costs(NamedTuple):
    """What counts of each timing."""

    timings: dict[str, Timing]
    baseline: str
    host_bound: bool
    exact: Collection[str]
    check: Timing

    def of(self, name: str) -> float:
        """Milliseconds that a call with the kernel adds to the forward; without end for one that was not timed."""
        if name not in self.timings:
            return math.inf
        device_ms, host_ms = self.timings[name]
        host_ms += 0 if name == self.baseline else DISPATCH_MS
        if name not in self.exact:
            device_ms += CHECKED_SHARE * self.check.device_ms
            host_ms += CHECKED_SHARE * self.check.host_ms
        return host_ms if self.host_bound else max(device_ms, host_ms)

    def against(self, name: str, rival: str, needed: float) -> Refusal | None:
        """Why the kernel does not cost less than ``rival`` by more than the share ``needed``; None when it does."""
        cost, other = self.of(name), self.of(rival)
        if cost >= other * (1 - needed):
            kind = " with its checks" if name not in self.exact and self.check != NO_CHECK else ""
            kind += " of host time, which limits this forward" if self.host_bound else ""
            detail = f"{name} takes {cost:.3g} ms{kind}; {rival} takes {other:.3g} ms"
            if cost < other:
                detail += f", and {needed:.0%} less is asked for"
            return Refusal(RefusalCode.NOT_WORTHWHILE, detail)
        if self.host_bound and rival in self.timings:
            device, other = self.timings[name].device_ms, self.timings[rival].device_ms
            if device > other * (1 + NOISE):
                detail = f"{name} takes {device:.3g} ms on the device; {rival} takes {other:.3g} ms"
                return Refusal(RefusalCode.NOT_WORTHWHILE, detail)
        return None
