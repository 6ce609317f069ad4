"""Whole graphs through a running ComfyUI server: what is cached, what is shown, what stops a prompt."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from safetensors.torch import load_file

import demo
from comfyui_server import Finished, PromptFailed, Server
from demo import APPLY, REPORT, SAMPLER, SAVE, node
from sage_core import KERNEL_CHOICES

SEEDS = itertools.count(1_000)
"""A seed of its own makes a sampler run whatever earlier tests left in the cache."""


def graph(kernel: str = "int8_reference", **widgets: Any) -> dict[str, Any]:
    nodes = demo.graph(kernel)
    nodes[APPLY]["inputs"].update(widgets)
    nodes[SAMPLER]["inputs"]["seed"] = next(SEEDS)
    return nodes


def like(nodes: dict[str, Any], node_id: str, **inputs: Any) -> dict[str, Any]:
    """A second node like the one of the graph, with other inputs."""
    return node(nodes[node_id]["class_type"], **{**nodes[node_id]["inputs"], **inputs})


def report(finished: Finished, node_id: str = REPORT) -> dict[str, Any]:
    return finished.outputs[node_id]["sagescope_report"][0]


def shown(finished: Finished, node_id: str = REPORT) -> list[dict[str, Any]]:
    data = report(finished, node_id)
    return [run for run in data["runs"] if run["id"] in data["shown"]]


def latent(server: Server, finished: Finished, node_id: str = SAVE) -> bytes:
    saved = finished.outputs[node_id]["latents"][0]
    file = server.base_directory / "output" / saved["subfolder"] / saved["filename"]
    return load_file(file)["latent_tensor"].numpy().tobytes()


def test_new_seed_samples_again_with_the_cached_node_and_the_report_shows_that_run(server: Server) -> None:
    nodes = graph(skip_blocks="9999")  # no other test's node, so that its record starts empty
    first = server.run(nodes)
    nodes[SAMPLER]["inputs"]["seed"] = next(SEEDS)
    second = server.run(nodes)
    assert APPLY in second.cached
    assert not {SAMPLER, REPORT} & set(second.cached)
    for finished, runs in ((first, 1), (second, 2)):
        (run,) = shown(finished)
        assert (run["prompt_id"], run["node_id"]) == (finished.prompt_id, SAMPLER)
        assert run["apply_node_id"] == APPLY
        assert (run["calls"], run["status"], run["steps"]) == (12, "finished", 3)
        assert len(report(finished)["runs"]) == runs
        assert report(finished)["notes"] == []


def test_report_after_the_sampler_runs_only_when_the_sampler_did(server: Server) -> None:
    nodes = graph()
    server.run(nodes)
    again = server.run({**nodes, "9": node("PreviewAny", source=[REPORT, 1])})
    assert {SAMPLER, REPORT} <= set(again.cached)
    assert again.outputs["9"]["text"] == again.outputs[REPORT]["text"]


def test_report_without_after_runs_each_time(server: Server) -> None:
    nodes = graph()
    nodes[SAVE]["inputs"]["samples"] = [SAMPLER, 0]
    del nodes[REPORT]["inputs"]["after"]
    server.run(nodes)
    again = server.run(nodes)
    assert SAMPLER in again.cached
    assert REPORT not in again.cached
    (run,) = shown(again)
    assert run["prompt_id"] != again.prompt_id
    assert "'after' is not connected" in report(again)["notes"][0]


def test_new_report_after_a_cached_sampler_says_that_the_run_is_an_earlier_one(server: Server) -> None:
    nodes = graph()
    server.run(nodes)
    flipped = {"9": node("LatentFlip", samples=[SAMPLER, 0], flip_method="x-axis: vertically")}
    finished = server.run({**nodes, **flipped, "10": like(nodes, REPORT, after=["9", 0])})
    assert SAMPLER in finished.cached
    (run,) = shown(finished, "10")
    assert run["prompt_id"] != finished.prompt_id
    assert "cached" in report(finished, "10")["notes"][0]


def test_two_samplers_of_one_prompt_are_two_runs(server: Server) -> None:
    nodes = graph()
    nodes["9"] = like(nodes, SAMPLER, latent_image=[SAMPLER, 0], denoise=0.5)
    nodes[REPORT]["inputs"]["after"] = ["9", 0]
    finished = server.run(nodes)
    first, second = shown(finished)
    assert (first["node_id"], second["node_id"]) == (SAMPLER, "9")
    assert first["prompt_id"] == second["prompt_id"] == finished.prompt_id
    assert first["calls"] == second["calls"] == 12


def test_two_equal_nodes_keep_records_of_their_own(server: Server) -> None:
    nodes = graph()
    nodes["9"] = like(nodes, APPLY)
    nodes["10"] = like(nodes, SAMPLER, model=["9", 0])
    nodes["11"] = node("AttentionBackendReport", model=["9", 0], after=["10", 0])
    finished = server.run(nodes)
    assert [run["node_id"] for run in shown(finished)] == [SAMPLER]
    assert [run["node_id"] for run in shown(finished, "11")] == ["10"]


def test_branch_without_the_node_gets_the_bits_it_gets_alone(server: Server) -> None:
    nodes = graph()
    alone = {name: nodes[name] for name in ("1", "2", "3", "4")}
    alone["10"] = like(nodes, SAMPLER, model=["1", 0])
    alone["11"] = node("SaveLatent", samples=["10", 0], filename_prefix="alone")
    expected = latent(server, server.run(alone), "11")
    # a new seed and the old one back, so that the branch samples again beside the patched one
    alone["10"]["inputs"]["seed"] += 1
    server.run(alone)
    alone["10"]["inputs"]["seed"] -= 1
    alone["11"]["inputs"]["filename_prefix"] = "beside"
    finished = server.run({**nodes, **alone})
    assert latent(server, finished, "11") == expected != latent(server, finished)


def test_node_that_is_bypassed_or_observes_leaves_the_bits(server: Server) -> None:
    nodes = graph("native (observe only)")
    observed = latent(server, server.run(nodes))
    nodes[SAMPLER]["inputs"]["model"] = nodes[REPORT]["inputs"]["model"] = ["1", 0]
    finished = server.run(nodes)
    assert latent(server, finished) == observed
    assert "no Apply SageAttention" in report(finished)["notes"][0]


def test_report_finds_the_record_behind_other_model_nodes(server: Server) -> None:
    nodes = graph(end_percent=0.5)
    nodes["9"] = node("ModelSamplingSD3", model=[APPLY, 0], shift=12.0)
    nodes[SAMPLER]["inputs"]["model"] = nodes[REPORT]["inputs"]["model"] = ["9", 0]
    (run,) = shown(server.run(nodes))
    served = {entry["kernel"]: entry["calls"] for entry in run["calls_by_kernel"]}
    assert served == {"int8_reference": 8, "native": 4}


def test_unavailable_kernel_stops_the_prompt_before_sampling(server: Server) -> None:
    nodes = graph("sageattn3_blackwell", if_unavailable="stop with an error")
    with pytest.raises(PromptFailed) as failure:
        server.run(nodes)
    assert str(failure.value).startswith(
        "ApplySageAttention: kernel 'sageattn3_blackwell' cannot be used on cpu:\n- this device is cpu; "
    )


@pytest.mark.parametrize(("name", "value"), [("kernel", "sage"), ("smooth_k", "maybe"), ("start_percent", 1.5)])
def test_value_that_no_version_offers_is_refused_by_name(server: Server, name: str, value: Any) -> None:
    """By the server where it compares values with options, by the node where it does not."""
    with pytest.raises(PromptFailed, match=name):
        server.run(graph(**{name: value}))


def test_inputs_in_object_info_are_what_workflows_depend_on(server: Server) -> None:
    info = server.get("/object_info/ApplySageAttention")["ApplySageAttention"]
    assert info["input_order"]["required"] == [
        *("model", "kernel", "smooth_k", "start_percent", "end_percent", "skip_blocks"),
        *("if_unavailable", "allow_hub_download", "tolerance", "compare_with_native"),
    ]
    assert info["input"]["required"]["kernel"][1]["options"] == list(KERNEL_CHOICES)
    assert (info["output"], info["category"], info["output_node"]) == (["MODEL"], "model/patch", False)
    info = server.get("/object_info/AttentionBackendReport")["AttentionBackendReport"]
    assert (info["input_order"]["required"], info["input_order"]["optional"]) == (["model"], ["after"])
    assert (info["output"], info["output_node"]) == (["*", "STRING", "STRING"], True)
