"""What the nodes ask of ComfyUI beyond its node API, and the one Session of this process."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

from comfy_api.latest import io
from comfy_execution.utils import get_executing_context

from ..sage_core import BACKENDS, OWN_KEY, Dispatcher, Session


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


def dispatcher_of(model: Any) -> Dispatcher | None:
    """The Dispatcher that an Apply SageAttention node upstream put on the model."""
    return model.get_attachment(OWN_KEY)


def schema(**fields: Any) -> io.Schema:
    """An io.Schema from the fields that this ComfyUI knows; an unknown one would drop every node of the pack."""
    known = {field.name for field in dataclasses.fields(io.Schema)}
    return io.Schema(**{name: value for name, value in fields.items() if name in known})
