"""Scenarios about what else is done to a model: other overrides, weights, threads, compiling."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

import inside
from patched import (
    NATIVE,
    OVERRIDE,
    apply,
    calls_counted,
    digest,
    distance,
    last_run,
    report,
)
from stand_ins import tiny_models


def halved(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An override of another pack that ends the chain, as those that put in one kernel do."""
    return func(*args, **kwargs) * 0.5


def with_override(model: Any, override: Any) -> Any:
    """The model with another pack's override in the slot, set as such packs set it."""
    clone = model.clone()
    clone.model_options["transformer_options"][OVERRIDE] = override
    return clone


def override_before(kernel: str) -> dict[str, Any]:
    tiny = tiny_models.wan()
    other = with_override(tiny.model, halved)
    patched = apply(apply(other, kernel="int8_reference"), kernel=kernel)
    return {
        "latent": digest(tiny.sample(patched)),
        "of the other": digest(tiny.sample(other)),
        "without any": digest(tiny.sample()),
        "report": report(patched),
    }


def override_after(chained: bool) -> dict[str, Any]:
    tiny = tiny_models.wan()
    patched = apply(tiny.model, kernel="int8_reference")
    ours = patched.model_options["transformer_options"][OVERRIDE]

    def cross_attention_only(func: Callable[..., Any], q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
        return halved(func, q, k, *args, **kwargs) if k.shape[1] == 8 else ours(func, q, k, *args, **kwargs)

    after = with_override(patched, cross_attention_only if chained else halved)
    latent = digest(tiny.sample(after))
    return {
        "latent": latent,
        "of the other": digest(tiny.sample(with_override(tiny.model, halved))),
        "run": last_run(after),
        "text": inside.execute("AttentionBackendReport", model=after).args[1],
    }


def two_applies(first: str, second: str) -> dict[str, Any]:
    """Two nodes in a row; what the second alone gives is what both must give."""
    tiny = tiny_models.flux()
    inner = apply(tiny.model, kernel=first)
    both, alone = apply(inner, kernel=second), apply(tiny.model, kernel=second)
    with calls_counted() as calls:
        latent = digest(tiny.sample(both))
        counted = calls()
    return {
        "latent": latent,
        "alone": digest(tiny.sample(alone)),
        "calls": counted,
        "report": report(both),
        "inner runs": len(report(inner)["runs"]),
        "wrappers": {kind: len(both.get_wrappers(kind, "sagescope")) for kind in ("outer_sample", "apply_model")},
    }


def lora_after() -> dict[str, Any]:
    """A clone downstream with changed weights, as a LoRA loader makes it; both count into one record."""
    tiny = tiny_models.flux()
    patched = apply(tiny.model, kernel="int8_reference")
    lora = patched.clone()
    key = next(name for name in tiny.model.model_state_dict() if name.endswith("qkv.weight"))
    lora.add_patches({key: (torch.ones_like(tiny.model.model_state_dict()[key]),)}, 0.1)
    with calls_counted() as calls:
        changed = tiny.sample(lora)
        counted = calls()
    return {
        "calls": counted,
        "changed": distance(changed, tiny.sample(patched)),
        "runs seen after it": len(report(lora)["runs"]),
        "runs seen before it": len(report(patched)["runs"]),
        "run": report(patched)["runs"][0],
    }


def in_two_threads() -> dict[str, Any]:
    """The two halves of each batch in a thread each, at once, as ComfyUI does with several GPUs."""
    tiny = tiny_models.wan()
    models = {}

    def halves_at_once(apply_model: Any, given: dict[str, Any]) -> torch.Tensor:
        together, outputs = threading.Barrier(2), [None, None]

        def half(index: int) -> None:
            rows = slice(index, index + 1)
            conditions = {name: v[rows] if torch.is_tensor(v) else v for name, v in given["c"].items()}
            together.wait(timeout=30)
            with torch.inference_mode():
                outputs[index] = apply_model(given["input"][rows], given["timestep"][rows], **conditions)

        threads = [threading.Thread(target=half, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat(outputs)

    for kernel in (None, NATIVE, "int8_reference"):
        models[kernel] = tiny.model.clone() if kernel is None else apply(tiny.model, kernel=kernel, skip_blocks="0")
        models[kernel].set_model_unet_function_wrapper(halves_at_once)
    latents = {str(kernel): digest(tiny.sample(model)) for kernel, model in models.items()}
    with calls_counted() as calls:
        tiny.sample(models["int8_reference"], steps=8)
        return {"latents": latents, "calls": calls(), "run": last_run(models["int8_reference"])}


def compiled(guard_filter: bool) -> list[dict[str, Any]]:
    """A model behind torch.compile: without the pack, with it in both orders of the two nodes, and without it again."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    tiny = tiny_models.qwen_image()
    options = {"guard_filter_fn": lambda entries: ["transformer_options" not in entry.name for entry in entries]}

    def compile_node(model: Any) -> Any:
        clone = model.clone()
        set_torch_compile_wrapper(model=clone, backend="eager", options=options if guard_filter else None)
        return clone

    torch.compiler.reset()
    facts = []
    for model in (
        compile_node(tiny.model),
        compile_node(apply(tiny.model, kernel="int8_reference")),
        compile_node(apply(tiny.model, kernel=NATIVE)),
        apply(compile_node(tiny.model), kernel="int8_reference"),
        compile_node(tiny.model),
    ):
        torch._dynamo.utils.counters.clear()
        latent = digest(tiny.sample(model))
        operators = torch._dynamo.utils.counters["stats"]["calls_captured"]
        runs = report(model)["runs"]
        facts.append({"latent": latent, "runs": runs, "operators compiled": operators})
    breaks = [_graph_breaks(tiny, compile_node(model)) for model in (tiny.model, apply(tiny.model, kernel=NATIVE))]
    quantized = apply(tiny.model, kernel="int8_reference")
    breaks.append(_graph_breaks(tiny, compile_node(quantized)))
    torch.compiler.reset()
    native = digest(tiny.sample())
    return [*facts, {"native": native, "quantized": digest(tiny.sample(quantized)), "breaks": breaks}]


def _graph_breaks(tiny: Any, model: Any) -> dict[str, int]:
    """Why the graphs of a model break that is traced for the first time, and how often."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    tiny.sample(model)
    return {reason.splitlines()[0]: times for reason, times in torch._dynamo.utils.counters["graph_break"].items()}
