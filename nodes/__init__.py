"""The ComfyUI extension: the list of the two nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .attention_report import AttentionBackendReport
from .patch_attention import ApplySageAttention


class SageScopeExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [ApplySageAttention, AttentionBackendReport]
