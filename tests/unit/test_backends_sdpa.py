"""PyTorch's own attention, pinned: on the CPU for real, and what is called when an operator is another one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sage_core import operators
from sage_core.backends import sdpa
from sage_core.backends.base import Kernel
from sage_core.environment import Environment
from sage_core.refusal import RefusalCode
from tests.unit.fp64 import exact

FLASH = sdpa.SDPA_FLASH.load(Environment(), "cpu", False)


def example(layout: str, heads=(4, 4), lengths=(50, 77), head_dim=64, dtype=torch.float32):
    """query, key and value, and exact attention of them in fp64."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int, length: int) -> torch.Tensor:
        tensor = torch.randn(2, length, count, head_dim, generator=generator).to(dtype)
        return tensor if layout == "NHD" else tensor.transpose(1, 2).contiguous()

    query, key, value = draw(heads[0], lengths[0]), draw(heads[1], lengths[1]), draw(heads[1], lengths[1])
    views = [tensor.double() if layout == "HND" else tensor.double().transpose(1, 2) for tensor in (query, key, value)]
    groups = heads[0] // heads[1]
    q, k, v = views[0], views[1].repeat_interleave(groups, 1), views[2].repeat_interleave(groups, 1)
    expected = torch.softmax(q @ k.mT * 0.3, -1) @ v
    return query, key, value, expected if layout == "HND" else expected.transpose(1, 2)


def relative_l2(output: torch.Tensor, expected: torch.Tensor) -> float:
    return ((output.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, 1e-5),
        ({"dtype": torch.bfloat16}, 0.01),
        ({"dtype": torch.float16, "head_dim": 36}, 0.002),
        ({"heads": (6, 2)}, 1e-5),
        ({"lengths": (1, 1)}, 1e-5),
        ({"head_dim": 320, "lengths": (130, 130)}, 1e-5),
    ],
    ids=str,
)
def test_flash_on_the_cpu_is_exact(layout, changes, bound):
    query, key, value, expected = example(layout, **changes)
    given = [tensor.clone() for tensor in (query, key, value)]
    output = FLASH.function(query, key, value, tensor_layout=layout, sm_scale=0.3)
    assert (output.shape, output.dtype) == (query.shape, query.dtype)
    assert relative_l2(output, expected) <= bound
    assert all(torch.equal(tensor, before) for tensor, before in zip((query, key, value), given, strict=True))


def test_output_from_nhd_flattens_without_a_copy():
    query, key, value, _ = example("NHD")
    output = FLASH.function(query, key, value, tensor_layout="NHD", sm_scale=0.3)
    hnd = output.transpose(1, 2)
    assert hnd.transpose(1, 2).reshape(2, 50, -1).data_ptr() == output.data_ptr()


def test_the_direct_call_gives_the_bits_of_the_pinned_public_function():
    query, key, value, _ = example("HND", dtype=torch.bfloat16)
    direct = FLASH.function(query, key, value, tensor_layout="HND", sm_scale=0.3)
    pinned = sdpa._pinned(sdpa.SDPBackend.FLASH_ATTENTION)(query, key, value, 0.3, None)
    assert torch.equal(direct, pinned)


@pytest.fixture(autouse=True)
def looked_up_anew():
    """Which operator there is, is looked up once in a process."""
    operators.flash_operator.cache_clear()
    yield
    operators.flash_operator.cache_clear()


@pytest.mark.parametrize("changed", [{"FLASH_CPU_SCHEMA": "query key value something_new"}, {"FLASH": "_no_such"}])
def test_another_schema_falls_back_to_the_public_function(monkeypatch, changed):
    for name, value in changed.items():
        monkeypatch.setattr(operators, name, value)
    assert operators.flash_operator(True) is None
    kernel = sdpa.SDPA_FLASH.load(Environment(), "cpu", False)
    query, key, value, expected = example("NHD", heads=(6, 2))
    output = kernel.function(query, key, value, tensor_layout="NHD", sm_scale=0.3)
    assert relative_l2(output, expected) <= 1e-5


@pytest.mark.parametrize(
    ("backend", "operator", "schema"),
    [
        (sdpa.SDPA_CUDNN, "_scaled_dot_product_cudnn_attention", sdpa.CUDNN_SCHEMA),
        (sdpa.SDPA_FLASH, "_scaled_dot_product_flash_attention", operators.FLASH_SCHEMA),
        (sdpa.SDPA_EFFICIENT, "_scaled_dot_product_efficient_attention", sdpa.EFFICIENT_SCHEMA),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_gpu_operators_get_exactly_what_their_schema_names(monkeypatch, backend, operator, schema):
    calls = []

    def fake(*positional, **named):
        calls.append((positional[3:], named))
        return positional[0], None

    fake._schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in schema.split()])
    monkeypatch.setattr(sdpa.torch.ops.aten, operator, SimpleNamespace(default=fake), raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    kernel = backend.load(Environment(), "sm90", False)
    query, key, value, _ = example("NHD")
    output = kernel.function(query, key, value, tensor_layout="NHD", sm_scale=0.3)
    assert torch.equal(output, query)
    assert calls == [(() if backend is sdpa.SDPA_FLASH else (None, False), {"scale": 0.3})]


MASKS = {
    "bool": torch.arange(77)[None, None, None] < 60,
    "additive": torch.linspace(-2, 2, 50 * 77).view(1, 1, 50, 77),
}


@pytest.fixture
def pinned_to(monkeypatch):
    """Which implementations PyTorch was held to; it runs another one, as this one is not there on a CPU."""
    found = []

    def hold(backend):
        found.append(backend)
        return nullcontext()

    monkeypatch.setattr(sdpa, "sdpa_kernel", hold)
    return found


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_efficient_leaves_a_mask_to_the_public_function(monkeypatch, pinned_to, layout, mask):
    monkeypatch.setattr(sdpa, "_operator", lambda name, schema: pytest.fail)
    kernel = sdpa.SDPA_EFFICIENT.load(Environment(), "sm86", False)
    assert kernel.options == {"attn_mask"}, "grouped heads are expanded by the caller"
    query, key, value, _ = example(layout)
    output = kernel.function(query, key, value, tensor_layout=layout, sm_scale=0.3, attn_mask=mask)
    tensors = (query, key, value) if layout == "HND" else [tensor.transpose(1, 2) for tensor in (query, key, value)]
    expected = exact(*tensors, sm_scale=0.3, attn_mask=mask)
    assert relative_l2(output, expected if layout == "HND" else expected.transpose(1, 2)) <= 1e-5
    assert pinned_to == [sdpa.SDPBackend.EFFICIENT_ATTENTION]


def test_efficient_under_another_schema_is_the_public_function(monkeypatch, pinned_to):
    monkeypatch.setattr(sdpa, "EFFICIENT_SCHEMA", "query key value something_new")
    kernel = sdpa.SDPA_EFFICIENT.load(Environment(), "sm86", False)
    query, key, value, expected = example("NHD")
    output = kernel.function(query, key, value, tensor_layout="NHD", sm_scale=0.3)
    assert relative_l2(output, expected) <= 1e-5
    assert pinned_to == [sdpa.SDPBackend.EFFICIENT_ATTENTION]


def test_a_torch_built_without_the_implementation_is_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    for backend in (sdpa.SDPA_CUDNN, sdpa.SDPA_FLASH):
        (refusal,) = backend.load(Environment(), "sm90", False)
        assert refusal.code is RefusalCode.BUILD
        assert torch.__version__ in refusal.detail
    assert isinstance(sdpa.SDPA_FLASH.load(Environment(), "cpu", False), Kernel)
