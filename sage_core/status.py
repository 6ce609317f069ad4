"""status_line(): a run in one line, for the node: what serves while it samples, and what came of it at the end."""

from __future__ import annotations

import math
from typing import Any

from .refusal import RefusalCode
from .selection import NATIVE

MAX_NAMED = 2
"""Kernels named in the line; the report has them all."""
ENDINGS = {"interrupted": "Interrupted", "error": "Stopped by an error"}
"""How a run that did not finish is called, by its status."""
TROUBLES = {
    RefusalCode.KERNEL_ERROR.value: "{} failed and is out",
    RefusalCode.FILE_ERROR.value: "a file error kept {} from some calls",
    RefusalCode.OUT_OF_MEMORY.value: "out of memory, the rest is native",
    RefusalCode.ACCURACY.value: "{} is too inaccurate at some sites",
    RefusalCode.NOT_FINITE.value: "NaN or Inf at some sites",
}
"""Refusals that tell of something that happened, by code; the others are limits."""


def status_line(run: dict[str, Any]) -> str:
    """The line for a run in JSON; a part of it is enough while it is sampled (``Run.progress_line``)."""
    running = run["status"] == "running"
    line = _served(run, "serves" if running else "served")
    found = _troubles(run) if running else [*_findings(run), *_troubles(run)]
    return ": ".join(filter(None, [_where(run), "; ".join([line, *found])]))


def _where(run: dict[str, Any]) -> str:
    """How far a run is, or where it ended early; nothing for one that finished."""
    total = run["total_steps"]
    if run["status"] == "finished" or total is None:
        return ""
    step = f"step {min(run['steps'] + 1, total)} of {total}"
    return step.capitalize() if run["status"] == "running" else f"{ENDINGS[run['status']]} in {step}"


def _served(run: dict[str, Any], serves: str) -> str:
    if not run["calls"]:
        return "the first model call is under way" if run["status"] == "running" else "no attention call came here"
    calls = _count(run["calls"], "call")
    kernels = [entry for entry in run["calls_by_kernel"] if entry["kernel"] != NATIVE]
    if not kernels:
        return f"native attention {serves} all of {calls}"
    named = [f"{entry['kernel']} {serves} {entry['share']:.1%}" for entry in kernels[:MAX_NAMED]]
    more = [_count(len(kernels) - MAX_NAMED, "more kernel")] if len(kernels) > MAX_NAMED else []
    return f"{', '.join([*named, *more])} of {calls}"


def _findings(run: dict[str, Any]) -> list[str]:
    """The measured gain, the worst error and the number of refusals, as far as they are known."""
    gains = sorted(comparison["native_ms"] / comparison["plan_ms"] for comparison in run["comparisons"])
    errors = [_error(site["accuracy"]) for site in run["sites"] if site["accuracy"] is not None]
    found = []
    if gains:
        found.append(" to ".join(f"x{gain:.2f}" for gain in dict.fromkeys((gains[0], gains[-1]))) + " against native")
    if errors:
        worst = max(errors)
        found.append(f"worst error {worst:.3f}" if math.isfinite(worst) else "worst error not finite")
    if run["refusals"]:
        found.append(_count(len(run["refusals"]), "refusal"))
    return found


def _error(accuracy: dict[str, Any]) -> float:
    worst = accuracy["worst_head_relative_l2"]
    return math.inf if worst is None else float(worst)


def _troubles(run: dict[str, Any]) -> list[str]:
    """What went wrong and was mended: each thing once."""
    rescued = run["rescued_forwards"]
    found = [f"{_count(rescued, 'model call')} rescued from NaN or Inf"] if rescued else []
    for refusal in run["refusals"]:
        trouble = TROUBLES.get(refusal["code"])
        if trouble is not None:
            found.append(trouble.format(refusal["kernel"]))
    return list(dict.fromkeys(found))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
