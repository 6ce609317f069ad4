"""Scenarios about what the pack may not change, what it must hand on, and what it counts."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import comfy.clip_model
import comfy.ldm.modules.attention as attention
import comfy.ops
import comfy.text_encoders.t5
import torch
from comfy.ldm.modules.diffusionmodules.model import AttnBlock, vae_attention
from comfy_extras.nodes_model_advanced import ModelComputeDtype

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

NEW = {"compare_with_native": "first time"}
"""What a new node has where the tests of counts want no forward made only to compare."""

# -- contained: nothing but the node's own output changes


def native_latent(model: str) -> str:
    return digest(tiny_models.ALL[model]().sample())


def latents_of_everything_else(model: str) -> dict[str, Any]:
    """Digests of what must equal a ComfyUI without the pack, sampled around a run that does differ."""
    tiny = tiny_models.ALL[model]()
    before = tiny.model.clone()
    patched = apply(tiny.model, kernel="int8_reference")
    quantized = digest(tiny.sample(patched))
    latents = {
        "the model before the node": tiny.model,
        "a clone taken before the node": before,
        "a sibling taken after the node": tiny.model.clone(),
        "kernel native": apply(tiny.model, kernel=NATIVE),
        "kernel native after another Apply": apply(patched, kernel=NATIVE),
        "kernel auto without a GPU": apply(tiny.model, kernel="auto"),
        "kernel native in a new node": apply(tiny.model, kernel=NATIVE, **NEW),
        "kernel auto in a new node": apply(tiny.model, kernel="auto", **NEW),
    }
    return {"quantized": quantized, "native": {name: digest(tiny.sample(m)) for name, m in latents.items()}}


HOST_MODULES = ("comfy", "comfy_api", "comfy_execution", "execution", "folder_paths", "latent_preview", "nodes")
TORCH_MODULES = ("torch.nn.functional", "torch.nn.attention", "torch.cuda", "torch.compiler")


def functions() -> dict[str, str]:
    """Every function and method of ComfyUI and of torch's attention, and the place in a file that it comes from."""
    return {name: _place(value) for name, value in _functions().items()}


def _functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if not any(name == root or name.startswith(f"{root}.") for root in (*HOST_MODULES, *TORCH_MODULES)):
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                methods = {key: method for key, method in vars(value).items() if callable(method)}
                found.update({f"{name}.{attribute}.{key}": method for key, method in methods.items()})
            elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
                found[f"{name}.{attribute}"] = value
    return found


def _place(value: Any) -> str:
    code = getattr(value, "__code__", None)
    where = "" if code is None else f" {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}{where}"


def _global_state() -> dict[str, Any]:
    """What torch and the process hold for everybody."""
    cuda, cpu = torch.backends.cuda, torch.backends.mkldnn
    kinds = ("flash", "math", "mem_efficient", "cudnn")
    return {
        "random numbers": digest(torch.random.get_rng_state()),
        "sdpa": [getattr(cuda, f"{kind}_sdp_enabled")() for kind in kinds],
        "precision": [cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(), cpu.enabled],
        "defaults": [str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled()],
        "environment": dict(os.environ),
    }


def changed_by_patching(kernel: str) -> dict[str, list[str]]:
    """What is another object, or another global setting, after a model was patched and sampled."""
    tiny = tiny_models.wan()
    tiny.sample()  # imports and settings that the first sampling brings are ComfyUI's own
    functions_before, state_before = _functions(), _global_state()
    patched = apply(tiny.model, kernel=kernel, **NEW)
    state_patched = _global_state()
    tiny.sample(patched)
    functions_after, state_after = _functions(), _global_state()
    random = "random numbers"  # sampling draws some, patching may not
    return {
        "functions": [name for name, value in functions_before.items() if functions_after.get(name) is not value],
        "by patching": [name for name, value in state_before.items() if state_patched[name] != value],
        "by sampling": [n for n, value in state_before.items() if n != random and state_after[n] != value],
    }


def text_encoders_and_vae(kernel: str | None) -> dict[str, Any]:
    """What text encoders and VAE compute and by which functions, before and after a model was patched and sampled."""
    before = _computed_elsewhere()
    if kernel is not None:
        tiny = tiny_models.flux()
        tiny.sample(apply(tiny.model, kernel=kernel))
    return {"before": before, "after": _computed_elsewhere()}


def _computed_elsewhere() -> dict[str, str]:
    facts = {}
    cpu, sizes = torch.device("cpu"), {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.manual_cast}
    for mask in (False, True):
        for small in (False, True):
            chosen = attention.optimized_attention_for_device(cpu, mask=mask, small_input=small)
            facts[f"function for mask={mask}, small_input={small}"] = _place(chosen)
    facts["function of the VAE"] = _place(vae_attention())
    generator = torch.Generator().manual_seed(5)
    with torch.inference_mode():
        for channels in (384, 512):
            block = AttnBlock(channels)
            tiny_models._fill(block)
            pixels = torch.randn(1, channels, 12, 12, generator=generator)
            facts[f"VAE with {channels} channels"] = digest(block(pixels))
        clip = comfy.clip_model.CLIPTextModel(
            {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "num_attention_heads": 2,
                "intermediate_size": 128,
                "hidden_act": "quick_gelu",
                "max_position_embeddings": 77,
                "eos_token_id": 49407,
            },
            **sizes,
        )
        tiny_models._fill(clip)
        tokens = torch.randint(0, 49407, (1, 77), generator=generator)
        facts["CLIP text encoder"] = digest(clip(tokens)[0])
        t5 = comfy.text_encoders.t5.T5(
            {
                "num_layers": 2,
                "d_model": 64,
                "d_kv": 32,
                "d_ff": 128,
                "num_heads": 2,
                "dense_act_fn": "gelu_pytorch_tanh",
                "is_gated_act": True,
                "model_type": "t5",
                "vocab_size": 128,
            },
            **sizes,
        )
        tiny_models._fill(t5)
        mask = (torch.arange(20) < 15).long()[None]
        facts["T5 text encoder"] = digest(t5(torch.randint(0, 128, (1, 20), generator=generator), mask)[0])
    return facts


# -- the whole contract of a call


def contract(
    model: str, kernel: str, adds: dict[str, Any] | None = None, compute_dtype: str | None = None
) -> dict[str, Any]:
    """What reached native attention and how far each call's output and the latent are from native ones.

    ``compute_dtype`` is an option of ComfyUI's node that sets the dtype of the model's activations.
    """
    tiny = tiny_models.ALL[model]()
    sampled = tiny.model
    if compute_dtype is not None:
        (sampled,) = ModelComputeDtype().patch(sampled, compute_dtype)
    adds = dict(adds or {})
    if "attn_precision" in adds:
        adds["attn_precision"] = getattr(torch, adds["attn_precision"])
    witness = Witness(apply(sampled, kernel=kernel), **adds)
    latent = tiny.sample(witness.model)
    return {
        "calls": witness.calls,
        "latent_error": distance(latent, tiny.sample(sampled)),
        "run": last_run(witness.model),
    }


def single_calls(shapes: Sequence[str], layout: str | None) -> list[dict[str, Any]]:
    """Calls of every form that ComfyUI's attention functions take, one by one through this ComfyUI's own functions.

    They go to int8_reference, or to an exact kernel that takes one ``layout`` and no grouped heads.
    """
    tiny = tiny_models.wan()
    if layout is None:
        patched = apply(tiny.model, kernel="int8_reference")
    else:
        plain = backend("plain", _plain_kernel, options="attn_mask", tensor_layouts=(layout,))
        patched, _ = with_dispatcher(tiny.model, "plain", plain)
    witness = Witness(patched)
    options = witness.model.model_options["transformer_options"]
    facts = []
    for form in _forms(shapes):
        with torch.inference_mode():
            function = getattr(attention, form.pop("function"))
            inputs, heads = form.pop("inputs"), form.pop("heads")
            name = form.pop("name")
            function(*inputs, heads, transformer_options={OVERRIDE: options[OVERRIDE]}, **form)
        facts.append({"form": name, **witness.calls[-1]})
    return facts


def _plain_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, tensor_layout: str, **options: Any
) -> torch.Tensor:
    if tensor_layout == "NHD":
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    mask, scale = options.get("attn_mask"), options["sm_scale"]
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return output if tensor_layout == "HND" else output.transpose(1, 2)


def _forms(shapes: Sequence[str]) -> list[dict[str, Any]]:
    """(batch 2, heads 4, 24 queries, 40 keys, head_dim 32) with each mask that broadcasts there, in both layouts."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    batch, heads, queries, keys, dim = 2, 4, 24, 40, 32
    axes = {"2 axes": (queries, keys), "3 axes": (batch, queries, keys), "4 axes": (batch, 1, queries, keys)}
    axes |= {"3 axes, one row": (batch, 1, keys), "4 axes, all heads": (batch, heads, queries, keys)}
    masks: dict[str, torch.Tensor | None] = {"no mask": None}
    for name, shape in axes.items():
        masks[f"additive mask of {name}"] = draw(*shape).masked_fill(draw(*shape) > 1, -1e4)
        masks[f"bool mask of {name}"] = draw(*shape) < 1
    forms = []
    for key_heads in (heads, 2) if "grouped" in shapes else (heads,):
        for split in (False, True):
            sizes = [(heads, queries), (key_heads, keys), (key_heads, keys)]
            if split:
                inputs = [draw(batch, count, length, dim) for count, length in sizes]
            else:
                inputs = [draw(batch, length, count * dim) for count, length in sizes]
            for mask_name, mask in masks.items():
                for flat in (True, False):
                    form: dict[str, Any] = {"function": "attention_pytorch", "inputs": inputs, "heads": heads}
                    form |= {"mask": mask, "skip_reshape": split, "skip_output_reshape": not flat}
                    if key_heads != heads:
                        form["enable_gqa"] = True
                    if "scale" in shapes:
                        form["scale"] = 0.3
                    form["name"] = f"{mask_name}, {key_heads} key heads, {split=}, {flat=}"
                    forms.append(form)
    return forms


# -- honest: every call counted once


def counted(model: str, cfg: float = 3.0, **widgets: Any) -> dict[str, Any]:
    """Two runs through one patched model, with the calls and forwards of the second counted without the pack."""
    tiny = tiny_models.ALL[model]()
    patched = apply(tiny.model, **widgets)
    tiny.sample(patched, cfg=cfg, steps=2)
    forwards = 0

    def count_forward(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    hook = tiny.model.model.diffusion_model.register_forward_hook(count_forward)
    with calls_counted() as calls:
        tiny.sample(patched, cfg=cfg)
        found = calls()
    hook.remove()
    runs = report(patched)["runs"]
    return {
        "calls": found,
        "forwards": forwards,
        "runs": runs,
        "by_kernel": [calls_by_kernel(run) for run in runs],
    }
