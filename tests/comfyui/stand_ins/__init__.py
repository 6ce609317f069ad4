"""A custom node pack for tests: what a workflow needs beside the pack when there are no model files to download."""

from __future__ import annotations

from typing import Any

from . import tiny_models


class StandInConditioning:
    """Random conditioning in place of a text encoder's."""

    CATEGORY = "sagescope tests"
    FUNCTION = "encode"
    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        number = {"min": 1, "max": 1 << 20}
        return {
            "required": {
                "seed": ("INT", {"default": 0, "min": 0, "max": 1 << 32}),
                "tokens": ("INT", {"default": 8, **number}),
                "dim": ("INT", {"default": 4096, **number}),
                "pooled": ("INT", {"default": 64, **number}),
            }
        }

    def encode(self, seed: int, tokens: int, dim: int, pooled: int) -> tuple[Any]:
        return (tiny_models.conditioning(tokens, dim, pooled, seed),)


NODE_CLASS_MAPPINGS = {"StandInConditioning": StandInConditioning}

# Before the first request, so that UNETLoader lists the file.
tiny_models.wan_file()
