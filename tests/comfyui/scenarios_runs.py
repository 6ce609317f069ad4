"""Scenarios about a run: its window and blocks, what is put before and after the node, and what goes wrong in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import comfy.ldm.modules.attention as attention
import comfy.model_management
import comfy.sample
import torch

import inside
import nodes
from patched import (
    NATIVE,
    OVERRIDE,
    Witness,
    apply,
    backend,
    calls_by_kernel,
    calls_counted,
    digest,
    distance,
    last_run,
    report,
    with_dispatcher,
)
from stand_ins import tiny_models

# -- parts of a run


def window(model: str, start: float, end: float, steps: int = 4, sampling_after: bool = False) -> dict[str, Any]:
    """Which steps native attention had to itself, and the sigmas that the model which was sampled gives the window."""
    tiny = tiny_models.ALL[model]()
    witness = Witness(apply(tiny.model, kernel="int8_reference", start_percent=start, end_percent=end))
    sampled = _other_schedule(witness.model) if sampling_after else witness.model
    tiny.sample(sampled, steps=steps)
    sampling = sampled.get_model_object("model_sampling")
    by_sigma: dict[float, set[int]] = {}
    for call in witness.calls:
        by_sigma.setdefault(call["sigma"], set()).add(call["native"])
    return {
        "steps": [[sigma, sorted(native)] for sigma, native in by_sigma.items()],
        "window": [sampling.percent_to_sigma(start), sampling.percent_to_sigma(end)],
        "run": last_run(sampled),
        "calls": len(witness.calls),
    }


def _other_schedule(model: Any) -> Any:
    """The model behind ComfyUI's node for its kind of schedule, which moves every sigma."""
    from comfy_extras import nodes_model_advanced

    if isinstance(model.get_model_object("model_sampling"), comfy.model_sampling.CONST):
        return nodes_model_advanced.ModelSamplingSD3().patch(model, 12.0)[0]
    return nodes_model_advanced.ModelSamplingDiscrete().patch(model, "v_prediction", True)[0]


def skipped_blocks(model: str, skip: str) -> dict[str, Any]:
    """The calls of one forward, and whether native attention had each."""
    tiny = tiny_models.ALL[model]()
    witness = Witness(apply(tiny.model, kernel="int8_reference", skip_blocks=skip))
    tiny.sample(witness.model, steps=1)
    return {
        "calls": [[call["block"], call["native"]] for call in witness.calls],
        "run": last_run(witness.model),
        "text": inside.execute("AttentionBackendReport", model=witness.model).args[1],
    }


def hires_fix(advanced: bool) -> dict[str, Any]:
    """One patched model through two samplers: a second pass at twice the size, or the two halves of a schedule."""
    tiny = tiny_models.flux()
    patched = apply(tiny.model, kernel="int8_reference", end_percent=0.6)
    positive, negative = (tiny_models.conditioning(*tiny.text, tiny.pooled, seed) for seed in (10, 11))
    latent = {"samples": torch.zeros(tiny.latent)}
    shared: dict[str, Any] = {"model": patched, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple"}
    shared |= {"positive": positive, "negative": negative}
    with calls_counted() as calls, torch.inference_mode():
        if advanced:
            shared |= {"noise_seed": 1, "steps": 4, "return_with_leftover_noise": "enable"}
            sample = nodes.KSamplerAdvanced().sample
            (half,) = sample(**shared, add_noise="enable", latent_image=latent, start_at_step=0, end_at_step=2)
            first = calls()
            sample(**shared, add_noise="disable", latent_image=half, start_at_step=2, end_at_step=4)
        else:
            (small,) = nodes.KSampler().sample(**shared, seed=1, steps=3, latent_image=latent)
            first = calls()
            large = {"samples": torch.nn.functional.interpolate(small["samples"], scale_factor=2)}
            nodes.KSampler().sample(**shared, seed=1, steps=4, latent_image=large, denoise=0.5)
        second = calls() - first
    return {"calls": [first, second], "runs": report(patched)["runs"]}


def split_conditions() -> dict[str, Any]:
    """Conditions of different lengths, which ComfyUI samples in a forward each."""
    tiny = tiny_models.wan()
    patched = apply(tiny.model, kernel="int8_reference")
    positive, negative = (tiny_models.conditioning(tokens, 4096, 64, tokens) for tokens in (8, 7))
    latent = torch.zeros(tiny.latent)
    with calls_counted() as calls, torch.inference_mode():
        noise = comfy.sample.prepare_noise(latent, 1)
        comfy.sample.sample(patched, noise, 2, 3.0, "euler", "simple", positive, negative, latent, disable_pbar=True)
        return {"calls": calls(), "run": last_run(patched)}


def previews() -> dict[str, list[Any]]:
    """What a sampler's callback, which draws previews and progress, gets without the node and behind it."""
    tiny = tiny_models.flux()
    positive, negative = (tiny_models.conditioning(*tiny.text, tiny.pooled, seed) for seed in (10, 11))
    latent = torch.zeros(tiny.latent)
    seen: dict[str, list[Any]] = {}
    for name, model in {"without": tiny.model, "behind": apply(tiny.model, kernel=NATIVE)}.items():
        calls = seen[name] = []

        def callback(*given: Any, calls: list[Any] = calls) -> None:
            calls.append([digest(value) if torch.is_tensor(value) else value for value in given])

        with torch.inference_mode():
            noise = comfy.sample.prepare_noise(latent, 1)
            comfy.sample.sample(model, noise, 3, 3.0, "dpmpp_2m", "simple", positive, negative, latent,
                                callback=callback, disable_pbar=True)  # fmt: skip
    return seen


# -- other patches before and after the node


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


# -- what goes wrong in a run


def _native_kernel(raises: Callable[[int], Exception | None]) -> Callable[..., Any]:
    """A kernel with the bits of native attention for Wan's calls, which raises at some of them."""
    count = 0

    def kernel(query: Any, key: Any, value: Any, *, tensor_layout: str, sm_scale: float, **options: Any) -> Any:
        nonlocal count
        error = raises(count)
        count += 1
        if error is not None:
            raise error
        query, key, value = (tensor.flatten(2) for tensor in (query, key, value))
        return attention.optimized_attention(query, key, value, heads=2).unflatten(2, (2, 128))

    return kernel


def failing_kernel(message: str, kind: str, first: int, times: int = 1) -> dict[str, Any]:
    """A kernel that raises ``times`` times from its ``first`` call on; the two trials before a run are calls, too."""
    tiny = tiny_models.wan()
    raised = []

    def raises(number: int) -> Exception | None:
        if not first <= number < first + times:
            return None
        raised.append(number)
        return {"memory": torch.OutOfMemoryError, "runtime": RuntimeError}[kind](message)

    patched, _ = with_dispatcher(tiny.model, "fragile", backend("fragile", _native_kernel(raises)))
    latents = [digest(tiny.sample(patched)) for _ in range(2)]
    runs = report(patched)["runs"]
    return {
        "latents": latents,
        "native": digest(tiny.sample()),
        "raised": len(raised),
        "runs": runs,
        "by_kernel": [calls_by_kernel(run) for run in runs],
        "retired": report(patched)["environment"]["retired"],
    }


def ended_early(how: str) -> dict[str, Any]:
    """A run that does not reach its end, and a whole one after it."""
    tiny = tiny_models.wan()
    patched = apply(tiny.model, kernel="int8_reference")
    error = comfy.model_management.InterruptProcessingException if how == "interrupt" else RuntimeError
    block = tiny.model.model.diffusion_model.blocks[1]
    forwards = 0

    def fail(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 2:
            raise error("in the second forward")

    hook = block.register_forward_pre_hook(fail)
    with calls_counted() as calls:
        try:
            tiny.sample(patched)
            raised = "nothing"
        except error as caught:
            raised = type(caught).__name__
        counted = calls()
    hook.remove()
    latent = tiny.sample(patched)
    return {
        "raised": raised,
        "calls": counted,
        "runs": report(patched)["runs"],
        "same latent": torch.equal(latent, tiny.sample(apply(tiny.model, kernel="int8_reference"))),
    }


def outside_a_run(model_call: bool) -> dict[str, Any]:
    """Calls that no sampler stands around, before and after a run."""
    tiny = tiny_models.wan()
    patched = apply(tiny.model, kernel="int8_reference")
    options = dict(patched.model_options["transformer_options"])
    generator = torch.Generator().manual_seed(3)
    latent = torch.randn(tiny.latent, generator=generator)
    context = tiny_models.conditioning(*tiny.text, 64, 1)[0][0]
    distances = []

    def call(options: dict[str, Any]) -> torch.Tensor:
        with torch.inference_mode():
            if model_call:
                return tiny.model.model.diffusion_model(
                    latent, torch.tensor([500.0]), context=context, transformer_options=options
                )
            q, k, v = torch.randn(3, 1, 64, 256, generator=torch.Generator().manual_seed(4))
            return attention.optimized_attention(q, k, v, heads=2, transformer_options=options)

    for _ in range(2):
        distances.append(distance(call(dict(options)), call({})))
        tiny.sample(patched)
    distances.append(distance(call(dict(options)), call({})))
    return {"distances": distances, "runs": report(patched)["runs"]}


def containers() -> dict[str, Any] | None:
    """A call whose tensors come in containers with one owner; None where this ComfyUI has none."""
    container = getattr(attention, "AttentionTensorContainer", None)
    if container is None:
        return None
    tiny = tiny_models.wan()
    patched = apply(tiny.model, kernel="int8_reference")
    options = {OVERRIDE: patched.model_options["transformer_options"][OVERRIDE]}
    tensors = [torch.randn(1, 64, 256, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]
    held = [container(tensor) for tensor in tensors]
    with torch.inference_mode():
        expected = attention.optimized_attention(*tensors, heads=2)
        output = attention.optimized_attention(*held, heads=2, transformer_options=options)
    return {
        "error": distance(output, expected),
        "consumed": [holder.tensor is None for holder in held],
        "run": last_run(patched),
    }


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
    torch.compiler.reset()
    quantized = apply(tiny.model, kernel="int8_reference")
    return [*facts, {"native": digest(tiny.sample()), "quantized": digest(tiny.sample(quantized))}]
