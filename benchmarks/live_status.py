"""What the status on the node costs a run, beside the same run that nobody looks at.

    python -m benchmarks.live_status

A look at a run holds Python's lock for as long as it composes the line and writes the message. The sampling thread can
lose no more than that, at two looks a second, and loses less where it waits for the device. Opening a run costs that
thread a little more, once. Both together, over a run of RUN_S seconds, must stay below the bar; exit code 1 when they
do not. Then whole runs with and without the status are timed in turns: the kernel does nothing, so that Python is never
idle and the worst case is shown. How far the ratios of single turns are apart is the noise of the machine.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.overhead import Executor, cases, dispatcher, seconds_of_forward
from sage_core.live import INTERVAL_S, Live, Record
from sage_core.stats import Run, Stats

BAR = 0.001
"""The share of a run that the status may cost."""
RUN_S = 5.0
"""A short run: what it costs once weighs less in a longer one."""
SITES = {"FLUX-sized": 57, "SDXL-sized": 140, "very large": 2_000}
LOOKS = 200
TURNS = 6
TURN_S = 2.0


def sampled(opened: Callable[[Run], None], sites: int, seconds: float, at_the_end: Callable[[], None]) -> int:
    """How many forwards a run makes in this time; ``at_the_end`` is called while it is still being sampled."""
    ours = dispatcher()
    ours.stats = Stats("5", opened)
    case = cases()[0]
    options = {"optimized_attention_override": ours}
    forward = Executor(lambda *args, **kwargs: seconds_of_forward(ours, case, sites))
    made = 0

    def sampler(*args: Any, **kwargs: Any) -> None:
        nonlocal made
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            ours.apply_model(forward, None, torch.ones(1), None, None, None, options)
            made += 1
        at_the_end()

    ours.outer_sample(Executor(sampler), None, None, None, torch.ones(21))
    return made


def median(action: Callable[[], object], times: int) -> float:
    """Seconds that the action takes."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def seconds_of_a_look(sites: int) -> float:
    runs: list[Run] = []
    found: list[float] = []

    def look_often() -> None:
        record = Record(runs[0], "workflow", {})
        found.append(median(lambda: json.dumps(record.status()), LOOKS))

    sampled(runs.append, sites, 0.2, look_often)
    return found[0]


def seconds_of_a_start() -> float:
    """What a run costs the sampling thread when it starts: it is added, and the thread that looks is made."""

    def start() -> None:
        Live(json.dumps, sleep=lambda seconds: time.sleep(0.01)).add(run, None, {})

    run = Run(1, "prompt", "3", "Model", "5")
    run.close("finished")  # so that the thread ends
    return median(start, LOOKS)


def ratios_of_whole_runs(sites: int) -> list[float]:
    """Forwards with the status to forwards without, of runs in turns: the least, the median and the most."""
    ratios = []
    for turn in range(TURNS):
        made = {}
        for followed in (turn % 2 == 0, turn % 2 == 1):  # who is first in a turn changes
            live = Live(json.dumps)
            opened = (lambda run, live=live: live.add(run, None, {})) if followed else lambda run: None
            made[followed] = sampled(opened, sites, TURN_S, lambda: None)
            time.sleep(2 * INTERVAL_S)  # the thread that looked ends
        ratios.append(made[True] / made[False])
    return [min(ratios), statistics.median(ratios), max(ratios)]


def main() -> int:
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    start = seconds_of_a_start()
    print(f"start of a run: {start * 1e6:.0f} microseconds")
    print(f"{'model':<12}{'sites':>7}{'a look':>12}{'of a run':>12}{'whole runs, least to most':>28}")
    missed = False
    for name, sites in SITES.items():
        look = seconds_of_a_look(sites)
        share = look / INTERVAL_S + start / RUN_S
        missed |= share >= BAR
        ratios = " ".join(f"{ratio:8.4f}" for ratio in ratios_of_whole_runs(sites))
        print(f"{name:<12}{sites:>7}{look * 1e6:>9.0f} us{share:>12.3%}  {ratios}   bar {BAR:.1%} of a run")
    print("missed" if missed else "within the bar")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
