"""What keeps the pack contained, portable and readable: who imports whom, and what no shipped file may do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import sage_core

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted([ROOT / "__init__.py", *(ROOT / "nodes").rglob("*.py"), *(ROOT / "sage_core").rglob("*.py")])
CORE = [path for path in SHIPPED if path.is_relative_to(ROOT / "sage_core")]
NODES = [path for path in SHIPPED if path.is_relative_to(ROOT / "nodes")]

WITHOUT_TORCH = {
    *("refusal", "spec", "policy", "support", "selection", "stats", "report", "environment"),
    *("status", "live", "paths", "same_origin", "backends.base", "backends.binding", "backends.starting_order"),
}
"""Files of sage_core that are plain data and decisions, and load without torch."""
SHARED_BY_BACKENDS = {"base", "binding", "quantization"}
NEEDS_TRITON = "backends.quantization"
"""Loaded by a backend that has found triton, and by nobody before."""
ALLOWED_IN_NODES = {"comfy_api"}
ALLOWED_IN_ROUTES = {"aiohttp"}
ALLOWED_IN_HOST = {"comfy", "comfy_api", "comfy_execution", "comfyui_version", "folder_paths"}
NETWORK_AND_PROCESSES = {
    *("subprocess", "multiprocessing", "pty", "socket", "ssl", "select", "asyncio", "http", "urllib", "ftplib"),
    *("smtplib", "requests", "httpx", "aiohttp", "webbrowser"),
}
ANSWERING = {"asyncio.to_thread", "web.Request", "web.Response", "web.RouteTableDef", "web.json_response"}
"""All that the routes use of aiohttp and asyncio: they answer ComfyUI's own server and open nothing."""


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """The module under sage_core, such as ``backends.base``; empty for its ``__init__``."""
    parts = path.relative_to(ROOT / "sage_core").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


class Import(NamedTuple):
    module: str
    """As written, with its leading dots."""
    names: tuple[str, ...]
    when_loaded: bool
    """Not inside a function and not for the type checker only."""

    @property
    def package(self) -> str:
        """The top package; empty for a relative import."""
        return "" if self.module.startswith(".") else self.module.split(".")[0]


def imports(path: Path) -> list[Import]:
    return list(_imports(parse(path), when_loaded=True))


def _imports(node: ast.AST, when_loaded: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, (), when_loaded) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            yield Import(module, tuple(alias.name for alias in child.names), when_loaded)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            checking = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from _imports(child, when_loaded and not inside and not checking)


def targets(path: Path) -> set[str]:
    """The modules of sage_core that a file of it imports, with every name that could be one."""
    package = module_of(path).split(".") if path.name == "__init__.py" else module_of(path).split(".")[:-1]
    found = set()
    for entry in imports(path):
        if entry.package == "":
            level = len(entry.module) - len(entry.module.lstrip("."))
            base = [part for part in package if part][: len(package) - level + 1]
            module = [*base, *filter(None, entry.module.lstrip(".").split("."))]
            found |= {".".join(module), *(".".join([*module, name]) for name in entry.names)}
    return found


def ids(paths):
    return pytest.mark.parametrize("path", paths, ids=named)


# -- who imports whom


def test_the_rules_read_the_files_they_are_about():
    assert {"dispatcher", "backends.hub", "backends.starting_order", "environment"} <= set(map(module_of, CORE))
    assert set(map(module_of, CORE)) >= WITHOUT_TORCH
    assert {"planning", "call", "backends.base"} <= targets(ROOT / "sage_core/dispatcher.py")
    assert {"candidates", "checking", "serving"} <= targets(ROOT / "sage_core/planning.py")
    assert {"spec", "backends.base"} <= targets(ROOT / "sage_core/backends/hub.py")


@ids(CORE)
def test_the_core_imports_nothing_of_comfyui(path):
    of_comfyui = {"nodes", "server", "execution", "folder_paths", "latent_preview", "node_helpers"}
    assert not {entry.package for entry in imports(path) if entry.package.startswith("comfy")} - {"comfy_kitchen"}
    assert not {entry.package for entry in imports(path)} & of_comfyui
    depth = len(path.relative_to(ROOT / "sage_core").parts)
    assert not any(entry.module.startswith("." * (depth + 1)) for entry in imports(path))


@ids(CORE)
def test_loading_the_core_needs_torch_at_most_and_plain_data_not_even_that(path):
    packages = {entry.package for entry in imports(path) if entry.when_loaded} - {"", *sys.stdlib_module_names}
    allowed = {"torch", "triton"} if module_of(path) == NEEDS_TRITON else {"torch"}
    assert packages <= (set() if module_of(path) in WITHOUT_TORCH else allowed)


def test_what_needs_triton_is_imported_where_a_kernel_is_loaded():
    importing = [path for path in CORE if NEEDS_TRITON in targets(path)]
    assert [path.stem for path in importing] == ["sageattention"]
    assert not [entry for entry in imports(importing[0]) if entry.module == ".quantization" and entry.when_loaded]


@ids([path for path in CORE if path.parent.name == "backends" and path.stem not in ("__init__", "starting_order")])
def test_no_backend_imports_another(path):
    backends = {other.stem for other in path.parent.glob("*.py")} - {"__init__"}
    imported = {target.split(".")[1] for target in targets(path) if target.startswith("backends.")}
    assert imported & backends <= (set() if path.stem in SHARED_BY_BACKENDS else SHARED_BY_BACKENDS) | {"base"}


@ids(CORE)
def test_only_the_package_itself_imports_the_dispatcher(path):
    assert ("dispatcher" in targets(path)) is (module_of(path) == "")


@ids(NODES)
def test_nodes_import_public_names_of_the_core_and_the_node_api(path):
    allowed = {"host.py": ALLOWED_IN_HOST, "routes.py": ALLOWED_IN_ROUTES}.get(path.name, ALLOWED_IN_NODES)
    for entry in imports(path):
        if entry.module == "..sage_core":
            assert set(entry.names) <= set(sage_core.__all__)
        elif entry.package == "":
            assert entry.module.lstrip(".") in {other.stem for other in NODES}
            assert not entry.module.startswith("..")
        else:
            assert entry.package in allowed | sys.stdlib_module_names


def test_the_entry_point_imports_nothing_before_comfyui_calls_it():
    early = [entry for entry in imports(ROOT / "__init__.py") if entry.when_loaded]
    assert {entry.package for entry in early} <= set(sys.stdlib_module_names)


# -- what no shipped file does


@ids(SHIPPED)
def test_no_file_opens_a_connection_or_starts_a_process(path):
    used = {entry.package for entry in imports(path)} & NETWORK_AND_PROCESSES
    if path.name == "routes.py":
        assert used == {"asyncio", "aiohttp"}
        of_both = {ast.unparse(node) for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)}
        assert {name for name in of_both if name.startswith(("asyncio.", "web."))} == ANSWERING
    else:
        assert not used
    calls = {ast.unparse(node.func) for node in ast.walk(parse(path)) if isinstance(node, ast.Call)}
    assert not {call for call in calls if re.fullmatch(r"os\.(system|popen|exec\w+|spawn\w+|fork\w*)|exec|eval", call)}


def changes_of_others(tree: ast.Module) -> list[str]:
    """What the file changes outside itself: environment variables, attributes of imported things, global switches."""
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.Delete)):
            changed = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            changed = [node.target]
        else:
            changed = []
        for target in changed:
            root = target
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if root is not target and isinstance(root, ast.Name) and root.id in imported:
                found.append(ast.unparse(target))
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            environ = r"os\.(putenv|unsetenv|environ\.(update|setdefault|pop|clear))"
            switches = r"torch\.(\w+\.)*(set_\w+|enable_\w+|manual_seed\w*|seed)|random\.seed|warnings\.\w*filter\w*"
            if re.fullmatch(f"{environ}|{switches}|(builtins\\.)?(setattr|delattr)", call):
                found.append(call)
        if isinstance(node, ast.Global):
            found.append(f"global {', '.join(node.names)}")
    return found


@ids(SHIPPED)
def test_no_file_changes_anything_that_others_use(path):
    """But for one: a forward that is run again puts the random generators back to where it found them."""
    restores = ["torch.set_rng_state", "torch.cuda.set_rng_state"] if path.name == "device.py" else []
    assert changes_of_others(parse(path)) == restores


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['A'] = '1'",
        "from os import environ\nenviron['A'] = '1'",
        "import os\nos.environ.setdefault('A', '1')",
        "import torch.nn.functional as F\nF.scaled_dot_product_attention = None",
        "import torch\ntorch.nn.functional.scaled_dot_product_attention = None",
        "import torch\ntorch.backends.cuda.enable_flash_sdp(False)",
        "import torch\ntorch.manual_seed(0)",
        "from comfy import attention\nsetattr(attention, 'optimized', None)",
        "import x\nx.y += 1",
        "import x\ndel x.y",
        "def f():\n    global a\n    a = 1",
    ],
)
def test_the_rule_finds_what_it_looks_for(code):
    assert changes_of_others(ast.parse(code))


@ids(SHIPPED)
def test_every_file_can_be_read_on_windows_with_its_default_encoding(path):
    path.read_text(encoding="utf-8").encode("cp1252")


IN_A_PROCESS_OF_ITS_OWN = """
import os, socket, sys
import torch
import torch.nn.functional as F

def world():
    return {
        "functional": {name: id(value) for name, value in vars(F).items()},
        "attention": id(torch._C._nn.scaled_dot_product_attention),
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "precision": (torch.get_float32_matmul_precision(), torch.get_default_dtype()),
        "kernels": [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "math", "cudnn")],
        "random": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
    }

def no_network(*args, **kwargs):
    raise AssertionError("a socket was opened")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = no_network
before, loaded = world(), set(sys.modules)
import sage_core
optional = {"sageattention", "sageattn3", "kernels", "comfy_kitchen", "flash_attn", "huggingface_hub"}
optional |= {"flash_attn_interface", "flash_attn_config"}
assert not optional & (set(sys.modules) - loaded), "an optional package was imported"
assert not torch.cuda.is_initialized(), "a GPU was touched"

from sage_core.environment import Environment
from tests.unit.conftest import FakeComfy, served
session = sage_core.Session(sage_core.BACKENDS, Environment.detect())
for kernel in sage_core.KERNEL_CHOICES:
    dispatcher = sage_core.Dispatcher(sage_core.Policy(kernel=kernel), session)
    dispatcher.prepare(torch.device("cpu"))
    comfy = FakeComfy(dispatcher)
    comfy.sample()
    print(kernel, served(comfy.run()))
    sage_core.to_markdown(sage_core.build_report(dispatcher.snapshot(), "", None, True))
after = world()
for name in before:
    assert before[name] == after[name], f"{name} changed"
"""


def test_importing_and_using_the_core_changes_nothing_that_others_use():
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "int8_reference {'int8_reference': 2}" in done.stdout
    assert "sdpa: flash {'sdpa: flash': 2}" in done.stdout
    assert "auto {'native': 2}" in done.stdout


# -- what workflows and packages rely on


def test_the_options_of_the_node_are_these_on_every_machine():
    assert sage_core.KERNEL_CHOICES == (
        "auto",
        "native (observe only)",
        "sageattn_qk_int8_pv_fp8_cuda_sm90",
        "sageattn_qk_int8_pv_fp8_cuda_sm90 (fused quantization)",
        "sageattn_qk_int8_pv_fp8_cuda",
        "sageattn_qk_int8_pv_fp8_cuda (fused quantization)",
        "sageattn_qk_int8_pv_fp16_cuda",
        "sageattn_qk_int8_pv_fp16_triton",
        "sageattn 1.x (triton)",
        "sageattn3_blackwell",
        "comfy_kitchen_int8",
        "hub: sage-attention",
        "hub: sage-blackwell",
        "hub: aiter-sage-attention (gfx1201)",
        "sdpa: cudnn",
        "sdpa: flash",
        "sdpa: efficient",
        "flash_attn 2",
        "flash_attn 3",
        "flash_attn 4",
        "hub: flash-attn2",
        "hub: flash-attn3",
        "int8_reference",
    )
    assert sage_core.SMOOTH_K_CHOICES == ("auto", "off", "on")
    assert sage_core.UNAVAILABLE_CHOICES == ("use native", "stop with an error")


def test_there_is_one_version():
    written = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert written is not None
    assert written[1] == sage_core.__version__


def test_every_public_name_is_there():
    assert all(hasattr(sage_core, name) for name in sage_core.__all__)
    assert len(set(sage_core.__all__)) == len(sage_core.__all__)
