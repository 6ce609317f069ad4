"""Prompts in a row inside real ComfyUIs: nothing grows, nothing is mixed up, and what the graph drops is gone."""

from __future__ import annotations

import pytest

from hosts import Host

BEFORE = 36
"""Prompts until the histories of runs, of 32 over all models, are full."""
ITEMS = 10
GROWN_MIB = 64
"""How much more memory the process may have after ten prompts: under 5 MiB were seen, and one latent is 0.03 MiB, so
that this speaks of leaks of the size of models or of compiled code."""
GROWN_OBJECTS = 500
"""How many more Python objects there may be: the notes of these tests themselves are some 10 per prompt."""
INT8, NATIVE = "int8_reference", "native (observe only)"


@pytest.mark.parametrize("models", [["wan"], ["wan", "sdxl"]], ids=["one model", "a model dropped for the next"])
def test_ten_prompts_in_a_row_leave_nothing_behind(host: Host, models: list[str]) -> None:
    facts = host.run("scenarios_queue:in_a_row", models=models, before=BEFORE, items=ITEMS)
    assert facts["ends"] == ["success"] * (BEFORE + ITEMS)
    assert [entry["kernel"] for entry in facts["run"]["calls_by_kernel"]] == [INT8]
    assert facts["run"]["id"] == (BEFORE + ITEMS if len(models) == 1 else 1)  # a dropped model begins anew
    turns = len(models)
    assert len(facts["alive"]) == len(facts["kept"]) == ITEMS + turns
    for turn in range(turns):  # the models are not of one size
        alive, kept = facts["alive"][turn::turns], facts["kept"][turn::turns]
        everything = [counts.pop("all") for counts in alive]
        assert alive == [alive[0]] * len(alive)
        assert alive[0]["Run"] == 32
        assert alive[0]["Dispatcher"] == 1
        assert everything[-1] - everything[0] < GROWN_OBJECTS
        assert kept == [kept[0]] * len(kept)
        assert kept[0]["plans.known"] > 0
    resident = [size for size in facts["resident_mib"] if size is not None]
    assert not resident or resident[-1] - resident[0] < GROWN_MIB


def test_two_patched_models_in_turns_keep_their_plans_and_counts_apart(host: Host) -> None:
    facts = host.run("scenarios_queue:alternating")
    assert facts["same plans"] == {"wan": True, "flux": True}
    assert facts["plans"] == {"wan": 4, "flux": 2}
    assert facts["apart"]
    assert facts["kernels"] == {"wan": INT8, "flux": NATIVE}
    assert facts["runs"] == {
        "wan": [["WAN21", "wan sample", {INT8: 4}]] * 4,
        "flux": [["Flux", "flux sample", {"native": 2}]] * 4,
    }


def test_one_model_in_two_samplers_of_a_prompt_gives_a_run_for_each(host: Host) -> None:
    facts = host.run("scenarios_queue:twice_in_a_prompt")
    assert facts["runs"] == [
        [prompt, sampler, "finished", {INT8: calls}]
        for prompt in facts["prompts"]
        for sampler, calls in (("wan sample", 4), ("wan again", 8))
    ]


def test_a_good_prompt_after_an_error_and_an_interrupt_gives_what_it_gave_before_them(host: Host) -> None:
    facts = host.run("scenarios_queue:ended_early_in_a_queue")
    assert facts["ends"] == ["success", "error", "interrupted", "success"]
    assert facts["runs"] == [["finished", 3, 12], ["error", 1, 6], ["interrupted", 1, 6], ["finished", 3, 12]]
    assert facts["last"] == facts["first"] != {}
    assert facts["same plans"]
    assert facts["more tensors"] == 0
    assert not facts["forward"]
    assert not facts["run"]


def test_a_model_that_the_graph_drops_is_gone(host: Host) -> None:
    facts = host.run("scenarios_queue:dropped")
    assert facts["end"] == "success"
    assert facts["there"] == [True] * 3
    assert facts["gone"] == [True] * 3
    assert facts["dispatchers"] == -1


@pytest.mark.parametrize("model", ["wan", "sdxl"])
def test_plans_outlive_that_the_model_is_taken_out_of_memory(host: Host, model: str) -> None:
    facts = host.run("scenarios_queue:unloaded_between", model=model)
    assert [size == 0 for size in facts["loaded"]] == [True, False] * 3
    assert facts["latents"] == [facts["latents"][0]] * 4
    assert facts["same plans"] == [True] * 4
    assert facts["plans"] > 0
    assert facts["by_kernel"] == [facts["by_kernel"][0]] * 4
    assert facts["override"]


def test_weights_that_are_cast_when_a_layer_runs_change_no_plan_and_no_bit(host: Host) -> None:
    """ComfyUI's low-VRAM mode, as far as a CPU goes: it shows that neither plans nor bits depend on where weights come
    from. It cannot show copies that are still on their way on another stream, pinned memory, nor memory that runs out.
    """
    facts = host.run("scenarios_queue:low_vram")
    assert facts["low"] == [False, True, False]
    assert facts["lora at run time"] == [0, 1, 0]
    assert facts["observed"] == facts["without the node"] == [facts["observed"][0]] * 3
    assert facts["served"] == [facts["served"][0]] * 3
    assert facts["served"][0] != facts["observed"][0]
    assert facts["changed by the LoRA"] == [True]
    assert facts["same plans"] == [True] * 3
    assert facts["by_kernel"] == [{INT8: 6}] * 3
