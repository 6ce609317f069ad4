"""Promises 1, 2 and 7 of the design inside real ComfyUIs: contained, the whole contract, honest counts."""

from __future__ import annotations

from typing import Any

import pytest

from hosts import Host

MODELS = ["wan", "flux", "sdxl", "omnigen2", "ltxv", "qwen_image"]
NATIVE = "native (observe only)"
CALL_ERROR = 0.03
"""Relative L2 of one int8 call: what the numerics give on normal data (0.02), and room for a model's own data."""
LATENT_ERROR = 0.03
"""As much for a latent: a model adds each call to a residual stream, which attenuates the error of one."""


# -- promise 1: contained


@pytest.mark.parametrize("model", MODELS)
def test_everything_but_the_nodes_output_has_the_bits_of_a_comfyui_without_the_pack(host: Host, model: str) -> None:
    expected = host.without_pack.run("scenarios_promises:native_latent", model=model)
    latents = host.run("scenarios_promises:latents_of_everything_else", model=model)
    assert latents["native"] == dict.fromkeys(latents["native"], expected)
    assert latents["quantized"] != expected


def test_importing_the_pack_replaces_no_function(host: Host) -> None:
    without, loaded = (worker.run("scenarios_promises:functions") for worker in (host.without_pack, host.with_pack))
    assert "comfy.ldm.modules.attention.optimized_attention" in without
    assert "torch.nn.functional.scaled_dot_product_attention" in without
    assert len(without) > 5_000
    both = without.keys() & loaded.keys()
    assert [(name, loaded[name]) for name in both if loaded[name] != without[name]] == []


@pytest.mark.parametrize("kernel", [NATIVE, "int8_reference", "sdpa: flash"])
def test_patching_and_sampling_change_nothing_global(host: Host, kernel: str) -> None:
    changed = host.run("scenarios_promises:changed_by_patching", kernel=kernel)
    assert changed == {"functions": [], "by patching": [], "by sampling": []}


def test_text_encoders_and_vae_keep_their_functions_and_bits(host: Host) -> None:
    expected = host.without_pack.run("scenarios_promises:text_encoders_and_vae", kernel=None)["before"]
    facts = host.run("scenarios_promises:text_encoders_and_vae", kernel="int8_reference")
    assert facts == {"before": expected, "after": expected}


# -- promise 2: the whole contract


def all_native(calls: list[dict[str, Any]]) -> bool:
    """Native attention ran once for each call, with the very arguments that the model gave, and made the output."""
    right = {"native": 1, "same_arguments": True, "unchanged": True, "same_layout": True, "error": 0.0}
    return bool(calls) and all(right.items() <= call.items() for call in calls)


@pytest.mark.parametrize("model", MODELS)
def test_native_calls_get_the_very_arguments_of_the_model(host: Host, model: str) -> None:
    facts = host.run("scenarios_promises:contract", model=model, kernel=NATIVE)
    assert all_native(facts["calls"])
    assert facts["latent_error"] == 0


@pytest.mark.parametrize("model", MODELS)
def test_every_call_of_a_quantized_run_is_close_to_native(host: Host, model: str) -> None:
    facts = host.run("scenarios_promises:contract", model=model, kernel="int8_reference")
    for call in facts["calls"]:
        assert call["native"] == 0
        assert call["unchanged"]
        assert call["same_layout"]
        assert 0 < call["error"] < CALL_ERROR
    assert 0 < facts["latent_error"] < LATENT_ERROR
    assert facts["run"]["calls_by_kernel"] == [{"kernel": "int8_reference", "calls": len(facts["calls"]), "share": 1.0}]


@pytest.mark.parametrize(
    ("adds", "code", "detail"),
    [
        ({"low_precision_attention": False}, "low_precision_forbidden", "low_precision_attention=False"),
        ({"attn_precision": "float32"}, "attn_precision", "float32"),
        ({"window_size": 5}, "unknown_argument", "window_size"),
        ({"sink": None, "bias": [1.0]}, "unknown_argument", "bias, sink"),
    ],
    ids=["opt-out", "fp32 wanted", "unknown keyword", "two unknown keywords"],
)
@pytest.mark.parametrize("model", ["wan", "sdxl"])
def test_arguments_that_no_kernel_honours_make_calls_native(
    host: Host, model: str, adds: dict[str, Any], code: str, detail: str
) -> None:
    facts = host.run("scenarios_promises:contract", model=model, kernel="int8_reference", adds=adds)
    assert all_native(facts["calls"])
    assert facts["latent_error"] == 0
    (refusal,) = facts["run"]["refusals"]
    assert refusal["code"] == code
    assert detail in refusal["detail"]
    assert refusal["calls"] == len(facts["calls"])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("model", ["wan", "flux"])
def test_half_precision_calls_come_back_in_their_dtype(host: Host, model: str, dtype: str) -> None:
    facts = host.run("scenarios_promises:contract", model=model, kernel="int8_reference", compute_dtype=dtype)
    assert all(call["same_layout"] and call["unchanged"] for call in facts["calls"])
    assert all(0 < call["error"] < CALL_ERROR for call in facts["calls"])
    name = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert {shape["spec"]["dtype"] for shape in facts["run"]["shapes"]} == {name}
    assert 0 < facts["latent_error"] < LATENT_ERROR


def test_allowed_low_precision_changes_nothing(host: Host) -> None:
    facts = host.run(
        "scenarios_promises:contract", model="wan", kernel="int8_reference", adds={"low_precision_attention": True}
    )
    assert all(call["native"] == 0 for call in facts["calls"])


@pytest.mark.parametrize(
    ("layout", "error"), [(None, CALL_ERROR), ("NHD", 1e-5), ("HND", 1e-5)], ids=["int8", "exact NHD", "exact HND"]
)
def test_every_form_of_a_call_is_served_as_native_serves_it(host: Host, layout: str | None, error: float) -> None:
    """Masks of 2 to 4 axes, both kinds; both layouts in and out; from 0.30 on also scale and grouped heads."""
    shapes = ["scale", "grouped"] if host.version >= (0, 30) else []
    facts = host.run("scenarios_promises:single_calls", shapes=shapes, layout=layout)
    wrong = [call for call in facts if call["native"] or not call["unchanged"] or not call["same_layout"]]
    assert wrong == []
    assert [call for call in facts if call["error"] >= error] == []
    assert len(facts) == 11 * 4 * (2 if "grouped" in shapes else 1)


# -- promise 7: honest


@pytest.mark.parametrize("cfg", [1.0, 3.0], ids=["cond only", "cond and uncond"])
@pytest.mark.parametrize("model", MODELS)
def test_calls_by_kernel_add_up_to_the_calls_made(host: Host, model: str, cfg: float) -> None:
    """Part of the calls is native: the second block where the model tells blocks, the first step everywhere."""
    widgets = {"kernel": "int8_reference", "skip_blocks": "1", "start_percent": 0.4}
    facts = host.run("scenarios_promises:counted", model=model, cfg=cfg, **widgets)
    assert len(facts["runs"]) == 2
    run = facts["runs"][1]
    served = facts["by_kernel"][1]
    assert run["calls"] == facts["calls"] == sum(served.values())
    assert run["forwards"] == facts["forwards"] == 3
    assert served.keys() == {"native", "int8_reference"}
    assert sum(site["calls"] for site in run["sites"]) == run["calls"]
    assert sum(shape["calls"] for shape in run["shapes"]) == run["calls"]
    native = [site for site in run["sites"] if site["kernel"] == "native"]
    assert all(len(site["reasons"]) == 1 for site in native)
    assert sum(reason["calls"] for reason in run["refusals"]) == served["native"]
    assert all(reason["detail"] and reason["advice"] for reason in run["refusals"])
    assert facts["runs"][0]["calls"] * 3 == run["calls"] * 2
