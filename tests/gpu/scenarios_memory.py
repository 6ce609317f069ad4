"""A GPU's memory in a queue of ComfyUI: weights that stream, models that come and go, runs in a row, peaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import comfy.model_management as management
import comfy.model_patcher
import torch

from benchmarks.entries import AUTO, NATIVE, served, the_pack
from benchmarks.lines import LINES, WAN
from benchmarks.machine import Machine
from benchmarks.sampling import Sampling
from tests.comfyui.resident import resident_mib
from tests.gpu.inside import (
    WAN_SMALL,
    allocated,
    attention_calls,
    blocks_in_use,
    build,
    distance,
    events,
    loaded_anew,
    patched,
    plans,
    quantized,
    record_allocations,
    retired,
    session,
    settle,
    small,
    warm,
)

STREAMED = small("wan-480p", dim=1536, ffn_dim=6144, num_heads=12, num_layers=4)
"""A third of a gigabyte of weights, so that what other programs take and give back meanwhile is little beside it."""
WIDE = replace(LINES["wan-480p"], unet={**WAN, "num_layers": 2}, latent=(1, 16, 11, 60, 104))
"""Two layers of Wan 14B in full width."""
RUNS = 12


@contextmanager
def reserved(size: float) -> Iterator[None]:
    """As with --reserve-vram of that many bytes: ComfyUI reads the option into this number once."""
    before, management.EXTRA_RESERVED_VRAM = management.EXTRA_RESERVED_VRAM, size
    try:
        yield
    finally:
        management.EXTRA_RESERVED_VRAM = before


def short_of_memory() -> dict[str, Any]:
    """A model in full, with less memory than it needs, in full again: natively and through the node.

    Started with an option by which ComfyUI leaves weights on the host; each layer then fetches its own as it runs.
    """
    full = build(STREAMED)
    models = {NATIVE: full.model, **patched(full.model)}
    whole = full.model.model_size()
    found: dict[str, Any] = {"calls": attention_calls(full), "states": {}, "offload streams": management.NUM_STREAMS}
    firsts: dict[str, torch.Tensor] = {}

    def sample(state: str, sampling: Sampling, models: dict[str, Any]) -> None:
        entry = found["states"][state] = {}
        for name, model in models.items():
            management.unload_all_models()
            settle()
            output = sampling.sample(model)
            entry[name] = {"loaded": sampling.model.loaded_size() / whole, "served": dict(served(model))}
            entry[name]["distance"] = distance(output, firsts[name])
            entry[name]["events"] = [] if name in (NATIVE, AUTO) else events(model)

    with reserved(0):
        for name, model in models.items():
            firsts[name] = warm(full, model)
        sample("full", full, models)
    if comfy.model_patcher.CoreModelPatcher is comfy.model_patcher.ModelPatcher:
        sample("streamed", full, models)
        management.unload_all_models()
        settle()
        with reserved(0):
            room = management.get_free_memory(full.model.load_device) - management.minimum_inference_memory()
        with reserved(room - whole / 2):
            sample("half", full, models)
        with reserved(0):
            sample("full again", full, models)
    else:
        management.unload_all_models()
        dynamic = loaded_anew(full)
        models = {NATIVE: dynamic.model, **patched(dynamic.model)}
        for model in models.values():
            warm(dynamic, model)
        sample("dynamic", dynamic, models)
        management.free_memory(1e30, dynamic.model.load_device)
        sample("dynamic again", dynamic, models)
    return {**found, "retired": retired()}


def unloaded_and_reloaded() -> dict[str, Any]:
    """A model that ComfyUI takes out of memory between runs, in each of its ways.

    ``left`` are the blocks that were in use when the memory was first not what it was before.
    """
    record_allocations()
    sampling = build(WAN_SMALL)
    models = patched(sampling.model)
    found: dict[str, Any] = {"calls": attention_calls(sampling), "models": {}, "allocated": [], "left": []}

    def look() -> None:
        found["allocated"].append(allocated())
        if found["allocated"][-1] != found["allocated"][0] and not found["left"]:
            found["left"] = blocks_in_use()

    management.unload_all_models()
    look()
    ways = {
        "all": management.unload_all_models,
        "for memory": lambda: management.free_memory(1e30, sampling.model.load_device),
        "detached": sampling.model.detach,
    }
    for name, model in models.items():
        first = warm(sampling, model)
        made, measured = plans(model), session().measurements.entries()
        facts: dict[str, Any] = {"plans": len(made), "distances": [], "same plans": [], "same measurements": []}
        facts |= {"served": [dict(served(model))], "loaded": []}
        for unload in ways.values():
            facts["loaded"].append(sampling.model.model.model_loaded_weight_memory)
            unload()
            facts["loaded"].append(sampling.model.model.model_loaded_weight_memory)
            look()
            facts["distances"].append(distance(sampling.sample(model), first))
            facts["same plans"].append(plans(model) == made)
            facts["same measurements"].append(session().measurements.entries() == measured)
            facts["served"].append(dict(served(model)))
        management.unload_all_models()
        look()
        found["models"][name] = facts
    return found


def in_a_row() -> dict[str, Any]:
    """One patched model sampled again and again: the memory of the device and of the process after each run."""
    sampling = build(WAN_SMALL)
    found: dict[str, Any] = {"calls": attention_calls(sampling), "models": {}}
    for name, model in patched(sampling.model).items():
        facts: dict[str, Any] = {"allocated": [], "resident_mib": [], "distances": [], "served": []}
        first = warm(sampling, model)
        for _ in range(RUNS):
            facts["distances"].append(distance(sampling.sample(model), first))
            facts["served"].append(dict(served(model)))
            facts["allocated"].append(allocated())
            facts["resident_mib"].append(resident_mib())
        found["models"][name] = facts
    return found


def peaks() -> dict[str, Any]:
    """The most memory that was in use in a warm run of a model of real width: natively, with auto, by each kernel."""
    sampling = build(WIDE, steps=2)
    machine = Machine(sampling.model.load_device)
    models = {NATIVE: sampling.model, AUTO: the_pack(sampling.model, kernel=AUTO, compare_with_native="first time")}
    models |= {name: the_pack(sampling.model, kernel=name) for name in quantized(sampling.model)}
    found: dict[str, Any] = {}
    for name, model in models.items():
        warm(sampling, model)
        settle()
        weights = torch.cuda.memory_allocated() if machine.cuda else 0
        _, _, peak = machine.run(lambda model=model: sampling.sample(model))
        found[name] = {"peak": peak, "before": weights, "served": dict(served(model))}
    return found
