"""What auto measures, when it measures again, and what it makes of the times; all with a clock of the tests."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from sage_core.backends.starting_order import Preference
from sage_core.refusal import Refusal, RefusalCode
from tests.unit.conftest import LONG, TRIAL_CALLS, Machine, Sites, attention, fake_backend, off_by, plain_model, served

pytestmark = pytest.mark.usefixtures("one_thread")

NATIVE = "native"
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


def refused(run):
    """(kernel, code) of every reason of a run."""
    return {(entry["kernel"], entry["code"]) for entry in run["refusals"]}


def winner(machine, **policy):
    comfy = machine.comfy(plain_model(calls=1, **LONG), **policy)
    comfy.sample()
    (kernel,) = served(comfy.run())
    return kernel


# -- what the times decide


@pytest.mark.parametrize(
    ("exact_ms", "quantized_ms", "expected"),
    [
        (5.0, 4.0, "quantized"),
        (5.0, 4.84, "quantized"),
        (5.0, 4.86, "exact"),  # less than 3 % below the best exact one
        (5.0, 6.0, "exact"),
        (12.0, 9.6, "quantized"),
        (12.0, 9.8, NATIVE),
        (12.0, 15.0, NATIVE),
        (9.95, 15.0, NATIVE),  # within what two measurements differ by
        (10.0, 10.0, NATIVE),
        (9.8, 15.0, "exact"),
    ],
)
def test_the_fastest_serves_if_it_is_worth_it(exact_ms, quantized_ms, expected):
    machine = Machine(native_ms=10.0)
    machine.add("exact", exact_ms, exact=True)
    machine.add("quantized", quantized_ms)
    assert winner(machine) == expected


@pytest.mark.parametrize(("host_ms", "expected"), [(0.03, "exact"), (0.06, NATIVE)])
def test_where_native_calls_are_short_a_kernel_that_launches_slower_loses(host_ms, expected):
    machine = Machine(native_ms=0.3, native_host_ms=0.05)
    machine.add("exact", 0.2, host_ms, exact=True)
    assert winner(machine) == expected


def test_where_native_calls_are_long_the_device_counts():
    machine = Machine(native_ms=3.0, native_host_ms=0.05)
    machine.add("exact", 2.0, 0.5, exact=True)
    assert winner(machine) == "exact"


def test_every_kernel_that_lost_says_by_how_much():
    machine = Machine()
    machine.add("slow", 20.0)
    machine.add("exact", 5.0, exact=True)
    machine.add("near", 4.9)
    comfy = machine.comfy()
    comfy.sample()
    assert served(comfy.run()) == {"exact": 3}
    details = {entry["kernel"]: entry["detail"] for entry in comfy.run()["refusals"]}
    assert details == {
        "slow": "slow takes 20 ms; exact takes 5 ms",
        "near": "near takes 4.9 ms; exact takes 5 ms, and 3% less is asked for",
    }
    (shape,) = comfy.run()["shapes"]
    assert {name: times["device_ms"] for name, times in shape["times"].items()} == pytest.approx(
        {NATIVE: 10.0, "slow": 20.0, "exact": 5.0, "near": 4.9}
    )


def test_what_auto_starts_with_has_no_say_once_it_is_measured():
    machine = Machine()
    machine.add("first in the order", 8.0)
    machine.add("not in the order", 2.0)
    session = machine.session(order=[Preference("first in the order", min_qo_len=100)])
    comfy = machine.comfy(session=session)
    comfy.sample()
    assert served(comfy.run()) == {"not in the order": 3}


def test_a_kernel_that_auto_may_not_take_is_not_timed():
    machine = Machine()
    kernel = machine.add("preview", 1.0, auto=False)
    machine.add("fast", 2.0)
    comfy = machine.comfy(session=machine.session(order=["fast"]))
    comfy.sample()
    assert served(comfy.run()) == {"fast": 3}
    assert kernel.calls == []


@pytest.mark.parametrize(
    ("fields", "spoil", "expected"),
    [
        ({}, None, "better"),
        ({"archs": ("sm90",)}, None, "slower"),  # not for this device
        ({"load": lambda *_: (Refusal(RefusalCode.NOT_INSTALLED, "not there"),)}, None, "slower"),
        ({}, off_by(0.5), "slower"),  # wrong on the small example
    ],
)
def test_a_kernel_is_tried_only_where_the_one_that_does_its_work_faster_may_not_serve(fields, spoil, expected):
    machine = Machine()
    slower = machine.add("slower", 2.0, slower_than=("better",))
    machine.add("better", 3.0, spoil=spoil, **fields)  # as slow here as it never is, to see that it does not matter
    assert winner(machine) == expected
    assert bool(slower.calls) is (expected == "slower")


def test_a_kernel_that_another_is_faster_than_serves_when_it_is_chosen_by_name():
    machine = Machine()
    machine.add("slower", 2.0, slower_than=("better",))
    machine.add("better", 3.0)
    assert winner(machine, kernel="slower") == "slower"


def test_why_an_expected_kernel_is_absent_is_said():
    machine = Machine()
    machine.add("fast", 2.0)
    absent = Refusal(RefusalCode.NOT_INSTALLED, "not installed")
    machine.backends.append(fake_backend(name="absent", load=lambda *asked: (absent,)))
    comfy = machine.comfy()
    comfy.sample()
    assert served(comfy.run()) == {"fast": 3}
    assert refused(comfy.run()) == {("absent", "not_installed")}


# -- when it measures


@pytest.mark.parametrize(("qo_len", "kv_len", "measured"), [(512, 512, True), (511, 512, False), (512, 511, False)])
def test_short_calls_are_not_measured(qo_len, kv_len, measured):
    machine = Machine()
    machine.add("fast", 1.0)
    comfy = machine.comfy(plain_model(qo_len=qo_len, kv_len=kv_len))
    comfy.sample()
    assert served(comfy.run()) == {"fast" if measured else NATIVE: 2}
    assert (machine.stopwatches[0].runs > 0) is measured
    assert refused(comfy.run()) == (set() if measured else {("any kernel", "not_worthwhile")})


def test_an_unknown_arch_is_native_and_nothing_is_measured_or_loaded():
    machine = Machine()
    machine.backends.append(fake_backend(name="fast", load=lambda *asked: pytest.fail("loaded")))
    comfy = machine.comfy(session=machine.session(order=None))
    comfy.sample()
    assert served(comfy.run()) == {NATIVE: 3}
    assert refused(comfy.run()) == {("any kernel", "arch")}
    assert machine.stopwatches[0].runs == 0


def test_a_kernel_chosen_by_name_is_never_measured():
    machine = Machine()
    machine.add("slow", 100.0)
    machine.add("fast", 1.0)
    comfy = machine.comfy(kernel="slow")
    comfy.sample()
    assert served(comfy.run()) == {"slow": 3}
    assert machine.stopwatches[0].runs == 0


def test_measuring_is_once_per_shape_whatever_the_sites_models_and_runs():
    machine = Machine()
    machine.add("fast", 1.0)
    session = machine.session()
    comfy = machine.comfy(Sites(calls=5), session)
    comfy.sample((1.0, 0.5, 0.0))
    (stopwatch,) = machine.stopwatches
    first = stopwatch.runs
    assert first > 0
    comfy.sample()
    machine.comfy(Sites(calls=2), session).sample()
    assert stopwatch.runs == first
    comfy.forward_once = Sites(calls=2, qo_len=640)
    comfy.sample()
    assert stopwatch.runs == 2 * first


def test_times_are_remembered_over_a_restart(tmp_path):
    machine = Machine(path=tmp_path / "measurements.json")
    machine.add("slow", 9.0)
    machine.add("fast", 1.0)
    first = machine.comfy()
    cold = first.sample()
    second = machine.comfy()
    warm = second.sample()
    assert machine.stopwatches[0].runs > 0
    assert machine.stopwatches[1].runs == 0
    for before, after in zip(cold[0], warm[0], strict=True):
        assert torch.equal(before, after)
    own = {"uid": "", "started": 0, "seconds": 0}
    assert {**first.run(), **own} == {**second.run(), **own}


def test_another_native_attention_is_measured_anew(tmp_path):
    def other_attention(*args, **kwargs):
        machine.clock.device_ms += 0.5
        return native(*args, **kwargs)

    machine = Machine(path=tmp_path / "measurements.json")
    machine.add("fast", 1.0)
    comfy = machine.comfy()
    comfy.sample()
    assert served(comfy.run()) == {"fast": 3}
    comfy = machine.comfy()
    native = comfy.native.function
    comfy.native = other_attention
    comfy.sample()
    assert machine.stopwatches[1].runs > 0
    assert served(comfy.run()) == {NATIVE: 3}


def test_a_kernel_that_was_measured_and_is_gone_makes_way_for_the_next(tmp_path):
    machine = Machine(path=tmp_path / "measurements.json")
    machine.add("fastest", 1.0)
    machine.add("fast", 2.0)
    assert winner(machine) == "fastest"
    absent = Refusal(RefusalCode.NOT_INSTALLED, "not installed")
    machine.backends[0] = fake_backend(name="fastest", load=lambda *asked: (absent,))
    comfy = machine.comfy(plain_model(calls=1, **LONG))
    comfy.sample()
    assert served(comfy.run()) == {"fast": 1}
    assert ("fastest", "not_installed") in refused(comfy.run())
    assert machine.stopwatches[1].runs == 0
    del machine.backends[0]  # as a later version of the pack may do
    assert winner(machine) == "fast"


def test_a_kernel_that_is_new_is_measured_and_the_others_with_it(tmp_path):
    machine = Machine(path=tmp_path / "measurements.json")
    machine.add("fast", 2.0)
    assert winner(machine) == "fast"
    machine.add("new", 1.0)
    assert winner(machine) == "new"
    assert machine.stopwatches[1].runs > 0
    assert winner(machine) == "new"
    assert machine.stopwatches[2].runs == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda times: times.pop(NATIVE),
        lambda times: times.update({NATIVE: "fast as light"}),
        lambda times: times.update({"fast": {"device_ms": -1, "host_ms": 0}}),
        lambda times: times.update({"fast": None}),
    ],
)
def test_times_that_make_no_sense_are_measured_again(tmp_path, damage):
    path = tmp_path / "measurements.json"
    machine = Machine(path=path)
    machine.add("fast", 1.0)
    assert winner(machine) == "fast"
    content = json.loads(path.read_text())
    (sections,) = content["fingerprints"].values()
    (times,) = sections["kernels"].values()
    damage(times)
    path.write_text(json.dumps(content))
    assert winner(machine) == "fast"
    assert machine.stopwatches[1].runs > 0


def test_a_kernel_that_there_was_no_time_for_is_remembered_as_such(tmp_path):
    machine = Machine(native_ms=4_000.0, path=tmp_path / "measurements.json")
    machine.add("first", 2_000.0)
    late = machine.add("late", 1.0)
    for _ in range(2):
        comfy = machine.comfy(plain_model(calls=2, **LONG))
        comfy.sample()
        assert served(comfy.run()) == {"first": 2}
        (entry,) = comfy.run()["refusals"]
        assert (entry["kernel"], entry["code"], entry["calls"]) == ("late", "not_worthwhile", 2)
        assert "not timed" in entry["detail"]
    assert len(late.calls) == TRIAL_CALLS, "more than its small example"
    assert machine.stopwatches[1].runs == 0


# -- what goes wrong while measuring


def fails_at(error, *numbers):
    """A kernel that raises at its calls of these numbers, the last of the small example being 0."""
    calls = Counter()

    def spoil(*call):
        calls["made"] += 1
        if calls["made"] - TRIAL_CALLS in numbers:
            raise type(error)(*error.args)
        return attention(*call)

    return spoil


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_kernel_that_raises_while_it_is_measured_is_retired(number, caplog):
    machine = Machine()
    broken = machine.add("broken", 1.0, spoil=fails_at(RuntimeError("no image"), *range(number, 100)))
    machine.add("fast", 2.0)
    session = machine.session()
    for _ in range(2):
        comfy = machine.comfy(session=session)
        comfy.sample()
        assert served(comfy.run()) == {"fast": 3}
        assert ("broken", "kernel_error") in refused(comfy.run())
    assert len(broken.calls) == TRIAL_CALLS + number
    assert len([record for record in caplog.records if "no image" in record.getMessage()]) == 1


def test_a_kernel_that_raised_while_it_was_measured_gets_another_chance_after_a_restart(tmp_path):
    machine = Machine(path=tmp_path / "measurements.json")
    machine.add("moody", 1.0, spoil=fails_at(RuntimeError("once"), 1))
    machine.add("fast", 2.0)
    assert [winner(machine), winner(machine)] == ["fast", "moody"]


def test_a_kernel_that_memory_was_too_short_for_while_measuring_is_out_for_the_run(tmp_path):
    machine = Machine(path=tmp_path / "measurements.json")
    large = machine.add("large", 1.0, spoil=fails_at(OUT_OF_MEMORY, 1))
    machine.add("fast", 2.0)
    comfy = machine.comfy()
    comfy.sample((1.0, 0.5, 0.0))
    assert served(comfy.run()) == {"fast": 6}
    assert refused(comfy.run()) == {("large", "out_of_memory")}
    assert len(large.calls) == TRIAL_CALLS + 1
    runs = machine.stopwatches[0].runs
    comfy.sample((1.0, 0.5, 0.0))
    assert machine.stopwatches[0].runs > runs
    assert served(comfy.run()) == {"large": 6}
    assert refused(comfy.run()) == {("fast", "not_worthwhile")} or refused(comfy.run()) == set()


def test_a_kernel_that_memory_was_too_short_for_when_it_was_tried_makes_the_run_native():
    machine = Machine()
    machine.add("large", 1.0, spoil=fails_at(OUT_OF_MEMORY, 0))
    machine.add("fast", 2.0)
    comfy = machine.comfy(kernel="large")
    comfy.sample((1.0, 0.5, 0.0))
    assert served(comfy.run()) == {NATIVE: 6}
    comfy.sample((1.0, 0.5, 0.0))
    assert served(comfy.run()) == {"large": 6}


# -- what smoothing costs


def smoothing(machine, plain_ms, smoothed_ms, plain_error=0.05, smoothed_error=0.01):
    """A kernel "s" whose pass over key takes time and makes it more accurate."""

    def function(query, key, value, tensor_layout, sm_scale, smooth_k):
        machine.clock.device_ms += smoothed_ms if smooth_k else plain_ms
        error = smoothed_error if smooth_k else plain_error
        return off_by(error)(query, key, value, tensor_layout, sm_scale)

    loose = fake_backend().tolerance._replace(relative_l2=1.0)
    machine.backends.append(fake_backend(function, name="s", options=("smooth_k",), smooth_k=True, tolerance=loose))


@pytest.mark.parametrize(
    ("smoothed_ms", "plain_error", "kernel", "smooth_k"),
    [
        (4.5, 0.05, "s", True),  # worth it: it takes 3 % less than the best exact kernel all the same
        (4.9, 0.05, "s", False),  # smoothing would eat up the gain
        (4.5, 0.5, "s", True),
        (4.9, 0.5, "exact", None),  # not accurate without, not fast enough with it
        (20.0, 0.05, "s", False),
    ],
)
def test_smoothing_is_measured_apart_and_kept_only_where_it_is_worth_its_time(
    smoothed_ms, plain_error, kernel, smooth_k
):
    machine = Machine()
    machine.add("exact", 5.0, exact=True)
    smoothing(machine, 4.0, smoothed_ms, plain_error)
    comfy = machine.comfy(tolerance=0.1)
    comfy.sample()
    assert served(comfy.run()) == {kernel: 3}
    assert {site["smooth_k"] for site in comfy.run()["sites"]} == {smooth_k}
    (shape,) = comfy.run()["shapes"]
    assert shape["times"]["s"]["device_ms"] == pytest.approx(4.0)
    assert shape["times"]["s with smooth_k"]["device_ms"] == pytest.approx(smoothed_ms)


def test_the_persons_choice_of_smoothing_is_what_is_measured(tmp_path):
    machine = Machine(path=tmp_path / "measurements.json")
    machine.add("exact", 5.0, exact=True)
    smoothing(machine, 4.0, 6.0)
    for choice, name, kernel in (
        ("on", "s with smooth_k", "exact"),
        ("off", "s", "s"),
        ("on", "s with smooth_k", "exact"),
    ):
        comfy = machine.comfy(tolerance=0.1, smooth_k=choice)
        comfy.sample()
        assert served(comfy.run()) == {kernel: 3}
        assert {"native", "exact", name} == comfy.run()["shapes"][0]["times"].keys()


@pytest.mark.parametrize("while_timed", [False, True])
def test_a_kernel_that_raises_is_not_called_again_with_smoothing(while_timed):
    calls = []

    def function(query, key, value, tensor_layout, sm_scale, smooth_k):
        calls.append(smooth_k)
        if query.shape[1] == 512 or not while_timed:  # 256 in the small example
            raise ValueError("bad")
        return attention(query, key, value, tensor_layout, sm_scale)

    machine = Machine()
    machine.backends.append(fake_backend(function, name="s", options=("smooth_k",), smooth_k=True))
    comfy = machine.comfy(tolerance=0.1)
    comfy.sample()
    assert served(comfy.run()) == {NATIVE: 3}
    tried = [False] * TRIAL_CALLS + [True] * TRIAL_CALLS
    assert calls == ([*tried, False] if while_timed else [False])


def test_running_out_of_memory_natively_passes_through():
    machine = Machine()
    machine.add("fast", 1.0)
    comfy = machine.comfy()

    def full(*args, **kwargs):
        raise OUT_OF_MEMORY

    comfy.native = full
    with pytest.raises(torch.OutOfMemoryError):
        comfy.sample()
    assert comfy.run()["events"] == []


@pytest.mark.parametrize("fails_with_smoothing", [False, True])
def test_a_kernel_that_raises_while_smoothing_is_tried_is_not_called_again(fails_with_smoothing):
    failures = []

    def function(query, key, value, tensor_layout, sm_scale, smooth_k):
        if query.shape[1] == 512 and smooth_k is fails_with_smoothing:  # not in its small example
            failures.append(smooth_k)
            raise ValueError("bad")
        return attention(query, key, value, tensor_layout, sm_scale)

    machine = Machine()
    machine.backends.append(fake_backend(function, name="a", options=("smooth_k",), smooth_k=True))
    comfy = machine.comfy(kernel="a", tolerance=0.1)
    comfy.sample()
    assert failures == [fails_with_smoothing]
    assert served(comfy.run()) == {NATIVE: 3}
    assert refused(comfy.run()) == {("a", "kernel_error")}


def test_measuring_costs_a_bounded_number_of_calls():
    machine = Machine(native_ms=50.0)
    fast, hopeless = machine.add("fast", 40.0), machine.add("hopeless", 200.0)
    assert winner(machine) == "fast"
    serving = 1
    assert len(fast.calls) == TRIAL_CALLS + 3 + serving
    assert len(hopeless.calls) == TRIAL_CALLS + 2


def test_a_quantized_kernel_is_checked_after_it_was_measured_and_loses_its_site_for_its_error():
    machine = Machine()
    machine.add("rough", 1.0, spoil=off_by(0.2), tolerance=fake_backend().tolerance._replace(relative_l2=1.0))
    machine.add("fine", 2.0, spoil=off_by(0.01))
    comfy = machine.comfy(tolerance=0.1)
    comfy.sample()
    assert served(comfy.run()) == {"fine": 3}
    assert refused(comfy.run()) == {("rough", "accuracy")}


# -- what the checks take


@pytest.fixture
def checks_take(monkeypatch):
    """Checks take this many milliseconds of the machine's clock, and are counted."""
    looked = Counter()

    def take(machine, device_ms, error=None):
        def looker(call, spec):
            def look(query, key, value, mask):
                looked["checks"] += 1
                machine.clock.device_ms += device_ms
                if error is not None:
                    raise error
                return lambda output: output.numel() == query.numel() or pytest.fail("no output of this call")

            return look

        monkeypatch.setattr("sage_core.candidates.looker", looker)
        return looked

    return take


@pytest.mark.parametrize(("check_ms", "expected"), [(0.0, "quantized"), (6.0, "quantized"), (7.0, "exact")])
def test_a_quantized_kernel_serves_only_if_it_earns_its_checks(checks_take, check_ms, expected):
    machine = Machine(native_ms=20.0)
    machine.add("exact", 10.0, exact=True)
    machine.add("quantized", 8.4)  # with a fifth of 7 ms more than 3 % below 10
    checks_take(machine, check_ms)
    assert winner(machine, tolerance=0.1) == expected


def test_what_a_check_takes_is_measured_once_and_remembered(checks_take, tmp_path):
    machine = Machine(path=tmp_path / "measurements.json")
    machine.add("quantized", 8.0)
    looked = checks_take(machine, 1.0)
    assert winner(machine, tolerance=0.1) == "quantized"
    measured = looked["checks"]
    assert 0 < measured < 20
    assert winner(machine, tolerance=0.1) == "quantized"
    assert looked["checks"] == measured
    (entry,) = json.loads((tmp_path / "measurements.json").read_text())["fingerprints"].values()
    assert [value["device_ms"] for value in entry["checks"].values()] == [1.0]


@pytest.mark.parametrize(("exact", "tolerance"), [(True, 0.1), (False, None)])
def test_no_check_is_timed_where_none_will_be_made(checks_take, exact, tolerance):
    machine = Machine()
    machine.add("kernel", 5.0, exact=exact)
    looked = checks_take(machine, 100.0)
    assert winner(machine, tolerance=tolerance) == "kernel"
    assert not looked


def test_a_check_that_memory_is_too_short_for_costs_nothing(checks_take):
    machine = Machine()
    machine.add("quantized", 5.0)
    looked = checks_take(machine, 100.0, error=OUT_OF_MEMORY)
    assert winner(machine, tolerance=0.1) == "quantized"
    assert looked["checks"] == 1


# -- while a CUDA graph is captured


def test_a_call_that_is_captured_before_it_has_a_plan_is_native_and_is_planned_when_it_comes_again(monkeypatch):
    machine = Machine()
    kernel = machine.add("exact", 5.0, exact=True)
    comfy = machine.comfy()
    monkeypatch.setattr("sage_core.planning.is_capturing", lambda device: True)
    comfy.sample()
    assert served(comfy.run()) == {NATIVE: 3}
    assert refused(comfy.run()) == {("any kernel", "stream_capture")}
    assert kernel.calls == []
    assert machine.stopwatches[0].runs == 0
    monkeypatch.setattr("sage_core.planning.is_capturing", lambda device: False)
    comfy.sample()
    assert served(comfy.run()) == {"exact": 3}


def test_a_call_that_has_its_plan_is_captured_with_its_kernel(monkeypatch):
    machine = Machine()
    machine.add("exact", 5.0, exact=True)
    comfy = machine.comfy()
    comfy.sample()
    monkeypatch.setattr("sage_core.planning.is_capturing", lambda device: True)
    comfy.sample()
    assert served(comfy.run()) == {"exact": 3}


def test_a_kernel_that_cannot_be_captured_serves_again_afterwards(monkeypatch):
    capturing = False

    def spoil(*call):
        if capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return attention(*call)

    machine = Machine()
    machine.add("exact", 5.0, exact=True, spoil=spoil)
    comfy = machine.comfy()
    comfy.sample()
    timed = machine.stopwatches[0].runs
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr("sage_core.planning.is_capturing", lambda device: capturing)
    capturing = True
    comfy.sample()
    assert served(comfy.run()) == {NATIVE: 3}
    assert refused(comfy.run()) == {("exact", "stream_capture"), ("any kernel", "stream_capture")}
    assert comfy.dispatcher.session.snapshot()["retired"] == []
    capturing = False
    comfy.sample()
    assert served(comfy.run()) == {"exact": 3}
    assert machine.stopwatches[0].runs == timed
