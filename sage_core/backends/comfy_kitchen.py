"""comfy-kitchen: ComfyUI's own INT8 attention, for NVIDIA and AMD."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..environment import Environment
from ..refusal import Refusal, RefusalCode
from ..support import EVERY_MASK, Support
from .base import Backend, Kernel, Prepare, Tolerance
from .binding import declared, find_function, import_package, refuse_parameters

PACKAGE = "comfy-kitchen"
MODULE = "comfy_kitchen"
FUNCTION = "int8_attention"
INSTALL = f"pip install -U {PACKAGE}"
CUDA_ARCHS = ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "sm121")
"""What the binary of the 0.2.40 wheel serves: it holds sm_75, sm_80, sm_89, sm_90a, sm_100f and sm_120f."""
HIP_ARCHS = (
    *("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
    *("gfx1200", "gfx1201"),
)
"""The entries with matrix cores in backends/hip/architectures.json of the 0.2.40 wheel."""
MAX_HEAD_DIM = 256
"""_validate_inputs in sage_attention.py; any head_dim up to it is padded to 64, 128 or 256."""
INT8 = Tolerance(relative_l2=0.03, cosine=0.9995)
"""0.014 to 0.020 measured on an H200, at head_dim 40 to 256 and with every kind of mask."""


def _load(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
    package = import_package(MODULE, INSTALL)
    if isinstance(package, Refusal):
        return (package,)
    function = find_function((package,), (FUNCTION,))
    is_available = find_function((package,), ("int8_attention_is_available",))
    if function is None or is_available is None:
        version = environment.package_version(PACKAGE) or "of unknown version"
        detail = f"the installed {PACKAGE} {version} has no {FUNCTION}; {INSTALL}"
        return (Refusal(RefusalCode.FUNCTION_MISSING, detail),)
    if (refusal := refuse_parameters(function, FUNCTION, ("scale",))) is not None:
        return (refusal,)
    if not is_available():
        return (Refusal(RefusalCode.BUILD, f"{PACKAGE} says that its {FUNCTION} cannot run on this machine"),)
    options = {"enable_gqa"} | ({"attn_mask"} & declared(function).keys())
    quantize = find_function((package,), ("prequantize_int8_attention",))
    attend = find_function((package,), ("int8_attention_from_prequantized",))
    prepare = None
    if quantize is not None and attend is not None and refuse_parameters(quantize, FUNCTION, ("scale",)) is None:
        prepare = _in_two(quantize, attend)
    return Kernel(_in_either_layout(function), frozenset(options), prepare)


def _in_either_layout(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which takes HND of any strides, for both layouts."""

    def kernel(query: Any, key: Any, value: Any, *, tensor_layout: str, sm_scale: float, **options: Any) -> Any:
        if tensor_layout == "HND":
            return function(query, key, value, scale=sm_scale, **options)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return function(query, key, value, scale=sm_scale, **options).transpose(1, 2)

    return kernel


def _in_two(quantize: Callable[..., Any], attend: Callable[[Any], Any]) -> Prepare:
    """The same from the package's own two halves, which are slower together than its one function."""

    def prepare(tensors: list[Any], *, tensor_layout: str, sm_scale: float) -> Callable[[], Any]:
        query, key, value = tensors
        tensors.clear()
        if tensor_layout == "HND":
            return partial(attend, quantize(query, key, value, scale=sm_scale))
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        quantized = quantize(query, key, value, scale=sm_scale)
        return lambda: attend(quantized).transpose(1, 2)

    return prepare


COMFY_KITCHEN_INT8 = Backend(
    name="comfy_kitchen_int8",
    support=Support(
        archs=CUDA_ARCHS + HIP_ARCHS,
        max_head_dim=MAX_HEAD_DIM,
        tensor_layouts=("HND", "NHD"),
        mask_kinds=EVERY_MASK,
    ),
    tolerance=INT8,
    load=_load,
    package=PACKAGE,
)
