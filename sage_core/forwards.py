"""Forwards: one call of the diffusion model, and what is made of it: looked at, compared, run again where broken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch

from .candidates import CandidateFinder, is_long
from .checking import CHECK, SiteAccuracy
from .comparing import Comparison, Wait, compare_forwards, is_host_bound
from .device import is_capturing
from .failure import explain, naming
from .outputs import all_finite, tensors_of
from .plans import Plans
from .policy import AUTO, Policy
from .refusal import Refusal, RefusalCode
from .selection import NATIVE, Plan
from .session import Session
from .stats import Run

logger = logging.getLogger("sagescope")


class Forward:
    """One call of the diffusion model on one thread: the plans of its calls so far, in order.

    ``reason`` keeps all of it native. ``watch`` is told of every call, with the output of its kernel, before the
    output goes back to the model: None for native, and where the plan is new and so has been checked just now. ``seen``
    is what it gathers, on the device.
    ``extra`` says that the forward is made for a comparison only, ``host_bound`` what was found to limit such forwards.
    """

    __slots__ = ("block", "block_number", "extra", "host_bound", "plans", "reason", "run", "seen", "watch")

    def __init__(self, run: Run, reason: Refusal | None, extra: bool = False, host_bound: bool | None = None) -> None:
        self.run = run
        self.reason = reason
        self.extra = extra
        self.host_bound = host_bound
        self.plans: list[Plan] = []
        self.watch: Watch | None = None
        self.seen: list[tuple[int, Plan, torch.Tensor]] = []
        self.block: tuple[Any, ...] | None = None
        self.block_number = -1

    def begin_again(self) -> None:
        """Be at the first call once more; what was gathered is forgotten, ``reason`` and the rest stay."""
        self.plans, self.seen = [], []
        self.block, self.block_number = None, -1


Watch = Callable[[Forward, int, Plan, "tuple[Any, ...]", "torch.Tensor | None"], None]
"""watch(forward, site, plan, (query, key, value, mask), output)."""

Check = Callable[[torch.Tensor], torch.Tensor]
"""check(output) -> errors, on the device."""

RunForward = Callable[[Forward], Any]
"""Runs the model once more as that forward; gives its output."""


class Review:
    """What becomes of the forwards of one patched model: approved, compared, or run again."""

    def __init__(self, policy: Policy, session: Session, plans: Plans, finder: CandidateFinder) -> None:
        self.policy = policy
        self.session = session
        self.plans = plans
        self.finder = finder
        self._for_now: dict[str, Comparison] = {}
        """Comparisons made while a kernel was away that comes back: with the next run, or the next start."""

    def forget_for_now(self) -> None:
        self._for_now.clear()

    def _known(self, key: str) -> Comparison | None:
        return self._for_now.get(key) or Comparison.from_json(self.session.measurements.get("forwards", key))

    def settled(self, run: Run) -> tuple[int, int, int, bool]:
        """Changes when a site loses its kernel: a forward in which that happens is none to be timed."""
        return run.rescued, self.plans.bans, self.session.generation, run.exact_from_now_on is None

    def not_faster(self, key: str) -> Refusal | None:
        """Why a forward is native as a whole: it was compared, and the plan did not pay off."""
        if self.policy.kernel != AUTO:
            return None
        known = self._known(key)
        return None if known is None or known.faster else _slower(known)

    def compares(self, run: Run, key: str, in_the_way: str | None, output: Any) -> bool:
        """Whether this forward is to be run natively as well; notes it where something is in the way."""
        when = self.policy.compare_with_native
        if when == "never" or not run.may_compare(key) or run.exact_from_now_on is not None:
            return False
        known = self._known(key)
        if when == "first time" and known is not None:
            run.compared(key, known, remembered=True)
            return False
        if next(tensors_of(output), None) is None:
            in_the_way = "the model returns no tensor"
        if in_the_way is not None:
            run.leave_uncompared(key, in_the_way)
        return in_the_way is None

    def host_bound(self, key: str) -> bool | None:
        """Whether the host limits such forwards; None before one was timed."""
        known = (self.session.measurements.get("limits", key) or {}).get("host_bound")
        return known if isinstance(known, bool) else None

    def find_limit(self, forward: Forward, key: str, native: Callable[[], Any], wait: Wait | None) -> bool | None:
        """Find out, once, whether the host limits such forwards, where the choice of a kernel rests on it.

        What was found, when some of the forward's plans were made for the other case: it is to be run again, and counts
        as made to find that out. None otherwise.
        """
        guessed = {plan.host_bound for plan in forward.plans} - {None}
        if wait is None or not guessed or forward.host_bound is not None or self.policy.compare_with_native == "never":
            return None
        if key in forward.run.limit_unknown:
            return None
        try:
            # beside a call that the device takes so long for, the host has time for all the others
            bound = not any(is_long(plan.times) for plan in forward.plans) and is_host_bound(native, wait)
        except torch.OutOfMemoryError:  # native needs more than the plan: a guess has to do
            forward.run.limit_unknown.add(key)
            return None
        self.session.measurements.put("limits", key, {"host_bound": bound})
        if guessed == {bound}:
            return None
        forward.run.made_again(forward.plans)
        forward.run.note(f"planned again: the {'host' if bound else 'device'} limits this model call")
        return bound

    def compare(
        self,
        forward: Forward,
        key: str,
        native: Callable[[], Any],
        run_forward: RunForward,
        wait: Wait | None,
        output: Any,
    ) -> Any:
        """Run the forward both ways, remember what came of it, and hand on the better one's output."""
        run = forward.run

        def plan() -> Any:
            again = Forward(run, run.exact_from_now_on, extra=True, host_bound=forward.host_bound)
            return self.approve(again, run_forward(again), run_forward)

        before = self.settled(run)
        try:
            comparison, native_output, plan_output = compare_forwards(native, plan, wait, self.host_bound(key))
        except torch.OutOfMemoryError as error:
            run.leave_uncompared(key, explain(error, NATIVE).detail)
            return output
        if self.settled(run) != before:  # planning anew was timed as well
            return plan_output
        if self.finder.no_room or self.session.has_retired:
            self._for_now[key] = comparison
        else:
            self.session.measurements.put("forwards", key, comparison._asdict())
        run.compared(key, comparison, remembered=False)
        if self.policy.kernel != AUTO or comparison.faster:
            return plan_output
        run.note(f"native from here on: {_slower(comparison).detail}")
        return native_output

    def approve(self, forward: Forward, output: Any, run_forward: RunForward) -> Any:
        """The forward's output, or that of another one where a kernel spoilt it.

        Waits for the device, once, when a quantized kernel served a call. Exact kernels are trusted as native is, and
        a wait in each forward would cost more than some of them bring: theirs are looked at where sites are checked.
        """
        run = forward.run
        run.unseen |= not _needs_a_look(forward) and any(plan.serve for plan in forward.plans)
        while _needs_a_look(forward):
            with naming(_kernels(forward.plans)):
                finite, accuracies = _read(output, forward.seen)
            if not finite:
                return self._rescue(forward, run_forward)
            failed = self._drifted(forward, accuracies)
            if not failed or run.obstacle is not None or run.step != run.first_check:
                break
            # the first check of a run comes before anything is handed on
            forward = Forward(run, forward.reason, forward.extra, forward.host_bound)
            forward.watch = check_sites
            output = run_forward(forward)
        return output

    def _drifted(self, forward: Forward, accuracies: list[SiteAccuracy]) -> bool:
        """Note what a check in the middle of a run found; move the sites out of tolerance off their kernels."""
        tolerance = self.policy.tolerance
        if tolerance is None:  # nothing was looked at
            return False
        failed: dict[Plan, SiteAccuracy] = {}
        for (site, plan, _), accuracy in zip(forward.seen, accuracies, strict=True):
            forward.run.record_accuracy(site, plan, accuracy)
            if not accuracy.within(tolerance):
                failed[plan] = accuracy
                forward.run.note(f"site {site}: {accuracy.refusal(plan.kernel, tolerance).detail}")
        if failed:
            self.plans.ban(failed, lambda plan: failed[plan].refusal(plan.kernel, tolerance))
        return bool(failed)

    def _rescue(self, broken: Forward, run_forward: RunForward) -> Any:
        """The output of the same forward with exact attention; finds the sites that broke the first one."""
        run = broken.run
        detail = "a forward's output was not finite: it was run again with exact attention"
        forward = Forward(run, Refusal(RefusalCode.NOT_FINITE, detail), broken.extra)
        forward.watch = _suspect(broken.plans)
        output = run_forward(forward)
        run.rescued += 1
        if not all_finite(output):
            found = "the model itself produced NaN or Inf: native attention gives them too"
            if run.unseen:
                found = "native attention gave NaN or Inf too: the model produced it, or a step that was not looked at"
            elif run.obstacle is not None:
                found = f"native attention gave NaN or Inf too, but the forward may not be repeatable: {run.obstacle}"
            run.exact_from_now_on = Refusal(RefusalCode.NOT_FINITE, found)
            run.note(found)
            logger.warning("SageScope: step %s: %s. The rest of this run is native.", run.current_step(), found)
            return output
        finite = [bool(flag) for _, _, flag in forward.seen]
        guilty = {plan for (_, plan, _), ok in zip(forward.seen, finite, strict=True) if not ok}
        # none found: the error grew behind attention, so none of them is above suspicion
        guilty = guilty or {plan for plan in broken.plans if plan.serve is not None}
        self.plans.ban(
            guilty, lambda plan: Refusal(RefusalCode.NOT_FINITE, f"{plan.kernel} made NaN or Inf out of this site")
        )
        kernels = _kernels(guilty)
        run.note(f"{detail}; {kernels} left {len(guilty)} sites")
        logger.warning("SageScope: step %s: %s; %s left %d sites.", run.current_step(), detail, kernels, len(guilty))
        return output


def _needs_a_look(forward: Forward) -> bool:
    return any(plan.quantized or (plan.serve and forward.watch) for plan in forward.plans)


def check_sites(forward: Forward, site: int, plan: Plan, tensors: tuple[Any, ...], output: torch.Tensor | None) -> None:
    """The watch of a forward whose quantized sites are checked again."""
    if output is not None:
        end_check(forward, site, plan, begin_check(forward, plan, tensors), output)


def begin_check(forward: Forward, plan: Plan, tensors: tuple[Any, ...]) -> Check | None:
    """The check of a call up to its output, which holds none of (query, key, value, mask); None where none is made.

    None is while a CUDA graph is captured: each of its runs would compute the check anew, and nobody would read it.
    """
    if plan.look is None or is_capturing(tensors[0].device):
        return None
    try:
        return plan.look(*tensors)  # type: ignore[no-any-return]
    except Exception as error:  # a check that memory is too short for must not cost the run
        _leave_out(forward, error)
        return None


def end_check(forward: Forward, site: int, plan: Plan, check: Check | None, output: torch.Tensor) -> None:
    """Note what the check makes of the output, to be read when the forward is over."""
    if check is None:
        return
    try:
        forward.seen.append((site, plan, check(output)))
    except Exception as error:  # as in begin_check
        _leave_out(forward, error)


def _leave_out(forward: Forward, error: Exception) -> None:
    forward.run.note_once(f"a check was left out: {explain(error, CHECK).detail}")


def _suspect(plans: list[Plan]) -> Watch:
    """The watch of a forward that is run again natively: ``plans`` served the calls of the broken one."""

    def watch(forward: Forward, site: int, _: Plan, tensors: tuple[Any, ...], output: torch.Tensor | None) -> None:
        plan = plans[site] if site < len(plans) else None
        if plan is None or plan.serve is None:
            return
        again = plan.serve(*tensors)
        if isinstance(again, torch.Tensor):
            forward.seen.append((site, plan, torch.isfinite(again).all()))

    return watch


def _read(output: Any, seen: list[tuple[int, Plan, torch.Tensor]]) -> tuple[bool, list[SiteAccuracy]]:
    """Whether the output is finite, and the errors of the checked sites, in one wait for the device."""
    parts = [all_finite(output).float().reshape(1), *(norms for _, _, norms in seen)]
    numbers = iter(torch.cat([part.to(parts[0].device) for part in parts]).tolist())
    finite, *by_site = [list(islice(numbers, len(part))) for part in parts]
    return finite == [1.0], [SiteAccuracy.from_norms(norms) for norms in by_site]


def _kernels(plans: Iterable[Plan]) -> str:
    return ", ".join(sorted({plan.kernel for plan in plans if plan.serve is not None}))


def _slower(comparison: Comparison) -> Refusal:
    with_kernels, natively = f"{comparison.plan_ms:.4g} ms with kernels", f"{comparison.native_ms:.4g} ms natively"
    return Refusal(RefusalCode.NOT_WORTHWHILE, f"the whole model call took {with_kernels} and {natively}")
