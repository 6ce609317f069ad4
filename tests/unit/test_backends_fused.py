"""SageAttention 2's attention functions behind quantization of our own: which one is found in the builds that people
have, and what it is handed.

The packages are written to a folder and imported like any other; their functions note what they are called with.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_core.backends.base import Kernel
from sage_core.backends.sageattention import SAGEATTN_FP8_FUSED, SAGEATTN_FP8_SM90_FUSED
from sage_core.environment import Environment
from sage_core.refusal import RefusalCode
from tests.unit.conftest import only_refusal
from tests.unit.sageattention2_layout import PER_THREAD, PER_WARP, TILES

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed on this platform"
)
IN_FP32 = "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf"
IN_FP16 = "qk_int8_sv_f8_accum_f16_fuse_v_scale_attn_inst_buf"
SM90 = f"""
    called = []

    def {IN_FP32}(*args):
        called.append(("{IN_FP32}", __name__, args))
        args[3].fill_(1)
"""
SM89 = f"""{SM90}
    def {IN_FP16}(*args):
        called.append(("{IN_FP16}", __name__, args))
        args[3].fill_(1)
"""
COMPILED = {"sm89": SM89, "sm90": SM90}
BACKENDS = {"sm89": SAGEATTN_FP8_FUSED, "sm90": SAGEATTN_FP8_SM90_FUSED}
PARTS = pytest.mark.parametrize("part", ["sm89", "sm90"])


def install_build(install, part: str, **files: str) -> None:
    """SageAttention 2 with its compiled part for this GPU, unless ``files`` say otherwise."""
    install(
        "sageattention",
        {"__init__.py": "from . import core", "core.py": "", f"_qattn_{part}.py": COMPILED[part], **files},
    )


def load(part: str, arch: str = "", cuda: str | None = "12.8", version: str | None = None):
    packages = {"sageattention": version} if version else {}
    return BACKENDS[part].load(Environment(cuda=cuda, packages=packages), arch or part, False)


def call(kernel: Any, *, tensor_layout: str = "NHD", head_dim: int = 128, smooth_k: bool = True) -> Tensor:
    """The output for tensors that have no memory."""
    shapes = [(2, 300, 4, head_dim), (2, 129, 2, head_dim), (2, 129, 2, head_dim)]
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    if tensor_layout == "HND":
        tensors = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
    assert isinstance(kernel, Kernel), kernel
    return kernel.function(*tensors, tensor_layout=tensor_layout, sm_scale=0.25, smooth_k=smooth_k)


def called(module: str) -> tuple[str, str, tuple[Any, ...]]:
    """The function's name, its module and what it was handed, of the one call."""
    (only,) = sys.modules[f"sageattention.{module}"].called
    return only


@pytest.fixture
def quantized(monkeypatch) -> list[tuple[Any, ...]]:
    """What quantization is asked for, where no kernel is launched."""
    from sage_core.backends import quantization

    class NoLaunch:
        def __getitem__(self, grid):
            return lambda *args, **keywords: None

    asked = []
    quantize = quantization.quantize

    def note(tensors, blocks, smooth_k, query_out):
        asked.append((blocks, smooth_k))
        return quantize(tensors, blocks, smooth_k, query_out)

    monkeypatch.setattr(quantization, "quantize", note)
    for name in ("_statistics", "_quantize"):
        monkeypatch.setattr(quantization, name, NoLaunch())
    return asked


# which function


@needs_triton
@PARTS
def test_the_compiled_part_serves(install, quantized, part):
    install_build(install, part)
    kernel = load(part)
    call(kernel)
    assert kernel.options == {"smooth_k", "enable_gqa"}
    assert kernel.prepare is not None
    assert called(f"_qattn_{part}")[1] == f"sageattention._qattn_{part}"


@needs_triton
@PARTS
@pytest.mark.parametrize(
    "part_file", [{}, {"_qattn_sm89.py": "", "_qattn_sm90.py": ""}], ids=["no part", "an empty part"]
)
def test_a_build_that_has_its_functions_only_as_operators(install, quantized, part, part_file):
    """Those for PyTorch's stable ABI: the compiled part registers operators and has no attributes."""
    operators = {"core.py": f"from . import {part}_compile", f"{part}_compile.py": COMPILED[part]}
    install("sageattention", {"__init__.py": "from . import core", **operators, **part_file})
    call(load(part))
    assert called(f"{part}_compile")[1] == f"sageattention.{part}_compile"


@needs_triton
@PARTS
def test_the_compiled_function_wins_over_the_operator_around_it(install, quantized, part):
    operators = {"core.py": f"from . import {part}_compile", f"{part}_compile.py": COMPILED[part]}
    install_build(install, part, **operators)
    call(load(part))
    assert len(sys.modules[f"sageattention._qattn_{part}"].called) == 1
    assert sys.modules[f"sageattention.{part}_compile"].called == []


@needs_triton
@pytest.mark.parametrize(
    ("arch", "cuda", "name", "value_max"),
    [
        ("sm89", "12.4", IN_FP32, 448.0),
        ("sm89", None, IN_FP32, 448.0),
        ("sm89", "12.8", IN_FP16, 2.25),
        ("sm120", "13.0", IN_FP16, 2.25),
    ],
)
def test_what_products_are_summed_in_goes_with_cuda_and_with_the_scale_of_value(
    install, quantized, arch, cuda, name, value_max
):
    install_build(install, "sm89")
    call(load("sm89", arch, cuda))
    assert called("_qattn_sm89")[0] == name
    assert quantized[0][0].value_max == value_max


@needs_triton
def test_a_build_without_sums_in_fp16_sums_in_fp32(install, quantized):
    install_build(install, "sm89", **{"_qattn_sm89.py": SM90})
    call(load("sm89", cuda="12.8"))
    assert called("_qattn_sm89")[0] == IN_FP32
    assert quantized[0][0].value_max == 448.0


# what it is handed


@needs_triton
@pytest.mark.parametrize(
    ("part", "arch", "granularity"),
    [
        *(("sm90", "sm90", PER_THREAD), ("sm89", "sm89", PER_THREAD)),
        *(("sm89", "sm100", PER_WARP), ("sm89", "sm120", PER_WARP), ("sm89", "sm121", PER_WARP)),
    ],
)
def test_the_tiles_are_those_that_the_part_is_compiled_for(install, quantized, part, arch, granularity):
    install_build(install, part)
    call(load(part, arch), smooth_k=False)
    ((blocks, smooth_k),) = quantized
    tiles = TILES[part]
    assert (blocks.query_tile, blocks.query_warp, blocks.key_tile, blocks.value_tile) == tiles
    assert blocks.per_thread == (granularity == PER_THREAD)
    assert smooth_k is False
    assert called(f"_qattn_{part}")[2][9] == granularity


@needs_triton
@pytest.mark.parametrize(("head_dim", "padded"), [(40, 64), (64, 64), (72, 128), (128, 128)])
@pytest.mark.parametrize("tensor_layout", ["NHD", "HND"])
def test_arguments_in_their_order(install, quantized, tensor_layout, head_dim, padded):
    install_build(install, "sm90")
    returned = call(load("sm90"), tensor_layout=tensor_layout, head_dim=head_dim)
    query, key, value, output, query_scale, key_scale, value_scale, *codes = called("_qattn_sm90")[2]
    assert [(tensor.shape, tensor.dtype) for tensor in (query, key, value)] == [
        ((2, 4, 300, padded), torch.int8),
        ((2, 2, 129, padded), torch.int8),
        ((2, 2, padded, 256), torch.float8_e4m3fn),
    ]
    assert [tuple(scale.shape) for scale in (query_scale, key_scale, value_scale)] == [
        (2, 4, 5 * 4 * 8),
        (2, 2, 2 * 4),
        (2, 2, padded),
    ]
    heads_first, not_causal, no_lse = 1, 0, 0
    assert codes == [heads_first, not_causal, PER_THREAD, 0.25, no_lse]
    # written heads first whatever the caller's layout, in which it is contiguous
    assert (output.shape, output.dtype) == ((2, 4, 300, padded), torch.bfloat16)
    in_callers_layout = output.transpose(1, 2) if tensor_layout == "NHD" else output
    assert in_callers_layout.is_contiguous()
    assert returned.shape == ((2, 300, 4, head_dim) if tensor_layout == "NHD" else (2, 4, 300, head_dim))
    assert returned.stride() == in_callers_layout.stride()


# why not


@PARTS
def test_without_triton_it_says_how_to_get_it(install, part):
    install_build(install, part)
    install("triton", None)
    refusal = only_refusal(load(part))
    assert refusal.code is RefusalCode.NOT_INSTALLED
    assert "triton is not installed; pip install triton" in refusal.detail


@PARTS
def test_without_either_both_are_named(install, part):
    install("sageattention", None)
    install("triton", None)
    refusals = load(part)
    assert [refusal.code for refusal in refusals] == 2 * [RefusalCode.NOT_INSTALLED]
    assert ["sageattention" in refusals[0].detail, "triton" in refusals[1].detail] == [True, True]


@PARTS
@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"__init__.py": "from .core import sageattn", "core.py": "def sageattn(q, k, v): ..."}, "1.0.6"),
        ({"__init__.py": "from . import core", "core.py": "SM89_ENABLED = SM90_ENABLED = False"}, "2.2.0"),
        ({"__init__.py": "", "_qattn_sm89.py": "", "_qattn_sm90.py": ""}, "2.0.0"),
    ],
    ids=["SageAttention 1", "without the part", "an older part"],
)
def test_a_build_that_lacks_the_function(install, part, files, version):
    install("triton", {"__init__.py": ""})
    install("sageattention", files)
    refusal = only_refusal(load(part, version=version))
    assert refusal.code is RefusalCode.FUNCTION_MISSING
    for word in (version, IN_FP32, part):
        assert word in refusal.detail


@PARTS
def test_a_part_that_breaks_while_it_is_imported(install, part):
    install("triton", {"__init__.py": ""})
    install_build(install, part, **{f"_qattn_{part}.py": "raise ImportError('undefined symbol: _ZN3c10')"})
    refusal = only_refusal(load(part))
    assert refusal.code is RefusalCode.BUILD
    assert f"_qattn_{part}" in refusal.detail
    assert "undefined symbol" in refusal.detail
