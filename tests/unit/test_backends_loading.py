"""From the packages that people really have, or half have, to a kernel or to a reason why not.

Each package here is written to a folder of its own and imported like any other; none is a real kernel.
"""

from __future__ import annotations

import sys
import weakref

import pytest
import torch

from sage_core.backends import BACKENDS
from sage_core.backends.base import Kernel
from sage_core.environment import Environment
from sage_core.refusal import RefusalCode
from tests.unit.conftest import only_refusal

BY_NAME = {backend.name: backend for backend in BACKENDS}
SM90, FP8, FP16, TRITON = (
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
)
SAGE1 = "sageattn 1.x (triton)"
SM90_FUSED, FP8_FUSED = f"{SM90} (fused quantization)", f"{FP8} (fused quantization)"
"""tests/unit/test_backends_fused.py has the rest about these."""
ARCH = {SM90_FUSED: "sm90", FP8_FUSED: "sm89", SM90: "sm90", FP8: "sm89", FP16: "sm80", TRITON: "sm86", SAGE1: "sm86"}
CUDA_12_8 = Environment(cuda="12.8", packages={})


def load(name: str, arch: str | None = None, environment: Environment = CUDA_12_8):
    return BY_NAME[name].load(environment, arch or ARCH[name], False)


SAGE_2 = """
    SM80_ENABLED = SM89_ENABLED = SM90_ENABLED = True
    calls = []

    def record(**arguments):
        calls.append(arguments)
        return arguments["q"]

    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
        raise AssertionError("the dispatching function is never called")

    def sageattn_qk_int8_pv_fp16_triton(q, k, v, tensor_layout="HND", quantization_backend="triton", is_causal=False,
                                        attn_mask=None, sm_scale=None, smooth_k=True, return_lse=False, **kwargs):
        return record(**locals())

    def sageattn_qk_int8_pv_fp16_cuda(q, k, v, tensor_layout="HND", is_causal=False, qk_quant_gran="per_thread",
                                      sm_scale=None, pv_accum_dtype="fp16+fp32", smooth_k=True, smooth_v=False,
                                      return_lse=False, **kwargs):
        return record(**locals())

    def sageattn_qk_int8_pv_fp8_cuda(q, k, v, tensor_layout="HND", is_causal=False, qk_quant_gran="per_thread",
                                     sm_scale=None, pv_accum_dtype="fp32+fp16", smooth_k=True, smooth_v=False,
                                     return_lse=False, **kwargs):
        return record(**locals())

    def sageattn_qk_int8_pv_fp8_cuda_sm90(q, k, v, tensor_layout="HND", is_causal=False, qk_quant_gran="per_thread",
                                          sm_scale=None, pv_accum_dtype="fp32+fp32", smooth_k=True,
                                          return_lse=False, **kwargs):
        return record(**locals())
"""
SAGE_2_INIT = """
    from .core import sageattn, sageattn_qk_int8_pv_fp16_triton, sageattn_qk_int8_pv_fp16_cuda
    from .core import sageattn_qk_int8_pv_fp8_cuda, sageattn_qk_int8_pv_fp8_cuda_sm90
"""
SAGE_1 = """
    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
        if smooth_k:
            k -= k.mean(dim=1 if tensor_layout == "NHD" else 2, keepdim=True)
        return k
"""


def install_sage_2(install, core: str = SAGE_2, **files: str) -> None:
    install("sageattention", {"__init__.py": SAGE_2_INIT, "core.py": core, **files})


def call(kernel: Kernel, **keywords):
    query = torch.zeros(1, 4, 2, 64, dtype=torch.float16)
    return kernel.function(query, query, query, tensor_layout="NHD", sm_scale=0.25, **keywords)


# SageAttention 2


@pytest.mark.parametrize("name", [SM90, SM90_FUSED, FP8, FP8_FUSED, FP16, TRITON, SAGE1])
def test_missing_package_says_how_to_get_it(install, name):
    install("triton", {"__init__.py": ""})
    install("sageattention", None)
    refusal = only_refusal(load(name))
    assert refusal.code is RefusalCode.NOT_INSTALLED
    assert "thu-ml/SageAttention" in refusal.detail or "pip install" in refusal.detail


@pytest.mark.parametrize("name", [SM90, FP8, FP16, TRITON])
def test_sageattention_1_has_none_of_the_functions_of_2(install, name):
    install("sageattention", {"__init__.py": "from .core import sageattn", "core.py": SAGE_1})
    refusal = only_refusal(load(name, environment=Environment(packages={"sageattention": "1.0.6"})))
    assert refusal.code is RefusalCode.FUNCTION_MISSING
    assert "1.0.6" in refusal.detail
    assert name in refusal.detail


@pytest.mark.parametrize("name", [SM90, FP8, FP16, TRITON])
def test_every_function_of_2_loads(install, name):
    install_sage_2(install)
    kernel = load(name)
    assert isinstance(kernel, Kernel)
    assert kernel.options == {"smooth_k", "enable_gqa"} | ({"attn_mask"} if name == TRITON else set())
    # only what is launched on the default stream has to be put in order with other streams
    assert hasattr(kernel.function.func, "__wrapped__") is (name != TRITON)


@pytest.mark.parametrize(
    ("name", "arch", "cuda", "expected"),
    [
        (SM90, "sm90", "12.4", {"pv_accum_dtype": "fp32+fp32", "qk_quant_gran": "per_thread"}),
        (FP8, "sm89", "12.8", {"pv_accum_dtype": "fp32+fp16", "qk_quant_gran": "per_thread"}),
        (FP8, "sm89", "13.0", {"pv_accum_dtype": "fp32+fp16", "qk_quant_gran": "per_thread"}),
        (FP8, "sm89", "12.6", {"pv_accum_dtype": "fp32+fp32", "qk_quant_gran": "per_thread"}),
        (FP8, "sm89", None, {"pv_accum_dtype": "fp32+fp32", "qk_quant_gran": "per_thread"}),
        (FP8, "sm100", "12.8", {"pv_accum_dtype": "fp32+fp16", "qk_quant_gran": "per_warp"}),
        (FP8, "sm120", "12.8", {"pv_accum_dtype": "fp32+fp16", "qk_quant_gran": "per_warp"}),
        (FP8, "sm121", "12.8", {"pv_accum_dtype": "fp32+fp16", "qk_quant_gran": "per_warp"}),
        (FP16, "sm80", "12.4", {"pv_accum_dtype": "fp32", "qk_quant_gran": "per_thread"}),
        (FP16, "sm120", "12.8", {"pv_accum_dtype": "fp32", "qk_quant_gran": "per_warp"}),
        (TRITON, "sm86", "12.4", {"attn_mask": None, "quantization_backend": "triton"}),
    ],
)
def test_arguments_by_gpu_and_cuda(install, name, arch, cuda, expected):
    install_sage_2(install)
    call(load(name, arch, Environment(cuda=cuda)), smooth_k=False)
    (arguments,) = sys.modules["sageattention.core"].calls
    received = {**expected, "tensor_layout": "NHD", "sm_scale": 0.25, "smooth_k": False, "is_causal": False}
    assert {name: arguments[name] for name in received} == received
    assert arguments["kwargs"] == {}


def test_a_build_that_cannot_sum_in_fp16_is_known_by_its_own_default(install):
    core = SAGE_2.replace('sm_scale=None, pv_accum_dtype="fp32+fp16"', 'sm_scale=None, pv_accum_dtype="fp32+fp32"')
    install_sage_2(install, core)
    call(load(FP8))
    assert sys.modules["sageattention.core"].calls[0]["pv_accum_dtype"] == "fp32+fp32"


@pytest.mark.parametrize(("name", "part"), [(SM90, "sm90"), (FP8, "sm89"), (FP16, "sm80")])
def test_a_build_without_the_part_for_the_gpu(install, name, part):
    install_sage_2(install, SAGE_2 + f"\n    {part.upper()}_ENABLED = False\n")
    refusal = only_refusal(load(name))
    assert refusal.code is RefusalCode.BUILD
    assert part in refusal.detail
    assert isinstance(load(TRITON), Kernel), "the Triton function needs no compiled part"


@pytest.mark.parametrize(("files", "built"), [({}, False), ({"_qattn_sm89.py": ""}, True)])
def test_a_build_without_flags_is_judged_by_its_extension(install, files, built):
    install_sage_2(install, SAGE_2.replace("SM80_ENABLED = SM89_ENABLED = SM90_ENABLED = True", ""), **files)
    result = load(FP8)
    assert isinstance(result, Kernel) if built else only_refusal(result).code is RefusalCode.BUILD


def test_a_fork_that_swallows_a_mask_is_not_said_to_take_one(install):
    install_sage_2(install, SAGE_2.replace("attn_mask=None, ", ""))
    kernel = load(TRITON)
    assert isinstance(kernel, Kernel)
    assert "attn_mask" not in kernel.options


def test_a_fork_that_swallows_smooth_k_has_no_such_switch(install):
    install_sage_2(install, SAGE_2.replace("smooth_k=True, ", ""))
    assert load(FP8).options == {"enable_gqa"}


@pytest.mark.parametrize("lost", ["tensor_layout", "sm_scale"])
def test_a_fork_that_swallows_what_must_be_obeyed_is_refused_by_name(install, lost):
    install_sage_2(
        install, SAGE_2.replace('tensor_layout="HND", ' if lost == "tensor_layout" else "sm_scale=None, ", "")
    )
    refusal = only_refusal(load(TRITON))
    assert refusal.code is RefusalCode.FUNCTION_MISSING
    assert f"does not declare {lost};" in refusal.detail


def test_a_fork_that_needs_more_than_is_known_is_refused_by_name(install):
    install_sage_2(
        install,
        SAGE_2.replace(
            "sageattn_qk_int8_pv_fp8_cuda_sm90(q, k, v, ", "sageattn_qk_int8_pv_fp8_cuda_sm90(q, k, v, topk, "
        ),
    )
    refusal = only_refusal(load(SM90))
    assert refusal.code is RefusalCode.FUNCTION_MISSING
    assert "topk" in refusal.detail


def test_a_fork_whose_first_parameters_are_others_is_refused(install):
    install_sage_2(
        install,
        SAGE_2.replace("sageattn_qk_int8_pv_fp8_cuda(q, k, v, ", "sageattn_qk_int8_pv_fp8_cuda(out, q, k, v=None, "),
    )
    refusal = only_refusal(load(FP8))
    assert refusal.code is RefusalCode.FUNCTION_MISSING
    assert "out, q, k" in refusal.detail


def test_a_fork_with_other_functions(install):
    install("sageattention", {"__init__.py": "def sageattn_sparse(q, k, v): ..."})
    for name in (SM90, FP8, FP16, TRITON, SAGE1):
        assert only_refusal(load(name)).code is RefusalCode.FUNCTION_MISSING


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
        ("raise RuntimeError('undefined symbol: _ZN3c10')", "undefined symbol"),
        ("raise ImportError('DLL load failed while importing _fused')", "DLL load failed"),
        ("raise AttributeError('no attribute jit')", "no attribute jit"),
        ("import triton_that_is_not_there", "triton_that_is_not_there"),
    ],
)
@pytest.mark.parametrize("name", [FP8, FP8_FUSED, SAGE1])
def test_a_package_that_breaks_while_it_is_imported(install, name, source, words):
    install("triton", {"__init__.py": ""})
    install("sageattention", {"__init__.py": source})
    refusal = only_refusal(load(name))
    assert refusal.code is RefusalCode.BUILD
    assert words in refusal.detail


# SageAttention 1


def test_sageattention_2_is_not_taken_for_1(install):
    install_sage_2(install)
    assert only_refusal(load(SAGE1)).code is RefusalCode.FUNCTION_MISSING


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_smoothing_of_1_works_on_a_copy_of_key_and_only_then(install, layout):
    install("sageattention", {"__init__.py": "from .core import sageattn", "core.py": SAGE_1})
    kernel = load(SAGE1)
    assert kernel.options == {"smooth_k", "enable_gqa"}
    key = torch.randn(1, 4, 2, 64)
    before = key.clone()
    smoothed = kernel.function(key, key, key, tensor_layout=layout, sm_scale=1.0, smooth_k=True)
    assert torch.equal(key, before)
    assert not torch.equal(smoothed, key)
    assert kernel.function(key, key, key, tensor_layout=layout, sm_scale=1.0, smooth_k=False) is key


# SageAttention 3

SAGE_3 = """
    def sageattn3_blackwell(q, k, v, attn_mask=None, is_causal=False, per_block_mean=True, **kwargs):
        assert attn_mask is None and not is_causal and not kwargs
        k -= k.mean(dim=-2, keepdim=True)
        return k
"""


def test_sageattn3_gets_a_key_of_its_own_and_nothing_that_it_would_swallow(install):
    install("sageattn3", {"__init__.py": SAGE_3})
    kernel = load("sageattn3_blackwell", "sm120")
    key = torch.randn(1, 2, 4, 64)
    before = key.clone()
    output = kernel.function(key, key, key, tensor_layout="HND", sm_scale=0.125)
    assert kernel.options == frozenset()
    assert torch.equal(key, before)
    assert not torch.equal(output, key)


@pytest.mark.parametrize(
    ("files", "code"),
    [
        (None, RefusalCode.NOT_INSTALLED),
        ({"__init__.py": "from .api import nothing", "api.py": "import fp4attn_cuda_x"}, RefusalCode.BUILD),
        ({"__init__.py": ""}, RefusalCode.FUNCTION_MISSING),
        ({"__init__.py": "def sageattn3_blackwell(qkv, **kwargs): ..."}, RefusalCode.FUNCTION_MISSING),
    ],
)
def test_sageattn3_refusals(install, files, code):
    install("sageattn3", files)
    assert only_refusal(load("sageattn3_blackwell", "sm120")).code is code


# comfy-kitchen

KITCHEN = """
    available = True
    calls = []

    def int8_attention_is_available(device=None):
        return available

    def int8_attention(q, k, v, *, scale=None, attn_mask=None):
        calls.append((tuple(q.shape), scale, attn_mask))
        return q.contiguous()
"""


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_comfy_kitchen_is_handed_hnd_and_answers_in_the_callers_layout(install, layout):
    install("comfy_kitchen", {"__init__.py": KITCHEN})
    kernel = load("comfy_kitchen_int8", "sm90")
    assert kernel.options == {"enable_gqa", "attn_mask"}
    query = torch.randn(1, 5, 2, 64) if layout == "NHD" else torch.randn(1, 2, 5, 64)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    output = kernel.function(query, query, query, tensor_layout=layout, sm_scale=0.5, attn_mask=mask)
    assert torch.equal(output, query)
    assert sys.modules["comfy_kitchen"].calls == [((1, 2, 5, 64), 0.5, mask)]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (None, RefusalCode.NOT_INSTALLED),
        ("", RefusalCode.FUNCTION_MISSING),
        (KITCHEN.replace("available = True", "available = False"), RefusalCode.BUILD),
        (KITCHEN.replace("scale=None, ", ""), RefusalCode.FUNCTION_MISSING),
        ("raise OSError('_C.so')", RefusalCode.BUILD),
    ],
)
def test_comfy_kitchen_refusals(install, source, code):
    install("comfy_kitchen", None if source is None else {"__init__.py": source})
    assert only_refusal(load("comfy_kitchen_int8", "sm90")).code is code


def test_comfy_kitchen_without_a_declared_mask_takes_none(install):
    install(
        "comfy_kitchen", {"__init__.py": KITCHEN.replace("attn_mask=None", "**kwargs").replace("attn_mask))", "0))")}
    )
    assert load("comfy_kitchen_int8", "sm90").options == {"enable_gqa"}


HALVES = """
    def prequantize_int8_attention(q, k, v, *, scale=None, attn_mask=None):
        return tuple(q.shape), scale, q * 2, k * 3, v * 5

    def int8_attention_from_prequantized(quantized):
        shape, scale, q, k, v = quantized
        calls.append((shape, scale))
        return q + k + v
"""


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_halves_of_comfy_kitchen_are_handed_hnd_and_hold_no_tensor(install, layout):
    install("comfy_kitchen", {"__init__.py": KITCHEN + HALVES})
    prepare = load("comfy_kitchen_int8", "sm90").prepare
    tensors = [torch.randn(1, 5, 2, 64) if layout == "NHD" else torch.randn(1, 2, 5, 64) for _ in range(3)]
    expected = tensors[0] * 2 + tensors[1] * 3 + tensors[2] * 5
    held = [weakref.ref(tensor) for tensor in tensors]
    attend = prepare(tensors, tensor_layout=layout, sm_scale=0.5)
    assert [tensor() for tensor in held] == [None, None, None]
    assert sys.modules["comfy_kitchen"].calls == []
    assert torch.equal(attend(), expected)
    assert sys.modules["comfy_kitchen"].calls == [((1, 2, 5, 64), 0.5)]


@pytest.mark.parametrize(
    "source",
    [
        KITCHEN,
        KITCHEN + HALVES.replace("prequantize_int8_attention", "prequantize"),
        KITCHEN + HALVES.replace("from_prequantized", "from"),
        KITCHEN + HALVES.replace("scale=None, ", "").replace("scale, q * 2", "0, q * 2"),
    ],
)
def test_comfy_kitchen_without_its_halves_serves_in_one(install, source):
    install("comfy_kitchen", {"__init__.py": source})
    kernel = load("comfy_kitchen_int8", "sm90")
    assert kernel.prepare is None
    assert torch.equal(
        kernel.function(torch.ones(1, 2, 5, 64), 1, 1, tensor_layout="HND", sm_scale=1.0), torch.ones(1, 2, 5, 64)
    )
