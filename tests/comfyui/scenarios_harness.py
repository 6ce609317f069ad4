"""Scenarios about the harness itself."""

from __future__ import annotations

import os
import sys
import time


def facts() -> dict[str, object]:
    print("printed by a scenario")
    import comfyui_version
    from comfy.cli_args import args

    import nodes

    return {
        "version": comfyui_version.__version__,
        "cpu": args.cpu,
        "nodes_file": nodes.__file__,
        "has_pack": "ApplySageAttention" in nodes.NODE_CLASS_MAPPINGS,
        "pid": os.getpid(),
    }


def fail(message: str) -> None:
    print("about to fail")
    raise ValueError(message)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def leave() -> None:
    sys.stdout.flush()
    os._exit(3)


def attention_calls(model: str) -> dict[str, object]:
    """Samples a tiny model twice and records what ComfyUI passes to attention."""
    import torch

    from stand_ins import tiny_models

    tiny = tiny_models.ALL[model]()
    calls = []

    def record(func, q, k, v, heads, mask=None, **kwargs):
        calls.append(
            {
                "q": list(q.shape),
                "k": list(k.shape),
                "heads": heads,
                "mask": None if mask is None else [str(mask.dtype), *mask.shape],
                "options": sorted(set(kwargs) - {"transformer_options", "_inside_attn_wrapper"}),
            }
        )
        return func(q, k, v, heads, mask=mask, **kwargs)

    recorded = tiny.model.clone()
    recorded.model_options["transformer_options"]["optimized_attention_override"] = record
    latent, again = tiny.sample(recorded), tiny.sample()
    return {
        "calls": calls,
        "finite": bool(torch.isfinite(latent).all()),
        "std": float(latent.std()),
        "same_bits": torch.equal(latent, again),
    }
