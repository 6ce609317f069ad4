"""What the nodes ask of ComfyUI beyond its node API, and the one Session and the runs of this process."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from comfy_api.latest import io
from comfy_execution.utils import get_executing_context

from ..sage_core import BACKENDS, OWN_KEY, Dispatcher, Live, Run, Session


def _comfyui_version() -> str:
    import comfyui_version

    return str(comfyui_version.__version__)


def _measurements_path() -> Path:
    import folder_paths

    folder = Path(folder_paths.get_user_directory()) / "sagescope"
    with suppress(OSError):  # a disk that cannot be written costs the memory of measurements, nothing else
        folder.mkdir(parents=True, exist_ok=True)
    return folder / "measurements.json"


SESSION = Session(BACKENDS, host=_comfyui_version(), measurements_path=_measurements_path())


def executing() -> tuple[str | None, str | None]:
    """(prompt_id, node_id) of the node that ComfyUI is executing; (None, None) outside the server."""
    context = get_executing_context()
    return (None, None) if context is None else (context.prompt_id, context.node_id)


def optimized_attention() -> Any:
    """The function that ComfyUI uses for attention now."""
    from comfy.ldm.modules import attention

    return attention.optimized_attention


def saves_memory() -> bool:
    """Whether ComfyUI takes its own attention to hold no scores of all query and key tokens."""
    from comfy import model_management

    return bool(
        model_management.xformers_enabled()
        or model_management.flash_attention_enabled()
        or model_management.pytorch_attention_flash_attention()
    )


def server() -> Any:
    """ComfyUI's PromptServer; None where its nodes are used without one. Importing its module would not start it."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def send_status(status: dict[str, Any]) -> None:
    """Tell every open page how a run is going; a page shows it if it has the workflow open."""
    running = server()
    if running is not None:
        with suppress(RuntimeError):  # ComfyUI is stopping, and its event loop is closed
            running.send_sync("sagescope.status", status)


LIVE = Live(send_status)


def remember(run: Run, about: dict[str, Any]) -> None:
    """Take in a run that starts now, among those of all patched models."""
    LIVE.add(run, _workflow_of(run.prompt_id), about)


def _workflow_of(prompt_id: str | None) -> str | None:
    """The id of the workflow that a page queued as this prompt, which is being executed.

    Node ids mean something in one workflow only, and the model with its node id may come from the cache of another.
    """
    running = server()
    if prompt_id is None or running is None:
        return None
    # a ComfyUI that keeps its queue in another way costs the line on the node, and not the run that starts here
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        for _, running_id, _, extra_data, *_ in running.prompt_queue.get_current_queue_volatile()[0]:
            if running_id == prompt_id:
                return str(extra_data["extra_pnginfo"]["workflow"]["id"])
    return None


def dispatcher_of(model: Any) -> Dispatcher | None:
    """The Dispatcher that an Apply SageAttention node upstream put on the model."""
    return model.get_attachment(OWN_KEY)


def schema(**fields: Any) -> io.Schema:
    """An io.Schema from the fields that this ComfyUI knows; an unknown one would drop every node of the pack."""
    known = {field.name for field in dataclasses.fields(io.Schema)}
    return io.Schema(**{name: value for name, value in fields.items() if name in known})
