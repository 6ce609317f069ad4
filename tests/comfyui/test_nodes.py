"""The two nodes inside real ComfyUIs: promises 8 and 9 of the design, bad input, the report."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hosts import Host

NATIVE = "native (observe only)"
PACKAGE_KERNELS = [
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp8_cuda_sm90 (fused quantization)",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda (fused quantization)",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn 1.x (triton)",
    "sageattn3_blackwell",
    "comfy_kitchen_int8",
    "hub: sage-attention",
    "hub: sage-blackwell",
    "hub: aiter-sage-attention (gfx1201)",
    "sdpa: cudnn",
    "sdpa: efficient",
    "flash_attn 2",
    "flash_attn 3",
    "flash_attn 4",
    "hub: flash-attn2",
    "hub: flash-attn3",
]
KERNELS = ["auto", NATIVE, *PACKAGE_KERNELS[:13], "sdpa: flash", *PACKAGE_KERNELS[13:], "int8_reference"]
"""Saved workflows hold these names: none is ever renamed, and new ones may only be added."""
PERCENT = {"min": 0.0, "max": 1.0, "step": 0.001}

# -- promise 8: portable


def test_inputs_of_apply_are_constants(host: Host) -> None:
    """Names, order, types, options and defaults: the same on every machine and in every ComfyUI."""
    facts = host.run("scenarios_nodes:declared", node_id="ApplySageAttention")
    expected = {
        "model": ["required", "MODEL", {}],
        "kernel": ["required", "COMBO", {"default": "auto", "options": KERNELS}],
        "smooth_k": ["required", "COMBO", {"default": "auto", "options": ["auto", "off", "on"]}],
        "start_percent": ["required", "FLOAT", {"default": 0.0, **PERCENT}],
        "end_percent": ["required", "FLOAT", {"default": 1.0, **PERCENT}],
        "skip_blocks": ["required", "STRING", {"default": "", "multiline": False}],
        "if_unavailable": [
            "required",
            "COMBO",
            {"default": "use native", "options": ["use native", "stop with an error"]},
        ],
        "allow_hub_download": ["required", "BOOLEAN", {"default": False}],
        "tolerance": [
            "required",
            "COMBO",
            {"default": "normal (0.10)", "options": ["normal (0.10)", "strict (0.05)", "off"]},
        ],
        "compare_with_native": [
            "required",
            "COMBO",
            {"default": "first time", "options": ["first time", "every run", "never"]},
        ],
    }
    assert facts["inputs"] == expected
    assert list(facts["inputs"]) == list(expected)  # saved workflows hold widget values by position
    assert facts["outputs"] == ["MODEL"]
    assert facts["not idempotent"]
    assert all(facts["tooltips"])


def test_inputs_of_the_report_are_constants(host: Host) -> None:
    facts = host.run("scenarios_nodes:declared", node_id="AttentionBackendReport")
    assert facts["inputs"] == {"model": ["required", "MODEL", {}], "after": ["optional", "*", {}]}
    assert facts["outputs"] == ["*", "STRING", "STRING"]
    assert facts["output node"]
    assert all(facts["tooltips"])


def test_every_kernel_of_a_shared_workflow_runs_on_a_machine_without_a_gpu(host: Host) -> None:
    facts = host.run("scenarios_nodes:every_kernel", kernels=KERNELS)
    for kernel in ("auto", NATIVE, *PACKAGE_KERNELS):
        run = facts[kernel]["run"]
        assert facts[kernel]["error"] == 0
        assert [entry["kernel"] for entry in run["calls_by_kernel"]] == ["native"]
        for site in run["sites"]:
            assert ("observe_only" if kernel == NATIVE else "arch") in site["reasons"]
    for kernel in ("sdpa: flash", "int8_reference"):
        assert [entry["kernel"] for entry in facts[kernel]["run"]["calls_by_kernel"]] == [kernel]
    assert facts["sdpa: flash"]["error"] < 1e-5
    assert 0 < facts["int8_reference"]["error"] < 0.03


@pytest.mark.parametrize("kernel", KERNELS)
def test_stop_with_an_error_raises_in_the_node_with_the_reasons(host: Host, kernel: str) -> None:
    facts = host.run("scenarios_nodes:stopped", kernel=kernel)
    assert facts["untouched"]
    if kernel not in PACKAGE_KERNELS:
        assert facts["error"] is None
        return
    assert facts["error"] == "RuntimeError"
    assert f"'{kernel}' cannot be used on cpu" in facts["message"]
    assert "this device is cpu" in facts["message"]
    assert "Choose a kernel by name that is made for this device" in facts["message"]


def test_the_override_says_of_its_memory_what_comfyui_takes_its_own_attention_for(host: Host) -> None:
    assert host.run("scenarios_nodes:memory_asked_for") == [[False, False], [True, True]]


# -- bad input


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("kernel", ["sage", "", None, 0, "Auto"]),
        ("smooth_k", ["maybe", True, None]),
        ("start_percent", [-0.001, 1.001, math.nan, math.inf, "0.5", None, True]),
        ("end_percent", [-1, 2, math.nan, "1"]),
        ("skip_blocks", ["a", "1-", "-1", "5-2", "1.5", "0 1", "10000", "0-99999", "٣", None, 3]),
        ("if_unavailable", ["crash", None]),
        ("allow_hub_download", ["yes", 1, None]),
        ("tolerance", ["0.1", 0.1, None]),
        ("compare_with_native", ["always", True, None]),
    ],
)
def test_widget_value_out_of_range_is_refused_by_name(host: Host, name: str, values: list[Any]) -> None:
    refused = host.run("scenarios_nodes:bad_widgets", cases=[{name: value} for value in values])
    for value, facts in zip(values, refused, strict=True):
        assert facts["error"] == "ValueError", value
        assert facts["message"].startswith(f"{name} "), value
        assert "allowed: " in facts["message"], value
        assert facts["untouched"], value


def test_window_that_ends_before_it_starts_is_refused(host: Host) -> None:
    (facts,) = host.run("scenarios_nodes:bad_widgets", cases=[{"start_percent": 0.6, "end_percent": 0.4}])
    assert facts["error"] == "ValueError"
    assert "start_percent" in facts["message"]
    assert "end_percent" in facts["message"]
    assert facts["untouched"]


def test_widget_values_at_their_limits_are_taken(host: Host) -> None:
    cases = [
        {"start_percent": 0, "end_percent": 1},  # JSON has one kind of number
        {"start_percent": 0.5, "end_percent": 0.5},
        {"skip_blocks": "0, 1, 47-49"},
        {"skip_blocks": " 3 - 5 ;7,, "},
        {"skip_blocks": "9999"},
    ]
    policies = host.run("scenarios_nodes:good_widgets", cases=cases)
    assert [(policy["start_percent"], policy["end_percent"]) for policy in policies[:2]] == [(0, 1), (0.5, 0.5)]
    assert [policy["skip_blocks"] for policy in policies[2:]] == [[0, 1, 47, 48, 49], [3, 4, 5, 7], [9999]]


def test_model_that_cannot_be_patched_is_refused_and_left_as_it_was(host: Host) -> None:
    facts = host.run("scenarios_nodes:bad_models")
    for case in facts.values():
        assert case["error"] == "ValueError"
        assert case["message"].startswith("model ")
        assert "allowed: " in case["message"]
        assert case["untouched"]


# -- promise 9: offline


def test_nothing_tries_the_network(host: Host) -> None:
    """Whatever kernel is chosen on whatever GPU, unless its download was allowed."""
    assert len(host.run("scenarios_nodes:network_is_watched")) == 2
    facts = host.run("scenarios_nodes:offline", kernels=KERNELS)
    assert facts["tried"] == []
    hub = [codes for name, codes in facts["refused"].items() if name.startswith("hub: ")]
    assert hub
    assert all(codes == ["download_not_allowed"] for codes in hub)


def test_kernel_by_name_is_not_refused_on_its_own_gpu_for_the_nodes_own_example(host: Host) -> None:
    """What the node looks at before sampling must be a call that the kernel takes; only the kernel itself may lack."""
    refused = host.run("scenarios_nodes:offline", kernels=[])["refused"]
    of_the_machine = {"not_installed", "function_missing", "build", "download_not_allowed", "kernel_error", "trial"}
    assert {name: codes for name, codes in refused.items() if not of_the_machine.issuperset(codes)} == {}
    assert len(refused) > 20


# -- the report


@pytest.mark.parametrize("after", [False, True], ids=["alone", "after the sampler"])
def test_report_node_gives_text_and_strict_json(host: Host, after: bool) -> None:
    facts = host.run("scenarios_nodes:report_node", after=after)
    assert facts["passed on"] is after
    assert facts["ui is lists"]
    assert facts["ui"] == {"text": [facts["text"]], "sagescope_report": [facts["json"]]}
    assert ("'after' is not connected" in facts["text"]) is not after
    assert facts["text"].startswith("## Attention Backend Report\n")
    (run,) = facts["json"]["runs"]
    assert run["status"] == "finished"
    for said in ("int8_reference", "outside_window", run["refusals"][0]["advice"], "2 x 2 x 128 x 128 float32"):
        assert said in facts["text"]


def test_report_of_a_model_without_the_node_says_so(host: Host) -> None:
    report = host.run("scenarios_nodes:notes", kind="not patched")
    assert report["runs"] == []
    assert "no Apply SageAttention" in report["notes"][0]


def test_report_before_the_first_sampling_says_so(host: Host) -> None:
    assert "Nothing was sampled" in host.run("scenarios_nodes:notes", kind="no after")["notes"][0]


def test_report_of_a_cached_sampler_shows_the_earlier_run_and_says_so(host: Host) -> None:
    report = host.run("scenarios_nodes:notes", kind="cached")
    assert report["shown"] == [report["runs"][0]["id"]]
    assert [report["runs"][0][name] for name in ("prompt_id", "node_id")] == ["a", "6"]
    assert "cached" in report["notes"][0]


def test_report_shows_the_runs_of_its_own_prompt(host: Host) -> None:
    report = host.run("scenarios_nodes:notes", kind="two samplers")
    shown = [run for run in report["runs"] if run["id"] in report["shown"]]
    assert [(run["prompt_id"], run["node_id"]) for run in shown] == [("b", "6"), ("b", "7")]
    assert len(report["runs"]) == 3
    assert report["notes"] == []


def test_report_in_a_script_claims_nothing_about_a_prompt(host: Host) -> None:
    """Outside the server nothing tells which prompt a run belongs to."""
    report = host.run("scenarios_nodes:notes", kind="in a script")
    assert report["notes"] == []
    assert report["shown"] == [1]


def test_report_keeps_the_last_runs(host: Host) -> None:
    report = host.run("scenarios_nodes:many_runs", runs=20)
    assert [run["id"] for run in report["runs"]] == list(range(5, 21))


def test_model_that_never_offers_its_attention_is_said_to(host: Host) -> None:
    facts = host.run("scenarios_nodes:never_offered")
    assert facts["same latent"]
    assert (facts["run"]["calls"], facts["run"]["forwards"]) == (0, 3)
    assert "offered none of its attention calls" in facts["text"]
