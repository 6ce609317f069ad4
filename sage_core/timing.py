"""What a call of each kernel costs, in time of the device and of the Python thread."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch

from .refusal import Refusal, RefusalCode

ROUND_MS = 1.5
"""How long one round of one kernel is to take: events resolve 0.0005 ms, so 0.1 % of it is still seen."""
ROUNDS = 4
"""Even, as every second round runs backwards: a drift of the clock that is steady then hits all kernels alike."""
MAX_CALLS = 100
"""Calls in one round. A device takes about 1,000 launches ahead of their work, and a call is up to ten."""
HOPELESS = 2.0
"""A kernel that takes this many times the best one's device time is not timed further: no drift is that large."""
NEAR = 1.1
"""A kernel that is further from the best after two rounds is told from it; those that are not get all rounds. Two
measurements of one 5 ms call differed by up to 4 % on an H200, as its clock follows the power it draws."""
LONG_MS = 200.0
"""From here one timed call is enough: what disturbs a call takes fractions of a millisecond."""
MAX_CANDIDATES_MS = 3_000.0
"""What the kernels beside the baseline may take before no further one is begun. A call that lasts a second is one of
at least 1,000 in a run, so that the measurement stays below a percent."""
HEAD_START = 1.5
"""How much longer the device is kept busy than the host should need to issue the calls, since that time varies."""
MAX_HEAD_START_MS = 3.0
"""Enough for a round of calls that are all host time; a first call that compiles must not ask for seconds."""
SPIN_CYCLES = 500_000
"""0.2 to 5 ms, once: beside it the time of a launch, which is timed with it, does not count."""

MAX_MS = 1e9
"""No call takes eleven days: what is more is no time."""

Spin = Callable[[int], None]
Function = Callable[[], object]
"""Runs one kernel on the tensors of a call. Returns its output, or the Refusal that it stands for; never raises."""


class Timing(NamedTuple):
    """Milliseconds of one call: on the device, and until the Python thread can go on."""

    device_ms: float
    host_ms: float

    @classmethod
    def from_json(cls, value: object) -> Timing | None:
        """The timing whose ``_asdict()`` is ``value``; None for anything else, as a file can be edited by hand."""
        if not isinstance(value, dict) or value.keys() != set(cls._fields):
            return None
        numbers = [value[name] for name in cls._fields]
        if not all(type(number) in (int, float) and 0 <= number < MAX_MS for number in numbers):
            return None
        return cls(*map(float, numbers))


class Stopwatch(ABC):
    """Times calls on one device."""

    @staticmethod
    def for_device(device: torch.device) -> Stopwatch:
        """Events where the device is CUDA or ROCm, the clock elsewhere."""
        if device.type == "cuda":
            return EventStopwatch(device)
        if device.type == "cpu":  # torch.cpu.synchronize exists, and does nothing
            return ClockStopwatch()
        return ClockStopwatch(getattr(getattr(torch, device.type, None), "synchronize", None))

    @abstractmethod
    def run(self, function: Function, calls: int, expected: Timing | None = None) -> Timing | Refusal:
        """The time per call of ``calls`` calls back to back; the refusal of the first that refuses.

        At most one output is alive at any time. ``expected`` is what a call took before: without it the device time
        of a few short calls includes the wait for the first launch.
        """


class ClockStopwatch(Stopwatch):
    """For a device that ``wait`` waits for; without ``wait``, as on a CPU, device time is host time."""

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self._wait = wait

    def run(self, function: Function, calls: int, expected: Timing | None = None) -> Timing | Refusal:
        if self._wait is not None:
            self._wait()
        start = time.perf_counter()
        refusal = _issue(function, calls)
        host = device = time.perf_counter() - start
        if self._wait is not None:
            self._wait()
            device = time.perf_counter() - start
        return refusal or Timing(device * 1e3 / calls, host * 1e3 / calls)


class EventStopwatch(Stopwatch):
    """For CUDA and ROCm: events on the device's current stream around the calls; waits for the last event only.

    Where it is known how long the host needs to issue the calls, the device is kept busy for as long, so that they run
    back to back, as in a forward that is bound by the device, even when each takes longer to issue than to run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rate: float | None = None

    def run(self, function: Function, calls: int, expected: Timing | None = None) -> Timing | Refusal:
        with torch.cuda.device(self._device):
            if expected is not None and _spin is not None:
                head_start_ms = min(HEAD_START * calls * expected.host_ms, MAX_HEAD_START_MS)
                _spin(int(head_start_ms * self._cycles_per_ms(_spin)))
            start, end = _event(), _event()
            start.record()
            began = time.perf_counter()
            refusal = _issue(function, calls)
            host = time.perf_counter() - began
            if refusal is not None:
                return refusal
            end.record()
            end.synchronize()
            return Timing(start.elapsed_time(end) / calls, host * 1e3 / calls)

    def _cycles_per_ms(self, spin: Spin) -> float:
        """How fast the counter runs that ``spin`` waits on: 100 MHz to 3 GHz, by device. Asked once."""
        if self._rate is None:
            spin(1)  # the first launch loads the kernel
            start, end = _event(), _event()
            start.record()
            spin(SPIN_CYCLES)
            end.record()
            end.synchronize()
            self._rate = SPIN_CYCLES / float(start.elapsed_time(end))
        return self._rate


_spin: Spin | None = getattr(torch.cuda, "_sleep", None)
"""Keeps the device busy for a number of cycles; PyTorch's own tests rely on it, but it is no public function."""


def _event() -> Any:
    event: Any = torch.cuda.Event  # typed by some versions of PyTorch only
    return event(enable_timing=True)


def _issue(function: Function, calls: int) -> Refusal | None:
    for _ in range(calls):
        output = function()
        if isinstance(output, Refusal):
            return output
        del output  # before the next call, which can then have its memory
    return None


def time_candidates(
    functions: Mapping[str, Function], baseline: str, stopwatch: Stopwatch
) -> dict[str, Timing | Refusal]:
    """The median time of each function, in the order of ``functions``; the refusal of one that refuses at any point.

    The baseline first, each is called twice: to warm up (it may compile) and timed. Those within HOPELESS of the best
    are then timed in rounds, in turns and every second round backwards, so that drift hits all alike: rounds of
    ROUND_MS while calls are shorter than that, else of one call with the timed call as the first round, and none from
    LONG_MS. After two rounds those that are NEAR the best go on, up to ROUNDS.

    So a kernel costs three calls of its own, two when it is hopeless or calls are long, and five when it is near the
    best. When calls are short it is two and at most about 15 ms: 1.5 ms of calls in a round, and as much in which the
    device waits for the host. No kernel is begun after the ones beside the baseline took MAX_CANDIDATES_MS; its
    refusal says so. Compiling comes on top and is not counted.
    """
    found: dict[str, Timing | Refusal] = {}
    spent = 0.0
    for name in (baseline, *(name for name in functions if name != baseline)):
        if spent >= MAX_CANDIDATES_MS:
            detail = f"{name} was not timed: the kernels timed before it took {spent / 1e3:.1f} s"
            found[name] = Refusal(RefusalCode.NOT_WORTHWHILE, detail)
            continue
        found[name] = first = _time_first(functions[name], stopwatch)
        if isinstance(first, Timing) and name != baseline:
            spent += 2 * first.device_ms
    _time_rounds(functions, found, stopwatch)
    return {name: found[name] for name in functions}


def _time_first(function: Function, stopwatch: Stopwatch) -> Timing | Refusal:
    warm = stopwatch.run(function, 1)
    if isinstance(warm, Refusal):
        return warm
    timed = stopwatch.run(function, 1, warm)
    # what disturbs a call only makes it longer, and one disturbance must not make a kernel look hopeless
    return timed if isinstance(timed, Refusal) else Timing(*map(min, warm, timed))


def _time_rounds(functions: Mapping[str, Function], found: dict[str, Timing | Refusal], stopwatch: Stopwatch) -> None:
    """Replace the single measurements in ``found`` by the median over rounds, where that is worth its time."""
    first = {name: timing for name, timing in found.items() if isinstance(timing, Timing)}
    least = {name: timing.device_ms for name, timing in first.items()}
    best = min(least.values(), default=math.inf)
    if best >= LONG_MS:
        return
    short = best < ROUND_MS
    samples = {name: [] if short else [timing] for name, timing in first.items()}
    contenders = [name for name in least if least[name] <= HOPELESS * best]
    for number in range(0 if short else 1, ROUNDS):
        if len(contenders) < 2:
            return
        contenders.reverse()
        for name in contenders:
            calls = int(ROUND_MS / max(*first[name], ROUND_MS / MAX_CALLS))
            timing = stopwatch.run(functions[name], max(calls, 1), first[name])
            if isinstance(timing, Refusal):
                found[name] = timing
                del least[name]
                continue
            least[name] = min(least[name], timing.device_ms)
            samples[name].append(timing)
            found[name] = Timing(*map(median, zip(*samples[name], strict=True)))
        best = min(least.values(), default=math.inf)
        factor = NEAR if number > 0 else HOPELESS
        contenders = [name for name in contenders if name in least and least[name] <= factor * best]
