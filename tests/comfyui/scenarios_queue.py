"""Scenarios about a queue: prompts in a row through ComfyUI's own executor, which keeps and drops what nodes made."""

from __future__ import annotations

import gc
import uuid
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import comfy.model_management as management
import execution
import torch

import inside
import nodes
import stand_ins
from patched import NATIVE, OVERRIDE, WIDGETS, apply, calls_by_kernel, digest, report
from resident import resident_mib
from stand_ins import tiny_models

Graph = dict[str, dict[str, Any]]


class Load:
    """A tiny model, as a loader gives it."""

    CATEGORY = "sagescope tests"
    FUNCTION = "load"
    RETURN_TYPES = ("MODEL", "LATENT")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"name": (list(tiny_models.ALL),)}}

    def load(self, name: str) -> tuple[Any, Any]:
        tiny = tiny_models.ALL[name]()
        return tiny.model, {"samples": torch.zeros(tiny.latent)}


class Look:
    """What a queue is asked for at its end: the model that sampled, and the bits of its latent."""

    CATEGORY = "sagescope tests"
    FUNCTION = "look"
    RETURN_TYPES = ()
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "latent": ("LATENT",), "name": ("STRING",)}}

    def look(self, model: Any, latent: Any, name: str) -> dict[str, Any]:
        return {"ui": {"digest": [digest(latent["samples"])]}}


TEXT = {"wan": (8, 4096, 64), "flux": (8, 128, 64), "sdxl": (77, 64, 1280)}


def branch(name: str, seed: int = 1, kernel: str = "int8_reference", steps: int = 1) -> Graph:
    """The nodes of one model: its ids begin with the model's name, so that they stay the same from prompt to prompt."""
    sampler = {"cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0, "steps": steps}
    tokens, dim, pooled = TEXT[name]
    text = {"tokens": tokens, "dim": dim, "pooled": pooled}
    sampler |= {"positive": [f"{name} positive", 0], "negative": [f"{name} negative", 0]}
    parts = {
        "load": ("SageScopeTestsLoad", {"name": name}),
        "apply": ("ApplySageAttention", {**WIDGETS, "kernel": kernel, "model": [f"{name} load", 0]}),
        "positive": ("StandInConditioning", {**text, "seed": 10}),
        "negative": ("StandInConditioning", {**text, "seed": 11}),
        "sample": (
            "KSampler",
            {**sampler, "seed": seed, "model": [f"{name} apply", 0], "latent_image": [f"{name} load", 1]},
        ),
        "look": (
            "SageScopeTestsLook",
            {"model": [f"{name} apply", 0], "latent": [f"{name} sample", 0], "name": name},
        ),
    }
    return {f"{name} {part}": {"class_type": kind, "inputs": inputs} for part, (kind, inputs) in parts.items()}


def plain_branch(name: str) -> Graph:
    """``branch`` without the node."""
    graph = branch(name)
    del graph[f"{name} apply"]
    for part in ("sample", "look"):
        graph[f"{name} {part}"]["inputs"]["model"] = [f"{name} load", 0]
    return graph


class Queue:
    """ComfyUI's executor with the cache that drops what the next prompt does not need; nobody listens to it."""

    def __init__(self) -> None:
        nodes.NODE_CLASS_MAPPINGS.update(
            SageScopeTestsLoad=Load, SageScopeTestsLook=Look, StandInConditioning=stand_ins.StandInConditioning
        )
        server = SimpleNamespace(client_id=None, last_node_id=None, send_sync=lambda *message: None)
        memory = {"lru": 0, "ram": 0.0, "ram_inactive": 0.0}
        self._executor = execution.PromptExecutor(server, execution.CacheType.CLASSIC, memory)
        self.models: dict[str, weakref.ref[Any]] = {}

    def put(self, graph: Graph) -> dict[str, Any]:
        """What became of a prompt: its end, and the latents of the models that it sampled."""
        prompt_id = str(uuid.uuid4())
        looked = [name for name, node in graph.items() if node["class_type"] == "SageScopeTestsLook"]
        with self._watched():
            self._executor.execute(graph, prompt_id, {}, looked)
        outputs = self._executor.history_result["outputs"]
        return {
            "id": prompt_id,
            "end": self._executor.status_messages[-1][0].removeprefix("execution_"),
            "latents": {name.partition(" ")[0]: outputs[name]["digest"][0] for name in looked if name in outputs},
        }

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Remembers weakly the patched models that Apply SageAttention makes in a prompt."""
        module = inside.pack_module("nodes.patch_attention")
        make = module._patched

        def patched(model: Any, dispatcher: Any) -> Any:
            made = make(model, dispatcher)
            self.models.pop(type(made.model).__name__, None)
            self.models[type(made.model).__name__] = weakref.ref(made)
            return made

        with patch.object(module, "_patched", patched):
            yield

    def dispatcher(self, model: str) -> Any:
        return inside.pack_module("nodes.host").dispatcher_of(self.models[model]())

    def last(self) -> Any:
        """The dispatcher that was made last."""
        return self.dispatcher(list(self.models)[-1])


def _alive() -> Counter[str]:
    """How many objects there are of the kinds that a run makes, after what is garbage is gone."""
    gc.collect()
    core = {name: inside.pack_module(f"sage_core.{name}") for name in ("selection", "stats", "forwards", "dispatcher")}
    kinds = {core["selection"].Plan, core["stats"].Run, core["forwards"].Forward, core["dispatcher"].Dispatcher}
    kinds |= {core["selection"].Use, core["selection"].Verdict}
    alive: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        alive["all"] += 1
        if kind in kinds:
            alive[kind.__name__] += 1
        elif issubclass(kind, torch.Tensor):
            alive["Tensor"] += 1
    return alive


def _kept(dispatcher: Any) -> dict[str, int]:
    """The sizes of what a patched model and the session keep."""
    session, live = dispatcher.session, inside.pack_module("nodes.host").LIVE
    holders = {
        "dispatcher": dispatcher,
        "plans": dispatcher._plans,
        "planner": dispatcher._planner,
        "finder": dispatcher._planner.finder,
        "review": dispatcher._review,
        "stats": dispatcher.stats,
        "session": session,
        "measurements": session.measurements,
        "live": live,
    }
    sizes = {}
    for name, holder in holders.items():
        for field, value in vars(holder).items():
            if value is live._open:  # emptied by a thread of its own
                continue
            if isinstance(value, (dict, list, set, deque, weakref.WeakKeyDictionary)):
                sizes[f"{name}.{field}"] = len(value)
    return {**sizes, "plans.known": len(_plans(dispatcher))}


def in_a_row(models: list[str], before: int, items: int) -> dict[str, Any]:
    """Prompts that differ by their seed, each with the next of the models alone, so that with several of them ComfyUI
    drops one and loads another for each prompt. Measured once all histories of bounded length are full."""
    queue = Queue()
    ends, alive, kept, resident = [], [], [], []
    for seed in range(before + items):
        ends.append(queue.put(branch(models[seed % len(models)], seed))["end"])
        if seed >= before - len(models):
            alive.append(_alive())
            kept.append(_kept(queue.last()))
            resident.append(resident_mib())
    return {
        "ends": ends,
        "alive": alive,
        "kept": kept,
        "resident_mib": resident,
        "run": queue.last().snapshot()["runs"][-1],
    }


def _plans(dispatcher: Any) -> list[int]:
    kept = dispatcher._plans.known.values()
    return sorted({id(plan) for known in kept for alike in known.values() for plan in alike.values()})


def alternating() -> dict[str, Any]:
    """Two patched models in one graph, of which each prompt samples one in turn."""
    queue = Queue()
    seeds = {"wan": 1, "flux": 1}
    queue.put({**branch("wan"), **branch("flux", kernel=NATIVE)})
    dispatchers = {"wan": queue.dispatcher("WAN21"), "flux": queue.dispatcher("Flux")}
    plans = {name: _plans(dispatcher) for name, dispatcher in dispatchers.items()}
    for item in range(6):
        seeds[list(seeds)[item % 2]] += 1
        queue.put({**branch("wan", seeds["wan"]), **branch("flux", seeds["flux"], kernel=NATIVE)})
    return {
        "same plans": {name: _plans(dispatcher) == plans[name] for name, dispatcher in dispatchers.items()},
        "plans": {name: len(set(ids)) for name, ids in plans.items()},
        "kernels": {name: dispatcher.snapshot()["policy"]["kernel"] for name, dispatcher in dispatchers.items()},
        "apart": not set(plans["wan"]) & set(plans["flux"]),
        "runs": {
            name: [[run["model"], run["node_id"], calls_by_kernel(run)] for run in dispatcher.snapshot()["runs"]]
            for name, dispatcher in dispatchers.items()
        },
    }


def twice_in_a_prompt() -> dict[str, Any]:
    """One patched model for two samplers of a prompt, the second on the latent of the first; twice."""
    queue = Queue()
    ends = []
    for seed in (1, 2):
        graph = branch("wan", seed)
        again = graph["wan sample"]["inputs"] | {"latent_image": ["wan sample", 0], "denoise": 0.5, "steps": 2}
        graph["wan again"] = {"class_type": "KSampler", "inputs": again}
        graph["wan look"]["inputs"]["latent"] = ["wan again", 0]
        ends.append(queue.put(graph))
    runs = queue.dispatcher("WAN21").snapshot()["runs"]
    return {
        "prompts": [end["id"] for end in ends],
        "runs": [[run["prompt_id"], run["node_id"], run["status"], calls_by_kernel(run)] for run in runs],
    }


@contextmanager
def _raising(model: Any, error: type[BaseException]) -> Iterator[None]:
    """A model that raises in the middle of its second forward, behind attention calls of its first block."""
    forwards = 0

    def fail(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 2:
            raise error("in the second forward")

    hook = model.model.diffusion_model.blocks[1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def ended_early_in_a_queue() -> dict[str, Any]:
    """A good prompt, one that fails, one that is interrupted, and the first one once more."""
    queue = Queue()
    items = [queue.put(branch("wan", seed=1, steps=3))]
    plans = _plans(queue.dispatcher("WAN21"))
    before = _alive()["Tensor"]
    for seed, error in ((2, RuntimeError), (3, management.InterruptProcessingException)):
        with _raising(queue.models["WAN21"](), error):
            items.append(queue.put(branch("wan", seed=seed, steps=3)))
    # the sampler of the first prompt is no longer cached, so it samples anew
    items.append(queue.put(branch("wan", seed=1, steps=3)))
    dispatcher = queue.dispatcher("WAN21")
    return {
        "ends": [item["end"] for item in items],
        "first": items[0]["latents"],
        "last": items[-1]["latents"],
        "runs": [[run["status"], run["steps"], run["calls"]] for run in dispatcher.snapshot()["runs"]],
        "same plans": _plans(dispatcher) == plans,
        "more tensors": _alive()["Tensor"] - before,
        "forward": getattr(dispatcher._threads, "forward", None) is not None,
        "run": dispatcher._run is not None,
    }


def dropped() -> dict[str, Any]:
    """What is left of a patched model once a graph has another one in its place, which we have no part in."""
    queue = Queue()
    queue.put(branch("wan"))
    patched, dispatcher = queue.models["WAN21"], weakref.ref(queue.dispatcher("WAN21"))
    network = weakref.ref(patched().model.diffusion_model)
    alive = _alive()
    there = [reference() is not None for reference in (patched, dispatcher, network)]
    end = queue.put(plain_branch("sdxl"))["end"]
    left = _alive()
    gone = [reference() is None for reference in (patched, dispatcher, network)]
    return {"end": end, "there": there, "gone": gone, "dispatchers": left["Dispatcher"] - alive["Dispatcher"]}


# -- memory


def unloaded_between(model: str) -> dict[str, Any]:
    """A patched model that ComfyUI takes out of memory between two runs, in each of its ways."""
    tiny = tiny_models.ALL[model]()
    patched = apply(tiny.model, kernel="int8_reference")
    dispatcher = inside.pack_module("nodes.host").dispatcher_of(patched)
    latents, plans, loaded = [digest(tiny.sample(patched))], [_plans(dispatcher)], []
    ways = {
        "all": management.unload_all_models,
        "for memory": lambda: management.free_memory(1e30, patched.load_device),
        "detached": patched.detach,
    }
    for unload in ways.values():
        unload()
        management.cleanup_models_gc()
        management.soft_empty_cache()
        loaded.append(patched.model.model_loaded_weight_memory)
        latents.append(digest(tiny.sample(patched)))
        plans.append(_plans(dispatcher))
        loaded.append(patched.model.model_loaded_weight_memory)
    return {
        "latents": latents,
        "loaded": loaded,
        "same plans": [made == plans[0] for made in plans],
        "plans": len(plans[0]),
        "by_kernel": [calls_by_kernel(run) for run in report(patched)["runs"]],
        "override": patched.model_options["transformer_options"][OVERRIDE] is dispatcher,
    }


@contextmanager
def _short_of_memory() -> Iterator[None]:
    """ComfyUI loads models as if they were for a GPU with no memory to spare."""
    with (
        patch.object(management, "is_device_cpu", lambda device: False),
        patch.object(management, "vram_state", management.VRAMState.NO_VRAM),
    ):
        yield


def low_vram() -> dict[str, Any]:
    """A model with a LoRA in full, as with ComfyUI's low-VRAM mode, and in full again.

    In that mode weights stay where they are, each layer casts its own when it runs and adds the LoRA then.
    """
    tiny = tiny_models.flux()
    name = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
    weight = tiny.model.model.state_dict()[name]
    change = 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    with_lora = tiny.model.clone()
    assert with_lora.add_patches({name: ("diff", (change,))}) == [name]
    models = {
        "without the node": with_lora,
        "observed": apply(with_lora, kernel=NATIVE),
        "served": apply(with_lora, kernel="int8_reference"),
    }
    dispatcher = inside.pack_module("nodes.host").dispatcher_of(models["served"])
    found: dict[str, list[Any]] = {name: [] for name in (*models, "low", "lora at run time", "same plans")}
    plans = None
    for low in (False, True, False):
        management.unload_all_models()
        tiny.model.detach()
        for kind, model in models.items():
            if low:
                with _short_of_memory():
                    found[kind].append(digest(tiny.sample(model)))
            else:
                found[kind].append(digest(tiny.sample(model)))
        found["low"].append(tiny.model.model.model_lowvram)
        found["lora at run time"].append(tiny.model.model.lowvram_patch_counter)
        plans = plans or _plans(dispatcher)
        found["same plans"].append(_plans(dispatcher) == plans)
    found["changed by the LoRA"] = [found["without the node"][0] != digest(tiny.sample())]
    found["by_kernel"] = [calls_by_kernel(run) for run in report(models["served"])["runs"]]
    return found
