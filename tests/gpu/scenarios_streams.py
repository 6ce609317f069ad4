"""Models in turns, streams and CUDA graphs: what a plan that was made once must bear."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management as management
import torch
from comfy.ldm.modules import attention

from benchmarks import comfyui
from benchmarks.entries import AUTO, NATIVE, OVERRIDE, served, the_pack
from tests.gpu.inside import (
    FLUX,
    SDXL,
    WAN_SMALL,
    attention_calls,
    build,
    distance,
    patched,
    plans,
    quantized,
    retired,
    session,
    that_load,
    warm,
)

ROUNDS = 4


def alternating() -> dict[str, Any]:
    """Three models in turns, each through a node of its own, in one process as in one queue."""
    found: dict[str, Any] = {}
    lines = {"flux": FLUX, "sdxl": SDXL, "wan": WAN_SMALL}
    samplings = {name: build(line) for name, line in lines.items()}
    models = {(name, kernel): model for name in lines for kernel, model in patched(samplings[name].model).items()}
    firsts: dict[tuple[str, str], torch.Tensor] = {}
    made: dict[tuple[str, str], list[int]] = {}
    for (name, kernel), model in models.items():
        firsts[name, kernel] = warm(samplings[name], model)
        made[name, kernel] = plans(model)
        facts = found[f"{name} {kernel}"] = {"distances": [], "served": [], "same plans": []}
        facts |= {"plans": len(made[name, kernel]), "calls": attention_calls(samplings[name])}
    for _ in range(ROUNDS):
        for (name, kernel), model in models.items():
            facts = found[f"{name} {kernel}"]
            output = samplings[name].sample(model)
            facts["distances"].append(distance(output, firsts[name, kernel]))
            facts["served"].append(dict(served(model)))
            facts["same plans"].append(plans(model) == made[name, kernel])
    every_plan = [plan for of_one in made.values() for plan in of_one]
    models_named = {
        f"{name} {kernel}": sorted({run["model"] for run in comfyui.dispatcher_of(model).snapshot()["runs"]})
        for (name, kernel), model in models.items()
    }
    return {"models": found, "apart": len(every_plan) == len(set(every_plan)), "named": models_named}


def on_another_stream() -> dict[str, Any]:
    """Sampling on a stream that is not the default one: with plans made on the default stream, and made on its own."""
    sampling = build(FLUX)
    stream = torch.cuda.Stream()
    found: dict[str, Any] = {"calls": attention_calls(sampling), "models": {}}
    native = sampling.sample(sampling.model)

    def aside(model: Any) -> torch.Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            output = sampling.sample(model)
        torch.cuda.current_stream().wait_stream(stream)
        return output

    found[NATIVE] = distance(aside(sampling.model), native)
    for begins_aside in (False, True):
        comfyui.new_session(Path(management.args.base_directory) / f"{begins_aside}.json")
        for name, model in patched(sampling.model).items():
            ways = [aside, sampling.sample] if begins_aside else [sampling.sample, aside]
            first = ways[0](model)
            facts: dict[str, Any] = {"distances": [], "served": []}
            for way in (*ways, *ways):
                facts["distances"].append(distance(way(model), first))
                facts["served"].append(dict(served(model)))
            found["models"][f"{name}, first on {'a stream' if begins_aside else 'the default stream'}"] = facts
    return {**found, "retired": retired()}


# -- CUDA graphs


class GraphCall:
    """An attention call of ComfyUI's on tensors that stay, whose contents can be drawn anew."""

    def __init__(self, override: Callable[..., torch.Tensor] | None) -> None:
        device = management.get_torch_device()
        self._options = {} if override is None else {OVERRIDE: override}
        self._tensors = [torch.empty(1, 1280, 512, device=device, dtype=torch.bfloat16) for _ in range(3)]
        self.draw(0)

    def draw(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)  # on the CPU: a failed capture can leave the GPU's unusable
        for tensor in self._tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))

    def __call__(self) -> torch.Tensor:
        with torch.inference_mode():
            output: torch.Tensor = attention.optimized_attention(*self._tensors, 4, transformer_options=self._options)
            return output

    def natively(self) -> torch.Tensor:
        with torch.inference_mode():
            output: torch.Tensor = attention.optimized_attention(*self._tensors, 4)
            return output

    def capture(self, *, warm: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph of the call and where it writes. ``warm`` runs the call before, on a stream of its own, as PyTorch
        asks for; native attention is always warm."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.natively()
                if warm:
                    self()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # when a capture fails PyTorch leaves its stream the current one
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            output = self()
        return graph, output


def cuda_graphs() -> dict[str, Any]:
    """Calls that have no plan first: a capture that failed may leave its traces in this process."""
    return {"unplanned": _unplanned_graphs(), "planned": _planned_graphs()}


def _planned_graphs() -> dict[str, Any]:
    """For each kernel: a call that has its plan, captured, and replayed on new contents of the same tensors."""
    sampling = build(WAN_SMALL)
    names = [backend.name for backend in session().backends]
    found = {}
    for name in [AUTO, *that_load(sampling.model, names)]:
        # random numbers without structure are hard for a quantized kernel: what is asked here is another thing
        dispatcher = comfyui.dispatcher_of(the_pack(sampling.model, kernel=name, tolerance="off"))
        call = GraphCall(dispatcher.attend)
        call()
        kernels = [dict(_by_kernel(dispatcher))]
        facts: dict[str, Any] = {"error": None}
        try:
            graph, output = call.capture(warm=True)
        except Exception as error:
            facts["error"] = f"{type(error).__name__}: {error}"
        else:
            for seed in (1, 2):
                call.draw(seed)
                graph.replay()
                facts[f"replay {seed}"] = {
                    "eager": distance(output.clone(), call()),
                    "native": distance(output, call.natively()),
                }
        torch.cuda.synchronize()
        facts["codes"] = _codes(dispatcher)
        before = _by_kernel(dispatcher)
        call.draw(3)
        facts["after"] = distance(call(), call.natively())
        kernels.append({kernel: calls - before.get(kernel, 0) for kernel, calls in _by_kernel(dispatcher).items()})
        facts["kernels"] = [[kernel for kernel, calls in by.items() if calls] for by in kernels]
        found[name] = {**facts, "retired": retired()}
    return found


def _unplanned_graphs() -> dict[str, Any]:
    """A call that is captured before it has a plan: recorded as native, and planned when it comes again."""
    sampling = build(WAN_SMALL)
    found = {}
    for name in (AUTO, quantized(sampling.model)[0]):
        dispatcher = comfyui.dispatcher_of(the_pack(sampling.model, kernel=name, tolerance="off"))
        call = GraphCall(dispatcher.attend)
        facts: dict[str, Any] = {"error": None}
        measured = session().measurements.entries()
        try:
            graph, output = call.capture(warm=False)
        except Exception as error:
            facts["error"] = f"{type(error).__name__}: {error}"
        else:
            call.draw(1)
            graph.replay()
            facts["replay"] = distance(output, call.natively())
            facts["codes"] = _codes(dispatcher)
        torch.cuda.synchronize()
        facts["measured"] = session().measurements.entries() != measured
        facts["retired"] = retired()
        before = _by_kernel(dispatcher)
        facts["after"] = distance(call(), call.natively())
        facts["kernels after"] = [
            kernel for kernel, calls in _by_kernel(dispatcher).items() if calls > before.get(kernel, 0)
        ]
        facts["plans"] = len(dispatcher._plans.known[None])
        found[name] = facts
    return found


def _by_kernel(dispatcher: Any) -> dict[str, int]:
    """Calls so far by kernel; they are outside of a sampler, and so in one run of their own."""
    run = dispatcher.snapshot()["runs"][-1] if dispatcher.snapshot()["runs"] else {"calls_by_kernel": []}
    return {entry["kernel"]: entry["calls"] for entry in run["calls_by_kernel"]}


def _codes(dispatcher: Any) -> list[str]:
    return [entry["code"] for entry in dispatcher.snapshot()["runs"][-1]["refusals"]]
