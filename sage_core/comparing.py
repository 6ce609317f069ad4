"""The whole-forward comparison: what the plan brings and what it changes, against the same forward run natively."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .accuracy import compare
from .outputs import tensors_of

NOISE = 0.005
"""A plan must be faster than native by more than this share, which two timings of one forward differ by."""
ENOUGH_MS = 400.0
"""Forwards are timed again until each side took this long together: single short ones differ by some percent."""
MAX_ROUNDS = 5

Forward = Callable[[], Any]


class Comparison(NamedTuple):
    """Milliseconds of one forward, natively and with the plan, and the error of the plan's output: relative L2 and
    cosine against native's, and PSNR in dB with native's range as the peak (None where the outputs are equal).

    None also where a number has no finite value, as when native's output is zero or NaN."""

    native_ms: float
    plan_ms: float
    relative_l2: float | None
    cosine: float | None
    psnr: float | None

    @property
    def faster(self) -> bool:
        return self.plan_ms < self.native_ms * (1 - NOISE)

    @classmethod
    def from_json(cls, value: object) -> Comparison | None:
        """The comparison whose ``_asdict()`` is ``value``; None for anything else, as a file can be edited by hand."""
        if not isinstance(value, dict) or value.keys() != set(cls._fields):
            return None
        numbers = [number for name, number in value.items() if name.endswith("_ms") or number is not None]
        if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
            return None
        if not (value["native_ms"] > 0 and value["plan_ms"] > 0):
            return None
        return cls(**value)


def compare_forwards(native: Forward, plan: Forward, wait: Callable[[], object]) -> tuple[Comparison, Any, Any]:
    """The comparison and both outputs; ``wait`` waits for the device.

    The forwards are run in turns, each at least once and as often as short ones need to be timed well; the shortest
    time of each counts, as everything else on the machine only ever adds to it. Both have run before, so that nothing
    is loaded or compiled here.
    """
    times: dict[str, list[float]] = {"native": [], "plan": []}
    outputs: dict[str, Any] = {}
    for _ in range(MAX_ROUNDS):
        for name, forward in (("native", native), ("plan", plan)):
            wait()
            start = time.perf_counter()
            outputs[name] = forward()
            wait()
            times[name].append((time.perf_counter() - start) * 1e3)
        if min(sum(side) for side in times.values()) >= ENOUGH_MS:
            break
    error = compare(_flat(outputs["plan"]), reference := _flat(outputs["native"]))
    peak = float(reference.max() - reference.min())
    comparison = Comparison(
        native_ms=min(times["native"]),
        plan_ms=min(times["plan"]),
        relative_l2=error.relative_l2 if math.isfinite(error.relative_l2) else None,
        cosine=error.cosine if error.finite else None,
        psnr=20 * math.log10(peak / error.rmse) if 0 < error.rmse < math.inf and peak > 0 else None,
    )
    return comparison, outputs["native"], outputs["plan"]


def obstacle(options: dict[str, Any], own_key: str) -> str | None:
    """Why another forward would disturb what other nodes put on the model; None when nothing is known to."""
    if any(options.get("patches_replace", {}).values()):
        return "another node replaces blocks of the model"
    wrappers = options.get("wrappers", {})
    for kind in ("apply_model", "diffusion_model"):
        others = [key for key, functions in wrappers.get(kind, {}).items() if functions and key not in (own_key, None)]
        others = [key for key in others if key != "torch.compile"]
        if others:
            return f"another node wraps the model call ({', '.join(map(str, others))})"
    return None


def lasting_obstacle(model_options: dict[str, Any], object_patches: Iterable[str]) -> str | None:
    """Why no forward of a run can be repeated: what caches steps often stands outside the wrappers."""
    if model_options.get("model_function_wrapper") is not None:
        return "another node wraps the model function"
    replaced = [name for name in object_patches if name.startswith("diffusion_model")]
    return f"another node replaced {replaced[0]}" if replaced else None


def own_control(control: Any) -> Any:
    """A ControlNet's output for one forward of its own: UNets take the entries out of the lists they are given."""
    if not isinstance(control, dict):
        return control
    return {name: list(entries) if isinstance(entries, list) else entries for name, entries in control.items()}


def _flat(output: Any) -> torch.Tensor:
    """All numbers of an output in one row."""
    return torch.cat([tensor.detach().flatten().float() for tensor in tensors_of(output)])
