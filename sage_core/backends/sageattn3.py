"""SageAttention 3: FP4 attention for consumer Blackwell GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..environment import Environment
from ..refusal import Refusal, RefusalCode
from ..support import Support
from .base import Backend, Kernel, Tolerance
from .binding import find_function, import_package, refuse_parameters

PACKAGE = "sageattn3"
FUNCTION = "sageattn3_blackwell"
INSTALL = "build it from sageattention3_blackwell in https://github.com/thu-ml/SageAttention"
ARCHS = ("sm120", "sm121")
"""mha_fwd in blackwell/api.cu checks for these two, although setup.py compiles for sm100 as well."""
HEAD_DIMS = (64, 128)
"""DISPATCH_HEAD_DIM in fp4_quantization_4d.cu; from 256 on the Python function quietly runs SDPA instead."""
FP4 = Tolerance(relative_l2=0.2, cosine=0.98)
"""Room for four bits in query, key, weights and value; not measured here yet."""


def _load(environment: Environment, arch: str, allow_download: bool) -> Kernel | tuple[Refusal, ...]:
    package = import_package(PACKAGE, INSTALL)
    if isinstance(package, Refusal):
        return (package,)
    function = find_function((package,), (FUNCTION,))
    if function is None:
        return (Refusal(RefusalCode.FUNCTION_MISSING, f"the installed {PACKAGE} has no {FUNCTION}; {INSTALL}"),)
    refusal = refuse_parameters(function, FUNCTION, ())
    return (refusal,) if refusal is not None else Kernel(_on_private_key(function))


def _on_private_key(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` without the arguments that it would swallow, on a key that it may change.

    preprocess_qkv in sageattn3/api.py subtracts the mean from the key it is given.
    """

    def kernel(query: Any, key: Any, value: Any, *, tensor_layout: str, sm_scale: float) -> Any:
        return function(query, key.clone(), value)

    return kernel


SAGEATTN3_BLACKWELL = Backend(
    name=FUNCTION,
    support=Support(archs=ARCHS, head_dims=HEAD_DIMS, tensor_layouts=("HND",), sm_scale=False),
    tolerance=FP4,
    load=_load,
    package=PACKAGE,
    auto=False,
)
