"""Policy: what the user asked for, checked once, when the node runs."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

AUTO = "auto"
NATIVE_ONLY = "native (observe only)"
SMOOTH_K_CHOICES = ("auto", "off", "on")
USE_NATIVE = "use native"
STOP = "stop with an error"
UNAVAILABLE_CHOICES = (USE_NATIVE, STOP)
TOLERANCES = {"normal (0.10)": 0.10, "strict (0.05)": 0.05, "off": None}
"""Relative L2 of the worst head up to which a quantized kernel may serve a site; None checks nothing."""
NORMAL_TOLERANCE = "normal (0.10)"
COMPARE_CHOICES = ("first time", "every run", "never")
MAX_BLOCK = 9_999
"""No model has so many blocks; it keeps a mistyped range from filling memory."""


class PolicyError(ValueError):
    """A widget value that is not allowed; the message names the input and what is."""


@dataclass(frozen=True)
class Policy:
    """The widgets of the node as values.

    ``start_percent`` and ``end_percent`` are fractions of the noise schedule from 0 (pure noise) to 1, both ends
    included. ``skip_blocks`` are block numbers in the order in which a forward reaches them, counted from 0.
    """

    kernel: str = AUTO
    smooth_k: str = "auto"
    start_percent: float = 0.0
    end_percent: float = 1.0
    skip_blocks: frozenset[int] = frozenset()
    if_unavailable: str = USE_NATIVE
    allow_hub_download: bool = False
    tolerance: float | None = TOLERANCES[NORMAL_TOLERANCE]
    compare_with_native: str = "first time"

    @classmethod
    def from_widgets(
        cls,
        kernels: Collection[str],
        *,
        kernel: str,
        smooth_k: str,
        start_percent: float,
        end_percent: float,
        skip_blocks: str,
        if_unavailable: str,
        allow_hub_download: bool,
        tolerance: str,
        compare_with_native: str,
    ) -> Policy:
        """The checked policy; raises PolicyError for a value that is not allowed.

        ComfyUI does not check every value by itself: workflows reach the server from scripts, and old versions do
        not compare combo values with their options.
        """
        _check_choice("kernel", kernel, kernels)
        _check_choice("smooth_k", smooth_k, SMOOTH_K_CHOICES)
        _check_choice("if_unavailable", if_unavailable, UNAVAILABLE_CHOICES)
        _check_choice("tolerance", tolerance, TOLERANCES)
        _check_choice("compare_with_native", compare_with_native, COMPARE_CHOICES)
        if not isinstance(allow_hub_download, bool):
            raise PolicyError(f"allow_hub_download is {allow_hub_download!r}; allowed: true or false")
        start = _check_fraction("start_percent", start_percent)
        end = _check_fraction("end_percent", end_percent)
        if start > end:
            raise PolicyError(f"start_percent is {start:g}, after end_percent {end:g}; allowed: start before end")
        return cls(
            kernel=kernel,
            smooth_k=smooth_k,
            start_percent=start,
            end_percent=end,
            skip_blocks=parse_blocks(skip_blocks),
            if_unavailable=if_unavailable,
            allow_hub_download=allow_hub_download,
            tolerance=TOLERANCES[tolerance],
            compare_with_native=compare_with_native,
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "skip_blocks": sorted(self.skip_blocks)}

    def plan_key(self) -> str:
        """All that plans depend on."""
        return repr(replace(self, if_unavailable="", compare_with_native=""))

    @property
    def whole_schedule(self) -> bool:
        """No step is outside the window."""
        return self.start_percent <= 0.0 and self.end_percent >= 1.0


def parse_blocks(text: str) -> frozenset[int]:
    """The block numbers that ``text`` names: ``0, 1, 47-49`` is {0, 1, 47, 48, 49}; empty text is no block."""
    if not isinstance(text, str):
        raise PolicyError(f"skip_blocks is {text!r}; allowed: text such as '0, 1, 47-49'")
    numbers: set[int] = set()
    for part in text.replace(";", ",").split(","):
        if not part.strip():
            continue
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part)
        if match is None:
            raise PolicyError(f"skip_blocks has {part.strip()!r}; allowed: numbers and ranges such as '0, 1, 47-49'")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if first > last or last > MAX_BLOCK:
            raise PolicyError(f"skip_blocks has {part.strip()!r}; allowed: rising ranges up to {MAX_BLOCK}")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def _check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if value not in tuple(choices):  # a list has no hash
        raise PolicyError(f"{name} is {value!r}; allowed: {', '.join(choices)}")


def _check_fraction(name: str, value: object) -> float:
    # bool is an int to Python, and NaN fails every comparison
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise PolicyError(f"{name} is {value!r}; allowed: 0.0 to 1.0")
    return float(value)
