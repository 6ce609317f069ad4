"""Attention Backend Report: finds the Dispatcher on a model and shows what ran, as text and as data."""

from __future__ import annotations

import json
import time
from typing import Any

from comfy_api.latest import io

from ..sage_core import __version__, build_report, to_markdown
from .host import dispatcher_of, executing, schema


class AttentionBackendReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AttentionBackendReport",
            display_name="Attention Backend Report",
            category="model/patch",
            description=(
                "Shows which kernel served which attention calls of a model patched by Apply SageAttention, and why "
                "the others did not. Connect the sampler's output to 'after' to see the run that has just finished."
            ),
            search_aliases=["sage report", "attention report", "which attention"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model from Apply SageAttention, or from any node after it that passes it on."
                ),
                io.AnyType.Input(
                    "after",
                    optional=True,
                    tooltip=(
                        "Anything that is ready only after sampling, such as the sampler's LATENT; it is passed "
                        "through. Without it the report may come before the sampler and shows the runs known so far."
                    ),
                ),
            ],
            outputs=[
                io.AnyType.Output("after_out", display_name="after"),
                io.String.Output("report", display_name="report"),
                io.String.Output("json", display_name="json"),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> Any:
        """Without ``after`` nothing tells that a sampler ran in between, so the node runs each time."""
        return "" if "after" in inputs else time.time_ns()

    @classmethod
    def execute(cls, model: Any, after: Any = None) -> io.NodeOutput:
        dispatcher = dispatcher_of(model)
        snapshot = None if dispatcher is None else dispatcher.snapshot()
        prompt_id, _ = executing()
        report = build_report(snapshot, __version__, prompt_id, after is not None)
        text = to_markdown(report)
        # ComfyUI merges ui values by iterating them, so each is a list
        ui = {"text": [text], "sagescope_report": [report]}
        return io.NodeOutput(after, text, json.dumps(report, ensure_ascii=False, indent=1), ui=ui)
