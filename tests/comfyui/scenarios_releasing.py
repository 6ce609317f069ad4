"""Scenarios about calls in ComfyUI's containers, and about the override, which serves them and is an object."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import comfy.hooks
import comfy.ldm.modules.attention as attention
import comfy.sample
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import inside
from patched import (
    NATIVE,
    OVERRIDE,
    apply,
    backend,
    calls_counted,
    digest,
    distance,
    last_run,
    report,
    with_dispatcher,
)
from stand_ins import tiny_models

STEPS = 6


def one_call() -> dict[str, Any]:
    """A call alone, outside any model."""
    patched = apply(tiny_models.wan().model, kernel="int8_reference")
    options = {OVERRIDE: patched.model_options["transformer_options"][OVERRIDE]}
    tensors = [torch.randn(1, 64, 256, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]
    held = [attention.AttentionTensorContainer(tensor) for tensor in tensors]
    with torch.inference_mode():
        expected = attention.optimized_attention(*tensors, heads=2)
        output = attention.optimized_attention(*held, heads=2, transformer_options=options)
    return {
        "error": distance(output, expected),
        "consumed": [holder.tensor is None for holder in held],
        "run": last_run(patched),
    }


def halved(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An override of another pack that knows no containers."""
    return func(*args, **kwargs) * 0.5


def halved_in_containers(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """One that knows them, as ComfyUI asks for it."""
    return halved(func, *args, **kwargs)


def _halved_container_function(*args: Any, **kwargs: Any) -> Any:
    return attention.optimized_attention(*args, **kwargs) * 0.5


halved_in_containers.container_function = _halved_container_function  # type: ignore[attr-defined]


def sampled() -> dict[str, Any]:
    """The model that makes such calls: with and without the pack, and behind overrides of others."""
    tiny = tiny_models.minimax_h3()
    facts: dict[str, Any] = {"without": digest(tiny.sample(steps=STEPS, cfg=1.0))}
    for name, previous in {"": None, "halved": halved, "halved in containers": halved_in_containers}.items():
        model = tiny.model.clone()
        if previous is not None:
            model.model_options["transformer_options"][OVERRIDE] = previous
            facts[name] = digest(tiny.sample(model, steps=STEPS, cfg=1.0))
        for kernel in (NATIVE, "int8_reference"):
            patched = apply(model, kernel=kernel, start_percent=0.0 if previous is None else 0.5)
            with calls_counted() as calls:
                latent = tiny.sample(patched, steps=STEPS, cfg=1.0)
                counted = calls()
            facts[f"{kernel} {name}".strip()] = {"latent": digest(latent), "calls": counted, "run": last_run(patched)}
    return facts


class Halves:
    """The exact kernel of a test in two halves; ``failing`` is what the second raises, ``alive`` what still holds
    memory of query, key and value when it begins."""

    def __init__(self, failing: Exception | None = None) -> None:
        self.failing = failing
        self.alive: list[int] = []

    def whole(self, query: Any, key: Any, value: Any, *, tensor_layout: str, sm_scale: float, **_: Any) -> Any:
        assert tensor_layout == "HND"
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=sm_scale)

    def prepare(self, tensors: list[Any], **keywords: Any) -> Callable[[], Any]:
        copies = [tensor.clone() for tensor in tensors]
        memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        tensors.clear()

        def attend() -> Any:
            self.alive.append(sum(not storage.expired() for storage in memory))
            if self.failing is not None:
                raise self.failing
            return self.whole(*copies, **keywords)

        return attend


def released(out_of_memory: bool) -> dict[str, Any]:
    """The memory of query, key and value when the attention of a real model begins, and what becomes of a failure."""
    tiny = tiny_models.minimax_h3()
    kernel = Halves(torch.OutOfMemoryError("CUDA out of memory") if out_of_memory else None)
    model, dispatcher = with_dispatcher(
        tiny.model, "halves", backend("halves", kernel.whole, prepare=kernel.prepare, tensor_layouts=("HND",))
    )
    with calls_counted() as calls:
        latent = tiny.sample(model, steps=STEPS, cfg=1.0)
        counted = calls()
    plain, _ = with_dispatcher(tiny.model, "whole", backend("whole", kernel.whole, tensor_layouts=("HND",)))
    return {
        "latent": digest(latent),
        "of tensors": digest(tiny.sample(plain, steps=STEPS, cfg=1.0)),
        "off native": distance(latent, tiny.sample(steps=STEPS, cfg=1.0)),
        "alive": kernel.alive,
        "calls": counted,
        "run": dispatcher.snapshot()["runs"][-1],
    }


def compiled() -> dict[str, Any]:
    """The same model behind torch.compile, with and without the pack."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    tiny = tiny_models.minimax_h3()
    options = {"guard_filter_fn": lambda entries: ["transformer_options" not in entry.name for entry in entries]}
    facts = {}
    for name, model in {
        "without": tiny.model,
        "native": apply(tiny.model, kernel=NATIVE),
        "quantized": apply(tiny.model, kernel="int8_reference"),
    }.items():
        torch.compiler.reset()
        behind = model.clone()
        set_torch_compile_wrapper(model=behind, backend="eager", options=options)
        latent = digest(tiny.sample(behind, steps=STEPS, cfg=1.0))
        runs = report(behind)["runs"] if name != "without" else []
        facts[name] = {"latent": latent, "eager": digest(tiny.sample(model, steps=STEPS, cfg=1.0)), "runs": runs}
    torch.compiler.reset()
    return facts


def the_override() -> dict[str, Any]:
    """What stands in the place of an override after a model was copied and patched again, and how reports name it."""
    tiny = tiny_models.flux()
    patched = apply(tiny.model, kernel="int8_reference")
    ours = patched.model_options["transformer_options"][OVERRIDE]
    copies = [patched.clone().clone(), patched.clone()]
    copies[1].model_options = copy.deepcopy(copies[1].model_options)
    without_attachments = patched.clone()
    without_attachments.attachments.clear()
    again = [apply(copies[0], kernel=NATIVE), apply(without_attachments, kernel=NATIVE)]
    for model in copies:
        tiny.sample(model)
    replaced = patched.clone()
    other = apply(tiny.model, kernel=NATIVE).model_options["transformer_options"][OVERRIDE]
    replaced.model_options["transformer_options"][OVERRIDE] = other
    tiny.sample(replaced)
    return {
        "same": [model.model_options["transformer_options"][OVERRIDE] is ours for model in copies],
        "container_function": callable(getattr(ours, "container_function", None)),
        "previous": [report(model)["previous_override"] for model in again],
        "runs": report(patched)["runs"],
        "text": inside.execute("AttentionBackendReport", model=replaced).args[1],
    }


def hooked() -> dict[str, Any]:
    """Conditioning with hooks, which merge what they bring into copies of the model's options."""
    tiny = tiny_models.flux()
    patched = apply(tiny.model, kernel="int8_reference")
    facts = {}
    for name, brought in {"another key": {"brought": 1}, "an override": {OVERRIDE: halved}}.items():
        hooks = comfy.hooks.HookGroup()
        hooks.add(comfy.hooks.TransformerOptionsHook(brought))
        positive, negative = (tiny_models.conditioning(*tiny.text, tiny.pooled, seed) for seed in (10, 11))
        conditions = [comfy.hooks.set_hooks_for_conditioning(each, hooks) for each in (positive, negative)]
        latent = torch.zeros(tiny.latent)
        with torch.inference_mode():
            noise = comfy.sample.prepare_noise(latent, 1)
            comfy.sample.sample(
                patched, noise, 3, 3.0, "euler", "simple", *conditions, latent, denoise=1.0, disable_pbar=True, seed=1
            )
        facts[name] = last_run(patched)
    return facts
