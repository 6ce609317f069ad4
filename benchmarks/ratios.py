"""From seconds in turns to ratios, noise and the bars: plain arithmetic on lists of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

BEST = 0.99
"""How much of the speed of the best entry `auto` must reach."""
NATIVE = 0.995
"""How much of native's speed `auto` must reach, also where nothing helps."""

MEMORY = 0.999
"""Native's peak memory over that of `auto`: what is left out of 1 is for scales, and what an allocator rounds up."""


class Ratio(NamedTuple):
    """How many times as fast as native: the median over the rounds, the slowest and the fastest."""

    median: float
    low: float
    high: float


def ratio(native: Sequence[float], seconds: Sequence[float]) -> Ratio:
    """Each round against native of the same round, so that what slows a whole round down cancels out."""
    rounds = [base / own for base, own in zip(native, seconds, strict=True)]
    return Ratio(median(rounds), min(rounds), max(rounds))


def noise(native: Sequence[float], again: Sequence[float]) -> float:
    """How far two native runs of one round are apart: the median over the rounds."""
    return median(abs(base / own - 1) for base, own in zip(native, again, strict=True))


class Verdict(NamedTuple):
    """A number and the bar for it; below the bar by no more than the noise still holds.

    A ``target`` is for one kind of machine: it is stated, and a miss is no failure.
    """

    name: str
    value: float
    bar: float
    noise: float
    target: bool = False

    @property
    def held(self) -> bool:
        return self.value >= self.bar - self.noise

    def text(self) -> str:
        how = "met" if self.value >= self.bar else "met within the noise" if self.held else "MISSED"
        kind = "target" if self.target else "bar"
        return f"{self.name}: {self.value:.3f}, {kind} {self.bar:g}, noise {self.noise:.3f}: {how}"

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "held": self.held}


class AtMost(NamedTuple):
    """A count of ``auto`` and native's, which it may not exceed; no machine is too slow for it."""

    name: str
    value: int
    bar: int

    @property
    def held(self) -> bool:
        return self.value <= self.bar

    def text(self) -> str:
        return f"{self.name}: {self.value}, bar: native's {self.bar}: {'met' if self.held else 'MISSED'}"

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "held": self.held}


def graph_verdicts(auto: Mapping[str, int], native: Mapping[str, int]) -> list[AtMost]:
    """What the pack must not add to compiled models; both are what compiling.Compiler found of an entry."""
    named = {"graph_breaks": "graph breaks of auto", "recompiles": "recompiles of auto after the first run"}
    return [AtMost(name, auto[count], native[count]) for count, name in named.items()]


def verdicts(ratios: Mapping[str, float], noise: float, target: float | None = None) -> list[Verdict]:
    """What `auto` must hold on one line; ``ratios`` are the medians to native of every other entry and of `auto`."""
    auto = ratios["auto"]
    best, name = max([(1.0, "native"), *((own, name) for name, own in ratios.items() if name != "auto")])
    found = [
        Verdict(f"auto over the best entry ({name})", auto / best, BEST, noise),
        Verdict("auto over native", auto, NATIVE, noise),
    ]
    return found if target is None else [*found, Verdict("auto over native", auto, target, noise, target=True)]


def memory_verdict(native: int, auto: int, compiled: bool) -> Verdict:
    """What `auto` must hold of memory; both are the most bytes in use in a run. For compiled models it is a target: a
    graph keeps query, key and value until attention is over, and what else it needs is less than what models need."""
    return Verdict("native's peak memory over auto's", native / auto, MEMORY, noise=0.0, target=compiled)
