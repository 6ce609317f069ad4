"""What the scenarios share: small models for a GPU, the node on them, and what can be read afterwards.

Scenarios run in processes of their own (processes.py), where ComfyUI may be imported, and give plain JSON types.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import comfy.model_management as management
import comfy.model_patcher
import torch

from benchmarks import comfyui
from benchmarks.entries import AUTO, OVERRIDE, Missing, the_pack
from benchmarks.lines import LINES, TINY_SDXL, TINY_WAN, Line
from benchmarks.sampling import Sampling
from tests.gpu.processes import Missing as NotHere

CPU = torch.device("cpu")
PREVIEW = "int8_reference"
STEPS = 3
FRAMES = 14
"""Calls shown of each block: from the allocation out to the node or the sampler that led there."""


def small(name: str, **unet: Any) -> Line:
    """A line of the benchmarks as a model of a few million weights, with as many tokens as kernels are timed for."""
    line = LINES[name]
    tokens_of_text = min(line.text[0], 128)
    latent = {"flux-1024": (1, 16, 64, 64), "sdxl-1024": (1, 4, 64, 64), "wan-480p": (1, 16, 5, 32, 32)}[name]
    text = (tokens_of_text, unet.get("context_in_dim", unet.get("context_dim", line.text[1])))
    return replace(line, unet={**line.unet, **unet}, latent=latent, text=text)


FLUX = small("flux-1024", hidden_size=512, num_heads=4, depth=2, depth_single_blocks=2, context_in_dim=128)
SDXL = small("sdxl-1024", **TINY_SDXL)
WAN_SMALL = small("wan-480p", **TINY_WAN)


def start(measurements: Path, *, dynamic_vram: bool) -> None:
    """A session that knows nothing yet, and the second half of what ComfyUI's main.py does for dynamic VRAM."""
    comfyui.new_session(measurements)
    gc.freeze()  # each collection from now on would look at all that was imported: a quarter of a second
    if management.args.cpu:
        torch.set_num_threads(1)  # models this small only lose by more
    if not dynamic_vram:
        return
    import comfy_aimdo.control
    from comfy import memory_management

    headroom = int(getattr(management.args, "vram_headroom", 0) * 1024**3)
    try:
        ready = comfy_aimdo.control.init_devices((device.index, headroom) for device in _gpus())
    except TypeError:  # older comfy-aimdo
        ready = comfy_aimdo.control.init_devices(device.index for device in _gpus())
    if not ready:
        raise NotHere("comfy-aimdo does not start on this GPU with these options")
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    memory_management.aimdo_enabled = True


def _gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


# -- parts


def build(line: Line, steps: int = STEPS) -> Sampling:
    """The model with its weights on the host, where ComfyUI loads it from and unloads it to."""
    device = management.get_torch_device()
    memory = sys.modules.get("comfy.memory_management")  # older ComfyUI has none
    # with dynamic VRAM layers are made without weights, and there would be none to fill
    with patch.object(memory, "aimdo_enabled", False, create=True) if memory else nullcontext():
        return Sampling.build(line, device, tiny=device.type == "cpu", steps=steps, offload=CPU)


def loaded_anew(sampling: Sampling) -> Sampling:
    """A model of the same weights as ComfyUI's loader makes it: with dynamic VRAM its layers have none, and take those
    given as they are. ``sampling``'s model must be on the host."""
    weights = dict(sampling.model.model.diffusion_model.state_dict())
    with torch.inference_mode():  # as in all nodes
        model = sampling.model.model.model_config.get_model(weights)
        ends = {"load_device": sampling.model.load_device, "offload_device": CPU}
        patcher = comfy.model_patcher.CoreModelPatcher(model, **ends)
        model.load_model_weights(weights, assign=patcher.is_dynamic())
    return replace(sampling, model=patcher)


def session() -> Any:
    return comfyui.pack("nodes.patch_attention").SESSION


def quantized(model: Any) -> list[str]:
    """The quantized kernels of this machine by name; the preview in plain PyTorch where there is no other."""
    names = [backend.name for backend in session().backends if not backend.exact and backend.name != PREVIEW]
    return that_load(model, names) or [PREVIEW]


def that_load(model: Any, names: list[str]) -> list[str]:
    loads = []
    for name in names:
        try:
            the_pack(model, kernel=name)
        except Missing:
            continue
        loads.append(name)
    return loads


def patched(model: Any) -> dict[str, Any]:
    """The model through the node, with auto and with the first quantized kernel by its name."""
    named = quantized(model)[0]
    return {
        AUTO: the_pack(model, kernel=AUTO, compare_with_native="first time"),
        named: the_pack(model, kernel=named),
    }


def warm(sampling: Sampling, model: Any) -> torch.Tensor:
    """The latent of the model's first run, which may plan, compare and plan again; another run follows it, so that
    what is counted from now on is alike."""
    first = sampling.sample(model)
    sampling.sample(model)
    return first


def attention_calls(sampling: Sampling) -> int:
    """How many attention calls a run makes, counted without the pack."""
    calls = 0

    def count(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return function(*args, **kwargs)

    counted = sampling.model.clone()
    counted.model_options.setdefault("transformer_options", {})[OVERRIDE] = count
    sampling.sample(counted)
    return calls


def plans(model: Any) -> list[int]:
    """The identities of the plans that a patched model has."""
    kept = comfyui.dispatcher_of(model)._plans.known.values()
    return sorted({id(plan) for known in kept for alike in known.values() for plan in alike.values()})


def events(model: Any) -> list[str]:
    """What went wrong or was changed in the last run."""
    return [event["text"] for event in comfyui.dispatcher_of(model).snapshot()["runs"][-1]["events"]]


def retired() -> list[str]:
    return [entry["kernel"] for entry in session().snapshot()["retired"]]


def settle() -> None:
    """What ComfyUI's executor does after a node, so that memory can be read."""
    if hasattr(management, "reset_cast_buffers"):
        management.reset_cast_buffers()
    gc.collect()
    management.soft_empty_cache()


def allocated() -> int:
    """Bytes that PyTorch has in use on the GPU, without the workspace that it keeps for matrix products."""
    settle()
    if management.args.cpu:
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def record_allocations() -> None:
    """Have PyTorch remember where each block of the GPU's memory was asked for, for ``blocks_in_use``."""
    if not management.args.cpu:
        torch.cuda.memory._record_memory_history("state", context="state", stacks="python")


def blocks_in_use() -> list[str]:
    """Each block that something holds: its size, and the calls that led to it, the innermost first."""
    if management.args.cpu:
        return []
    return [_described(block) for block in _active(torch.cuda.memory._snapshot())]


def _active(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    return [block for block in blocks if block["state"] != "inactive"]


def _described(block: dict[str, Any]) -> str:
    frames = [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in block.get("frames", [])[:FRAMES]]
    return "\n    ".join([f"{block['size']} bytes, {block['state']}", *(frames or ["made before it was recorded"])])


def distance(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2 in double precision; 0 means the same bits."""
    if torch.equal(tensor, reference):
        return 0.0
    return float((tensor.double() - reference.double()).norm() / reference.double().norm())
