"""Calls whose tensors come in ComfyUI's containers, in the model that makes such calls; the override as an object."""

from __future__ import annotations

from typing import Any

import pytest

from hosts import Host

NATIVE = "native (observe only)"
STEPS, BLOCKS = 6, 2
CALLS = STEPS * BLOCKS
REFINED = 2
"""Calls for the text, one of each condition, before the sampler begins: without transformer_options, so offered to no
override."""


@pytest.fixture
def newer(host: Host) -> Host:
    if host.version < (0, 33):
        pytest.skip(f"ComfyUI {'.'.join(map(str, host.version))} has no AttentionTensorContainer")
    return host


def kernels(run: dict[str, Any]) -> dict[str, int]:
    return {entry["kernel"]: entry["calls"] for entry in run["calls_by_kernel"]}


def test_a_call_alone_reaches_the_kernel(newer: Host) -> None:
    facts = newer.run("scenarios_releasing:one_call")
    assert 0 < facts["error"] < 0.03
    assert facts["consumed"] == [True, True, True]
    assert kernels(facts["run"]) == {"int8_reference": 1}


def test_a_model_with_containers_keeps_its_bits_and_is_counted(newer: Host) -> None:
    facts = newer.run("scenarios_releasing:sampled")
    latents = {name: fact["latent"] if isinstance(fact, dict) else fact for name, fact in facts.items()}
    assert latents[NATIVE] == latents["without"]
    assert latents[f"{NATIVE} halved"] == latents["halved"] != latents["without"]
    assert latents[f"{NATIVE} halved in containers"] == latents["halved in containers"] == latents["halved"]
    assert latents["int8_reference halved"] == latents["int8_reference halved in containers"]
    quantized = {latents[name] for name in ("int8_reference", "int8_reference halved")}
    assert len(quantized | {latents["without"], latents["halved"]}) == 4
    for name, fact in facts.items():
        if isinstance(fact, dict):
            assert (fact["calls"], fact["run"]["calls"]) == (CALLS + REFINED, CALLS)
            served = kernels(fact["run"])
            if name.startswith(NATIVE):
                assert served == {"native": CALLS}
            elif name == "int8_reference":
                assert served == {"int8_reference": CALLS}
            else:  # the other half is outside the window
                assert served.keys() == {"int8_reference", "native"}


def test_tensors_are_released_before_attention_in_a_real_model(newer: Host) -> None:
    facts = newer.run("scenarios_releasing:released", out_of_memory=False)
    assert facts["alive"] == [0] * (STEPS - 1) * BLOCKS
    assert facts["latent"] == facts["of tensors"]
    assert kernels(facts["run"]) == {"halves": CALLS}
    assert (facts["run"]["events"], facts["run"]["comparison_calls"]) == ([], 0)


def test_a_failure_after_the_release_runs_the_model_call_again(newer: Host) -> None:
    facts = newer.run("scenarios_releasing:released", out_of_memory=True)
    run = facts["run"]
    assert facts["alive"] == [0]
    assert facts["off native"] < 1e-4
    assert kernels(run) == {"halves": BLOCKS, "native": CALLS - BLOCKS}
    assert (run["forwards"], run["comparison_calls"]) == (STEPS, 1)
    assert facts["calls"] == run["calls"] + run["comparison_calls"] + REFINED
    assert [event["step"] for event in run["events"]] == [2, 2]
    assert "run again" in run["events"][1]["text"]


def test_a_compiled_model_with_containers_has_the_bits_of_an_eager_one(newer: Host) -> None:
    facts = newer.run("scenarios_releasing:compiled", timeout_s=300)
    latents = {name: fact["latent"] for name, fact in facts.items()}
    assert latents == {name: fact["eager"] for name, fact in facts.items()}
    assert latents["native"] == latents["without"] != latents["quantized"]
    served = {name: [kernels(run) for run in fact["runs"]] for name, fact in facts.items()}
    assert served == {"without": [], "native": [{"native": CALLS}], "quantized": [{"int8_reference": CALLS}]}


def test_copies_of_a_model_share_the_override_and_it_is_named_well(host: Host) -> None:
    facts = host.run("scenarios_releasing:the_override")
    assert facts["container_function"]
    assert facts["same"] == [True, True]
    assert facts["previous"] == [None, None]
    *copies, replaced = facts["runs"]
    assert [kernels(run) for run in copies] == [{"int8_reference": 6}] * 2
    assert [run["override_replaced_by"] for run in facts["runs"]] == [None, None, "another Apply SageAttention"]
    assert (replaced["calls"], replaced["forwards"]) == (0, 3)
    assert "No call came here: another Apply SageAttention stands where" in facts["text"]


def test_hooks_of_a_condition_leave_the_override_or_are_named(host: Host) -> None:
    facts = host.run("scenarios_releasing:hooked")
    assert kernels(facts["another key"]) == {"int8_reference": 6}
    assert facts["another key"]["override_replaced_by"] is None
    assert facts["an override"]["calls"] == 0
    assert facts["an override"]["override_replaced_by"] == "scenarios_releasing.halved"
