"""The whole forward against native: when it is compared, what follows, what is counted; and the way past us."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch

from sage_core import comparing, dispatcher
from sage_core.comparing import MAX_REPEATS, MAX_ROUNDS, Comparison, compare_forwards, obstacle
from sage_core.report import build_report, to_markdown
from tests.unit.conftest import (
    LONG,
    Clock,
    Executor,
    FakeComfy,
    FakeKernel,
    Machine,
    Native,
    Sites,
    attention,
    fake_backend,
    make_dispatcher,
    off_by,
    plain_model,
    served,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NATIVE = "native"
OVERRIDE = "optimized_attention_override"
STEPS = (1.0, 0.75, 0.5, 0.25, 0.0)
FORWARDS = 2 * (1 + MAX_REPEATS * MAX_ROUNDS)
"""That a comparison of forwards as short as those of the machine here makes."""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine on which forwards too take the time of its clock."""
    machine = Machine(path=tmp_path / "measurements.json")
    monkeypatch.setattr(comparing, "time", machine.clock)
    return machine


def slower_in_a_forward(machine, extra_ms=30.0):
    """What a kernel does that looks fast while it is timed alone."""

    def spoil(*call):
        if not machine.stopwatches[-1].running:
            machine.clock.device_ms += extra_ms
        return off_by(0.01)(*call)

    return spoil


def sampled(machine, model=None, steps=STEPS, **policy):
    comfy = machine.comfy(model, **{"compare_with_native": "first time", **policy})
    return comfy, comfy.sample(steps)


def same_bits(one, other):
    return all(
        torch.equal(left, right)
        for outputs in zip(one, other, strict=True)
        for left, right in zip(*outputs, strict=True)
    )


# -- when


def test_the_first_forward_is_compared_once_and_remembered(machine):
    machine.add("fast", 1.0, spoil=off_by(0.01))
    comfy, _ = sampled(machine)
    (comparison,) = comfy.run()["comparisons"]
    assert comparison == {
        "native_ms": pytest.approx(30.0),
        "plan_ms": pytest.approx(3.0),
        "noise": pytest.approx(0.0),
        "relative_l2": pytest.approx(0.01, rel=1e-3),
        "cosine": pytest.approx(1.0),
        "psnr": pytest.approx(comparison["psnr"]),
        "faster": True,
        "remembered": False,
    }
    assert 20 < comparison["psnr"] < 80
    # the forward itself is no part of what is counted apart
    assert comfy.run()["comparison_calls"] == 3 * FORWARDS
    assert (comfy.run()["forwards"], served(comfy.run())) == (4, {"fast": 12})
    comfy.sample(STEPS)
    assert comfy.run()["comparison_calls"] == 0
    assert comfy.run()["comparisons"] == [{**comparison, "remembered": True}]
    later, _ = sampled(machine)
    assert later.run()["comparison_calls"] == 0
    assert later.run()["comparisons"] == [{**comparison, "remembered": True}]


@pytest.mark.parametrize(
    ("when", "compared"), [("first time", [1, 0, 0]), ("every run", [1, 1, 1]), ("never", [0] * 3)]
)
@pytest.mark.parametrize("kernel", ["auto", "fast"])
def test_how_often_is_the_persons_choice(machine, when, compared, kernel):
    machine.add("fast", 1.0)
    comfy, _ = sampled(machine, kernel=kernel, compare_with_native=when)
    comfy.sample(STEPS)
    comfy.sample(STEPS)
    assert [run["comparison_calls"] for run in comfy.runs()] == [3 * FORWARDS * number for number in compared]
    assert [served(run) for run in comfy.runs()] == [{"fast": 12}] * 3


def test_every_size_model_and_choice_is_compared_of_its_own(machine):
    machine.add("fast", 1.0)
    comfy, _ = sampled(machine)

    def calls_for(**policy):
        other, _ = sampled(machine, **policy)
        return other.run()["comparison_calls"]

    assert calls_for() == 0
    assert calls_for(kernel="fast") > 0
    assert calls_for(tolerance=0.05) > 0

    class OtherModel:
        pass

    comfy.diffusion_model = OtherModel()
    comfy.sample()
    assert comfy.run()["comparison_calls"] > 0
    comfy.sample()
    assert comfy.run()["comparison_calls"] == 0
    comfy.sample((1.0, 0.0), lambda *step: comfy.forward(1.0, batch=2))
    assert comfy.run()["comparison_calls"] > 0


def test_long_forwards_are_timed_once(machine):
    machine.native_ms = 500.0
    machine.add("fast", 200.0)
    comfy, _ = sampled(machine)
    assert comfy.run()["comparison_calls"] == 2 * 3


def test_nothing_is_compared_where_nothing_is_served(machine):
    machine.add("slow", 100.0)
    comfy, _ = sampled(machine)
    assert (comfy.run()["comparisons"], comfy.run()["comparison_calls"]) == ([], 0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"patches_replace": {"dit": {("double_block", 0): "f"}}}, "replaces blocks"),
        ({"wrappers": {"diffusion_model": {"easycache": ["f"]}}}, "easycache"),
        ({"wrappers": {"apply_model": {"a": ["f"], "sagescope": ["g"]}}}, "(a)"),
        ({"patches_replace": {"attn1": {}}}, None),
        ({"wrappers": {"apply_model": {"sagescope": ["f"], None: ["g"]}}}, "(without a name)"),
        ({"wrappers": {"apply_model": {"sagescope": ["f"], None: []}}}, None),
        ({"wrappers": {"diffusion_model": {"easycache": [], "torch.compile": ["f"]}}}, None),
        ({"wrappers": {"outer_sample": {"other": ["f"]}}}, None),
    ],
)
def test_what_another_forward_would_disturb_is_not_compared(machine, options, why):
    machine.add("fast", 1.0)
    comfy = machine.comfy(compare_with_native="first time")
    comfy.options.update(options)
    comfy.sample(STEPS)
    texts = [event["text"] for event in comfy.run()["events"]]
    assert (comfy.run()["comparison_calls"] > 0) is (why is None)
    if why is None:
        assert texts == []
    else:
        (text,) = texts
        assert text.startswith("not compared with native: ")
        assert why in text
    assert (obstacle(options, "sagescope") is None) is (why is None)


# -- what follows


def test_a_plan_that_is_not_faster_becomes_native_the_same_forward_included(machine):
    machine.add("deceptive", 1.0, spoil=slower_in_a_forward(machine))
    model = Sites()
    comfy, outputs = sampled(machine, model)
    native = model.natively()
    assert same_bits(outputs, [native] * 4)
    run = comfy.run()
    assert served(run) == {"deceptive": 3, NATIVE: 9}
    (comparison,) = run["comparisons"]
    assert comparison["faster"] is False
    (event,) = run["events"]
    assert event["text"].startswith("native from here on: the whole model call took 93 ms with kernels and 30 ms")
    assert ("any kernel", "not_worthwhile") in {(entry["kernel"], entry["code"]) for entry in run["refusals"]}
    again = comfy.sample(STEPS)
    assert same_bits(again, outputs)
    assert served(comfy.run()) == {NATIVE: 12}


@pytest.mark.parametrize(("extra_ms", "kept"), [(8.0, True), (8.94, True), (8.96, False), (9.0, False)])
def test_faster_means_by_more_than_noise(machine, extra_ms, kept):
    machine.add("a", 1.0, spoil=slower_in_a_forward(machine, extra_ms))
    comfy, _ = sampled(machine)
    assert served(comfy.run()) == ({"a": 12} if kept else {"a": 3, NATIVE: 9})


def test_a_kernel_chosen_by_name_goes_on_however_slow_it_is(machine):
    machine.add("slow", 100.0, spoil=off_by(0.01))
    comfy, outputs = sampled(machine, kernel="slow")
    assert served(comfy.run()) == {"slow": 12}
    assert comfy.run()["comparisons"][0]["faster"] is False
    assert same_bits(outputs[1:], outputs[:1] * 3)
    assert comfy.run()["events"] == []


def test_every_run_tries_again_what_was_not_faster_before(machine):
    spoil = slower_in_a_forward(machine)
    fast = []
    machine.add("moody", 1.0, spoil=lambda *call: off_by(0.01)(*call) if fast else spoil(*call))
    comfy, _ = sampled(machine, compare_with_native="every run")
    assert served(comfy.run()) == {"moody": 3, NATIVE: 9}
    comfy.sample(STEPS)
    assert served(comfy.run()) == {"moody": 3, NATIVE: 9}
    fast.append(1)
    comfy.sample(STEPS)
    assert served(comfy.run()) == {"moody": 12}
    assert [len(run["comparisons"]) for run in comfy.runs()] == [1, 1, 1]


@pytest.mark.parametrize("extra_ms", [0.0, 30.0])
@pytest.mark.parametrize("tolerance", [0.1, None])
def test_a_cold_run_and_a_warm_one_have_the_same_bits(machine, extra_ms, tolerance):
    model = Sites(calls=4)

    def rough_at_one_site(*call):
        return off_by(0.3 if model.site == 2 else 0.01)(*call)

    deceptive = slower_in_a_forward(machine, extra_ms)
    machine.add("fastest", 1.0, spoil=lambda *call: (deceptive(*call), rough_at_one_site(*call))[1])
    machine.add("fast", 2.0, spoil=off_by(0.02), tolerance=fake_backend().tolerance._replace(relative_l2=1.0))
    _, cold = sampled(machine, model, tolerance=tolerance)
    runs = machine.stopwatches[0].runs
    warm_comfy, warm = sampled(machine, model, tolerance=tolerance)
    assert runs > 0
    assert machine.stopwatches[1].runs == 0
    assert warm_comfy.run()["comparison_calls"] == 0
    assert same_bits(cold, warm)
    assert same_bits(cold[1:], cold[:1] * 3)
    assert (NATIVE in served(warm_comfy.run())) is (extra_ms > 0)


def test_calls_of_a_model_call_that_was_planned_again_are_counted_apart(asynchronous):
    made = []
    asynchronous.native_ms, asynchronous.native_host_ms = 0.3, 0.03
    asynchronous.add("saves device time", 0.15, 0.09, exact=True)
    model = launching(asynchronous, 0.1, 9.0)
    comfy, _ = sampled(
        asynchronous,
        lambda attention, options: model(lambda *args, **kw: made.append(1) or attention(*args, **kw), options),
    )
    run = comfy.run()
    assert any("planned again" in event["text"] for event in run["events"])
    assert run["calls"] + run["comparison_calls"] == len(made)
    assert f"and {run['comparison_calls']} calls more to compare and plan" in to_markdown(
        build_report(comfy.dispatcher.snapshot(), "0.1.0", None, True)
    )


def test_calls_add_up_with_those_of_comparisons_apart(machine):
    made = []
    machine.add("fast", 1.0)
    model = Sites()
    comfy = machine.comfy(
        lambda attention, options: model(lambda *args, **kw: made.append(1) or attention(*args, **kw), options),
        compare_with_native="every run",
    )
    for _ in range(3):
        comfy.sample(STEPS)
    runs = comfy.runs()
    assert sum(run["calls"] + run["comparison_calls"] for run in runs) == len(made)
    for run in runs:
        for table in ("calls_by_kernel", "sites", "shapes"):
            assert sum(entry["calls"] for entry in run[table]) == run["calls"] == 12


def test_running_out_of_memory_while_comparing_is_no_comparison(machine):
    calls = []

    def spoil(*call):
        if not machine.stopwatches[-1].running:
            calls.append(1)
        if len(calls) == 1 + 3 + 2:  # its small example, the forward, and one call of the forward to compare
            raise torch.OutOfMemoryError("CUDA out of memory")
        return attention(*call)

    machine.add("large", 1.0, spoil=spoil)
    model = Sites()
    comfy, outputs = sampled(machine, model)
    assert comfy.run()["comparisons"] == []
    assert served(comfy.run()) == {"large": 3, NATIVE: 9}
    assert same_bits(outputs[1:], [model.natively()] * 3)
    comfy.sample(STEPS)
    assert comfy.run()["comparisons"][0]["faster"]


# -- numbers without a finite value


@pytest.mark.parametrize(
    ("native", "plan", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], (0.0, 1.0, None)),
        ([0.0, 0.0], [0.0, 0.0], (0.0, 1.0, None)),
        ([0.0, 0.0], [1.0, 0.0], (None, 0.0, None)),
        ([math.nan, 1.0], [1.0, 1.0], (None, None, None)),
        ([1.0, 1.0], [math.inf, 1.0], (None, None, None)),
        ([0.0, 2.0], [0.0, 1.0], (0.5, 1.0, 20 * math.log10(2 / math.sqrt(0.5)))),
    ],
)
def test_a_comparison_is_plain_json_and_read_back(native, plan, expected):
    comparison, *outputs = compare_forwards(lambda: torch.tensor(native), lambda: (torch.tensor(plan),), None)
    assert comparison[-3:] == pytest.approx(expected)
    assert Comparison.from_json(json.loads(json.dumps(comparison._asdict(), allow_nan=False))) == comparison
    assert torch.equal(outputs[1][0].nan_to_num(), torch.tensor(plan).nan_to_num())


GOOD = Comparison(2.0, 1.0, noise=0.0, relative_l2=0.0, cosine=1.0, psnr=None)._asdict()


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {name: value for name, value in GOOD.items() if name != "noise"},
        {**GOOD, "more": 1.0},
        *({**GOOD, name: None} for name in ("native_ms", "plan_ms", "noise")),
        *({**GOOD, name: value} for name in GOOD for value in (math.inf, math.nan, True, "0")),
    ],
)
def test_what_is_no_comparison_is_none(value):
    assert Comparison.from_json(GOOD) is not None
    assert Comparison.from_json(value) is None


@pytest.mark.parametrize(
    ("plan_ms", "noise", "faster"),
    [(99.4, 0.0, True), (99.6, 0.0, False), (101.0, 0.0, False), (97.0, 0.04, False), (95.0, 0.04, True)],
)
def test_a_plan_is_faster_when_it_is_so_by_more_than_two_native_times_differ(plan_ms, noise, faster):
    assert Comparison(**{**GOOD, "native_ms": 100.0, "plan_ms": plan_ms, "noise": noise}).faster is faster


def taking(clock, *milliseconds):
    """A forward that takes these times in turn, and then the last one."""
    left = list(milliseconds)

    def forward():
        clock.device_ms += left.pop(0) if len(left) > 1 else left[0]
        return torch.ones(2)

    return forward


@pytest.mark.parametrize(
    ("native", "plan", "native_ms", "noise"),
    [
        ((500,), (450,), 500, 0.0),
        ((150, 180, 180, 200), (110,), 150, 0.0),  # every native time is longer
        ((150, 180, 180), (151,), 150, 0.2),
        ((120, 105, 110, 116), (110,), 105, 113 / 105 - 1),
        ((40,), (50,), 40, 0.0),
    ],
)
def test_noise_is_by_how_much_native_usually_takes_longer_than_at_best(monkeypatch, native, plan, native_ms, noise):
    monkeypatch.setattr(comparing, "time", clock := Clock())
    found = compare_forwards(taking(clock, *native), taking(clock, *plan), None)[0]
    assert (found.native_ms, found.plan_ms) == (pytest.approx(native_ms), pytest.approx(plan[0]))
    assert found.noise == pytest.approx(noise)


@pytest.mark.parametrize(("host_bound", "noise"), [(None, 0.0), (False, 0.0), (True, 0.05)])
def test_where_the_host_limits_a_forward_a_few_percent_are_noise(monkeypatch, host_bound, noise):
    """Even where each time of the plan is shorter than every native one."""
    for plan_ms, faster in ((0.94 * 150, True), (0.97 * 150, not host_bound), (0.996 * 150, False)):
        monkeypatch.setattr(comparing, "time", clock := Clock())
        found = compare_forwards(taking(clock, 150), taking(clock, plan_ms), None, host_bound)[0]
        assert found.noise == pytest.approx(noise)
        assert found.faster is faster
    monkeypatch.setattr(comparing, "time", clock := Clock())
    assert compare_forwards(taking(clock, 150, 180, 180), taking(clock, 151), None, True)[0].noise == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("milliseconds", "forwards"),
    [(500, 1), (250, 2), (150, 3), (110, 4), (60, 1 + 2 * 4), (30, 1 + 4 * 4), (10, 1 + 8 * 5), (0, 1 + 8 * 5)],
)
def test_short_forwards_are_run_in_a_row_and_until_it_is_enough(monkeypatch, milliseconds, forwards):
    monkeypatch.setattr(comparing, "time", clock := Clock())
    made = []

    def forward():
        clock.device_ms += milliseconds
        made.append(1)
        return torch.ones(2)

    compare_forwards(forward, lambda: forward() * 1, None)
    assert len(made) == 2 * forwards


def test_what_a_forward_waits_for_between_two_of_them_counts(monkeypatch):
    """A plan that keeps the host from running ahead is not as fast as one that takes as long by itself."""
    clock = Clock()
    device = Asynchronous(clock)
    monkeypatch.setattr(comparing, "time", device)

    def launching(waits):
        def forward():
            clock.host_ms += 10.0
            clock.device_ms = max(clock.device_ms, clock.host_ms - 10.0) + 12.0
            if waits:
                device.wait()
            return torch.ones(2)

        return forward

    comparison = compare_forwards(launching(False), launching(True), device.wait)[0]
    assert comparison.plan_ms > comparison.native_ms + 1.0 or comparison.plan_ms == pytest.approx(12.0)
    assert not comparison.faster


def test_a_model_whose_output_is_zero_runs_and_reports(machine):
    machine.add("exact", 1.0, exact=True)
    model = Sites()
    comfy, _ = sampled(machine, lambda *given: [output * 0.0 for output in model(*given)])
    snapshot = comfy.dispatcher.snapshot()
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot
    (comparison,) = comfy.run()["comparisons"]
    assert comparison["relative_l2"] == 0.0
    assert "Whole model call" in to_markdown(build_report(snapshot, "0.1.0", None, True))
    assert sampled(machine)[0].run()["comparison_calls"] == 0


# -- what limits the forward


class Asynchronous:
    """A device behind a host: launches take the host's time, and whoever waits goes on when the later of both is."""

    def __init__(self, clock):
        self.clock = clock

    def wait(self):
        self.clock.host_ms = self.clock.device_ms = max(self.clock.host_ms, self.clock.device_ms)

    def perf_counter(self):
        return self.clock.host_ms / 1e3


@pytest.fixture
def asynchronous(machine, monkeypatch):
    device = Asynchronous(machine.clock)
    monkeypatch.setattr(comparing, "time", device)
    monkeypatch.setattr(dispatcher, "waiter", lambda tensor: device.wait)
    return machine


def launching(machine, host_ms, device_ms=0.0):
    """A model with launches of its own beside its attention calls."""
    sites = Sites()

    def model(attention, options):
        machine.clock.host_ms += host_ms
        machine.clock.device_ms += device_ms
        return sites(attention, options)

    return model


@pytest.mark.parametrize(
    ("native_ms", "around", "expected", "limits", "planned_again"),
    [
        # short calls are taken to be limited by the host
        (0.3, (5.0, 0.0), NATIVE, [True], False),
        (0.3, (0.1, 9.0), "saves device time", [False], True),
        # longer ones by the device
        (0.8, (0.1, 9.0), "saves device time", [False], False),
        (0.8, (9.0, 0.0), NATIVE, [True], True),
        # and of calls this long it is not asked; where the device has nothing to save, the comparison finds that out
        (3.0, (0.1, 0.0), "saves device time", [], False),
        (3.0, (20.0, 0.0), NATIVE, [], False),
    ],
)
def test_what_limits_the_forward_is_measured_and_decides(
    asynchronous, native_ms, around, expected, limits, planned_again
):
    asynchronous.native_ms, asynchronous.native_host_ms = native_ms, 0.03
    asynchronous.add("saves device time", native_ms / 2, 0.09, exact=True)
    steps = (1.0, 0.5, 0.0)
    cold, first = sampled(asynchronous, launching(asynchronous, *around), steps=steps)
    run = cold.run()
    assert any("planned again" in event["text"] for event in run["events"]) is planned_again
    assert (run["forwards"], run["calls"]) == (2, 6)  # however often they were made: what is besides is counted apart
    assert not planned_again or served(run) == {expected: 6}
    assert all(sum(entry["calls"] for entry in run[table]) == 6 for table in ("sites", "shapes"))
    found = cold.dispatcher.session.measurements.entries().get("limits", {}).values()
    assert [entry["host_bound"] for entry in found] == limits
    warm, second = sampled(asynchronous, launching(asynchronous, *around), steps=steps)
    assert served(warm.run()) == {expected: 6}
    assert warm.run()["comparison_calls"] == 0
    assert same_bits(first, second)


@pytest.mark.parametrize(("around_ms", "expected"), [(20.0, "saves host time"), (40.0, NATIVE)])
def test_a_forward_that_the_host_limits_must_gain_more_than_hosts_vary(asynchronous, around_ms, expected):
    """Three calls that save half a millisecond each: 6.5 % of a shorter forward, 3.5 % of a longer one."""
    asynchronous.native_ms, asynchronous.native_host_ms = 0.1, 1.0
    asynchronous.add("saves host time", 0.1, 0.5, exact=True)
    steps = (1.0, 0.5, 0.0)
    sampled(asynchronous, launching(asynchronous, around_ms), steps=steps)
    warm, _ = sampled(asynchronous, launching(asynchronous, around_ms), steps=steps)
    assert served(warm.run()) == {expected: 6}


def test_forwards_that_share_calls_and_are_limited_differently_have_plans_of_their_own(asynchronous, monkeypatch):
    asynchronous.native_ms, asynchronous.native_host_ms = 0.3, 0.03
    asynchronous.add("saves device time", 0.15, 0.09, exact=True)
    limited = {1: launching(asynchronous, 5.0), 2: launching(asynchronous, 0.1, 9.0)}
    comfy = asynchronous.comfy(compare_with_native="first time")
    planned = []
    plan = comfy.dispatcher._planner.plan
    monkeypatch.setattr(comfy.dispatcher._planner, "plan", lambda *given: planned.append(1) or plan(*given))
    for batch in (1, 2, 1, 2):
        comfy.forward_once = limited[batch]
        comfy.forward = lambda sigma, batch=batch: FakeComfy.forward(comfy, sigma, batch=batch)
        comfy.sample((1.0, 0.5, 0.0))
    assert [served(run) for run in comfy.runs()[2:]] == [{NATIVE: 6}, {"saves device time": 6}]
    assert len(planned) == 3 + 3  # once for each site and limit; what was guessed rightly holds


@pytest.mark.parametrize("obstructed", ["never compared", "another node", "no memory"])
def test_where_native_cannot_be_run_as_well_the_length_of_the_calls_tells(asynchronous, obstructed):
    asynchronous.native_ms, asynchronous.native_host_ms = 0.3, 0.03
    asynchronous.add("saves device time", 0.15, 0.09, exact=True)
    policy = {"compare_with_native": "never"} if obstructed == "never compared" else {}
    model = launching(asynchronous, 0.1, 9.0)
    comfy = asynchronous.comfy(None, **{"compare_with_native": "first time", **policy})

    def forward(attention, options):
        if obstructed == "no memory" and OVERRIDE not in options and comfy.run()["forwards"] == 1:
            raise torch.OutOfMemoryError("out of memory")
        return model(attention, options)

    comfy.forward_once = forward
    if obstructed == "another node":
        comfy.options["wrappers"] = {"diffusion_model": {"easycache": [forward]}}
    comfy.sample((1.0, 0.5, 0.0))
    assert (comfy.run()["status"], served(comfy.run())) == ("finished", {NATIVE: 6})
    assert comfy.dispatcher.session.measurements.entries().get("limits", {}) == {}


# -- past us


class Watching:
    """A model that notes the override and the options dict of each of its forwards."""

    def __init__(self, model):
        self.model, self.overrides, self.options = model, [], []

    def __call__(self, attention, options):
        self.overrides.append(options.get(OVERRIDE))
        self.options.append(options)
        return self.model(attention, options)


def test_after_a_native_forward_the_model_sees_no_override_and_the_counts_go_on():
    kernel = FakeKernel()
    comfy = FakeComfy(make_dispatcher(fake_backend(kernel, head_dims=(64,))), model := Watching(Sites()))
    comfy.sample(STEPS)
    assert model.overrides == [comfy.dispatcher, None, None, None]
    assert (comfy.run()["forwards"], served(comfy.run())) == (4, {NATIVE: 12})
    assert [(site["site"], site["block"], site["calls"]) for site in comfy.run()["sites"]] == [
        (0, "double 0", 4),
        (1, "double 1", 4),
        (2, "double 2", 4),
    ]
    assert [(entry["code"], entry["calls"]) for entry in comfy.run()["refusals"]] == [("head_dim", 12)]
    assert comfy.native.calls == 12
    del model.overrides[:]
    comfy.sample(STEPS)
    assert model.overrides == [comfy.dispatcher, None, None, None]
    assert served(comfy.run()) == {NATIVE: 12}


def test_the_override_that_was_there_before_comes_back():
    def previous(func, *args, **kwargs):
        return func(*args, **kwargs) * 2

    dispatcher = make_dispatcher(fake_backend(head_dims=(64,)), previous=previous)
    comfy = FakeComfy(dispatcher, model := Watching(Sites()))
    outputs = comfy.sample(STEPS)
    assert model.overrides == [dispatcher, previous, previous, previous]
    assert same_bits(outputs, [[output * 2 for output in Sites().natively()]] * 4)
    assert served(comfy.run()) == {NATIVE: 12}


def test_a_changed_shape_brings_us_back():
    comfy = FakeComfy(make_dispatcher(fake_backend(head_dims=(64,))), model := Watching(Sites()))
    served_model, native_model = Sites(head_dim=64), model.model
    comfy.sample((1.0, 0.5, 0.0), lambda *step: comfy.forward(1.0, batch=2) if step[0] == 0 else None)
    ours = comfy.dispatcher
    assert model.overrides == [ours, ours, None]

    def grow(*step):
        model.model = served_model
        for _ in range(2):
            comfy.forward(1.0, batch=3)
        model.model = native_model

    del model.overrides[:]
    comfy.sample((1.0, 0.5, 0.0), grow)
    assert model.overrides == [ours, ours, ours, None, ours, ours]
    assert served(comfy.run()) == {NATIVE: 6, "fake kernel": 12}


def test_a_forward_with_a_served_call_keeps_us():
    comfy = FakeComfy(make_dispatcher(skip_blocks=frozenset({0, 2})), model := Watching(Sites()))
    comfy.sample(STEPS)
    assert model.overrides == [comfy.dispatcher] * 4


def test_steps_outside_the_window_go_past_us_and_those_inside_do_not():
    comfy = FakeComfy(make_dispatcher(start_percent=0.5), model := Watching(Sites()))
    comfy.sample((1.0, 0.9, 0.8, 0.5, 0.2, 0.0))
    ours = comfy.dispatcher
    assert model.overrides == [ours, None, None, ours, ours]
    assert served(comfy.run()) == {NATIVE: 9, "fake kernel": 6}


def test_a_forward_without_a_call_says_nothing_about_the_next_one():
    model = Watching(Sites())
    cached = [True, False, True, False]

    def caching(attention, options):
        return [] if cached.pop(0) else model(attention, options)

    comfy = FakeComfy(make_dispatcher(), caching)
    comfy.sample(STEPS)
    assert model.overrides == [comfy.dispatcher] * 2
    assert (comfy.run()["forwards"], served(comfy.run())) == (4, {"fake kernel": 6})


def test_where_another_node_may_leave_calls_out_we_stay_and_count():
    model = Sites()
    cached = [False, True, True, False]

    def caching(attention, options):
        return [] if cached.pop(0) else model(attention, options)

    comfy = FakeComfy(make_dispatcher(fake_backend(head_dims=(64,))), caching)
    comfy.options["wrappers"] = {"diffusion_model": {"easycache": [caching]}}
    comfy.sample(STEPS)
    assert served(comfy.run()) == {NATIVE: 6}


@pytest.mark.parametrize("by_name", [True, False])
def test_the_options_of_the_caller_are_left_alone(by_name):
    dispatcher = make_dispatcher(fake_backend(head_dims=(64,)))
    comfy = FakeComfy(dispatcher)
    seen, model = [], plain_model(**LONG)

    def apply_model(x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **others):
        seen.append((transformer_options, control, others))
        return model(comfy.attention, transformer_options)

    given = {OVERRIDE: dispatcher, "sigmas": object(), "wrappers": {}}
    before = copy.copy(given)
    executor = Executor(apply_model, comfy)
    t = torch.ones(1)
    for _ in range(2):
        if by_name:
            dispatcher.apply_model(executor, None, t, transformer_options=given, control="c", y=1)
        else:
            dispatcher.apply_model(executor, None, t, None, None, "c", given, y=1)
    assert given == before
    assert seen[0] == (given, "c", {"y": 1})
    assert seen[0][0] is given
    assert seen[1] == ({name: value for name, value in given.items() if name != OVERRIDE}, "c", {"y": 1})
    assert served(comfy.run()) == {NATIVE: 4}


def test_another_override_in_our_place_is_not_taken_out():
    dispatcher = make_dispatcher(fake_backend(head_dims=(64,)))
    comfy = FakeComfy(dispatcher, model := Watching(Sites()))

    def other(func, *args, **kwargs):
        return dispatcher.attend(func, *args, **kwargs)

    comfy.options[OVERRIDE] = other
    comfy.sample(STEPS)
    assert model.overrides == [other] * 4
    assert served(comfy.run()) == {NATIVE: 12}
    assert Native().calls == 0
