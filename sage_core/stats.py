"""Stats: what one patched model did, run by run, as bounded counters and plain JSON."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

from .checking import SiteAccuracy
from .comparing import Comparison
from .memory import PeakMemory
from .refusal import Refusal
from .status import status_line

if TYPE_CHECKING:
    import torch

    from .selection import Plan

SCHEMA = 1
"""Version of the report's JSON; raised when a field changes its meaning or goes."""

OUTSIDE = "called outside a sampler"
"""Stands for the model's name in a run that no sampler made."""

STEPS_PER_CHECK = 5
MOST_CHECKS = 4
"""Steps of a run in which sites are checked: one in five, and no more than four."""
CHECKS_PER_STEP = 4
"""Forwards of one step that are checked: as many as conditions are commonly sampled one by one."""

MAX_SILENT = 64
"""Kinds of native forwards remembered per run: sizes and conditions in one run are few."""
MAX_RUNS = 16
MAX_EVENTS = 100
MAX_COUNTERS = 20_000
"""(site, plan) pairs kept apart per run; a model with more goes on being counted without its sites."""


class Run:
    """One sampling: counters of calls by (site, plan), and what happened on the way."""

    def __init__(
        self,
        number: int,
        prompt_id: str | None,
        node_id: str | None,
        model: str = "",
        apply_node_id: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.number = number
        self.uid = uuid.uuid4().hex
        self.prompt_id = prompt_id
        self.node_id = node_id
        self.apply_node_id = apply_node_id
        self.model = model
        self._memory = PeakMemory(device)
        self.started = time.time()
        self.seconds: float | None = None
        self.status = "running"
        self.step = 0
        """Steps that are done."""
        self.total_steps: int | None = None
        self.forwards = 0
        self.exact_from_now_on: Refusal | None = None
        """Set after running out of memory: the rest of the run is native for this reason."""
        self.replaced_by: str | None = None
        """The override that stands where ours was put, when another node downstream took the place."""
        self.rescued = 0
        """Forwards that were run again because their output was not finite."""
        self.obstacle: str | None = None
        """Why a forward of this run cannot be repeated as it was."""
        self.first_check: int | None = None
        """The step of the first forward that kernels may serve; a window can begin late."""
        self.window: tuple[float, float] | None = None
        """The sigmas of start_percent and end_percent, high to low; None when every step is inside."""
        self._silent: dict[tuple[str, Refusal | None], list[Plan]] = {}
        self._comparisons: dict[str, dict[str, Any]] = {}
        self._uncompared: set[str] = set()
        self.unseen = False
        """Whether the output of a forward with kernels was handed on without a look at it."""
        self.limit_unknown: set[str] = set()
        """Kinds of forwards that memory was too short for to find out what limits them."""
        self._comparison_calls = 0
        self._checks: Counter[int] = Counter()
        self._worst: dict[tuple[int, Plan], tuple[int | None, SiteAccuracy]] = {}
        """The largest error that the checks in the middle of the run found, with the step."""
        self._calls: Counter[tuple[int, Plan]] = Counter()
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._looked_at: set[tuple[int, Plan]] = set()
        self._refused: dict[tuple[str, str], None] = {}
        """Kernel and code of each refusal in a plan that was looked at."""
        self._lock = threading.Lock()

    def record(self, plans: Iterable[Plan], extra: bool = False) -> None:
        """Count one forward: ``plans`` are the plans that served its calls, in order.

        The calls of an ``extra`` forward, made to compare, are counted apart: they are no part of the picture.
        """
        with self._lock:
            if extra:
                self._comparison_calls += sum(1 for _ in plans)
                return
            self.forwards += 1
            self._count(zip(count(), plans))

    def made_again(self, plans: list[Plan]) -> None:
        """Count a recorded forward as an extra one after all: the next one takes its place in the picture."""
        with self._lock:
            self.forwards -= 1
            for site, plan in enumerate(plans):
                joined = len(self._calls) > MAX_COUNTERS and (-1, plan) in self._calls
                counted = (-1, plan) if joined else (site, plan)
                self._calls[counted] -= 1
                if not self._calls[counted]:
                    del self._calls[counted]
            self._comparison_calls += len(plans)

    def record_outside(self, plans: Iterable[Plan]) -> None:
        """Count calls that came outside any forward, and so have no site."""
        with self._lock:
            self._count((-1, plan) for plan in plans)

    def _count(self, calls: Iterable[tuple[int, Plan]]) -> None:
        if len(self._calls) > MAX_COUNTERS:
            calls = ((-1, plan) for _, plan in calls)
        self._calls.update(calls)

    def current_step(self) -> int | None:
        """The step that is under way, counted from 1 as people do; None outside a sampler.

        A sampler may call the model once more after it has said that the last step is done.
        """
        return None if self.total_steps is None else min(self.step + 1, self.total_steps)

    def takes_check(self) -> bool:
        """Whether the forward that starts now is one to check the quantized sites in: those of the first step and of up
        to three more, spread over the run, a few per step where the conditions are sampled one by one.

        In a short run there are fewer of them, so that its checks stay a small part of it; two at least, in any run
        that has two steps.
        """
        total = self.total_steps or 0
        if self.first_check is None:
            self.first_check = self.step
        checks = min(max(-(-total // STEPS_PER_CHECK), 2), MOST_CHECKS)
        if self.step != self.first_check and self.step not in {total * number // checks for number in range(1, checks)}:
            return False
        self._checks[self.step] += 1
        return self._checks[self.step] <= CHECKS_PER_STEP

    def record_accuracy(self, site: int, plan: Plan, accuracy: SiteAccuracy) -> None:
        with self._lock:
            before = self._worst.get((site, plan))
            if before is None or not accuracy.worst_head_relative_l2 <= before[1].worst_head_relative_l2:
                self._worst[site, plan] = self.current_step(), accuracy

    def silence(self, key: str, reason: Refusal | None, plans: list[Plan]) -> None:
        """Remember a forward that was native at every site: the next ones like it need no way through us."""
        if len(self._silent) < MAX_SILENT:
            self._silent[key, reason] = plans

    def silent_plans(self, key: str, reason: Refusal | None) -> list[Plan] | None:
        """The plans of the forward like this that was native at every site, to count the next one by."""
        return self._silent.get((key, reason))

    def compared(self, key: str, comparison: Comparison, remembered: bool) -> None:
        self._comparisons[key] = {**comparison._asdict(), "faster": comparison.faster, "remembered": remembered}

    def leave_uncompared(self, key: str, why: str) -> None:
        """Compare no forward like this in this run."""
        self._uncompared.add(key)
        self.note_once(f"not compared with native: {why}")

    def may_compare(self, key: str) -> bool:
        return key not in self._comparisons and key not in self._uncompared

    def comparison_of(self, key: str) -> dict[str, Any] | None:
        return self._comparisons.get(key)

    def note_once(self, text: str) -> None:
        if all(event["text"] != text for event in list(self._events)):
            self.note(text)

    def note(self, text: str) -> None:
        """Remember an event of this run, with the step it happened in."""
        with self._lock:
            self._events.append({"step": self.current_step(), "text": text})

    def close(self, status: str) -> None:
        self.seconds = time.time() - self.started
        self._memory.stop()
        self.status = status

    def summary(self) -> str:
        """One line for the log: who served the calls of this run."""
        with self._lock:
            calls = dict(self._calls)
        by_kernel = _by_kernel(_by_plan(calls))
        served = ", ".join(f"{kernel} {number}" for kernel, number in by_kernel.most_common())
        return f"{by_kernel.total()} attention calls in {self.forwards} forwards: {served or 'none was offered'}"

    def progress_line(self) -> str:
        """The line on how the run is going, cheap enough to be asked for while it is sampled.

        Each plan is looked at once for its refusals.
        """
        with self._lock:
            calls = dict(self._calls)
        by_kernel: dict[str, int] = {}
        for (_, plan), number in calls.items():
            by_kernel[plan.kernel] = by_kernel.get(plan.kernel, 0) + number
        for place in calls.keys() - self._looked_at:
            found = ((kernel, refusal.code.value) for kernel, refusal in place[1].reasons())
            self._refused.update(dict.fromkeys(found))
        self._looked_at.update(calls)
        total = sum(by_kernel.values())
        progress = {
            "status": "running",
            "steps": self.step,
            "total_steps": self.total_steps,
            "calls": total,
            "calls_by_kernel": _shares(Counter(by_kernel), total),
            "refusals": [{"kernel": kernel, "code": code} for kernel, code in list(self._refused)],
            "rescued_forwards": self.rescued,
        }
        return status_line(progress)

    def snapshot(self) -> dict[str, Any]:
        """The run in plain JSON types; consistent while other threads go on counting."""
        with self._lock:
            calls = dict(self._calls)
            forwards = self.forwards
            events = list(self._events)
            worst = dict(self._worst)
            comparison_calls = self._comparison_calls
        total = sum(calls.values())
        by_plan = _by_plan(calls)
        snapshot = {
            "id": self.number,
            "uid": self.uid,
            "prompt_id": self.prompt_id,
            "node_id": self.node_id,
            "apply_node_id": self.apply_node_id,
            "model": self.model,
            "started": round(self.started, 3),
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "status": self.status,
            "steps": self.step,
            "total_steps": self.total_steps,
            "forwards": forwards,
            "calls": total,
            "calls_by_kernel": _shares(_by_kernel(by_plan), total),
            "refusals": _refusals(by_plan),
            "shapes": _shapes(by_plan),
            "sites": _sites(calls, worst),
            "rescued_forwards": self.rescued,
            "comparison_calls": comparison_calls,
            "comparisons": list(self._comparisons.values()),
            "events": events,
            "override_replaced_by": self.replaced_by,
            "vram_peak_mib": self._memory.mib(),
        }
        return {**snapshot, "summary": status_line(snapshot)}


def _by_plan(calls: dict[tuple[int, Plan], int]) -> Counter[Plan]:
    by_plan: Counter[Plan] = Counter()
    for (_, plan), number in calls.items():
        by_plan[plan] += number
    return by_plan


def _by_kernel(by_plan: Counter[Plan]) -> Counter[str]:
    by_kernel: Counter[str] = Counter()
    for plan, number in by_plan.items():
        by_kernel[plan.kernel] += number
    return by_kernel


def _shares(by_kernel: Counter[str], total: int) -> list[dict[str, Any]]:
    return [
        {"kernel": kernel, "calls": number, "share": round(number / total, 6)}
        for kernel, number in by_kernel.most_common()
    ]


def _refusals(by_plan: Counter[Plan]) -> list[dict[str, Any]]:
    """Each reason once, with the calls that it kept from a kernel, most frequent first."""
    by_reason: Counter[tuple[str, Refusal]] = Counter()
    for plan, number in by_plan.items():
        for reason in plan.reasons():
            by_reason[reason] += number
    return [
        {
            "kernel": kernel,
            "code": refusal.code.value,
            "detail": refusal.detail,
            "advice": refusal.advice,
            "calls": number,
        }
        for (kernel, refusal), number in by_reason.most_common()
    ]


def _shapes(by_plan: Counter[Plan]) -> list[dict[str, Any]]:
    by_spec: Counter[tuple[Any, str]] = Counter()
    times: dict[Any, Any] = {}
    for plan, number in by_plan.items():
        # offsets tell sites apart that share a shape
        spec = plan.spec and plan.spec.without_offsets()
        by_spec[spec, plan.kernel] += number
        times.setdefault(spec, {}).update(plan.times)
    return [
        {
            "spec": None if spec is None else spec_to_json(spec),
            "kernel": kernel,
            "calls": number,
            "times": {name: timing._asdict() for name, timing in times[spec].items()},
        }
        for (spec, kernel), number in by_spec.most_common()
    ]


def _sites(
    calls: dict[tuple[int, Plan], int], worst: dict[tuple[int, Plan], tuple[int | None, SiteAccuracy]]
) -> list[dict[str, Any]]:
    """One row per site and plan, in the order in which a forward makes the calls; calls without a site come last.

    Blocks are numbered as ``skip_blocks`` numbers them: from 0, in the order in which the forward reaches them.
    """
    rows = sorted(calls.items(), key=lambda item: (item[0][0] < 0, item[0][0], -item[1]))
    sites = []
    number, last = -1, None
    for (site, plan), count_of_calls in rows:
        if plan.block is not None and plan.block != last:
            number, last = number + 1, plan.block
        sites.append(
            {
                "site": site if site >= 0 else None,
                "block": plan.block,
                "block_number": None if plan.block is None else number,
                "kernel": plan.kernel,
                "smooth_k": plan.use.smooth_k if plan.use else None,
                "accuracy": accuracy_to_json(plan, worst.get((site, plan))),
                "spec": None if plan.spec is None else plan.spec.describe(),
                "calls": count_of_calls,
                "reasons": [refusal.code.value for _, refusal in plan.reasons()],
            }
        )
    return sites


def accuracy_to_json(plan: Plan, later: tuple[int | None, SiteAccuracy] | None) -> dict[str, Any] | None:
    """The largest error found at a site: when its plan was made (step null) or at a later check."""
    first = plan.use.accuracy if plan.use else None
    found: list[tuple[int | None, SiteAccuracy]] = [(None, first)] if first else []
    found += [later] if later else []
    if not found:
        return None
    step, accuracy = max(found, key=lambda entry: nan_to_infinity(entry[1].worst_head_relative_l2))
    numbers = {name: value if math.isfinite(value) else None for name, value in accuracy._asdict().items()}
    return {"step": step, **numbers}


def nan_to_infinity(value: float) -> float:
    return math.inf if math.isnan(value) else value


def spec_to_json(spec: Any) -> dict[str, Any]:
    """An AttentionSpec as JSON, with the text that people read beside the numbers."""
    fields = spec._asdict()
    del fields["max_offset"], fields["mask_offset"]
    fields["mask_kind"] = spec.mask_kind.value
    return {"text": spec.describe(), **fields}


class Stats:
    """The last runs of one patched model; runs are kept apart by prompt and sampler node.

    ``opened`` is told of each run when it starts, on the thread that samples.
    """

    def __init__(self, apply_node_id: str | None = None, opened: Callable[[Run], None] = lambda run: None) -> None:
        self._apply_node_id = apply_node_id
        self._opened = opened
        self._runs: deque[Run] = deque(maxlen=MAX_RUNS)
        self._numbers = count(1)
        self._lock = threading.Lock()

    def open(
        self, prompt_id: str | None, node_id: str | None, model: str = "", device: torch.device | None = None
    ) -> Run:
        with self._lock:
            return self._open(prompt_id, node_id, model, device)

    def outside(self, prompt_id: str | None, node_id: str | None) -> Run:
        """The run for calls that no sampler stands around: the last one, if it is for such calls of the same node."""
        with self._lock:
            last = self._runs[-1] if self._runs else None
            if last and (last.prompt_id, last.node_id, last.model) == (prompt_id, node_id, OUTSIDE):
                return last
            return self._open(prompt_id, node_id, OUTSIDE, None)

    def _open(self, prompt_id: str | None, node_id: str | None, model: str, device: torch.device | None) -> Run:
        run = Run(next(self._numbers), prompt_id, node_id, model, self._apply_node_id, device)
        self._runs.append(run)
        self._opened(run)
        return run

    def snapshot(self) -> list[dict[str, Any]]:
        """The runs in plain JSON types, oldest first."""
        with self._lock:
            runs = list(self._runs)
        return [run.snapshot() for run in runs]
