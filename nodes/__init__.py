"""The ComfyUI extension: the list of the two nodes, and the routes beside them."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .attention_report import AttentionBackendReport
from .host import server
from .patch_attention import ApplySageAttention

if (running := server()) is not None:  # the nodes can be used without a server
    from .routes import add_routes

    add_routes(running.routes)


class SageScopeExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [ApplySageAttention, AttentionBackendReport]
