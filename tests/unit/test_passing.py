"""What passes, such as memory that was short or a kernel that is out until the next start, leaves nothing behind."""

from __future__ import annotations

import math
import sys
import threading

import pytest
import torch

from sage_core import comparing, dispatcher
from sage_core.plans import Plans
from sage_core.refusal import Refusal, RefusalCode
from sage_core.selection import Plan
from tests.unit.conftest import Machine, Sites, attention, comfy_arguments, fake_backend, make_session, off_by, served

pytestmark = pytest.mark.usefixtures("one_thread")

NATIVE = "native"
STEPS = (1.0, 0.75, 0.5, 0.25, 0.0)
FULL = torch.OutOfMemoryError("out of memory")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine on which forwards too take the time of its clock."""
    machine = Machine(path=tmp_path / "measurements.json")
    monkeypatch.setattr(comparing, "time", machine.clock)
    return machine


def timing(machine):
    return machine.stopwatches[-1].running


def failing(condition, error):
    """A kernel that raises where ``condition()`` holds."""

    def spoil(*call):
        if condition():
            raise error
        return off_by(0.01)(*call)

    return spoil


def slow_in_a_forward(machine):
    """What looks fast while it is timed alone."""

    def spoil(*call):
        machine.clock.device_ms += 0 if timing(machine) else 30.0
        return attention(*call)

    return spoil


def sampled(machine, steps=STEPS, **policy):
    comfy = machine.comfy(**{"compare_with_native": "first time", **policy})
    comfy.sample(steps)
    return comfy


def test_memory_that_was_short_for_the_small_example_is_tried_again_in_the_next_run(machine):
    short = [True]
    machine.add("fast", 1.0, spoil=failing(lambda: bool(short and short.pop()), FULL))
    comfy = sampled(machine)
    assert served(comfy.run()) == {NATIVE: 12}
    comfy.sample(STEPS)
    assert served(comfy.run()) == {"fast": 12}


@pytest.mark.parametrize("after", ["a restart", "the next run"])
def test_a_comparison_without_the_best_kernel_keeps_it_away_no_longer_than_it_is_away(machine, after):
    """A poorer one served in its place, and was not faster."""
    away = [True]
    if after == "a restart":
        good = failing(lambda: bool(away) and not timing(machine), RuntimeError("broken"))
    else:
        good = failing(lambda: bool(away) and timing(machine), FULL)
    machine.add("good", 5.0, spoil=good)
    machine.add("exact", 9.5, exact=True, spoil=slow_in_a_forward(machine))
    comfy = sampled(machine)
    assert "good" not in served(comfy.run())
    away.clear()
    if after == "a restart":
        comfy = sampled(machine)
    else:
        comfy.sample(STEPS)
    assert "good" in served(comfy.run())


def test_a_comparison_in_which_a_kernel_was_retired_is_not_kept(machine):
    calls = []
    broken = failing(lambda: not timing(machine) and not calls.append(1) and len(calls) == 20, ValueError("broken"))
    machine.add("fast", 1.0, spoil=broken)
    comfy = sampled(machine)
    assert len(calls) >= 20
    assert comfy.dispatcher.session.measurements.entries().get("forwards", {}) == {}
    assert all(
        comparison["plan_ms"] in (pytest.approx(3.0), pytest.approx(30.0)) for comparison in comfy.run()["comparisons"]
    )


def test_a_site_that_made_nan_loses_its_kernel_although_another_kernel_raised_in_that_forward():
    sick = []
    machine = Machine()
    machine.add("sick", 1.0, spoil=lambda *call: off_by(0.01)(*call) * (math.nan if sick else 1.0), head_dims=(16,))
    machine.add("broken", 1.0, spoil=failing(lambda: bool(sick), ValueError("broken")), head_dims=(32,))
    one, two = Sites(calls=1, head_dim=16), Sites(calls=1, head_dim=32)
    comfy = machine.comfy(lambda *given: one(*given) + two(*given), tolerance=None)
    comfy.sample((1.0, 0.0))
    sick.append(1)
    comfy.sample(STEPS)
    assert comfy.run()["rescued_forwards"] == 1


def test_each_kernel_that_a_site_loses_counts():
    plans = Plans(make_session())
    for number, kernel in enumerate(("a", "b"), 1):
        plan = Plan(kernel, None, None)
        plans.keep(("k",), (0, None), plan, None)
        plans.ban([plan], lambda plan: Refusal(RefusalCode.ACCURACY, "far off"))
        assert plans.bans == number
    assert [verdict.kernel for verdict in plans.banned(("k",), (0, None))] == ["a", "b"]


def test_a_site_loses_a_kernel_whatever_limits_the_forward():
    plans = Plans(make_session())
    key, place, site = ("k",), (0, None), (1, None)
    made = {limit: Plan("a", None, None, host_bound=limit) for limit in (True, False)}
    for limit, plan in made.items():
        plans.keep(key, place, plan, limit)
        plans.keep(key, site, Plan("a", None, None), limit)
    plans.ban([made[True]], lambda plan: Refusal(RefusalCode.ACCURACY, "far off"))
    assert [set(plans.known[limit][key]) for limit in (True, False)] == [{site}, {site}]
    assert [verdict.kernel for verdict in plans.banned(key, place)] == ["a"]
    assert plans.bans == 1


def test_a_file_error_that_passed_is_forgotten_although_the_kernel_never_serves():
    errors = [1]
    machine = Machine()
    machine.add("slow", 12.0, spoil=failing(lambda: timing(machine) and bool(errors) and bool(errors.pop()), OSError()))
    machine.add("fast", 1.0)
    comfy = machine.comfy()
    comfy.sample(STEPS)
    assert errors == []
    assert comfy.dispatcher.session.failing == {}


def test_choices_of_smoothing_keep_what_each_other_measured(tmp_path):
    machine = Machine(path=tmp_path / "measurements.json")
    machine.add("fast", 1.0, options=("attn_mask", "enable_gqa"))
    kernel = machine.backends.pop().load(None, "cpu", False).function

    def smoothing(*call, smooth_k, **keywords):
        return kernel(*call, **keywords)

    machine.backends.append(fake_backend(smoothing, name="fast", options=("smooth_k",), smooth_k=True))
    for _ in range(2):
        for choice in ("on", "off"):
            comfy = machine.comfy(smooth_k=choice)
            comfy.sample()
            assert served(comfy.run()) == {"fast": 3}
    assert [bool(stopwatch.runs) for stopwatch in machine.stopwatches] == [True, True, False, False]


def test_memory_that_is_short_for_smoothing_leaves_the_kernel_without_it():
    machine = Machine()

    def function(query, key, value, *, smooth_k, tensor_layout, sm_scale):
        machine.clock.device_ms += 1.0
        if smooth_k and query.shape[1] >= 512 and not timing(machine):
            raise FULL
        return off_by(0.01)(query, key, value, tensor_layout, sm_scale)

    machine.backends.append(fake_backend(function, name="fast", options=("smooth_k",), smooth_k=True))
    comfy = machine.comfy(tolerance=0.1)
    comfy.sample(STEPS)
    assert served(comfy.run()) == {"fast": 12}
    assert {site["smooth_k"] for site in comfy.run()["sites"]} == {False}


def test_nan_of_an_exact_kernel_in_a_step_that_was_not_looked_at_is_not_laid_on_the_model():
    calls = []
    machine = Machine()

    def spoil(*call):
        calls.extend([] if timing(machine) else [1])
        return attention(*call) * (math.nan if len(calls) == 8 and not timing(machine) else 1.0)

    machine.add("exact", 1.0, exact=True, spoil=spoil)
    sites, carried = Sites(), [torch.zeros(())]

    def model(*given):
        outputs = [output + carried[0] * 0 for output in sites(*given)]
        carried[0] = sum(output.sum() for output in outputs)
        return outputs

    comfy = machine.comfy(model, compare_with_native="never")
    comfy.sample([1 - step / 20 for step in range(21)])
    (event,) = comfy.run()["events"]
    assert "or a step that was not looked at" in event["text"]


def test_native_that_memory_is_too_short_for_is_tried_once_in_a_run_to_find_the_limit(machine, monkeypatch):
    monkeypatch.setattr(dispatcher, "waiter", lambda tensor: lambda: None)
    machine.native_ms = 0.8
    machine.add("fast", 0.4, exact=True)
    comfy = machine.comfy(compare_with_native="first time")
    model, tried = Sites(), []

    def forward(attention, options):
        if "optimized_attention_override" not in options:
            tried.append(1)
            raise FULL
        return model(attention, options)

    comfy.forward_once = forward
    comfy.sample([1 - step / 20 for step in range(21)])
    assert comfy.run()["status"] == "finished"
    assert len(tried) == 2  # for the limit, and for the comparison


def test_beside_a_long_call_nobody_asks_what_limits_the_forward(machine, monkeypatch):
    monkeypatch.setattr(dispatcher, "waiter", lambda tensor: lambda: None)
    monkeypatch.setattr(comparing, "LIMIT_ROUNDS", 1_000)
    machine.native_ms = 0.3
    machine.add("fast", 0.1, exact=True)
    machine.add("far", 20.0)
    sites, long = Sites(), Sites(calls=1, qo_len=1024)

    def model(attention, options):
        machine.native_ms = 0.3
        outputs = sites(attention, options)
        return outputs + long(attention, options)

    comfy = machine.comfy(model, compare_with_native="first time")
    native = comfy.native

    def by_length(q, *args, **kwargs):
        native.device_ms = 5.0 if q.shape[1] == 1024 else 0.3
        return native(q, *args, **kwargs)

    comfy.native = by_length
    comfy.sample((1.0, 0.0))
    entries = comfy.dispatcher.session.measurements.entries()
    assert [entry["host_bound"] for entry in entries["limits"].values()] == [False]
    assert comfy.run()["comparison_calls"] < 4 * 500


def test_threads_that_plan_at_once_do_not_disturb_each_other():
    machine = Machine()
    for number in range(6):
        machine.add(f"k{number}", 1.0 + number / 100, spoil=failing(lambda: timing(machine), FULL))
    comfy = machine.comfy()
    errors = []

    def work(number):
        try:
            for length in range(12):
                args, keywords = comfy_arguments(heads=1, qo_len=512 + 64 * number + length, head_dim=8)
                comfy.attention(*args, **keywords, transformer_options=dict(comfy.options))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
