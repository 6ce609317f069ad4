"""ComfyUI-SageScope: measured, checked and accounted-for attention kernels for one MODEL of a ComfyUI graph."""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


def comfy_entrypoint() -> Any:
    """The extension with the pack's nodes; ComfyUI calls it when it loads the pack."""
    from .nodes import SageScopeExtension

    return SageScopeExtension()
