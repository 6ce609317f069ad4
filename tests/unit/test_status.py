"""The line about a run: while it is sampled, at its end, and when it went wrong."""

from __future__ import annotations

import pytest

from sage_core.backends.base import Kernel
from sage_core.checking import SiteAccuracy
from sage_core.comparing import Comparison
from sage_core.refusal import Refusal, RefusalCode
from sage_core.selection import Plan, Use, Verdict
from sage_core.stats import Run
from tests.unit.conftest import attention, fake_backend, make_spec


def plan(kernel: str, error: float | None = None, **codes: RefusalCode) -> Plan:
    """A plan of ``kernel``; each keyword is a kernel that was refused, with the reason."""
    verdicts = tuple(Verdict(name, (Refusal(code, f"{name} {code.value}"),)) for name, code in codes.items())
    accuracy = None if error is None else SiteAccuracy(error / 2, error, 0.99)
    use = Use(fake_backend(name=kernel), Kernel(attention), "NHD", False, None, accuracy) if error is not None else None
    return Plan(kernel, make_spec(), None, verdicts, use)


def run_of(*forwards: list[Plan], steps: int = 0, total: int | None = 4) -> Run:
    run = Run(1, "prompt", "3", "Flux")
    run.total_steps, run.step = total, steps
    for plans in forwards:
        run.record(plans)
    return run


def ended(run: Run, status: str = "finished") -> str:
    run.close(status)
    return run.snapshot()["summary"]


A, B, C, NATIVE = plan("a", 0.02), plan("b", 0.04), plan("c"), plan("native", b=RefusalCode.HEAD_DIM)


def test_while_the_first_model_call_is_under_way() -> None:
    assert run_of().progress_line() == "Step 1 of 4: the first model call is under way"


def test_while_kernels_serve_and_while_native_does() -> None:
    assert run_of([A, A, A, NATIVE], steps=1).progress_line() == "Step 2 of 4: a serves 75.0% of 4 calls"
    assert run_of([A, A, B, NATIVE], steps=4).progress_line() == (
        "Step 4 of 4: a serves 50.0%, b serves 25.0% of 4 calls"
    )
    assert run_of([A, B, C] * 1_000).progress_line().endswith("b serves 33.3%, 1 more kernel of 3,000 calls")
    assert run_of([NATIVE] * 3).progress_line() == "Step 1 of 4: native attention serves all of 3 calls"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (RefusalCode.KERNEL_ERROR, "x failed and is out"),
        (RefusalCode.FILE_ERROR, "a file error kept x from some calls"),
        (RefusalCode.OUT_OF_MEMORY, "out of memory, the rest is native"),
        (RefusalCode.ACCURACY, "x is too inaccurate at some sites"),
        (RefusalCode.NOT_FINITE, "NaN or Inf at some sites"),
    ],
)
def test_what_was_retired_is_told_while_it_runs_and_after(code: RefusalCode, text: str) -> None:
    run = run_of([A, plan("native", x=code), plan("native", x=code)])
    assert run.progress_line() == f"Step 1 of 4: a serves 33.3% of 3 calls; {text}"
    assert run.progress_line().count(text) == 1
    assert ended(run).endswith(f"; 1 refusal; {text}")


def test_a_rescue_is_told() -> None:
    run = run_of([A])
    run.rescued = 1
    assert run.progress_line().endswith("; 1 model call rescued from NaN or Inf")
    run.rescued = 2
    assert ended(run).endswith("; 2 model calls rescued from NaN or Inf")


def test_the_summary_has_kernel_share_gain_worst_error_and_refusals() -> None:
    run = run_of([A, A, B, plan("native", a=RefusalCode.HEAD_DIM, b=RefusalCode.ATTN_MASK)])
    run.compared("size", Comparison(13.1, 10.0, 0.0, None, None, None), remembered=False)
    assert ended(run) == (
        "a served 50.0%, b served 25.0% of 4 calls; x1.31 against native; worst error 0.040; 2 refusals"
    )


def test_several_comparisons_give_a_range_and_a_later_check_the_worst_error() -> None:
    run = run_of([A])
    run.compared("small", Comparison(9.0, 10.0, 0.0, None, None, None), remembered=True)
    run.compared("large", Comparison(14.0, 10.0, 0.0, None, None, None), remembered=True)
    run.record_accuracy(0, A, SiteAccuracy(0.1, 0.3, 0.9))
    assert ended(run) == "a served 100.0% of 1 call; x0.90 to x1.40 against native; worst error 0.300"
    run.record_accuracy(0, A, SiteAccuracy(float("nan"), float("nan"), 0.9))
    assert run.snapshot()["summary"].endswith("worst error not finite")


def test_runs_that_ended_early_say_where() -> None:
    assert ended(run_of([A], steps=1), "interrupted") == (
        "Interrupted in step 2 of 4: a served 100.0% of 1 call; worst error 0.020"
    )
    assert ended(run_of(steps=0), "error") == "Stopped by an error in step 1 of 4: no attention call came here"
    assert ended(run_of(steps=4)) == "no attention call came here"


def test_calls_outside_a_sampler_have_no_steps() -> None:
    assert run_of([A], total=None).snapshot()["summary"].startswith("a serves 100.0% of 1 call")
