"""Kernels from the Hugging Face Hub, through its ``kernels`` package.

Without ``allow_download`` only what is on this disk is looked at: the repositories named by the LOCAL_KERNELS setting
of ``kernels``, then the local Hub cache; no connection is opened. With it, ``kernels.get_kernel`` may download.

Downloading is all that ``allow_download`` says yes to. ``trust_remote_code`` is never passed, so ``kernels`` itself
refuses a publisher that the Hub does not mark as trusted; to run such code, a person fetches it into the local cache
or names it in LOCAL_KERNELS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..device import on_default_stream
from ..environment import Environment
from ..refusal import Refusal, RefusalCode
from ..spec import AttentionSpec
from ..support import MAX_GRID, Support, head_dim_multiples
from .base import Backend, Kernel, Tolerance
from .binding import declared, describe, find_function, import_package, output_of, refuse_parameters

INSTALL = "pip install -U kernels"
KEYWORDS = {"tensor_layout": ("tensor_layout", "layout"), "sm_scale": ("sm_scale", "softmax_scale", "scale")}
"""What these keywords of ours may be called by a function that was found."""
NOT_CAUSAL = ("is_causal", "causal")
"""Passed as False by the names that are declared: what a function does by default is not known before it is found."""
LAYOUTS = {"layout": {"NHD": "bshd", "HND": "bhsd"}}
"""How a parameter of that name wants a layout written, as aiter's attention functions do."""


@dataclass(frozen=True)
class HubKernel:
    """Where a kernel is published, and how it is found and called.

    ``functions`` are names to look for on an arch ("" for any), in the module or in its ``core``; where none is there,
    the only public function with ``like`` in its name is taken. ``required`` are keywords of ours that the function
    must declare in one spelling or another. ``changes_key`` says that it writes to the key that it is given, and
    ``on_default_stream`` that it launches there whatever stream is current.
    """

    repo: str
    version: int
    functions: dict[str, Sequence[str]]
    like: str = ""
    required: tuple[str, ...] = ()
    enable_gqa: bool = False
    changes_key: bool = False
    on_default_stream: bool = False

    @property
    def title(self) -> str:
        return f"{self.repo} version {self.version}"


def _load(hub: HubKernel) -> Callable[[Environment, str, bool], Kernel | tuple[Refusal, ...]]:
    def load(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
        kernels = import_package("kernels", INSTALL)
        if isinstance(kernels, Refusal):
            return (kernels,)
        module = _from_this_disk(kernels, hub)
        if allow_download and isinstance(module, Refusal) and _local_folder(hub) is None:
            module = _from_the_hub(kernels, hub)
        if isinstance(module, Refusal):
            return (module,)
        bound = _bind(hub, module, arch)
        return (bound,) if isinstance(bound, Refusal) else bound

    return load


def _from_this_disk(kernels: ModuleType, hub: HubKernel) -> ModuleType | Refusal:
    """The module of ``hub`` from LOCAL_KERNELS or the local Hub cache, without any connection.

    The folder is found here and then handed to ``kernels``: its own lookup by version asks the Hub in some releases
    even for what LOCAL_KERNELS names.
    """
    folder = None
    try:
        folder = _local_folder(hub) or _cached_folder(hub)
        if folder is None:
            return Refusal(RefusalCode.DOWNLOAD_NOT_ALLOWED, f"{hub.title} is not in the local Hub cache")
        if elsewhere := _other_repositories(folder):
            detail = f"{hub.title} builds on {', '.join(elsewhere)}, which would be looked up online; set LOCAL_KERNELS"
            return Refusal(RefusalCode.DOWNLOAD_NOT_ALLOWED, detail)
        module: ModuleType = kernels.get_local_kernel(folder)
    except Exception as error:  # code of others runs here, and a broken build raises whatever it likes
        version = getattr(kernels, "__version__", "of unknown version")
        detail = f"kernels {version} cannot load {hub.title} from {folder}: {describe(error)}"
        return Refusal(RefusalCode.BUILD, detail)
    return module


def _local_folder(hub: HubKernel) -> Path | None:
    """What LOCAL_KERNELS ("repository=folder:repository=folder") names for the repository of ``hub``."""
    return _local_kernels().get(hub.repo)


def _local_kernels() -> dict[str, Path]:
    entries = (entry.partition("=") for entry in os.environ.get("LOCAL_KERNELS", "").split(":"))
    return {repo: Path(folder) for repo, _, folder in entries if folder}


def _cached_folder(hub: HubKernel) -> Path | None:
    """The newest snapshot of this version in the local Hub cache.

    ``kernels`` downloads a version by its commit and leaves no trace of the version's name in the cache, so its own
    lookup by version does not find there what it downloaded. What it did leave is each build's metadata.
    """
    from huggingface_hub import constants

    cache = Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)
    snapshots = (cache / f"kernels--{hub.repo.replace('/', '--')}" / "snapshots").glob("*")
    found = [folder for folder in snapshots if any(m.get("version") == hub.version for m in _metadata(folder))]
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def _metadata(folder: Path) -> list[dict[str, Any]]:
    """What the builds in ``folder`` say about themselves."""
    files = folder.rglob("metadata.json")
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _from_the_hub(kernels: ModuleType, hub: HubKernel) -> ModuleType | Refusal:
    try:
        module: ModuleType = kernels.get_kernel(hub.repo, version=hub.version)
    except Exception as error:  # the Hub, the connection, the build and the kernel's own code can all fail here
        text = str(error)
        code = RefusalCode.DOWNLOAD_FAILED
        if "not from a trusted publisher" in text:
            code = RefusalCode.UNTRUSTED_PUBLISHER
        elif isinstance(error, ImportError) or "build variant" in text or "current device" in text:
            code = RefusalCode.BUILD
        return Refusal(code, f"{hub.title} cannot be loaded: {describe(error)}")
    return module


def _other_repositories(folder: Path) -> list[str]:
    """The repositories that a kernel in ``folder`` needs and LOCAL_KERNELS does not name.

    ``kernels`` has no way to load a kernel from a folder and look for those in the local cache only.
    """
    needed = {entry["repo-id"] for metadata in _metadata(folder) for entry in metadata.get("kernel-depends", ())}
    return sorted(needed - _local_kernels().keys())


def _bind(hub: HubKernel, module: ModuleType, arch: str) -> Kernel | Refusal:
    """The function of ``hub`` that ``module`` offers for ``arch``, called with the names that it declares."""
    core = getattr(module, "core", module)
    if not getattr(core, f"{arch.upper()}_ENABLED", True):  # the flags of SageAttention's core
        return Refusal(RefusalCode.BUILD, f"{hub.title} was built without its {arch} part")
    names = hub.functions.get(arch, hub.functions.get("", ()))
    function = find_function((module, core), names)
    if function is None:
        offered = _offered(module)
        alike = [name for name in offered if hub.like and hub.like in name]
        if len(alike) != 1:
            detail = f"{hub.title} offers {', '.join(offered) or 'no function'}; expected is {' or '.join(names)}"
            return Refusal(RefusalCode.FUNCTION_MISSING, detail)
        function = getattr(module, alike[0])
    title = f"{getattr(function, '__name__', 'the function')} of {hub.title}"
    parameters = declared(function)
    fixed = {name: False for name in NOT_CAUSAL if name in parameters}
    spelled = {
        ours: next((name for name in spellings if name in parameters), ours) for ours, spellings in KEYWORDS.items()
    }
    passed = [spelled[ours] for ours in KEYWORDS if ours in hub.required or spelled[ours] in parameters]
    if (refusal := refuse_parameters(function, title, (*passed, *fixed))) is not None:
        return refusal
    options = {"smooth_k"} & parameters.keys() | ({"enable_gqa"} if hub.enable_gqa else set())
    if hub.on_default_stream:
        function = on_default_stream(function)
    return Kernel(_call(partial(function, **fixed), passed, spelled, hub.changes_key), frozenset(options))


def _offered(module: ModuleType) -> list[str]:
    """The public functions of ``module``: those in ``__all__``, or those without an underscore."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    found = {name: getattr(module, name, None) for name in names}
    return sorted(name for name, value in found.items() if callable(value) and not isinstance(value, type))


def _call(
    function: Callable[..., Any], passed: Sequence[str], spelled: dict[str, str], changes_key: bool
) -> Callable[..., Any]:
    """``function`` behind our keywords; one that it does not declare is not passed on."""
    layout, scale = spelled["tensor_layout"], spelled["sm_scale"]
    written = LAYOUTS.get(layout, {"NHD": "NHD", "HND": "HND"})

    def kernel(query: Any, key: Any, value: Any, *, tensor_layout: str, sm_scale: float, **options: Any) -> Any:
        if layout in passed:
            options[layout] = written[tensor_layout]
        if scale in passed:
            options[scale] = sm_scale
        return output_of(function(query, key.clone() if changes_key else key, value, **options))

    return kernel


EXACT = Tolerance(relative_l2=0.01, cosine=0.9999)
"""The authors' tests allow twice the largest error of plain attention in the same dtype, which has 0.002 in bf16."""
INT8_FP8 = Tolerance(relative_l2=0.06, cosine=0.998)
"""0.038 measured for int8 QK with fp8 PV; the AMD kernel's authors report a cosine of 0.9993."""
FP4 = Tolerance(relative_l2=0.2, cosine=0.98)
"""Room for four bits in query, key, weights and value; not measured here yet."""

SAGE_ATTENTION = HubKernel(
    repo="kernels-community/sage-attention",
    version=2,
    functions={
        "sm80": ("sageattn_qk_int8_pv_fp16_cuda",),
        "sm89": ("sageattn_qk_int8_pv_fp8_cuda",),
        "sm90": ("sageattn_qk_int8_pv_fp8_cuda_sm90",),
    },
    required=("tensor_layout", "sm_scale"),
    enable_gqa=True,
    on_default_stream=True,
)
"""Its build.toml compiles for capabilities 8.0, 8.9 and 9.0a; its public sageattn() picks the same functions."""
SAGE_BLACKWELL = HubKernel(
    repo="kernels-community/sage-blackwell",
    version=1,
    functions={"": ("sageattn3_blackwell",)},
    changes_key=True,
)
"""Its build.toml compiles for capability 12.0a; a port of SageAttention 3, which smooths the caller's key in place."""
AITER_SAGE_ATTENTION = HubKernel(
    repo="kernels-community/aiter-sage-attention",
    version=1,
    functions={"": ("sageattn", "sage_attention", "sage_attn", "sage_attn_func")},
    like="sage",
)
FLASH_ATTN_2 = HubKernel(
    repo="kernels-community/flash-attn2",
    version=3,
    functions={"": ("flash_attn_func",)},
    required=("sm_scale",),
    enable_gqa=True,
)
"""Its build.toml compiles for capabilities 8.0, 9.0, 10.0 and 12.0, which other GPUs of the same generation run."""
FLASH_ATTN_3 = HubKernel(
    repo="kernels-community/flash-attn3",
    version=1,
    functions={"": ("flash_attn_func",)},
    required=("sm_scale",),
    enable_gqa=True,
)
"""Its build.toml compiles for capabilities 8.0 and 9.0a; upstream's README asks for the latter."""
FLASH_ATTN_2_ARCHS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "sm121")
FLASH_ATTN_3_MAX_HEAD_DIM = {"sm90": 256}

GFX1201_HEAD_DIM = 128
"""The kernel takes bf16 query, key and value of equal shape with this head_dim, unmasked and not causal."""


def _equal_shapes(spec: AttentionSpec) -> Refusal | None:
    """Grouped heads do not count: the caller expands them for a kernel that does not take them."""
    if spec.qo_len == spec.kv_len:
        return None
    detail = f"qo_len is {spec.qo_len} and kv_len is {spec.kv_len}; {HUB_AITER.name} takes equal shapes"
    return Refusal(RefusalCode.SHAPE, detail)


HUB_SAGE_ATTENTION = Backend(
    name="hub: sage-attention",
    support=Support(archs=tuple(SAGE_ATTENTION.functions), max_head_dim=128, smooth_k=True),
    tolerance=INT8_FP8,
    load=_load(SAGE_ATTENTION),
    package="kernels",
)
HUB_SAGE_BLACKWELL = Backend(
    name="hub: sage-blackwell",
    support=Support(archs=("sm120",), head_dims=(64, 128), tensor_layouts=("HND",), sm_scale=False),
    tolerance=FP4,
    load=_load(SAGE_BLACKWELL),
    package="kernels",
    auto=False,
)
HUB_AITER = Backend(
    name="hub: aiter-sage-attention (gfx1201)",
    support=Support(
        archs=("gfx1201",),
        dtypes=("bfloat16",),
        head_dims=(GFX1201_HEAD_DIM,),
        tensor_layouts=("NHD",),
        sm_scale=False,
        rules=(_equal_shapes,),
    ),
    tolerance=INT8_FP8,
    load=_load(AITER_SAGE_ATTENTION),
    package="kernels",
)
HUB_FLASH_ATTN_2 = Backend(
    name="hub: flash-attn2",
    support=Support(
        archs=FLASH_ATTN_2_ARCHS, max_head_dim=256, tensor_layouts=("NHD",), max_batch_size=MAX_GRID, max_offset=None
    ),
    tolerance=EXACT,
    load=_load(FLASH_ATTN_2),
    package="kernels",
    exact=True,
)
HUB_FLASH_ATTN_3 = Backend(
    name="hub: flash-attn3",
    support=Support(
        archs=tuple(FLASH_ATTN_3_MAX_HEAD_DIM),
        tensor_layouts=("NHD",),
        max_offset=None,
        rules=(head_dim_multiples("hub: flash-attn3", FLASH_ATTN_3_MAX_HEAD_DIM),),
    ),
    tolerance=EXACT,
    load=_load(FLASH_ATTN_3),
    package="kernels",
    exact=True,
)
