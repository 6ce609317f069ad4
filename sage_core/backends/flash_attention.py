"""The flash-attn packages 2, 3 and 4: exact attention by the authors of FlashAttention.

2 and 4 share the package name ``flash_attn``, and either may be there without the other: 4 brings the folder
``flash_attn/cute`` and nothing else. So each is imported by the module that only it has. ``flash_attn_interface`` of 3
lies at the top; what a package ``flash_attn_3`` offers under that name imports it from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..environment import Environment
from ..refusal import Refusal, RefusalCode
from ..support import MAX_GRID, Support, head_dim_multiples
from .base import Backend, Kernel, Tolerance
from .binding import find_function, import_package, output_of, refuse_parameters

FUNCTION = "flash_attn_func"
MODULE_2, MODULE_3, MODULE_4 = "flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn.cute"
INSTALL_2 = "pip install flash-attn --no-build-isolation"
INSTALL_3 = "build it from the folder hopper in https://github.com/Dao-AILab/flash-attention"
INSTALL_4 = "pip install flash-attn-4"

CUDA_ARCHS_2 = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "sm121")
"""cuda_archs() in setup.py names 80, 90, 100 and 120; code for 80 runs on sm86 and sm89, code for 120 on sm121."""
HIP_ARCHS_2 = (
    *("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151"),
    *("gfx1200", "gfx1201"),
)
"""allowed_archs in setup.py."""
MAX_HEAD_DIM_2 = 256
"""mha_fwd raises above; the Python function pads any head_dim to a multiple of 8."""
MAX_HEAD_DIM_3 = {"sm90": 256}
"""The README asks for an H100 or H800. Kernels for sm80 are built too, unless switched off: then a launch fails, and
CHECK_CUDA in cuda_check.h answers with exit(1), which would end ComfyUI."""
LEFT_OUT_3 = {"FLASHATTENTION_DISABLE_FP16": "float16", "FLASHATTENTION_DISABLE_HDIM256": "head_dim 256"}
"""What a build of 3 says in flash_attn_config that it lacks, of what is declared here. With torch 2.11 on an H200, a
call that its own checks refuse ended the process."""
MAX_HEAD_DIM_4 = {"sm90": 256, "sm100": 128, "sm120": 128, "sm121": 128}
"""_validate_head_dims in cute/interface.py for the first two; the others are not checked there, and their tiles fit
into shared memory up to 192. sm80 is in the code but not in the README."""
EXACT = Tolerance(relative_l2=0.01, cosine=0.9999)
"""0.002 measured in bf16 for 3 and 4 on an H200; 2 is what PyTorch's own flash is made from, and has as much there."""


def _load(module: str, install: str) -> Callable[[Environment, str, bool], Kernel | tuple[Refusal, ...]]:
    """A load() for the function of ``module``."""

    def load(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
        found = import_package(module, install)
        if isinstance(found, Refusal):
            return (found,)
        function = find_function((found,), (FUNCTION,))
        if function is None:
            detail = f"the installed {module} has no {FUNCTION}; {install}"
            return (Refusal(RefusalCode.FUNCTION_MISSING, detail),)
        refusal = refuse_parameters(function, f"{FUNCTION} of {module}", ("softmax_scale", "causal"))
        return (refusal,) if refusal is not None else Kernel(_without_lse(function), frozenset({"enable_gqa"}))

    return load


def _load_3(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
    kernel = _load(MODULE_3, INSTALL_3)(environment, arch, allow_download)
    config = import_package("flash_attn_config", INSTALL_3)  # builds from before November 2025 have none
    flags = getattr(config, "CONFIG", {}).get("build_flags", {})
    lacking = [what for flag, what in LEFT_OUT_3.items() if flags.get(flag)]
    if lacking and isinstance(kernel, Kernel):
        detail = f"this {MODULE_3} was built without {' and '.join(lacking)}; {INSTALL_3}"
        return (Refusal(RefusalCode.BUILD, detail),)
    return kernel


def _without_lse(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which takes NHD only, behind our keywords.

    4 and older builds of 3 return the logsumexp beside the output; 2 and newer builds of 3 only when asked.
    """

    def kernel(query: Any, key: Any, value: Any, *, tensor_layout: str, sm_scale: float) -> Any:
        return output_of(function(query, key, value, softmax_scale=sm_scale, causal=False))

    return kernel


FLASH_ATTN_2 = Backend(
    name="flash_attn 2",
    support=Support(
        # The default max_offset: CUDA's half counts in 64 bits, AMD's hands strides on in 32.
        archs=CUDA_ARCHS_2 + HIP_ARCHS_2,
        max_head_dim=MAX_HEAD_DIM_2,
        tensor_layouts=("NHD",),
        max_batch_size=MAX_GRID,
    ),
    tolerance=EXACT,
    load=_load(MODULE_2, INSTALL_2),
    package="flash-attn",
    exact=True,
)
FLASH_ATTN_3 = Backend(
    name="flash_attn 3",
    support=Support(
        archs=tuple(MAX_HEAD_DIM_3),
        tensor_layouts=("NHD",),
        max_offset=None,  # index_t in flash.h is 64 bits wide; right on views past 2**31 elements on an H200
        rules=(head_dim_multiples("flash_attn 3", MAX_HEAD_DIM_3),),
    ),
    tolerance=EXACT,
    load=_load_3,
    package="flash-attn-3",
    exact=True,
)
FLASH_ATTN_4 = Backend(
    name="flash_attn 4",
    support=Support(
        archs=tuple(MAX_HEAD_DIM_4),
        tensor_layouts=("NHD",),
        max_batch_size=MAX_GRID,
        max_offset=None,  # its tensors have strides of 64 bits; right on views past 2**31 elements on an H200
        rules=(head_dim_multiples("flash_attn 4", MAX_HEAD_DIM_4),),
    ),
    tolerance=EXACT,
    load=_load(MODULE_4, INSTALL_4),
    package="flash-attn-4",
    exact=True,
)
