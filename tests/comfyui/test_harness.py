"""The harness keeps scenarios apart from pytest and says what went wrong inside ComfyUI."""

from __future__ import annotations

import pytest

from hosts import Host, ScenarioFailed, Worker


def test_scenario_runs_inside_this_comfyui(host: Host) -> None:
    facts = host.run("scenarios_harness:facts")
    assert facts["nodes_file"] == str(host.root / "nodes.py")
    assert tuple(map(int, facts["version"].split("."))) == host.version
    assert facts["cpu"]


def test_pack_is_loaded_unless_asked_otherwise(host: Host) -> None:
    assert host.run("scenarios_harness:facts")["has_pack"]
    assert not host.without_pack.run("scenarios_harness:facts")["has_pack"]


def test_one_process_serves_a_session(host: Host) -> None:
    assert host.run("scenarios_harness:facts")["pid"] == host.run("scenarios_harness:facts")["pid"]


def test_failure_carries_the_traceback_and_the_log(host: Host) -> None:
    with pytest.raises(ScenarioFailed, match=r"(?s)ValueError: because.*about to fail"):
        host.run("scenarios_harness:fail", message="because")


def test_worker_that_dies_or_hangs_is_replaced(host: Host) -> None:
    with Worker(host.root, pack=False) as worker:
        with pytest.raises(ScenarioFailed, match="the process ended"):
            worker.run("scenarios_harness:leave")
        assert worker.run("scenarios_harness:facts")["cpu"]
        with pytest.raises(ScenarioFailed, match=r"no answer within 0\.2 s"):
            worker.run("scenarios_harness:sleep", seconds=60, timeout_s=0.2)


@pytest.mark.parametrize("model", ["wan", "flux", "sdxl", "omnigen2", "ltxv", "qwen_image"])
def test_tiny_model_samples_reproducibly_through_attention(host: Host, model: str) -> None:
    facts = host.without_pack.run("scenarios_harness:attention_calls", model=model)
    assert facts["finite"]
    assert facts["std"] > 0.1
    assert facts["same_bits"]
    assert len(facts["calls"]) % 3 == 0  # as many in each of 3 steps


def test_tiny_models_cover_grouped_queries_and_masks(host: Host) -> None:
    calls = {
        model: host.without_pack.run("scenarios_harness:attention_calls", model=model)["calls"]
        for model in ("omnigen2", "ltxv", "qwen_image")
    }
    assert any(call["mask"] == ["torch.float32", 2, 1, 1, 8] for call in calls["ltxv"])
    if host.version >= (0, 30):
        assert all(call["q"][1] == 2 * call["k"][1] and "enable_gqa" in call["options"] for call in calls["omnigen2"])
        assert all(call["mask"] == ["torch.float32", 2, 1, 72] for call in calls["qwen_image"])
