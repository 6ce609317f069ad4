"""The pack in a running ComfyUI server, used through its HTTP API and websocket."""

from __future__ import annotations

import pytest

import demo
from comfyui_server import PromptFailed, Server


def test_server_offers_the_nodes(server: Server) -> None:
    for node_id in ("ApplySageAttention", "AttentionBackendReport", "StandInConditioning"):
        assert node_id in server.get(f"/object_info/{node_id}")


def test_demo_finds_nothing_wrong(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.compare(server, "int8_reference") == 0
    shown = capsys.readouterr()
    assert "int8_reference served 12 of 12 attention calls" in shown.out
    assert "relative L2" in shown.out
    assert not shown.err


def test_demo_says_when_the_chosen_kernel_served_nothing(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.compare(server, "sageattn3_blackwell") == 1
    assert "sageattn3_blackwell served no call" in capsys.readouterr().err


def test_unchanged_prompt_runs_no_node_again(server: Server) -> None:
    graph = demo.graph("int8_reference")
    server.run(graph)
    again = server.run(graph)
    assert set(again.cached) == set(graph)
    assert again.outputs[demo.REPORT]["sagescope_report"]


def test_refused_prompt_raises(server: Server) -> None:
    graph = demo.graph("int8_reference")
    graph[demo.SAMPLER]["inputs"]["steps"] = 0
    with pytest.raises(PromptFailed, match="value_smaller_than_min"):
        server.run(graph)


def test_failing_node_raises(server: Server) -> None:
    graph = demo.graph("int8_reference")
    graph[demo.APPLY]["inputs"]["skip_blocks"] = "every"
    with pytest.raises(PromptFailed, match="ApplySageAttention"):
        server.run(graph)
