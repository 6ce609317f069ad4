"""The Hub kernels through the real ``kernels`` package, offline: from a local repository, the cache, or not at all.

The gfx1201 kernel's stand-in computes real attention in PyTorch, so that what arrives in it and what comes back can be
checked; the machine is a CPU with an environment that says gfx1201.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sage_core.backends import hub
from sage_core.backends.base import Kernel
from sage_core.backends.hub import (
    HUB_AITER,
    HUB_FLASH_ATTN_2,
    HUB_FLASH_ATTN_3,
    HUB_SAGE_ATTENTION,
    HUB_SAGE_BLACKWELL,
)
from sage_core.environment import Device, Environment
from sage_core.refusal import RefusalCode
from sage_core.spec import AttentionSpec
from tests.unit.conftest import only_refusal

pytest.importorskip("kernels", reason="the kernels package is not installed")

GFX1201 = Environment(devices=(Device(0, "gfx1201", "AMD Radeon AI PRO R9700"),), hip="6.4")
AITER = "kernels-community/aiter-sage-attention"
SAGE = "kernels-community/sage-attention"
BLACKWELL = "kernels-community/sage-blackwell"
FLASH_2, FLASH_3 = "kernels-community/flash-attn2", "kernels-community/flash-attn3"

ATTENTION = """
    import torch

    def {name}({parameters}):
        {check}
        q, k, v = (tensor.transpose(1, 2).float() for tensor in ({tensors}))
        return (torch.softmax(q @ k.mT * 128**-0.5, -1) @ v).transpose(1, 2).to(torch.bfloat16)
"""


def attention(name="sage_attention", more="", check="pass", tensors="q, k, v") -> str:
    """The source of a module whose function ``name`` computes attention on NHD tensors after ``check`` holds."""
    parameters = f"{tensors}, {more}" if more else tensors
    return ATTENTION.format(name=name, parameters=parameters, check=check, tensors=tensors)


@pytest.fixture(autouse=True)
def attempts(monkeypatch):
    """Every attempt to reach the network, each of which fails."""
    found: list[str] = []

    def refuse(*arguments, **keywords):
        found.append(repr(arguments))
        raise OSError("the network is off limits")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return found


@pytest.fixture(autouse=True)
def empty_machine(tmp_path, monkeypatch):
    """No local kernels, and a Hub cache of this test's own."""
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("_sagescope_test"):
            del sys.modules[name]


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """publish(repo, source, version=...): a kernel repository on this disk, in LOCAL_KERNELS or in the Hub cache."""
    count = 0

    def write(repo, source, version=1, cached=False, files=None, **metadata):
        nonlocal count
        count += 1
        if os.name == "nt" and not cached:
            pytest.skip("LOCAL_KERNELS separates its entries by ':' and so cannot hold a drive letter")
        root = tmp_path / f"repository{count}"
        if cached:
            root = tmp_path / "cache" / f"kernels--{repo.replace('/', '--')}" / "snapshots" / f"commit{count}"
        build = root / "build" / "torch-universal"
        build.mkdir(parents=True)
        name = repo.partition("/")[2]
        described = {
            "id": f"_sagescope_test_{tmp_path.name}_{count}",
            "name": name,
            "version": version,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": "cpu"},
            **metadata,
        }
        (build / "metadata.json").write_text(json.dumps(described), encoding="utf-8")
        for file, text in {"__init__.py": source, **(files or {})}.items():
            (build / file).write_text(textwrap.dedent(text), encoding="utf-8")
        if not cached:
            entries = [entry for entry in (os.environ.get("LOCAL_KERNELS"), f"{repo}={root}") if entry]
            monkeypatch.setenv("LOCAL_KERNELS", ":".join(entries))
        return root

    return write


def load(backend=HUB_AITER, arch="gfx1201", allow_download=False):
    return backend.load(GFX1201, arch, allow_download)


def check_serves(kernel) -> None:
    """The kernel computes attention on the NHD tensors that it is handed, and leaves them alone."""
    assert isinstance(kernel, Kernel), kernel
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 40, 3, 128, generator=generator).bfloat16() for _ in range(3))
    given = [tensor.clone() for tensor in (query, key, value)]
    output = kernel.function(query, key, value, tensor_layout="NHD", sm_scale=128**-0.5)
    expected = scaled_dot_product_attention(*(tensor.transpose(1, 2).float() for tensor in given)).transpose(1, 2)
    assert (output.shape, output.dtype) == (query.shape, query.dtype)
    assert (output.float() - expected).norm() <= 0.01 * expected.norm()
    assert all(torch.equal(tensor, before) for tensor, before in zip((query, key, value), given, strict=True))


# gfx1201, end to end


@pytest.mark.parametrize("cached", [False, True], ids=["LOCAL_KERNELS", "Hub cache"])
def test_gfx1201_from_this_disk(publish, attempts, cached):
    publish(AITER, attention(), cached=cached)
    check_serves(load())
    assert attempts == []


@pytest.mark.parametrize(
    "source",
    [
        attention("sageattn"),
        attention("sage_attn_forward_gfx1201"),
        attention(tensors="query, key, value"),
        attention(more="tensor_layout='HND'", check="assert tensor_layout == 'NHD'"),
        attention(
            more="layout='bhsd', softmax_scale=None, causal=True",
            check="assert (layout, softmax_scale, causal) == ('bshd', 128**-0.5, False)",
        ),
        attention(more="*, scale, is_causal, **kwargs", check="assert scale and not is_causal and not kwargs"),
        attention() + "\n    def sage_quantize(x): ...\n",
        attention("sage_fwd") + "\n    def sage_quantize(x): ...\n    __all__ = ['sage_fwd']\n",
    ],
    ids=[
        "renamed",
        "found by its name",
        "query key value",
        "tensor_layout",
        "aiter's spelling",
        "needed keywords",
        "known name beside a helper",
        "public name beside a helper",
    ],
)
def test_function_and_parameters_are_looked_up(publish, source):
    publish(AITER, source)
    check_serves(load())


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def rmsnorm(x): ...", "offers rmsnorm; expected is sageattn or sage_attention"),
        ("", "offers no function"),
        ("def sage_a(q, k, v): ...\ndef sage_b(q, k, v): ...", "offers sage_a, sage_b"),
        ("def sageattn(qkv): ...", "starts with the parameters qkv"),
        ("def sageattn(out, q, k, v): ...", "starts with the parameters out, q, k"),
        ("def sageattn(q, k, v, workspace): ...", "needs workspace"),
        ("def sageattn(*args, **kwargs): ...", "starts with the parameters"),
    ],
)
def test_a_function_that_cannot_be_bound_is_refused_in_words(publish, source, words):
    publish(AITER, source)
    refusal = only_refusal(load())
    assert refusal.code is RefusalCode.FUNCTION_MISSING
    assert words in refusal.detail
    assert AITER in refusal.detail


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"kv_len": 512}, RefusalCode.SHAPE),
        ({"head_dim": 64}, RefusalCode.HEAD_DIM),
        ({"dtype": "float16"}, RefusalCode.DTYPE),
        ({"arch": "gfx1200"}, RefusalCode.ARCH),
    ],
)
def test_calls_that_the_gfx1201_kernel_cannot_take_are_known_before_it_is_loaded(changes, code):
    fields = {"arch": "gfx1201", "dtype": "bfloat16", "batch_size": 1, "num_qo_heads": 24, "num_kv_heads": 24}
    spec = AttentionSpec(**{**fields, "qo_len": 4608, "kv_len": 4608, "head_dim": 128, **changes})
    assert [refusal.code for refusal in HUB_AITER.support.refusals(spec, HUB_AITER.name)] == [code]


# SageAttention's Hub builds

HUB_CORE = """
    SM80_ENABLED = SM89_ENABLED = True
    SM90_ENABLED = False

    def sageattn_qk_int8_pv_fp16_cuda(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True,
                                      **kwargs):
        return ["fp16", tensor_layout, is_causal, sm_scale, smooth_k]

    def sageattn_qk_int8_pv_fp8_cuda(q, k, v, tensor_layout="HND", sm_scale=None, **kwargs):
        return ["fp8", tensor_layout, sm_scale, kwargs]

    def sageattn_qk_int8_pv_fp8_cuda_sm90(q, k, v, tensor_layout="HND", sm_scale=None, **kwargs): ...
"""


def test_hub_sage_attention_is_bound_per_gpu(publish):
    publish(SAGE, "from . import core", version=2, files={"core.py": HUB_CORE})
    sm80, sm89 = load(HUB_SAGE_ATTENTION, "sm80"), load(HUB_SAGE_ATTENTION, "sm89")
    assert (sm80.options, sm89.options) == ({"smooth_k", "enable_gqa"}, {"enable_gqa"})
    key = torch.zeros(1)
    arguments = {"tensor_layout": "NHD", "sm_scale": 0.5}
    assert sm80.function(key, key, key, **arguments, smooth_k=False) == ["fp16", "NHD", False, 0.5, False]
    assert sm89.function(key, key, key, **arguments) == ["fp8", "NHD", 0.5, {}]
    refusal = only_refusal(load(HUB_SAGE_ATTENTION, "sm90"))
    assert refusal.code is RefusalCode.BUILD
    assert "sm90" in refusal.detail


def test_hub_sage_attention_is_put_in_order_with_other_streams(publish, monkeypatch):
    publish(SAGE, "from . import core", version=2, files={"core.py": HUB_CORE})
    ordered = []
    monkeypatch.setattr(hub, "on_default_stream", lambda function: ordered.append(function.__name__) or function)
    load(HUB_SAGE_ATTENTION, "sm80")
    assert ordered == ["sageattn_qk_int8_pv_fp16_cuda"]


def test_hub_sage_attention_that_swallows_sm_scale_is_refused(publish):
    core = HUB_CORE.replace("sm_scale=None, **kwargs", "**kwargs").replace(
        '["fp8", tensor_layout, sm_scale', '["fp8", 0'
    )
    publish(SAGE, "from . import core", version=2, files={"core.py": core})
    refusal = only_refusal(load(HUB_SAGE_ATTENTION, "sm89"))
    assert refusal.code is RefusalCode.FUNCTION_MISSING
    assert "sm_scale" in refusal.detail


def test_hub_sage_blackwell_gets_a_key_of_its_own(publish):
    publish(
        BLACKWELL,
        "def sageattn3_blackwell(q, k, v, attn_mask=None, is_causal=False, **kwargs):\n    k += 1\n    return k",
    )
    key = torch.zeros(1, 2, 4, 64)
    output = load(HUB_SAGE_BLACKWELL, "sm120").function(key, key, key, tensor_layout="HND", sm_scale=0.125)
    assert key.sum() == 0
    assert output.sum() == key.numel()


# flash-attn's Hub builds

FLASH_BUILDS = [(HUB_FLASH_ATTN_2, FLASH_2, 3), (HUB_FLASH_ATTN_3, FLASH_3, 1)]


@pytest.mark.parametrize(("backend", "repo", "version"), FLASH_BUILDS)
@pytest.mark.parametrize("cached", [False, True], ids=["LOCAL_KERNELS", "Hub cache"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_hub_flash_attention_gets_its_scale_and_gives_its_output(publish, backend, repo, version, cached, with_lse):
    source = attention(
        "flash_attn_func",
        more="dropout_p=0.0, softmax_scale=None, causal=True",
        check="assert (softmax_scale, causal) == (128**-0.5, False)",
    )
    if with_lse:
        source = source.replace(".to(torch.bfloat16)", ".to(torch.bfloat16), None")
    publish(repo, source, version=version, cached=cached)
    kernel = load(backend, "sm90")
    check_serves(kernel)
    assert kernel.options == {"enable_gqa"}


@pytest.mark.parametrize(("backend", "repo", "version"), FLASH_BUILDS)
def test_hub_flash_attention_that_takes_no_scale_is_refused(publish, backend, repo, version):
    publish(repo, attention("flash_attn_func", more="causal=True"), version=version)
    refusal = only_refusal(load(backend, "sm90"))
    assert refusal.code is RefusalCode.FUNCTION_MISSING
    assert "sm_scale" in refusal.detail


# Not on this disk


@pytest.mark.parametrize(
    ("backend", "arch"),
    [
        (HUB_AITER, "gfx1201"),
        (HUB_SAGE_ATTENTION, "sm90"),
        (HUB_SAGE_BLACKWELL, "sm120"),
        (HUB_FLASH_ATTN_2, "sm86"),
        (HUB_FLASH_ATTN_3, "sm90"),
    ],
)
def test_nothing_is_downloaded_without_leave(attempts, backend, arch):
    refusal = only_refusal(load(backend, arch))
    assert refusal.code is RefusalCode.DOWNLOAD_NOT_ALLOWED
    assert "not in the local Hub cache" in refusal.detail
    assert attempts == []


def test_another_version_in_the_cache_is_not_the_pinned_one(publish, attempts):
    publish(AITER, attention(), version=2, cached=True)
    assert only_refusal(load()).code is RefusalCode.DOWNLOAD_NOT_ALLOWED
    assert attempts == []


def test_a_kernel_that_builds_on_another_repository_is_not_looked_up_online(publish, attempts):
    publish(
        AITER,
        attention(),
        cached=True,
        **{"kernel-depends": [{"repo-id": "kernels-community/aiter-kernels", "version": 1}]},
    )
    refusal = only_refusal(load())
    assert refusal.code is RefusalCode.DOWNLOAD_NOT_ALLOWED
    assert "kernels-community/aiter-kernels" in refusal.detail
    assert attempts == []


@pytest.mark.parametrize("cached", [False, True], ids=["LOCAL_KERNELS", "Hub cache"])
@pytest.mark.parametrize(
    ("source", "words"),
    [("raise RuntimeError('no HIP runtime')", "no HIP runtime"), ("raise OSError('libamdhip64.so')", "libamdhip64.so")],
)
def test_a_broken_kernel_keeps_its_own_error(publish, attempts, source, words, cached):
    publish(AITER, source, cached=cached)
    refusal = only_refusal(load())
    assert refusal.code is RefusalCode.BUILD
    assert words in refusal.detail
    assert attempts == []


def test_no_build_for_this_machine_is_said(publish, attempts):
    build = publish(AITER, attention()) / "build"
    (build / "torch-universal").rename(build / "torch29-cxx11-rocm70-x86_64-linux")
    refusal = only_refusal(load())
    assert refusal.code is RefusalCode.BUILD
    assert "Cannot find a build variant" in refusal.detail
    assert attempts == []


def test_unreadable_metadata_is_a_broken_build(publish):
    folder = publish(AITER, attention(), cached=True)
    (folder / "build" / "torch-universal" / "metadata.json").write_text("{", encoding="utf-8")
    assert only_refusal(load()).code is RefusalCode.BUILD


# With leave to download: what ``kernels`` answers, since there is no Hub here


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(f"Kernel repository '{AITER}' is not from a trusted publisher."), RefusalCode.UNTRUSTED_PUBLISHER),
        (ValueError(f"Kernel repository '{AITER}' could not verify publisher trust."), RefusalCode.DOWNLOAD_FAILED),
        (ConnectionError("Name or service not known"), RefusalCode.DOWNLOAD_FAILED),
        (FileNotFoundError("Cannot find a build variant for this system"), RefusalCode.BUILD),
        (RuntimeError("variant 'x' does not support the current device: ROCm arch gfx1100"), RefusalCode.BUILD),
        (ImportError("Kernel module requires Python dependency `einops`"), RefusalCode.BUILD),
    ],
)
def test_a_download_that_fails(monkeypatch, error, code):
    def get_kernel(repo, **keywords):
        raise error

    monkeypatch.setattr("kernels.get_kernel", get_kernel)
    refusal = only_refusal(load(allow_download=True))
    assert refusal.code is code
    assert str(error)[:40] in refusal.detail


def test_a_download_gives_no_yes_to_untrusted_publishers(monkeypatch):
    asked = []

    def get_kernel(repo, **keywords):
        asked.append((repo, keywords))
        return SimpleNamespace(sageattn=lambda q, k, v: q, __all__=["sageattn"])

    monkeypatch.setattr("kernels.get_kernel", get_kernel)
    assert isinstance(load(allow_download=True), Kernel)
    assert asked == [(AITER, {"version": 1})]


def test_what_is_on_this_disk_is_not_downloaded_again(publish, attempts):
    publish(AITER, attention(), cached=True)
    check_serves(load(allow_download=True))
    assert attempts == []


def test_a_missing_kernels_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    refusal = only_refusal(load())
    assert refusal.code is RefusalCode.NOT_INSTALLED
    assert "pip install" in refusal.detail
