"""The whole-forward comparison: what the plan brings and what it changes, against the same forward run natively."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple

import torch

from .accuracy import compare
from .outputs import tensors_of

NOISE = 0.005
"""What two timings of one forward differ by on a quiet machine; a plan must be faster by more than that."""
MAX_NUMBER = 1e300
"""Beyond it, and so no float that can be reckoned with."""
HOST_NOISE = 0.05
"""The same where the host limits the forward. Other work on the machine comes and goes there for seconds at a time, so
a few timings in turns can agree and say nothing: on an H200 a plan that they found 3 % faster was slower in all runs
behind it, and native runs in turn differed by 7 to 27 %."""
HOST_SHARE = 0.95
"""A forward whose launches take this share of its time is limited by the host. Where the device is, a host can be held
up by a full queue too, but then it is some thousand launches ahead, and forwards have less than twenty thousand."""
LIMIT_ROUNDS = 3
ENOUGH_MS = 400.0
"""Forwards are timed until each side took this long together: single short ones differ by some percent."""
MAX_ROUNDS = 5
ROUND_MS = 100.0
"""Shorter forwards are run several times in a row, as in a run, where the host goes on before the device is done."""
MAX_REPEATS = 8

Forward = Callable[[], Any]
Wait = Callable[[], object]


class Comparison(NamedTuple):
    """Milliseconds of one forward, natively and with the plan; the share by which native's times are usually longer, 0
    where every time of the plan is shorter than every native one, and HOST_NOISE at least where the host limits the
    forward; and the error of the plan's output: relative L2 and cosine against native's, and PSNR in dB with native's
    range as the peak (None where the outputs are equal).

    None also where a number has no finite value, as when native's output is zero or NaN."""

    native_ms: float
    plan_ms: float
    noise: float
    relative_l2: float | None
    cosine: float | None
    psnr: float | None

    @property
    def faster(self) -> bool:
        return self.plan_ms < self.native_ms * (1 - max(NOISE, self.noise))

    @classmethod
    def from_json(cls, value: object) -> Comparison | None:
        """The comparison whose ``_asdict()`` is ``value``; None for anything else, as a file can be edited by hand."""
        if not isinstance(value, dict) or value.keys() != set(cls._fields):
            return None
        needed = ("native_ms", "plan_ms", "noise")
        numbers = [number for name, number in value.items() if name in needed or number is not None]
        if not all(type(number) in (int, float) and -MAX_NUMBER < number < MAX_NUMBER for number in numbers):
            return None
        if not (value["native_ms"] > 0 and value["plan_ms"] > 0):
            return None
        return cls(**value)


def compare_forwards(
    native: Forward, plan: Forward, wait: Wait | None, host_bound: bool | None = None
) -> tuple[Comparison, Any, Any]:
    """The comparison and both outputs; ``wait`` waits for the device, and is None where the host does the work itself.
    ``host_bound`` says whether the host limits the forward, None that it is not known.

    The forwards are run in turns, each at least once and as often as short ones need to be timed well; the shortest
    time of each counts, as everything else on the machine only ever adds to it. Both have run before, so that nothing
    is loaded or compiled here.
    """
    sides = {"native": native, "plan": plan}
    times: dict[str, list[float]] = {name: [] for name in sides}
    outputs: dict[str, Any] = {}
    repeats = 1
    for number in range(MAX_ROUNDS + 1):
        for name, forward in sides.items():
            outputs[name], _, milliseconds = _timed(forward, wait, repeats)
            times[name].append(milliseconds)
        shortest = min(map(min, times.values()))
        if number == 0 and shortest < ROUND_MS:  # says only how long a round has to be
            repeats = math.ceil(min(ROUND_MS / shortest, MAX_REPEATS)) if shortest > 0 else MAX_REPEATS
            times = {name: [] for name in sides}
        elif min(map(sum, times.values())) * repeats >= ENOUGH_MS:
            break
    error = compare(_flat(outputs["plan"]), reference := _flat(outputs["native"]))
    peak = float(reference.max() - reference.min())
    native_ms = min(times["native"])
    noise = median(times["native"]) / native_ms - 1 if 0 < native_ms <= max(times["plan"]) else 0.0
    comparison = Comparison(
        native_ms=native_ms,
        plan_ms=min(times["plan"]),
        noise=max(noise, HOST_NOISE) if host_bound else noise,
        relative_l2=error.relative_l2 if math.isfinite(error.relative_l2) else None,
        cosine=error.cosine if error.finite else None,
        psnr=20 * math.log10(peak / error.rmse) if 0 < error.rmse < math.inf and peak > 0 else None,
    )
    return comparison, outputs["native"], outputs["plan"]


def is_host_bound(native: Forward, wait: Wait) -> bool:
    """Whether the host limits the forward: its launches take about as long as the work on the device that they start.

    The forward has run before. A long one is run once more, a short one LIMIT_ROUNDS times.
    """
    timed = [_timed(native, wait)[1:]]
    while len(timed) < LIMIT_ROUNDS and timed[-1][1] < ENOUGH_MS:
        timed.append(_timed(native, wait)[1:])
    launches_ms, whole_ms = map(min, zip(*timed, strict=True))
    return bool(launches_ms >= HOST_SHARE * whole_ms)


def _timed(forward: Forward, wait: Wait | None, repeats: int = 1) -> tuple[Any, float, float]:
    """The forward's last output, and milliseconds per forward: of its launches alone, and of all of it."""
    if wait is not None:
        wait()
    start = time.perf_counter()
    for _ in range(repeats):
        output = forward()
    launched = time.perf_counter()
    if wait is not None:
        wait()
    return output, (launched - start) * 1e3 / repeats, (time.perf_counter() - start) * 1e3 / repeats


def obstacle(options: dict[str, Any], own_key: str) -> str | None:
    """Why another forward would disturb what other nodes put on the model; None when nothing is known to."""
    if any(options.get("patches_replace", {}).values()):
        return "another node replaces blocks of the model"
    wrappers = options.get("wrappers", {})
    for kind in ("apply_model", "diffusion_model"):
        entries = wrappers.get(kind, {}).items()
        others = [key for key, functions in entries if functions and key not in (own_key, "torch.compile")]
        if others:
            named = ", ".join("without a name" if key is None else str(key) for key in others)
            return f"another node wraps the model call ({named})"
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
