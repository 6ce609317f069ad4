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
