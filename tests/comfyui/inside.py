"""What runs inside a ComfyUI: it is started here, with the pack loaded the way ComfyUI loads custom nodes."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PACK = Path(__file__).resolve().parents[2]


def start(comfyui: str, base_directory: str, *, pack: bool) -> None:
    """Imports ComfyUI for the CPU. It reads its options while it is imported, so nothing of it may come before."""
    sys.path.insert(0, comfyui)
    from comfy.cli_args import args

    args.cpu = True
    args.base_directory = base_directory
    args.disable_api_nodes = True
    import nodes

    if pack and not asyncio.run(nodes.load_custom_node(str(PACK))):
        raise RuntimeError("ComfyUI could not load the pack; its log says why")


def pack_module(name: str = "") -> ModuleType:
    """A module of the pack as this ComfyUI loaded it, such as "sage_core.stats": `import sage_core` is another copy."""
    package = str(PACK).replace(".", "_x_")
    return importlib.import_module(f"{package}.{name}" if name else package)


def node(node_id: str) -> Any:
    """The class that ComfyUI runs for this node id."""
    import nodes

    return nodes.NODE_CLASS_MAPPINGS[node_id]


def execute(node_id: str, **inputs: Any) -> Any:
    """The NodeOutput of a V3 node, run as ComfyUI does: on a locked clone of its class. Hidden values are None."""
    from comfy_api.internal import make_locked_method_func

    cls = node(node_id)
    return make_locked_method_func(cls, "EXECUTE_NORMALIZED", cls.PREPARE_CLASS_CLONE(None))(**inputs)
