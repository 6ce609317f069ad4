"""SageAttention 1 and 2: one import name, told apart by the functions that are really installed.

The version string says nothing about a build: releases, forks and prebuilt wheels share it. So each function is looked
up by name, its parameters are read, and for the CUDA ones the compiled part for this GPU must be there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import util
from types import ModuleType
from typing import Any

from ..device import on_default_stream
from ..environment import Environment
from ..refusal import Refusal, RefusalCode
from ..spec import AttentionSpec, MaskKind
from ..support import MAX_GRID, MAX_OFFSET_32_BIT, Support
from .base import Backend, Kernel, Tolerance
from .binding import declared, find_function, import_package, refuse_parameters

PACKAGE = "sageattention"
INSTALL_1 = 'pip install "sageattention<2" triton'
INSTALL_TRITON = "pip install triton (on Windows: triton-windows)"
INSTALL_2 = "build SageAttention 2 from https://github.com/thu-ml/SageAttention, or install a wheel made for this torch"

FP16_CUDA_ARCHS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "sm121")
"""setup.py compiles _qattn_sm80 for each of these (and for no other)."""
FP8_CUDA_ARCHS = ("sm89", "sm100", "sm120", "sm121")
"""setup.py compiles _qattn_sm89 for these; sm90 has it too, but a kernel of its own as well."""
SM90_ARCHS = ("sm90",)
TRITON_ARCHS = ("sm80", "sm86", "sm89", "sm90")
"""Those in upstream's benchmarks; the comments in its sageattn() call Triton unusable on sm120 and sm121."""
PER_WARP_ARCHS = ("sm100", "sm120", "sm121")
"""Per-thread quantization is written in Triton, so sageattn() asks for per-warp there."""
MAX_HEAD_DIM = 128
"""Each function pads head_dim to 64 or 128 and raises above: "Unsupported head_dim"."""
FP16_ACCUMULATION_CUDA = (12, 8)
"""fp8 products summed in fp16 need CUDA 12.8 (the check that sageattn_qk_int8_pv_fp8_cuda carries as a comment)."""

COMPILED = "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf"
COMPILED_IN_FP16 = "qk_int8_sv_f8_accum_f16_fuse_v_scale_attn_inst_buf"
"""The attention functions behind quantization in the compiled parts of SageAttention 2.1 and newer, by what products of
fp8 are summed in."""
E4M3_MAX = 448.0
E4M3_MAX_IN_FP16 = 2.25
"""What value is scaled to, as sageattn_qk_int8_pv_fp8_cuda() has it: sums in fp16 must not overflow."""

LARGEST_VALUE_TILE = 128
"""What the length of value is padded to a multiple of, at most."""

SAGEATTN_1_HEAD_DIMS = (64, 96, 128)
"""The assertion on headdim in sageattn() of 1.0.6."""
FP16_KEY_TILE = 64
"""CTA_K of sageattn_qk_int8_pv_fp16_cuda()."""
SAGEATTN_1_KEY_TILE = 64
"""BLOCK_N in forward() of attn_qk_int8_per_block.py of 1.0.6, which does not mask the scores of a partial tile."""

INT8_FP16 = Tolerance(relative_l2=0.02, cosine=0.9998)
"""0.011 to 0.013 measured for int8 QK with fp16 PV."""
INT8_FP8 = Tolerance(relative_l2=0.06, cosine=0.998)
"""0.038 measured for int8 QK with fp8 PV."""


def _load_2(
    name: str, part: str, fixed: Callable[[Environment, str, dict[str, Any]], dict[str, Any]]
) -> Callable[[Environment, str, bool], Kernel | tuple[Refusal, ...]]:
    """A load() for function ``name`` of SageAttention 2, compiled into ``part`` ("" for Triton).

    ``fixed`` gives the arguments that depend on the GPU and on what the function declares.
    """

    def load(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
        package = import_package(PACKAGE, INSTALL_2)
        if isinstance(package, Refusal):
            return (package,)
        core = getattr(package, "core", package)
        function = find_function((package, core), (name,))
        if function is None:
            version = environment.package_version(PACKAGE) or "of unknown version"
            detail = f"the installed {PACKAGE} {version} has no {name}; {INSTALL_2}"
            return (Refusal(RefusalCode.FUNCTION_MISSING, detail),)
        found = [_refuse_part(core, part, name)] if part else []
        found.append(refuse_parameters(function, name, ("tensor_layout", "sm_scale")))
        if refusals := tuple(refusal for refusal in found if refusal is not None):
            return refusals
        parameters = declared(function)
        options = {option for option in ("smooth_k", "attn_mask") if option in parameters} | {"enable_gqa"}
        # the compiled parts launch on the default stream, Triton on the current one
        function = on_default_stream(function) if part else function
        bound = partial(function, **fixed(environment, arch, parameters))
        return Kernel(bound, frozenset(options))

    return load


def _refuse_part(core: ModuleType, part: str, name: str) -> Refusal | None:
    """Why the compiled ``part`` ("sm89") that ``name`` calls is not there; None when it is."""
    enabled = getattr(core, f"{part.upper()}_ENABLED", None)
    if enabled is None:  # builds without the flag are judged by the extension's file
        enabled = util.find_spec(f"{PACKAGE}._qattn_{part}") is not None
    if enabled:
        return None
    detail = f"this {PACKAGE} was built without its {part} part, which {name} needs; {INSTALL_2}"
    return Refusal(RefusalCode.BUILD, detail)


def _triton_arguments(environment: Environment, arch: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {}


def _fp16_arguments(environment: Environment, arch: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Sums in fp32, as sageattn() asks for on sm80; the other choices sum in fp16 and can overflow."""
    return _known(parameters, pv_accum_dtype="fp32", qk_quant_gran=_granularity(arch))


def _fp8_arguments(environment: Environment, arch: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Sums in fp32+fp16 where CUDA and the build know it (its own default says so), else in fp32+fp32."""
    accumulation = parameters.get("pv_accum_dtype")
    in_fp16 = accumulation is not None and accumulation.default == "fp32+fp16" and sums_in_fp16(environment)
    return _known(
        parameters,
        pv_accum_dtype="fp32+fp16" if in_fp16 else "fp32+fp32",
        qk_quant_gran=_granularity(arch),
    )


def sums_in_fp16(environment: Environment) -> bool:
    """Whether this CUDA can sum fp8 products in fp16, which is faster."""
    return (environment.cuda_version or (0, 0)) >= FP16_ACCUMULATION_CUDA


def _sm90_arguments(environment: Environment, arch: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return _known(parameters, pv_accum_dtype="fp32+fp32", qk_quant_gran=_granularity(arch))


def _granularity(arch: str) -> str:
    return "per_warp" if arch in PER_WARP_ARCHS else "per_thread"


def _known(parameters: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in parameters}


def _load_fused(part: str, **tiles: int) -> Callable[[Environment, str, bool], Kernel | tuple[Refusal, ...]]:
    """A load() for the attention function in the compiled ``part`` ("sm89") behind quantization of our own, which reads
    and writes less than the package's; the ``tiles`` of ``quantization.Blocks`` are what the function is compiled for.
    """

    def load(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
        package = import_package(PACKAGE, INSTALL_2)
        triton = import_package("triton", INSTALL_TRITON)
        if missing := tuple(found for found in (package, triton) if isinstance(found, Refusal)):
            return missing
        # the operators around the compiled functions cost each call more, but some builds have nothing else
        compiled = import_package(f"{PACKAGE}._qattn_{part}", INSTALL_2)
        places = (compiled, getattr(getattr(package, "core", package), f"{part}_compile", None))
        function, in_fp16 = find_function(places, (COMPILED,)), find_function(places, (COMPILED_IN_FP16,))
        if function is None:
            if isinstance(compiled, Refusal) and compiled.code is RefusalCode.BUILD:
                return (compiled,)
            version = environment.package_version(PACKAGE) or "of unknown version"
            detail = f"the installed {PACKAGE} {version} has no {COMPILED} in a part for {part}; {INSTALL_2}"
            return (Refusal(RefusalCode.FUNCTION_MISSING, detail),)
        per_thread, value_max = arch not in PER_WARP_ARCHS, E4M3_MAX
        if in_fp16 is not None and sums_in_fp16(environment):
            function, value_max = in_fp16, E4M3_MAX_IN_FP16
        from .quantization import Blocks, in_two, whole  # needs triton

        function = on_default_stream(function)
        blocks = Blocks(**tiles, per_thread=per_thread, value_max=value_max)
        return Kernel(whole(function, blocks), frozenset({"smooth_k", "enable_gqa"}), in_two(function, blocks))

    return load


def _load_1(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
    package = import_package(PACKAGE, INSTALL_1)
    if isinstance(package, Refusal):
        return (package,)
    places = (package, getattr(package, "core", package))
    function = find_function(places, ("sageattn",))
    if function is None or find_function(places, ("sageattn_qk_int8_pv_fp16_triton", "sageattn_qk_int8_pv_fp16_cuda")):
        version = environment.package_version(PACKAGE) or "of unknown version"
        detail = f"the installed {PACKAGE} {version} is not SageAttention 1; {INSTALL_1}"
        return (Refusal(RefusalCode.FUNCTION_MISSING, detail),)
    refusal = refuse_parameters(function, "sageattn", ("tensor_layout", "sm_scale", "smooth_k"))
    if refusal is not None:
        return (refusal,)
    return Kernel(_without_changing_key(function), frozenset({"smooth_k", "enable_gqa"}))


def _without_changing_key(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` on a copy of key when it smooths: sageattn() of 1.0.6 subtracts the mean in place."""

    def kernel(query: Any, key: Any, value: Any, *, tensor_layout: str, sm_scale: float, smooth_k: bool = True) -> Any:
        key = key.clone() if smooth_k else key
        return function(query, key, value, tensor_layout=tensor_layout, sm_scale=sm_scale, smooth_k=smooth_k)

    return kernel


def _a_whole_key_tile(spec: AttentionSpec) -> Refusal | None:
    """The fp16 kernel loads the rows of value that there are and multiplies those that a first tile lacks by zero, with
    whatever was in shared memory before: NaN at times. Behind a first full tile it is finite."""
    if spec.kv_len >= FP16_KEY_TILE:
        return None
    detail = f"kv_len is {spec.kv_len}; sageattn_qk_int8_pv_fp16_cuda is only right from {FP16_KEY_TILE} on"
    return Refusal(RefusalCode.KV_LEN, detail)


def _fused_support(name: str, archs: tuple[str, ...]) -> Support:
    """What serves behind quantization of our own, which counts in 64 bits: query, key and value may lie in tensors of
    any size. The attention function counts in 32 bits, in what came of them."""

    def within_32_bits(spec: AttentionSpec) -> Refusal | None:
        padded_dim = 64 if spec.head_dim <= 64 else 128
        rows = max(spec.num_qo_heads * spec.qo_len, spec.num_kv_heads * (spec.kv_len + LARGEST_VALUE_TILE))
        elements = spec.batch_size * rows * padded_dim
        if elements <= MAX_OFFSET_32_BIT:
            return None
        detail = f"query, key or value has {elements} elements, padded; {name} takes at most {MAX_OFFSET_32_BIT}"
        return Refusal(RefusalCode.OFFSET, detail)

    return Support(
        archs=archs,
        max_head_dim=MAX_HEAD_DIM,
        smooth_k=True,
        max_batch_size=MAX_GRID,
        max_offset=None,
        rules=(within_32_bits,),
    )


def _full_key_tiles(spec: AttentionSpec) -> Refusal | None:
    """sageattn() of 1.0.6 lets the missing keys of a partial last tile take part in the softmax."""
    if spec.kv_len % SAGEATTN_1_KEY_TILE == 0:
        return None
    detail = f"kv_len is {spec.kv_len}; sageattn 1.x (triton) is only right on multiples of {SAGEATTN_1_KEY_TILE}"
    return Refusal(RefusalCode.KV_LEN, detail)


SAGEATTN_FP8_SM90 = Backend(
    name="sageattn_qk_int8_pv_fp8_cuda_sm90",
    support=Support(archs=SM90_ARCHS, max_head_dim=MAX_HEAD_DIM, smooth_k=True, max_batch_size=MAX_GRID),
    tolerance=INT8_FP8,
    load=_load_2("sageattn_qk_int8_pv_fp8_cuda_sm90", "sm90", _sm90_arguments),
    package=PACKAGE,
    slower_than=("sageattn_qk_int8_pv_fp8_cuda_sm90 (fused quantization)",),
)
SAGEATTN_FP8_SM90_FUSED = Backend(
    name="sageattn_qk_int8_pv_fp8_cuda_sm90 (fused quantization)",
    support=_fused_support("sageattn_qk_int8_pv_fp8_cuda_sm90 (fused quantization)", SM90_ARCHS),
    tolerance=INT8_FP8,
    load=_load_fused("sm90", query_tile=64, query_warp=16, key_tile=128, value_tile=128),
    package=PACKAGE,
)
SAGEATTN_FP8 = Backend(
    name="sageattn_qk_int8_pv_fp8_cuda",
    support=Support(archs=FP8_CUDA_ARCHS, max_head_dim=MAX_HEAD_DIM, smooth_k=True, max_batch_size=MAX_GRID),
    tolerance=INT8_FP8,
    load=_load_2("sageattn_qk_int8_pv_fp8_cuda", "sm89", _fp8_arguments),
    package=PACKAGE,
    slower_than=("sageattn_qk_int8_pv_fp8_cuda (fused quantization)",),
)
SAGEATTN_FP8_FUSED = Backend(
    name="sageattn_qk_int8_pv_fp8_cuda (fused quantization)",
    support=_fused_support("sageattn_qk_int8_pv_fp8_cuda (fused quantization)", FP8_CUDA_ARCHS),
    tolerance=INT8_FP8,
    load=_load_fused("sm89", query_tile=128, query_warp=32, key_tile=64, value_tile=64),
    package=PACKAGE,
)
SAGEATTN_FP16 = Backend(
    name="sageattn_qk_int8_pv_fp16_cuda",
    support=Support(
        archs=FP16_CUDA_ARCHS,
        max_head_dim=MAX_HEAD_DIM,
        smooth_k=True,
        max_batch_size=MAX_GRID,
        rules=(_a_whole_key_tile,),
    ),
    tolerance=INT8_FP16,
    load=_load_2("sageattn_qk_int8_pv_fp16_cuda", "sm80", _fp16_arguments),
    package=PACKAGE,
)
SAGEATTN_FP16_TRITON = Backend(
    name="sageattn_qk_int8_pv_fp16_triton",
    support=Support(
        archs=TRITON_ARCHS,
        max_head_dim=MAX_HEAD_DIM,
        max_batch_size=MAX_GRID,
        # An additive mask is added to scores that are already times log2(e), and so counts for less than it should.
        mask_kinds=(MaskKind.NONE, MaskKind.BOOL),
        smooth_k=True,
    ),
    tolerance=INT8_FP16,
    load=_load_2("sageattn_qk_int8_pv_fp16_triton", "", _triton_arguments),
    package=PACKAGE,
)
SAGEATTN_1 = Backend(
    name="sageattn 1.x (triton)",
    support=Support(
        archs=TRITON_ARCHS,
        head_dims=SAGEATTN_1_HEAD_DIMS,
        smooth_k=True,
        max_batch_size=MAX_GRID,
        rules=(_full_key_tiles,),
    ),
    tolerance=INT8_FP16,
    load=_load_1,
    package=PACKAGE,
)
