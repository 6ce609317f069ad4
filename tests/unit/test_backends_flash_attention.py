"""The flash-attn packages 2, 3 and 4: which function is found, how it is called, and why there is none.

Each package here is written to a folder of its own and imported like any other; its attention is PyTorch's, on the CPU.
"""

from __future__ import annotations

import pytest
import torch

from sage_core.backends import BACKENDS
from sage_core.backends.base import Kernel
from sage_core.backends.binding import import_package
from sage_core.call import shaping
from sage_core.environment import Environment
from sage_core.refusal import Refusal, RefusalCode
from sage_core.selection import Use
from sage_core.trial import try_kernel
from tests.unit.conftest import CPU, make_call, make_spec, only_refusal
from tests.unit.fp64 import exact, example

BY_NAME = {backend.name: backend for backend in BACKENDS}
TWO, THREE, FOUR = "flash_attn 2", "flash_attn 3", "flash_attn 4"

ATTENTION = """
    import torch

    def attention(q, k, v, softmax_scale, causal):
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        q, k, v = (tensor.transpose(1, 2).double() for tensor in (q, k, v))
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        if causal:
            scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2), torch.logsumexp(scores, -1)
"""
FUNCTION_2 = """
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                        alibi_slopes=None, deterministic=False, return_attn_probs=False):
        output, lse = attention(q, k, v, softmax_scale, causal)
        output = output.to(q.dtype)
        return (output, lse, None) if return_attn_probs else output
"""
FUNCTION_3 = """
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                        pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
        output, lse = attention(q, k, v, softmax_scale, causal)
        output = output.to(q.dtype)
        return (output, lse) if return_attn_probs else output
"""
OLD_3 = FUNCTION_3.replace("return (output, lse) if return_attn_probs else output", "return output, lse")
FUNCTION_4 = """
    def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
                        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
                        deterministic=False, score_mod=None, mask_mod=None, aux_tensors=None, return_lse=False):
        output, lse = attention(q, k, v, softmax_scale, causal)
        return output.to(q.dtype), lse if return_lse else None
"""
CAUSAL_UNLESS_TOLD = {"causal=False": "causal=True"}
PACKAGE_2 = {
    "__init__.py": "from flash_attn.flash_attn_interface import flash_attn_func",
    "flash_attn_interface.py": ATTENTION + FUNCTION_2,
}
PACKAGE_3 = {"__init__.py": ATTENTION + FUNCTION_3}
PACKAGE_4 = {"cute/__init__.py": "from .interface import flash_attn_func", "cute/interface.py": ATTENTION + FUNCTION_4}
PACKAGES = {
    TWO: ("flash_attn", PACKAGE_2),
    THREE: ("flash_attn_interface", PACKAGE_3),
    FOUR: ("flash_attn", PACKAGE_4),
}


@pytest.fixture(autouse=True)
def nothing_installed(install):
    """No test here reaches a package of this machine."""
    for name in ("flash_attn", "flash_attn_interface", "flash_attn_config"):
        install(name, None)


def load(name: str):
    return BY_NAME[name].load(Environment(packages={}), "sm90", False)


def changed(files: dict[str, str], changes: dict[str, str]) -> dict[str, str]:
    for old, new in changes.items():
        assert any(old in source for source in files.values())
        files = {file: source.replace(old, new) for file, source in files.items()}
    return files


# -- found and called


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (TWO, {}),
        (TWO, CAUSAL_UNLESS_TOLD),
        (THREE, {}),
        (THREE, CAUSAL_UNLESS_TOLD),
        (THREE, {FUNCTION_3: OLD_3}),
        (FOUR, {}),
        (FOUR, CAUSAL_UNLESS_TOLD),
        (FOUR, {"return output.to(q.dtype), lse if return_lse else None": "return output.to(q.dtype)"}),
    ],
    ids=["2", "2 causal", "3", "3 causal", "3 with lse", "4", "4 causal", "4 without lse"],
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["heads", "grouped heads"])
def test_attention_is_exact_and_the_inputs_stay_as_they_were(install, name, changes, heads):
    package, files = PACKAGES[name]
    install(package, changed(files, changes))
    kernel = load(name)
    assert isinstance(kernel, Kernel), kernel
    assert kernel.options == {"enable_gqa"}
    tensors = example(50, 77, heads=heads, batch=2)
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
    given = [tensor.clone() for tensor in (query, key, value)]
    output = kernel.function(query, key, value, tensor_layout="NHD", sm_scale=0.3)
    assert (output.shape, output.dtype) == (query.shape, query.dtype)
    torch.testing.assert_close(output.transpose(1, 2).double(), exact(*tensors, sm_scale=0.3), rtol=0, atol=1e-6)
    assert all(torch.equal(tensor, before) for tensor, before in zip((query, key, value), given, strict=True))


@pytest.mark.parametrize("name", [TWO, THREE, FOUR])
def test_the_small_example_passes(install, name):
    install(*PACKAGES[name])
    use = Use(BY_NAME[name], load(name), "NHD", expand_kv=False, smooth_k=None)
    for changes in ({}, {"num_qo_heads": 6, "num_kv_heads": 2}, {"qo_len": 1000, "kv_len": 77, "sm_scale": 1.0}):
        assert try_kernel(use, make_spec(dtype="bfloat16", **changes), CPU) is None


@pytest.mark.parametrize("name", [TWO, THREE, FOUR])
@pytest.mark.parametrize("heads_first", [False, True], ids=["views of a fused qkv", "heads first in memory"])
def test_views_reach_the_function_as_they_are_and_the_output_has_the_callers_shape(install, name, heads_first):
    install(*PACKAGES[name])
    call = make_call(batch=2, heads=4, qo_len=40, head_dim=32, skip_reshape=heads_first)
    if not heads_first:
        query, key, value = torch.randn(2, 40, 3 * 4 * 32, generator=torch.Generator().manual_seed(0)).chunk(3, -1)
        call = call._replace(query=query, key=key, value=value)
    spec, _ = call.read("sm90")
    limits = BY_NAME[name].support
    to_kernel, from_kernel = shaping(call, spec, limits.tensor_layouts[0], False, limits.max_offset)
    tensors = to_kernel(*call[:3])
    assert [tensor.data_ptr() for tensor in tensors] == [tensor.data_ptr() for tensor in call[:3]]
    output = from_kernel(load(name).function(*tensors, tensor_layout="NHD", sm_scale=spec.softmax_scale))
    expected = exact(*(tensor.transpose(1, 2) for tensor in tensors)).transpose(1, 2).flatten(2)
    assert output.shape == (2, 40, 4 * 32)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-6)


# -- 2 and 4 share a name


def test_2_without_4(install):
    install("flash_attn", PACKAGE_2)
    assert isinstance(load(TWO), Kernel)
    refusal = only_refusal(load(FOUR))
    assert refusal.code is RefusalCode.NOT_INSTALLED
    assert "pip install flash-attn-4" in refusal.detail


def test_4_without_2(install):
    install("flash_attn", PACKAGE_4)
    assert isinstance(load(FOUR), Kernel)
    refusal = only_refusal(load(TWO))
    assert refusal.code is RefusalCode.NOT_INSTALLED
    assert "pip install flash-attn --no-build-isolation" in refusal.detail


def test_2_and_4_in_one_folder_are_each_found(install):
    install("flash_attn", {**PACKAGE_2, **PACKAGE_4})
    functions = [load(name).function.__closure__[0].cell_contents.__module__ for name in (TWO, FOUR)]
    assert functions == ["flash_attn.flash_attn_interface", "flash_attn.cute.interface"]


# -- not to be had


@pytest.mark.parametrize("missing", ["there_is_no_such_package.cute", "flash_attn.cute.there_is_no_such_module"])
def test_a_module_is_not_installed_where_it_or_what_it_lies_in_is_missing(install, missing):
    install("flash_attn", PACKAGE_4)
    refusal = import_package(missing, "pip install it")
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.detail) == (RefusalCode.NOT_INSTALLED, f"{missing} is not installed; pip install it")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (TWO, "pip install flash-attn "),
        (THREE, "from the folder hopper in https://"),
        (FOUR, "pip install flash-attn-4"),
    ],
)
def test_a_package_that_is_not_there_says_how_to_get_it(name, words):
    refusal = only_refusal(load(name))
    assert refusal.code is RefusalCode.NOT_INSTALLED
    assert words in refusal.detail


@pytest.mark.parametrize(
    ("name", "file"), [(TWO, "flash_attn_interface.py"), (THREE, "__init__.py"), (FOUR, "cute/interface.py")]
)
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import flash_attn_cuda_that_is_not_there", "No module named 'flash_attn_cuda_that_is_not_there'"),
        ("raise ImportError('undefined symbol: _ZN3c104cuda')", "undefined symbol"),
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
    ],
)
def test_a_package_that_breaks_while_it_is_imported(install, name, file, source, words):
    package, files = PACKAGES[name]
    install(package, {**files, file: source})
    refusal = only_refusal(load(name))
    assert refusal.code is RefusalCode.BUILD
    assert words in refusal.detail


def test_4_says_so_when_it_is_2_that_breaks(install):
    install("flash_attn", {**PACKAGE_4, "__init__.py": "raise OSError('flash_attn_2_cuda.so')"})
    refusal = only_refusal(load(FOUR))
    assert refusal.code is RefusalCode.BUILD
    assert "flash_attn_2_cuda.so" in refusal.detail


@pytest.mark.parametrize("name", [TWO, THREE, FOUR])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"flash_attn_func": "flash_attn_unpadded_func"}, "has no flash_attn_func"),
        ({"softmax_scale=None": "scale=None"}, "does not declare softmax_scale;"),
        ({"causal=False": "is_causal=False"}, "does not declare causal;"),
        ({"flash_attn_func(q, k, v": "flash_attn_func(q, k, v, cu_seqlens"}, "needs cu_seqlens"),
        ({"flash_attn_func(q, k, v": "flash_attn_func(qkv, k, v"}, "starts with the parameters qkv"),
    ],
)
def test_a_function_that_cannot_be_called_as_it_must_be_is_refused_in_words(install, name, changes, words):
    package, files = PACKAGES[name]
    install(package, changed(files, changes))
    refusal = only_refusal(load(name))
    assert refusal.code is RefusalCode.FUNCTION_MISSING
    assert words in refusal.detail


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"FLASHATTENTION_DISABLE_FP16": True}, "without float16;"),
        ({"FLASHATTENTION_DISABLE_HDIM256": True}, "without head_dim 256;"),
        ({"FLASHATTENTION_DISABLE_FP16": True, "FLASHATTENTION_DISABLE_HDIM256": True}, "float16 and head_dim 256;"),
        ({"FLASHATTENTION_DISABLE_FP16": False, "FLASHATTENTION_DISABLE_BACKWARD": True}, None),
        ({}, None),
    ],
)
def test_a_build_of_3_without_what_is_declared_is_not_used(install, flags, words):
    install("flash_attn_interface", PACKAGE_3)
    install("flash_attn_config", {"__init__.py": f"CONFIG = {{'build_flags': {flags}}}"})
    loaded = load(THREE)
    if words is None:
        assert isinstance(loaded, Kernel)
        return
    refusal = only_refusal(loaded)
    assert refusal.code is RefusalCode.BUILD
    assert words in refusal.detail
