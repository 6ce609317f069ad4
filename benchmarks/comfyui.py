"""ComfyUI and the pack in this process: found, started without its server, and the node run as in a workflow."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import dev

ROOT = Path(__file__).resolve().parents[1]
PACK = "sagescope_pack"
NOT_FOR_SAMPLING = ("av",)
"""Packages that ComfyUI imports for video and audio files: a sampler never calls them."""


def find(path: str | None) -> Path:
    """The ComfyUI to measure in: ``path``, else COMFYUI_PATH, else the first that dev.py has unpacked."""
    given = path or os.environ.get("COMFYUI_PATH")
    roots = [Path(given)] if given else [carried.root for carried in dev.CARRIED]
    for root in roots:
        if (root / "comfy" / "sample.py").exists():
            return root.resolve()
    raise SystemExit(
        f"no ComfyUI in {' or '.join(map(str, roots))}: name its folder with --comfyui, or run `python dev.py test`"
    )


def start(comfyui: Path, base_directory: Path, *, cpu: bool, options: Sequence[str] = ()) -> list[str]:
    """Make ComfyUI importable, with its user folder in ``base_directory``; the packages that are stood in for.

    ComfyUI reads its options while it is imported, so nothing of it may come before. ``options`` are as on its command
    line.
    """
    # before the pack's root, whose folder `nodes` has the name of a file of ComfyUI's
    sys.path.insert(0, str(comfyui))
    missing = [name for name in NOT_FOR_SAMPLING if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_StandIns(missing))
    from comfy.cli_args import args, parser

    parser.parse_args(options, args)
    args.cpu = cpu
    args.base_directory = str(base_directory)
    return missing


class _StandIns(MetaPathFinder, Loader):
    """Finds modules in which every name is a class with any attribute: enough to import and to annotate with."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _Anything(type):
    def __getattr__(cls, name: str) -> type:
        return _anything(name)


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        return _anything(name)


def _anything(name: str) -> type:
    if name.startswith("__"):  # what Python itself asks for is really absent
        raise AttributeError(name)
    return _Anything(name, (), {})


def pack(module: str) -> ModuleType:
    """A module of the pack, loaded as ComfyUI loads custom nodes: from its folder, under a name of its own."""
    if PACK not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[PACK] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACK])
    return importlib.import_module(f"{PACK}.{module}")


def new_session(measurements: Path) -> Any:
    """A Session over a file of measurements; nodes that run from now on use it, as after a restart of ComfyUI."""
    core, host, patch = pack("sage_core"), pack("nodes.host"), pack("nodes.patch_attention")
    patch.SESSION = core.Session(core.BACKENDS, host=host.SESSION.host, measurements_path=measurements)
    return patch.SESSION


def apply(model: Any, **widgets: Any) -> Any:
    """The MODEL that Apply SageAttention gives; widgets not named stand as in a new node."""
    node = pack("nodes.patch_attention").ApplySageAttention
    defaults = {field.id: field.default for field in node.define_schema().inputs if hasattr(field, "default")}
    return node.execute(model, **{**defaults, **widgets}).args[0]


def dispatcher_of(model: Any) -> Any:
    """The Dispatcher on a model, None where the pack is not on it."""
    return pack("nodes.host").dispatcher_of(model)


def version() -> str:
    return str(importlib.import_module("comfyui_version").__version__)
