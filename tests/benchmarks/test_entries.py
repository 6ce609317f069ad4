"""Which kernels are measured by name, and what a plain override does to ComfyUI's arguments."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import entries
from sage_core import Session
from sage_core.backends import base
from sage_core.backends.base import Backend, Kernel, Tolerance
from sage_core.environment import Device, Environment
from sage_core.refusal import Refusal, RefusalCode
from sage_core.support import Support
from tests.unit.fp64 import exact

GPU = torch.device("cuda", 0)


def backend(name, *, loads, archs=("sm80",)):
    found = Kernel(lambda *_, **__: None) if loads else (Refusal(RefusalCode.NOT_INSTALLED, "not installed"),)
    return Backend(name, Support(archs=archs), Tolerance(0.1, 0.9), lambda *_: found, package="sageattention")


def by_name(monkeypatch, *backends, order=()):
    environment = Environment(devices=(Device(0, "sm80", "a GPU"),))
    preferences = {"sm80": tuple(SimpleNamespace(kernel=name) for name in order)}
    session = Session(backends, environment, order=preferences)
    modules = {
        "sage_core": SimpleNamespace(BACKENDS=backends),
        "sage_core.backends.base": base,
        "nodes.patch_attention": SimpleNamespace(SESSION=session),
    }
    monkeypatch.setattr(entries.comfyui, "pack", modules.__getitem__)
    return entries.kernels_by_name(GPU)


def test_the_first_kernel_of_sageattention_that_loads_for_the_gpu_is_measured(monkeypatch):
    absent, first = backend("absent", loads=False), backend("first", loads=True)
    other_gpu, second = backend("other", loads=True, archs=("sm90",)), backend("second", loads=True)
    assert by_name(monkeypatch, absent, other_gpu, first, second) == ("first",)
    assert by_name(monkeypatch, absent) == ()


def test_kernels_that_the_pack_starts_from_come_first_but_none_that_may_download(monkeypatch):
    found = by_name(monkeypatch, backend("first", loads=True), order=("sdpa: cudnn", "hub: any", "first"))
    assert found == ("sdpa: cudnn", "first")


def test_on_a_cpu_it_is_the_preview():
    assert entries.kernels_by_name(torch.device("cpu")) == ("int8_reference",)


def sageattn(query, key, value, tensor_layout, is_causal, sm_scale):
    assert not is_causal
    if tensor_layout == "NHD":
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    assert query.shape[1] == key.shape[1]
    output = scaled_dot_product_attention(query, key, value, scale=sm_scale)
    return output.transpose(1, 2) if tensor_layout == "NHD" else output


def untouched(*args, **kwargs):
    raise AssertionError("the override handed the call back")


@pytest.mark.parametrize("heads_first_in", [False, True])
@pytest.mark.parametrize("heads_first_out", [False, True])
@pytest.mark.parametrize(("key_heads", "scale"), [(4, None), (2, 0.3)])
def test_the_plain_override_honours_layout_groups_and_scale(heads_first_in, heads_first_out, key_heads, scale):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 10, 8), (2, key_heads, 12, 8), (2, key_heads, 12, 8))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    given = tensors if heads_first_in else [tensor.transpose(1, 2).flatten(2) for tensor in tensors]
    flags = {"skip_reshape": heads_first_in, "skip_output_reshape": heads_first_out}
    keywords = {} if scale is None else {"scale": scale}
    output = entries._sage_override(sageattn, untouched, *given, 4, **flags, **keywords)
    if not heads_first_out:
        output = output.unflatten(2, (4, 8)).transpose(1, 2)
    torch.testing.assert_close(output.double(), exact(*tensors, sm_scale=scale), rtol=1e-5, atol=1e-5)


def test_the_plain_override_leaves_masked_calls_to_native():
    seen = {}
    mask = torch.ones(3, 3, dtype=torch.bool)
    query = torch.zeros(1, 3, 8)

    def native(*args, **kwargs):
        seen.update(kwargs, args=args)
        return query

    assert entries._sage_override(sageattn, native, query, query, query, 2, mask, scale=0.5) is query
    assert seen["mask"] is mask
    assert seen["scale"] == 0.5
    assert seen["args"][3] == 2


def names(compiled):
    return [name for name in entries.entries(torch.device("cpu"), compiled=compiled) if name.startswith("plain")]


def test_plain_sageattn_is_there_once_and_for_compiled_models_twice():
    assert names(False) == ["plain sageattn"]
    assert names(True) == ["plain sageattn, in the graph", "plain sageattn, outside the graph"]
    assert all(entries.chosen(name, ["plain sageattn"]) for name in names(False) + names(True))
    assert not any(entries.chosen(name, ["core sage"]) for name in names(True))
    assert all(entries.chosen(name, []) for name in ("native", "native again", "auto"))
    assert entries.chosen("any", None)


class Model:
    """A MODEL as far as an entry needs it."""

    def __init__(self):
        self.model_options = {}

    def clone(self):
        return Model()


@pytest.mark.parametrize(("name", "breaks"), [(entries.IN_GRAPH, False), (entries.OUTSIDE_GRAPH, True)])
def test_one_plain_entry_is_traced_with_the_model_and_one_leaves_the_graph(monkeypatch, name, breaks):
    monkeypatch.setitem(sys.modules, "sageattention", SimpleNamespace(sageattn=sageattn))
    patched = entries.entries(torch.device("cpu"), compiled=True)[name](Model())
    override = patched.model_options["transformer_options"]["optimized_attention_override"]
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    query = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0))
    output = torch.compile(lambda x: override(untouched, x * 2, x, x, 2) + 1, backend="eager")(query)
    assert torch.equal(output, override(untouched, query * 2, query, query, 2) + 1)
    assert (sum(torch._dynamo.utils.counters["graph_break"].values()) > 0) is breaks
    torch.compiler.reset()
