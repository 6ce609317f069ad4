"""Scenarios about a run: its window and blocks, several runs of one model, and what goes wrong in one."""

from __future__ import annotations

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
    """A kernel that raises ``times`` times from call ``first`` on; the calls of the two trials before a run count."""
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


def forgotten_measurements() -> list[list[int]]:
    """The plans that served each of three runs of one patched model; all is forgotten before the third."""
    tiny, host = tiny_models.wan(), inside.pack_module("nodes.host")
    patched = apply(tiny.model, kernel="int8_reference")
    stats = host.dispatcher_of(patched).stats
    for run in range(3):
        if run == 2:
            host.SESSION.forget()
        tiny.sample(patched)
    return [sorted({id(plan) for _, plan in run._calls}) for run in stats._runs]
