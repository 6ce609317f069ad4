"""Counters of a run and the runs of a model: bounded, adding up, and plain JSON."""

from __future__ import annotations

import json
import threading

import pytest

from sage_core.backends.base import Kernel
from sage_core.checking import SiteAccuracy
from sage_core.refusal import Refusal, RefusalCode
from sage_core.selection import Plan, Use, Verdict
from sage_core.spec import MaskKind
from sage_core.stats import MAX_COUNTERS, MAX_EVENTS, MAX_RUNS, OUTSIDE, Run, Stats, spec_to_json
from tests.unit.conftest import attention, fake_backend, make_spec

TOO_LONG = Refusal(RefusalCode.HEAD_DIM, "head_dim is 160; a takes 64")
MASKED = Refusal(RefusalCode.ATTN_MASK, "attn_mask is bool; a takes none")
ACCURATE = SiteAccuracy(relative_l2=0.03, worst_head_relative_l2=0.05, cosine=0.999)
USE = Use(fake_backend(name="a"), Kernel(attention), "NHD", expand_kv=False, smooth_k=True, accuracy=ACCURATE)
SERVED = Plan("a", make_spec(), "double 0", (Verdict("a", ()),), USE)
REFUSED = Plan(
    "native", make_spec(head_dim=160), "double 1", (Verdict("a", (TOO_LONG, MASKED)), Verdict("b", (MASKED,)))
)
UNREADABLE = Plan("native", None, None, (Verdict("any kernel", (MASKED,)),))


def make_run(*forwards) -> Run:
    run = Run(7, "prompt", "12:5", "Flux", "12:4")
    for plans in forwards:
        run.record(plans)
    return run


def test_a_run_as_json_has_every_field_of_the_schema():
    run = make_run([SERVED, REFUSED], [SERVED, UNREADABLE])
    run.record_outside([UNREADABLE])
    run.total_steps, run.step = 4, 2
    run.note("something happened")
    run.close("finished")
    written = json.loads(json.dumps(run.snapshot(), allow_nan=False))
    assert written == run.snapshot()
    assert {name: written[name] for name in ("id", "prompt_id", "node_id", "apply_node_id", "model", "status")} == {
        "id": 7,
        "prompt_id": "prompt",
        "node_id": "12:5",
        "apply_node_id": "12:4",
        "model": "Flux",
        "status": "finished",
    }
    assert (written["steps"], written["total_steps"], written["forwards"], written["calls"]) == (2, 4, 2, 5)
    assert written["calls_by_kernel"] == [
        {"kernel": "native", "calls": 3, "share": 0.6},
        {"kernel": "a", "calls": 2, "share": 0.4},
    ]
    assert written["events"] == [{"step": 3, "text": "something happened"}]
    assert written["override_replaced_by"] is None
    assert written["seconds"] >= 0
    assert written["started"] > 1.7e9
    assert set(written) == {
        *("id", "uid", "prompt_id", "node_id", "apply_node_id", "vram_peak_mib", "summary"),
        *("model", "started", "seconds", "status", "steps", "total_steps", "forwards"),
        *("calls", "calls_by_kernel", "refusals", "shapes", "sites", "events", "override_replaced_by"),
        *("rescued_forwards", "comparison_calls", "comparisons"),
    }


def test_refusals_are_told_by_kernel_and_reason_with_the_calls_they_kept_away():
    refusals = make_run([REFUSED, UNREADABLE], [REFUSED]).snapshot()["refusals"]
    assert [(entry["kernel"], entry["code"], entry["calls"]) for entry in refusals] == [
        ("a", "head_dim", 2),
        ("a", "attn_mask", 2),
        ("b", "attn_mask", 2),
        ("any kernel", "attn_mask", 1),
    ]
    assert refusals[0] == {
        "kernel": "a",
        "code": "head_dim",
        "detail": TOO_LONG.detail,
        "advice": TOO_LONG.advice,
        "calls": 2,
    }


def test_sites_are_in_the_order_of_the_forward_and_calls_without_a_site_come_last():
    run = make_run([SERVED, REFUSED, SERVED], [SERVED, SERVED, SERVED])
    run.record_outside([SERVED, SERVED])
    sites = run.snapshot()["sites"]
    assert [(site["site"], site["kernel"], site["calls"]) for site in sites] == [
        (0, "a", 2),
        (1, "native", 1),
        (1, "a", 1),
        (2, "a", 2),
        (None, "a", 2),
    ]
    assert sites[1] == {
        "site": 1,
        "block": "double 1",
        "block_number": 1,
        "kernel": "native",
        "smooth_k": None,
        "accuracy": None,
        "spec": make_spec(head_dim=160).describe(),
        "calls": 1,
        "reasons": ["head_dim", "attn_mask", "attn_mask"],
    }
    assert (sites[0]["smooth_k"], sites[0]["reasons"]) == (True, [])
    assert sites[0]["accuracy"] == {"step": None, **ACCURATE._asdict()}


def test_shapes_that_differ_in_their_offset_only_are_one():
    plans = [Plan("a", make_spec(max_offset=offset, mask_offset=2 * offset), None) for offset in range(5)]
    (shape,) = make_run(plans).snapshot()["shapes"]
    assert (shape["kernel"], shape["calls"]) == ("a", 5)
    assert shape["spec"] == spec_to_json(make_spec())
    assert make_run([UNREADABLE]).snapshot()["shapes"] == [{"spec": None, "kernel": "native", "calls": 1, "times": {}}]


def test_a_spec_as_json_has_plain_values_and_the_text_that_people_read():
    spec = make_spec(mask_kind=MaskKind.BOOL, mask_dtype="bool", sm_scale=0.5)
    written = json.loads(json.dumps(spec_to_json(spec)))
    assert written["text"] == spec.describe()
    assert (written["mask_kind"], written["mask_dtype"], written["sm_scale"]) == ("bool", "bool", 0.5)
    assert set(written) == {"text", *spec._fields} - {"max_offset", "mask_offset"}


def test_a_run_without_a_call_is_empty_and_no_error():
    run = make_run([], [])
    assert (run.snapshot()["calls"], run.snapshot()["forwards"], run.snapshot()["calls_by_kernel"]) == (0, 2, [])
    assert run.snapshot()["seconds"] is None
    assert run.summary() == "0 attention calls in 2 forwards: none was offered"
    assert make_run([SERVED, REFUSED, SERVED]).summary() == "3 attention calls in 1 forwards: a 2, native 1"


def test_events_count_steps_from_one_as_the_run_does():
    run = make_run()
    run.note("before the sampler")
    run.total_steps = 3
    for done in range(4):
        run.step = done
        run.note(f"{done} done")
    snapshot = run.snapshot()
    # a sampler may go on after the last step is done
    assert [event["step"] for event in snapshot["events"]] == [None, 1, 2, 3, 3]
    assert snapshot["steps"] == snapshot["total_steps"] == 3


def test_events_are_bounded_and_the_last_ones_stay():
    run = make_run()
    for number in range(MAX_EVENTS + 20):
        run.note(str(number))
    events = run.snapshot()["events"]
    assert [event["text"] for event in events] == [str(number) for number in range(20, MAX_EVENTS + 20)]


def test_counters_are_bounded_and_no_call_is_lost():
    run = make_run([SERVED] * (MAX_COUNTERS + 1), *[[REFUSED] * 10] * 3)
    snapshot = run.snapshot()
    assert snapshot["calls"] == MAX_COUNTERS + 31
    assert len(snapshot["sites"]) == MAX_COUNTERS + 2
    assert snapshot["sites"][-1]["site"] is None
    assert snapshot["sites"][-1]["calls"] == 30


@pytest.mark.parametrize("before", [[], [SERVED], [SERVED] * (MAX_COUNTERS + 1)], ids=["none", "one", "too many"])
def test_a_forward_that_is_made_again_leaves_nothing_but_its_number_of_calls(before):
    run, other = make_run(before, [SERVED, REFUSED]), make_run(before)
    run.made_again([SERVED, REFUSED])
    left, expected = run.snapshot(), other.snapshot()
    assert (left["comparison_calls"], left["calls"], left["forwards"]) == (2, len(before), 1)
    for table in ("sites", "shapes", "refusals", "calls_by_kernel"):
        assert left[table] == expected[table]


def test_a_forward_that_is_made_again_takes_nothing_from_calls_outside():
    run, other = make_run([SERVED]), make_run()
    for each in (run, other):
        each.record_outside([SERVED])
    run.made_again([SERVED])
    assert run.snapshot()["sites"] == other.snapshot()["sites"]


def test_a_model_with_two_thousand_sites_is_counted_site_by_site():
    plans = [Plan("a", make_spec(kv_len=1 + site), f"block {site}") for site in range(2_000)]
    snapshot = make_run(*[plans] * 3).snapshot()
    assert [site["calls"] for site in snapshot["sites"]] == [3] * 2_000
    assert len(snapshot["shapes"]) == 2_000
    assert snapshot["calls"] == sum(shape["calls"] for shape in snapshot["shapes"]) == 6_000


def test_a_run_can_be_looked_at_while_other_threads_count():
    run, stop, errors = make_run(), threading.Event(), []

    def look():
        try:
            while not stop.is_set():
                snapshot = run.snapshot()
                assert sum(site["calls"] for site in snapshot["sites"]) == snapshot["calls"] == 2 * snapshot["forwards"]
        except BaseException as error:
            errors.append(error)

    looking = threading.Thread(target=look)
    looking.start()
    for number in range(300):
        run.record([SERVED, Plan("a", make_spec(kv_len=1 + number % 20), None)])
        run.note("event")
    stop.set()
    looking.join()
    assert errors == []
    assert run.snapshot()["calls"] == 600


def test_the_last_runs_are_kept_oldest_first_each_with_a_number_of_its_own():
    stats = Stats()
    for number in range(MAX_RUNS + 3):
        stats.open("prompt", str(number))
    assert [run["id"] for run in stats.snapshot()] == list(range(4, MAX_RUNS + 4))
    assert [run["node_id"] for run in stats.snapshot()][-1] == str(MAX_RUNS + 2)


@pytest.mark.parametrize(
    ("context", "same"), [(("p", "1"), True), (("q", "1"), False), (("p", "2"), False), ((None, None), False)]
)
def test_calls_outside_a_sampler_share_the_run_of_their_node(context, same):
    stats = Stats()
    first = stats.outside("p", "1")
    assert first.model == OUTSIDE
    assert (stats.outside(*context) is first) is same
    assert len(stats.snapshot()) == 2 - same


def test_a_sampler_ends_the_run_of_calls_outside_one():
    stats = Stats()
    first = stats.outside("p", "1")
    sampled = stats.open("p", "1", "Flux")
    assert stats.outside("p", "1") not in (first, sampled)


def test_every_run_has_an_id_of_its_own_and_tells_of_its_start():
    opened = []
    stats = Stats("12:4", opened.append)
    runs = [stats.open("p", "1"), stats.outside("p", "1"), Stats().open("p", "1")]
    assert opened == runs[:2]
    assert [run.apply_node_id for run in runs] == ["12:4", "12:4", None]
    written = [run.snapshot() for run in runs]
    assert len({run["uid"] for run in written}) == 3
    assert all(len(run["uid"]) == 32 for run in written)
