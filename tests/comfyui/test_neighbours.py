"""A patched model beside what else is done to it in real ComfyUIs: other overrides, weights, threads, compiling."""

from __future__ import annotations

from typing import Any

import pytest

from hosts import Host

NATIVE = "native (observe only)"


def kernels(run: dict[str, Any]) -> dict[str, int]:
    return {entry["kernel"]: entry["calls"] for entry in run["calls_by_kernel"]}


def test_override_that_was_there_before_stands_for_native_and_is_named(host: Host) -> None:
    facts = host.run("scenarios_neighbours:override_before", kernel=NATIVE)
    assert facts["latent"] == facts["of the other"] != facts["without any"]
    assert facts["report"]["previous_override"] == "scenarios_neighbours.halved"
    assert any("scenarios_neighbours.halved" in note for note in facts["report"]["notes"])
    quantized = host.run("scenarios_neighbours:override_before", kernel="int8_reference")
    assert quantized["latent"] not in (facts["latent"], facts["without any"])
    assert kernels(quantized["report"]["runs"][0]) == {"int8_reference": 12}


def test_override_that_takes_our_place_downstream_is_said_to(host: Host) -> None:
    facts = host.run("scenarios_neighbours:override_after", chained=False)
    assert facts["latent"] == facts["of the other"]
    assert (facts["run"]["calls"], facts["run"]["forwards"]) == (0, 3)
    assert facts["run"]["override_replaced_by"] == "scenarios_neighbours.halved"
    assert "No call came here: scenarios_neighbours.halved" in facts["text"]


def test_override_downstream_that_hands_on_part_of_the_calls_is_named(host: Host) -> None:
    facts = host.run("scenarios_neighbours:override_after", chained=True)
    assert kernels(facts["run"]) == {"int8_reference": 6}
    assert "cross_attention_only" in facts["text"]


@pytest.mark.parametrize(("first", "second"), [("int8_reference", NATIVE), (NATIVE, "int8_reference")])
def test_last_of_two_nodes_in_a_row_wins_and_counts_once(host: Host, first: str, second: str) -> None:
    facts = host.run("scenarios_neighbours:two_applies", first=first, second=second)
    assert facts["latent"] == facts["alone"]
    assert facts["wrappers"] == {"outer_sample": 1, "apply_model": 1}
    assert facts["inner runs"] == 0
    assert facts["report"]["previous_override"] is None
    (run,) = facts["report"]["runs"]
    assert run["calls"] == facts["calls"] == 6
    assert kernels(run) == {"native" if second == NATIVE else second: 6}


def test_clone_with_other_weights_downstream_counts_into_the_same_record(host: Host) -> None:
    facts = host.run("scenarios_neighbours:lora_after")
    assert facts["changed"] > 0.01
    assert facts["runs seen after it"] == facts["runs seen before it"] == 2
    assert facts["run"]["calls"] == facts["calls"]


def test_forwards_in_two_threads_are_kept_apart(host: Host) -> None:
    facts = host.run("scenarios_neighbours:in_two_threads")
    latents = facts["latents"]
    assert latents[NATIVE] == latents["None"] != latents["int8_reference"]
    assert facts["run"]["calls"] == facts["calls"] == 64
    assert facts["run"]["forwards"] == 16
    assert {site["site"] for site in facts["run"]["sites"]} == {0, 1, 2, 3}
    assert all(site["calls"] == 16 for site in facts["run"]["sites"])
    half = {"int8_reference": 32, "native": 32}
    assert kernels(facts["run"]) == (half if host.version >= (0, 30) else {"int8_reference": 64})


def test_compiled_model_counts_each_call_and_keeps_its_bits(host: Host) -> None:
    guard_filter = host.version >= (0, 30)  # as its own node does: no guards on transformer_options
    *facts, eager = host.run("scenarios_neighbours:compiled", guard_filter=guard_filter, timeout_s=300)
    latents = [fact["latent"] for fact in facts]
    native, quantized = eager["native"], eager["quantized"]
    assert latents == [native, quantized, native, quantized, native]
    operators = [fact["operators compiled"] for fact in facts]
    assert operators[0] > 0
    # no graph breaks at a call of the pack; without it, one does where ComfyUI's own attention cannot be traced
    assert eager["breaks"][1:] == [{}, {}]
    served = [[kernels(run) for run in fact["runs"]] for fact in facts]
    assert served == [[], [{"int8_reference": 3}], [{"native": 3}], [{"int8_reference": 3}], []]
