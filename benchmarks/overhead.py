"""What the pack's own path costs per attention call, beside a plain override that calls the same kernel.

    python -m benchmarks.overhead

The kernel does nothing, so all that is timed is Python: from ComfyUI's arguments to the kernel and back. Both overrides
are timed in turns in one process; the numbers are those of the least disturbed round. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sage_core import Policy, Session
from sage_core.backends.base import Backend, Kernel, Tolerance
from sage_core.dispatcher import Dispatcher
from sage_core.environment import Environment
from sage_core.support import Support

BAR_MICROSECONDS = 5.0
"""How much more a call may cost through the dispatcher than through the plain override."""
BAR_GROWTH = 1.15
"""How much a call may cost in a long forward or a long run, relative to a short one."""
CALLS = 140
"""Attention calls of one SDXL-sized forward."""
ROUNDS = 60


OUTPUT = {"NHD": torch.zeros(1, 64, 2, 64), "HND": torch.zeros(1, 2, 64, 64)}


def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """A contiguous output in the layout it was called with, as kernels return it, but made beforehand."""
    return OUTPUT[keywords["tensor_layout"]]


def plain_override(
    func: Any,
    q: Any,
    k: Any,
    v: Any,
    heads: int,
    mask: Any = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """The shortest override that reshapes as ComfyUI expects and calls the kernel, without any decision."""
    if skip_reshape:
        b, _, _, dim_head = q.shape
        tensor_layout = "HND"
    else:
        b, _, dim_head = q.shape
        dim_head //= heads
        q, k, v = (t.view(b, -1, heads, dim_head) for t in (q, k, v))
        tensor_layout = "NHD"
    out = kernel(q, k, v, tensor_layout=tensor_layout, sm_scale=dim_head**-0.5)
    if tensor_layout == "HND":
        return out if skip_output_reshape else out.transpose(1, 2).reshape(b, -1, heads * dim_head)
    return out.transpose(1, 2) if skip_output_reshape else out.reshape(b, -1, heads * dim_head)


class Executor:
    """Stands for what ComfyUI runs inside a wrapper."""

    class class_obj:
        class model_patcher:
            model = None

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


@dataclass
class Case:
    """One kind of call: the arguments of every call of a forward."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def cases() -> list[Case]:
    flat = torch.zeros(1, 64, 128)
    split = torch.zeros(1, 2, 64, 64)
    options = {"transformer_options": {"block_index": 1, "block_type": "double"}, "_inside_attn_wrapper": True}
    return [
        Case("tokens x channels", (flat, flat, flat, 2), options),
        Case("heads split", (split, split, split, 2), {**options, "skip_reshape": True}),
    ]


def dispatcher() -> Dispatcher:
    """A dispatcher whose one kernel does nothing; a tolerance without end, since nothing is a wrong result."""
    backend = Backend(
        name="does nothing",
        support=Support(archs=None, dtypes=("float32",)),
        tolerance=Tolerance(relative_l2=float("inf"), cosine=-1.0),
        load=lambda environment, arch, allow_download: Kernel(kernel),
    )
    policy = Policy(kernel="does nothing", tolerance=None, compare_with_native="never")
    return Dispatcher(policy, Session([backend], Environment()))


def seconds_of_forward(attend: Callable[..., Any], case: Case, calls: int) -> float:
    args, kwargs = case.args, case.kwargs
    start = time.perf_counter()
    for _ in range(calls):
        attend(None, *args, **kwargs)
    return time.perf_counter() - start


def through_dispatcher(ours: Dispatcher, case: Case, calls: int) -> float:
    """The time of a forward with its wrapper: counting belongs to the cost."""
    options = {"optimized_attention_override": ours}
    forward = Executor(lambda *args, **kwargs: seconds_of_forward(ours, case, calls))
    start = time.perf_counter()
    ours.apply_model(forward, None, torch.ones(1), None, None, None, options)
    return time.perf_counter() - start


def least_per_call(time_forward: Callable[[], float], calls: int, rounds: int = ROUNDS) -> float:
    return min(time_forward() for _ in range(rounds)) / calls * 1e6


def measure_case(case: Case) -> tuple[float, float]:
    """Microseconds per call of the plain override and of ours, timed in turns."""
    ours = dispatcher()
    plain_times, our_times = [], []
    for _ in range(ROUNDS):
        plain_times.append(seconds_of_forward(plain_override, case, CALLS))
        our_times.append(through_dispatcher(ours, case, CALLS))
    return min(plain_times) / CALLS * 1e6, min(our_times) / CALLS * 1e6


def measure_growth(case: Case) -> tuple[float, float]:
    """Cost per call relative to a short forward: with 20 times as many sites, and after 2,000 forwards."""
    ours = dispatcher()
    short = least_per_call(lambda: through_dispatcher(ours, case, CALLS), CALLS)
    many_sites = least_per_call(lambda: through_dispatcher(ours, case, CALLS * 20), CALLS * 20, rounds=20)
    for _ in range(2_000):
        through_dispatcher(ours, case, 5)
    later = least_per_call(lambda: through_dispatcher(ours, case, CALLS), CALLS)
    return many_sites / short, later / short


def main() -> int:
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"{'call':<20}{'plain':>10}{'ours':>10}{'more':>10}   microseconds per call")
    missed = False
    for case in cases():
        plain, ours = measure_case(case)
        missed |= ours - plain > BAR_MICROSECONDS
        print(f"{case.name:<20}{plain:>10.2f}{ours:>10.2f}{ours - plain:>10.2f}   bar {BAR_MICROSECONDS:g} more")
    many_sites, later = measure_growth(cases()[0])
    missed |= max(many_sites, later) > BAR_GROWTH
    print(
        f"cost of a call with 20 x the sites: x{many_sites:.2f}, after 2,000 forwards: x{later:.2f}   bar {BAR_GROWTH}"
    )
    print("missed" if missed else "within the bars")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
