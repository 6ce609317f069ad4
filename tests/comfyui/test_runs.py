"""Runs inside real ComfyUIs: window and blocks, several runs of one model, failures."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hosts import Host

NATIVE = "native (observe only)"


def kernels(run: dict[str, Any]) -> dict[str, int]:
    return {entry["kernel"]: entry["calls"] for entry in run["calls_by_kernel"]}


def reasons(run: dict[str, Any]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for refusal in run["refusals"]:
        found[refusal["code"]] += refusal["calls"]
    return dict(found)


# -- window and blocks


@pytest.mark.parametrize(
    ("start", "end", "served"),
    [
        (0.0, 1.0, [0, 1, 2, 3]),
        (0.25, 0.5, [1, 2]),
        (0.5, 0.5, [2]),
        (0.0, 0.0, [0]),
        (0.3, 0.45, []),
        (1.0, 1.0, []),
        (0.26, 1.0, [2, 3]),
    ],
)
@pytest.mark.parametrize("sampling_after", [False, True], ids=["own schedule", "schedule changed after"])
def test_window_is_in_percent_of_a_flow_schedule_with_both_ends_in_it(
    host: Host, start: float, end: float, served: list[int], sampling_after: bool
) -> None:
    """Four steps of a flow model start at 0, 25, 50 and 75 percent, however much the schedule is shifted."""
    facts = host.run("scenarios_runs:window", model="wan", start=start, end=end, sampling_after=sampling_after)
    assert [step for step, (_, native) in enumerate(facts["steps"]) if native == [0]] == served
    assert all(native in ([0], [1]) for _, native in facts["steps"])
    outside = facts["calls"] * (4 - len(served)) // 4
    assert reasons(facts["run"]) == ({"outside_window": outside} if outside else {})
    assert facts["run"]["calls"] == facts["calls"]


@pytest.mark.parametrize("sampling_after", [False, True], ids=["own schedule", "schedule changed after"])
def test_window_of_an_eps_model_follows_the_sigmas_of_the_model_that_is_sampled(
    host: Host, sampling_after: bool
) -> None:
    facts = host.run("scenarios_runs:window", model="sdxl", start=0.2, end=0.7, steps=5, sampling_after=sampling_after)
    first, last = facts["window"]
    assert len(facts["steps"]) == 5
    assert {tuple(native) for _, native in facts["steps"]} == {(0,), (1,)}
    for sigma, native in facts["steps"]:
        assert native == [0 if last <= sigma <= first else 1]


def test_changed_schedule_moves_the_window(host: Host) -> None:
    for model in ("wan", "sdxl"):
        own, moved = (
            host.run("scenarios_runs:window", model=model, start=0.2, end=0.7, sampling_after=after)["window"]
            for after in (False, True)
        )
        assert own != moved


@pytest.mark.parametrize(
    ("model", "skip", "served"),
    [
        ("flux", "0", {"single"}),
        ("flux", "1", {"double"}),
        ("flux", "0-1", set()),
        ("flux", "2-9", {"double", "single"}),
        ("sdxl", "0, 2-3", {"('middle', 0)"}),
    ],
)
def test_skipped_blocks_are_numbered_as_the_model_runs_them(
    host: Host, model: str, skip: str, served: set[str]
) -> None:
    facts = host.run("scenarios_runs:skipped_blocks", model=model, skip=skip)
    assert {block for block, native in facts["calls"] if not native} == served
    native = [block for block, native in facts["calls"] if native]
    assert not served & set(native)
    assert reasons(facts["run"]) == ({"skipped_block": len(native)} if native else {})


def test_skipped_blocks_of_a_model_that_reports_none_are_said_to_have_no_effect(host: Host) -> None:
    facts = host.run("scenarios_runs:skipped_blocks", model="wan", skip="0")
    reports_blocks = host.version >= (0, 30)
    assert [native for _, native in facts["calls"]] == ([1, 1, 0, 0] if reports_blocks else [0, 0, 0, 0])
    assert ("does not report its blocks" in facts["text"]) is not reports_blocks


@pytest.mark.parametrize("advanced", [False, True], ids=["second pass at twice the size", "halves of a schedule"])
def test_one_model_in_two_samplers_gives_two_runs(host: Host, advanced: bool) -> None:
    facts = host.run("scenarios_runs:hires_fix", advanced=advanced)
    first, second = facts["runs"]
    assert [first["calls"], second["calls"]] == facts["calls"]
    assert all(run["status"] == "finished" and run["steps"] == run["total_steps"] for run in (first, second))
    assert all(sum(kernels(run).values()) == run["calls"] for run in (first, second))
    if advanced:
        assert (kernels(first), kernels(second)) == ({"int8_reference": 4}, {"int8_reference": 2, "native": 2})
    else:
        assert {shape["spec"]["qo_len"] for shape in first["shapes"]} == {8 + 64}
        assert {shape["spec"]["qo_len"] for shape in second["shapes"]} == {8 + 256}


def test_conditions_that_need_a_forward_each_are_counted_so(host: Host) -> None:
    facts = host.run("scenarios_runs:split_conditions")
    assert facts["run"]["forwards"] == 4
    assert facts["run"]["steps"] == 2
    assert facts["run"]["calls"] == facts["calls"]


def test_sampler_callback_gets_what_it_gets_without_the_node(host: Host) -> None:
    seen = host.run("scenarios_runs:previews")
    assert seen["behind"] == seen["without"]
    assert [call[0] for call in seen["without"]] == [0, 1, 2]


# -- what goes wrong in a run


def test_out_of_memory_leaves_the_rest_of_the_run_to_native_and_the_next_run_tries_again(host: Host) -> None:
    """The kernel is tried with two calls before the first of each of the two shapes: call 6 is the model's third."""
    facts = host.run("scenarios_runs:failing_kernel", kind="memory", message="CUDA out of memory", first=6)
    assert facts["latents"] == [facts["native"]] * 2
    assert facts["raised"] == 1
    first, second = facts["runs"]
    assert kernels(first) == {"fragile": 2, "native": 10}
    assert reasons(first) == {"out_of_memory": 10}
    assert [event["step"] for event in first["events"]] == [1]
    assert "fragile" in first["events"][0]["text"]
    assert kernels(second) == {"fragile": 12}
    assert facts["retired"] == []


def test_kernel_that_raises_is_out_until_restart(host: Host) -> None:
    facts = host.run("scenarios_runs:failing_kernel", kind="runtime", message="no kernel image", first=6, times=99)
    assert facts["latents"] == [facts["native"]] * 2
    assert facts["raised"] == 1
    first, second = facts["runs"]
    assert kernels(first) == {"fragile": 2, "native": 10}
    assert kernels(second) == {"native": 12}
    assert reasons(second) == {"kernel_error": 12}
    assert "no kernel image" in second["refusals"][0]["detail"]
    assert [retired["kernel"] for retired in facts["retired"]] == ["fragile"]


@pytest.mark.parametrize(
    ("how", "raised", "status"),
    [("interrupt", "InterruptProcessingException", "interrupted"), ("error", "RuntimeError", "error")],
)
def test_run_that_ends_early_is_closed_with_what_it_did(host: Host, how: str, raised: str, status: str) -> None:
    facts = host.run("scenarios_runs:ended_early", how=how)
    assert facts["raised"] == raised
    early, whole = facts["runs"]
    assert (early["status"], early["steps"], early["total_steps"]) == (status, 1, 3)
    assert early["calls"] == facts["calls"] == 6
    assert early["seconds"] is not None
    assert (whole["status"], whole["calls"]) == ("finished", 12)
    assert facts["same latent"]


@pytest.mark.parametrize("model_call", [False, True], ids=["one attention call", "whole model"])
def test_calls_outside_a_sampler_are_served_and_counted_in_a_run_of_their_own(host: Host, model_call: bool) -> None:
    facts = host.run("scenarios_runs:outside_a_run", model_call=model_call)
    assert len(set(facts["distances"])) == 1
    assert 0 < facts["distances"][0] < 0.03
    outside = [run for run in facts["runs"] if run["model"] == "called outside a sampler"]
    sampled = [run for run in facts["runs"] if run not in outside]
    assert sum(run["calls"] for run in outside) == 3 * (4 if model_call else 1)
    assert [run["calls"] for run in sampled] == [12, 12]


def test_what_was_measured_is_forgotten_in_the_plans_of_patched_models_too(host: Host) -> None:
    first, second, third = host.run("scenarios_runs:forgotten_measurements")
    assert first == second
    assert not set(second) & set(third)
