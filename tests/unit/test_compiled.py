"""Attention calls in graphs of torch.compile: one operator each, with all that they have without a graph."""

from __future__ import annotations

import gc
import importlib.util
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
from torch._inductor.utils import get_first_incompatible_cudagraph_node

from sage_core import compiled
from sage_core.backends.base import Tolerance
from sage_core.policy import NATIVE_ONLY
from tests.unit.conftest import (
    KERNEL,
    TRIAL_CALLS,
    FakeComfy,
    FakeKernel,
    Machine,
    attention,
    comfy_arguments,
    fake_backend,
    make_dispatcher,
    normal,
    off_by,
    served,
)

SIGMAS = (1.0, 0.75, 0.5, 0.25, 0.0)
ARGUMENTS, KEYWORDS = comfy_arguments()
BLOCKS = 3


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def graph_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def without_options(entries: Any) -> list[bool]:
    """The guard filter of ComfyUI's node."""
    return ["transformer_options" not in entry.name for entry in entries]


class Host(FakeComfy):
    """ComfyUI, with a plain function as its own attention, as it has one."""

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        self.counted = counted = self.native
        self.native = lambda *args, **kwargs: counted(*args, **kwargs)


class Network:
    """A model of equal blocks as ComfyUI has them: the options say which block it is in, x goes from block to block."""

    def __init__(self, args: tuple[Any, ...] = ARGUMENTS, **keywords: Any) -> None:
        self.args, self.keywords = args, keywords
        self.attention: Any = None

    def block(self, x: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        q = (x * 3).to(x.dtype)
        return x + self.attention(q, *self.args[1:], **self.keywords, transformer_options=transformer_options) / 2

    def forward(self, x: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        transformer_options = dict(transformer_options)
        for index in range(BLOCKS):
            transformer_options["block_type"] = "double"
            transformer_options["block_index"] = index
            x = self.block(x, transformer_options)
        return x * 2


class Compiled:
    """A patched model, the same uncompiled, and what both give; steps differ in their sigmas, as a sampler's do."""

    def __init__(
        self, dispatcher: Any, backend: Any = "eager", network: Network | None = None, filtered: bool = False
    ) -> None:
        self.network = network or Network(**KEYWORDS)
        self.filtered = filtered
        self.forward = self.compile(self.network.forward, backend)
        self.comfy = self.patched(dispatcher)

    def compile(self, function: Any, backend: Any = "eager") -> Any:
        """The function compiled as ComfyUI does it; torch takes the filter out of the options that it is given."""
        options = {"guard_filter_fn": without_options} if self.filtered else None
        return torch.compile(function, backend=backend, options=options)

    def patched(self, dispatcher: Any) -> Host:
        """A model patched with another dispatcher, over the same compiled code."""
        comfy = Host(dispatcher)
        step = 0

        def forward_once(attention: Callable[..., Tensor], transformer_options: dict[str, Any]) -> Tensor:
            nonlocal step
            step += 1
            self.network.attention = comfy.attention
            schedule = {"sigmas": torch.full((1,), 1 / step), "grid_sizes": torch.ones(1, 3), "uuids": [object()]}
            return self.forward(self.network.args[0], transformer_options={**transformer_options, **schedule})

        comfy.forward_once = forward_once
        return comfy

    def uncompiled(self, dispatcher: Any) -> tuple[Tensor, dict[str, Any]]:
        """The output of a forward, and the run, without torch.compile."""
        compiled_forward, self.forward = self.forward, self.network.forward
        comfy = self.patched(dispatcher)
        outputs = comfy.sample(SIGMAS)
        self.forward = compiled_forward
        return outputs[-1], comfy.run()


def sites(run: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(site["site"], site["block"], site["calls"]) for site in run["sites"]]


# -- the same as without a graph


@pytest.mark.parametrize("filtered", [True, False], ids=["guards dropped", "guards kept"])
def test_all_steps_run_one_graph_with_the_bits_and_counts_of_the_uncompiled_model(filtered):
    model = Compiled(make_dispatcher(fake_backend()), filtered=filtered)
    outputs = model.comfy.sample(SIGMAS)
    expected, run = model.uncompiled(make_dispatcher(fake_backend()))
    assert all(torch.equal(output, expected) for output in outputs)
    assert served(model.comfy.run()) == served(run) == {KERNEL: BLOCKS * 4}
    assert sites(model.comfy.run()) == sites(run) == [(site, f"double {site}", 4) for site in range(BLOCKS)]
    assert (graph_breaks(), graphs()) == (0, 1)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")


@needs_compiler
@pytest.mark.parametrize("dynamic", [None, True])
def test_inductor_keeps_each_call_and_what_it_gives(dynamic):
    model = Compiled(make_dispatcher(fake_backend()))
    model.forward = torch.compile(model.network.forward, backend="inductor", dynamic=dynamic)
    with torch.inference_mode():
        outputs = model.comfy.sample(SIGMAS)
        expected, run = model.uncompiled(make_dispatcher(fake_backend()))
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert sites(model.comfy.run()) == sites(run)
    assert served(model.comfy.run()) == {KERNEL: BLOCKS * 4}
    assert (graph_breaks(), graphs()) == (0, 1)


def masks() -> dict[str, Tensor | None]:
    allowed = normal(24, 24) > -1
    return {
        "no mask": None,
        "bool": allowed,
        "additive": normal(24, 24),
        "per head": normal(1, 1, 1, 24).expand(1, 2, 24, 24),
    }


CALLS = [
    *({"mask": mask} for mask in masks()),
    *({"skip_reshape": inwards, "skip_output_reshape": out} for inwards in (True, False) for out in (True, False)),
    *({"skip_reshape": inwards, "heads": 4, "kv_heads": 2} for inwards in (True, False)),
    {"skip_reshape": True, "skip_output_reshape": True, "heads": 4, "kv_heads": 1},
    {"scale": 0.3, "low_precision_attention": True},
    {"low_precision_attention": False},
    {"attn_precision": torch.float32},
    {"kv_len": 7, "batch": 2},
    {"dtype": torch.bfloat16},
]


def arguments_of(call: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = {**call, "mask": masks()[call["mask"]]} if "mask" in call else call
    return comfy_arguments(**named)


def name_of(call: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in call.items())


@pytest.mark.parametrize("call", CALLS, ids=name_of)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_every_kind_of_call_has_the_shape_strides_and_bits_of_the_uncompiled_one(call, backend):
    """aot_eager checks what the compiler was told of the output against what it gets."""
    args, keywords = arguments_of(call)
    comfy, plain = (Host(make_dispatcher(fake_backend(exact=True))) for _ in range(2))

    def forward(attention: Callable[..., Tensor], options: dict[str, Any]) -> Tensor:
        return attention(*args[:3], heads=args[3], **keywords, transformer_options=options) + 0

    plain.forward_once = forward
    comfy.forward_once = torch.compile(forward, backend=backend)
    (output,), (expected,) = comfy.sample(), plain.sample()
    assert torch.equal(output, expected)
    assert (output.shape, output.dtype) == (expected.shape, expected.dtype)
    assert served(comfy.run()) == served(plain.run())
    assert graph_breaks() == 0


@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_the_operator_is_what_it_is_declared_to_be(call):
    args, keywords = arguments_of(call)
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(node for node in graph.graph.nodes if node.target is compiled.OPERATOR)
        return graph

    dispatcher = make_dispatcher(fake_backend(exact=True))
    torch.compile(lambda: dispatcher.attend(attention_of_host, *args, **keywords), backend=backend)()
    (node,) = seen
    operands = (*args[:3], keywords.get("mask"), *node.args[4:])
    torch.library.opcheck(compiled.OPERATOR, operands)
    assert not compiled.OPERATOR._schema.is_mutable


def attention_of_host(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kw
):
    """The shape of what ComfyUI's functions give, with memory in the order that attention leaves it in."""
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for t in (q, k, v))
    output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=kw.get("scale"), enable_gqa=bool(kw.get("enable_gqa"))
    )
    output = output.transpose(1, 2).contiguous()
    return output.transpose(1, 2) if skip_output_reshape else output.flatten(2)


def test_attention_that_hands_back_its_value_gives_a_copy():
    """The compiler was told that the output has memory of its own, and may write into it."""
    q, k, v, heads = ARGUMENTS
    dispatcher = make_dispatcher(kernel=NATIVE_ONLY)
    call = torch.compile(lambda: dispatcher.attend(lambda q, k, v, *args, **kw: v, q, k, v, heads), backend="aot_eager")
    output = call()
    assert torch.equal(output, v)
    assert output.data_ptr() != v.data_ptr()


# -- calls that a graph cannot express


class Marked(Tensor):
    pass


def unplain(x: Tensor) -> Tensor:
    return x.as_subclass(Marked)


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


class Ones:
    def attention(self, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.ones_like(q)

    __call__ = attention


ONLY_NATIVE = {"kernel": NATIVE_ONLY}
BREAKS: dict[str, dict[str, Any]] = {
    "unknown argument": {"keywords": {"window": 3}},
    "tensor of a class of its own": {"change": unplain},
    "dtypes that differ": {"change": Tensor.double},
    "autocast": {"around": lambda: torch.autocast("cpu", torch.bfloat16)},
    "value of another width": {"arguments": {"skip_reshape": True}, "value": normal(1, 2, 24, 8)},
    "tensors with too few axes": {"keywords": {"skip_reshape": True}},
    "scale that is a tensor": {"keywords": {"scale": torch.tensor(0.3)}},
    "flag that is a number": {"policy": ONLY_NATIVE, "keywords": {"low_precision_attention": 1}},
    "attention that is a method": {"policy": ONLY_NATIVE, "native": Ones().attention},
    "attention that is an object": {"policy": ONLY_NATIVE, "native": Ones()},
    "block that is an object": {"policy": ONLY_NATIVE, "options": {"block": Ones()}},
    "number of a block that is text": {"policy": ONLY_NATIVE, "options": {"block_index": "first"}},
}


@pytest.mark.parametrize("case", BREAKS.values(), ids=BREAKS)
def test_what_a_graph_cannot_express_leaves_it_and_is_counted(case):
    (q, k, v, heads), keywords = comfy_arguments(**case.get("arguments", {}))
    keywords = {**keywords, **case.get("keywords", {})}
    v = case.get("value", v)
    dispatcher = make_dispatcher(fake_backend(), **case.get("policy", {}))
    comfy = Host(dispatcher)
    comfy.native = case.get("native", lambda q, *args, **kwargs: torch.ones_like(q))

    def forward(attention: Callable[..., Tensor], options: dict[str, Any]) -> Tensor:
        options = {**options, **case.get("options", {})}
        return attention(case.get("change", unchanged)(q), k, v, heads, **keywords, transformer_options=options) * 2

    comfy.forward_once = torch.compile(forward, backend="eager")
    with case.get("around", torch.no_grad)():
        (output,) = comfy.sample()
    assert torch.equal(torch.as_tensor(output).float(), torch.full_like(q, 2.0))
    assert served(comfy.run()) == {"native": 1}
    assert graph_breaks() > 0


def test_another_override_below_ours_is_given_the_options_as_the_model_has_them():
    received = []

    def sparse(func: Any, *args: Any, **kwargs: Any) -> Tensor:
        received.append(kwargs["transformer_options"]["grid_sizes"])
        return func(*args, **kwargs)

    model = Compiled(make_dispatcher(kernel=NATIVE_ONLY, previous=sparse))
    model.comfy.sample()
    assert [grid.tolist() for grid in received] == [[[1.0, 1.0, 1.0]]] * BLOCKS
    assert graph_breaks() > 0


def test_gradients_flow_through_native_attention_outside_the_graph():
    q, *others = ARGUMENTS
    query = q.clone().requires_grad_()
    dispatcher = make_dispatcher(fake_backend())
    call = torch.compile(lambda x: dispatcher.attend(attention_of_host, x * 2, *others).sum(), backend="aot_eager")
    call(query).backward()
    assert query.grad is not None
    assert query.grad.norm() > 0
    assert served(dispatcher.snapshot()["runs"][-1]) == {"native": 1}


@pytest.mark.parametrize("limit", [{"OPERATOR": None}, {"MAX_CALLS": 0}], ids=["old torch", "table full"])
def test_without_an_operator_calls_leave_the_graph_and_are_counted(monkeypatch, limit):
    monkeypatch.setattr(compiled, "_numbers", {})
    for name, value in limit.items():
        monkeypatch.setattr(compiled, name, value)
    model = Compiled(make_dispatcher(fake_backend()))
    outputs = model.comfy.sample(SIGMAS)
    expected, _ = model.uncompiled(make_dispatcher(fake_backend()))
    assert all(torch.equal(output, expected) for output in outputs)
    assert served(model.comfy.run()) == {KERNEL: BLOCKS * 4}
    assert graph_breaks() > 0


def test_no_operator_is_made_where_it_could_not_be_kept_out_of_cuda_graphs(monkeypatch):
    monkeypatch.setattr(torch, "Tag", SimpleNamespace())
    assert compiled._register() == (None, None)


def test_a_second_copy_of_the_pack_has_an_operator_of_its_own():
    root = Path(compiled.__file__).parent
    spec = importlib.util.spec_from_file_location(
        "other_pack", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["other_pack"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules["other_pack"])
        other = sys.modules["other_pack.compiled"]
        assert other.OPERATOR is not compiled.OPERATOR
        received = []

        def func(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            received.append(args)
            return q * 2

        q, k, v, heads = ARGUMENTS
        output = torch.compile(lambda: other.call_in_graph(func, q, k, v, heads), backend="eager")()
        assert torch.equal(output, q * 2)
        assert len(received) == 1
        assert graph_breaks() == 0
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "other_pack"]:
            del sys.modules[name]


# -- what happens inside


def test_a_kernel_that_fails_inside_a_graph_is_retired_and_native_takes_over():
    calls = 0

    def failing(*call: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > TRIAL_CALLS + BLOCKS:  # each of the first forward, after the small example
            raise RuntimeError("broken")
        return attention(*call)

    model = Compiled(make_dispatcher(fake_backend(FakeKernel(failing), exact=True)))
    outputs = model.comfy.sample(SIGMAS)
    expected, _ = model.uncompiled(make_dispatcher(kernel=NATIVE_ONLY))
    assert torch.equal(outputs[-1], expected)
    assert served(model.comfy.run()) == {KERNEL: BLOCKS, "native": BLOCKS * 3}
    assert (graph_breaks(), graphs()) == (0, 1)


def test_an_error_of_native_attention_comes_out_as_it_is():
    class Mine(Exception):
        pass

    def raising(*args: Any, **kwargs: Any) -> Tensor:
        raise Mine("out of luck")

    model = Compiled(make_dispatcher(kernel=NATIVE_ONLY))
    model.comfy.native = raising
    with pytest.raises(Mine, match="out of luck"):
        model.comfy.sample()


def test_a_forward_that_is_not_finite_is_rescued_through_the_same_graph():
    calls = 0

    def spoilt(*call: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return attention(*call) * (float("nan") if calls > TRIAL_CALLS + 2 * BLOCKS else 1.0)

    model = Compiled(make_dispatcher(fake_backend(FakeKernel(spoilt)), tolerance=None))
    outputs = model.comfy.sample(SIGMAS)
    expected, _ = model.uncompiled(make_dispatcher(kernel=NATIVE_ONLY))
    run = model.comfy.run()
    assert run["rescued_forwards"] == 1
    assert torch.equal(outputs[-1], expected)
    assert (graph_breaks(), graphs()) == (0, 1)


def test_a_site_out_of_tolerance_is_found_through_the_graph():
    """The small example is sound; the model's own tensors are what the kernel is bad at."""

    def worse(query: Tensor, *others: Any) -> Tensor:
        return attention(query, *others) * (1.5 if query.shape[1] == 600 else 1.0)

    args, keywords = comfy_arguments(qo_len=600)
    model = Compiled(make_dispatcher(fake_backend(FakeKernel(worse)), tolerance=0.1), network=Network(args, **keywords))
    model.comfy.sample(SIGMAS)
    run = model.comfy.run()
    assert served(run) == {"native": BLOCKS * 4}
    assert {refusal["code"] for refusal in run["refusals"]} == {"accuracy"}
    assert (graph_breaks(), graphs()) == (0, 1)


# -- native forwards


@pytest.mark.parametrize("filtered", [True, False], ids=["guards dropped", "guards kept"])
def test_a_native_forward_is_native_in_the_graph_it_has_without_being_traced_again(filtered, monkeypatch):
    dispatcher = make_dispatcher(kernel=NATIVE_ONLY)
    model = Compiled(dispatcher, filtered=filtered)
    asked = []
    new_plan = dispatcher._new_plan
    monkeypatch.setattr(dispatcher, "_new_plan", lambda *args: asked.append(args[1]) or new_plan(*args))
    outputs = model.comfy.sample(SIGMAS)
    expected, _ = model.uncompiled(make_dispatcher(kernel=NATIVE_ONLY))
    assert all(torch.equal(output, expected) for output in outputs)
    assert served(model.comfy.run()) == {"native": BLOCKS * 4}
    assert len(asked) == BLOCKS
    assert model.comfy.counted.calls == BLOCKS * 4
    assert (graph_breaks(), graphs()) == (0, 1)


def test_calls_beside_the_graph_are_native_too_in_a_native_forward():
    """Parts of a model that are not compiled see the override, which stays in the options for the graph's sake."""
    dispatcher = make_dispatcher(kernel=NATIVE_ONLY)
    comfy = Host(dispatcher)

    def call(attention: Callable[..., Tensor], options: dict[str, Any]) -> Tensor:
        return attention(*ARGUMENTS, **KEYWORDS, transformer_options=options)

    in_graph = torch.compile(call, backend="eager")

    def both(attention: Callable[..., Tensor], options: dict[str, Any]) -> Tensor:
        return in_graph(attention, options) + call(attention, options)

    comfy.forward_once = both
    comfy.sample(SIGMAS)
    assert served(comfy.run()) == {"native": 2 * 4}
    assert [run["calls"] for run in comfy.runs()] == [2 * 4]
    assert comfy.counted.calls == 2 * 4
    assert graph_breaks() == 0


@pytest.mark.parametrize("filtered", [True, False], ids=["guards dropped", "guards kept"])
def test_the_comparison_runs_the_graph_natively(filtered, one_thread):
    kernel = FakeKernel(off_by(0.01))
    dispatcher = make_dispatcher(fake_backend(kernel), compare_with_native="every run")
    model = Compiled(dispatcher, filtered=filtered)
    model.comfy.sample((1.0, 0.5, 0.0))
    (comparison,) = model.comfy.run()["comparisons"]
    native, _ = model.uncompiled(make_dispatcher(kernel=NATIVE_ONLY))
    with_kernel, _ = model.uncompiled(make_dispatcher(fake_backend(FakeKernel(off_by(0.01)))))
    assert comparison["relative_l2"] == pytest.approx(float((with_kernel - native).norm() / native.norm()), rel=1e-3)
    assert served(model.comfy.run()) == {KERNEL: 2 * BLOCKS}
    assert (graph_breaks(), graphs()) == (0, 1)


def test_a_plan_that_does_not_pay_off_in_compiled_code_is_native_from_there_on():
    machine = Machine(native_ms=10.0)
    kernel = machine.add(KERNEL, device_ms=20.0)
    model = Compiled(make_dispatcher(session=machine.session(), kernel=KERNEL, compare_with_native="every run"))
    model.comfy.sample((1.0, 0.5, 0.0))
    made = len(kernel.calls)
    assert made > BLOCKS
    assert served(model.comfy.run()) == {KERNEL: 2 * BLOCKS}


def test_what_was_compared_without_compiling_is_not_taken_for_compiled_models():
    dispatcher = make_dispatcher(fake_backend(FakeKernel(off_by(0.01))), compare_with_native="first time")
    comfy = Host(dispatcher)
    wrappers = {"wrappers": {"apply_model": {"torch.compile": [print]}}}
    for options in ({}, wrappers, {}, wrappers):
        comfy.options = {**comfy.options, "wrappers": {}, **options}
        comfy.sample()
    remembered = [[comparison["remembered"] for comparison in run["comparisons"]] for run in comfy.runs()]
    assert remembered == [[False], [False], [True], [True]]


# -- CUDA graphs


@needs_compiler
def test_inductor_cuts_what_becomes_cuda_graphs_at_each_operator(monkeypatch):
    """As for a GPU: on a CPU inductor would cut everywhere. What is between the operators may become CUDA graphs."""
    reasons = {}
    should_partition = Scheduler.should_partition

    def asked(scheduler: Scheduler, node: Any) -> Any:
        reason = reasons[node.get_name()] = should_partition(scheduler, node)
        if getattr(node.node, "op_overload", None) is compiled.OPERATOR:
            operators.add(node.get_name())
        return reason

    operators: set[str] = set()
    monkeypatch.setattr(Scheduler, "should_partition", asked)
    monkeypatch.setattr(BaseSchedulerNode, "is_gpu", lambda node: True)
    model = Compiled(make_dispatcher(fake_backend()))
    options = {"triton.cudagraphs": True, "graph_partition": True}
    model.forward = torch.compile(model.network.forward, backend="inductor", options=options)
    with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):  # a cached graph is not cut
        outputs = model.comfy.sample(SIGMAS)
        expected, _ = model.uncompiled(make_dispatcher(fake_backend()))
    torch.testing.assert_close(outputs[-1], expected, rtol=1e-5, atol=1e-5)
    assert served(model.comfy.run()) == {KERNEL: BLOCKS * 4}
    assert len(operators) == BLOCKS
    assert all(reasons[name] is not None for name in operators)
    assert None in reasons.values()


def test_no_cuda_graph_is_made_of_a_whole_model_that_has_an_operator():
    """What the backend "cudagraphs" looks for, and inductor where it does not cut graphs."""
    found = []

    def compiler(graph: Any, inputs: Any) -> Any:
        found.append(get_first_incompatible_cudagraph_node(graph).target)
        return graph

    model = Compiled(make_dispatcher(fake_backend()), backend=aot_autograd(fw_compiler=compiler))
    with torch.no_grad():
        model.comfy.sample()
    assert found == [compiled.OPERATOR]
    assert torch.Tag.cudagraph_unsafe in compiled.OPERATOR.tags


# -- a graph outlives what it was traced with


class OfAnySize(Network):
    """Attention of x with itself, so that an image may have any number of tokens."""

    def block(self, x: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        return x + self.attention(x * 3, x, x, self.args[3], transformer_options=transformer_options) / 2


@pytest.mark.parametrize("filtered", [True, False], ids=["guards dropped", "guards kept"])
def test_images_of_other_sizes_are_compiled_as_often_as_without_the_pack(filtered):
    """Once for the first size and once for all others: torch itself takes what changes as any size."""
    model = Compiled(make_dispatcher(fake_backend()), network=OfAnySize(), filtered=filtered)
    without = OfAnySize()
    without.attention = lambda *args, transformer_options: attention_of_host(*args)
    alone = model.compile(without.forward)
    found: dict[str, list[int]] = {"pack": [], "alone": []}
    for tokens in (24, 40, 56, 24):
        x = normal(1, tokens, 32)
        model.network.args = (x, *ARGUMENTS[1:])
        before = graphs()
        outputs = model.comfy.sample(SIGMAS)
        after = graphs()
        alone(x, transformer_options={})
        found["pack"].append(after - before)
        found["alone"].append(graphs() - after)
        expected, _ = model.uncompiled(make_dispatcher(fake_backend()))
        assert torch.equal(outputs[-1], expected)
    assert found["pack"] == found["alone"] == [1, 1, 0, 0]
    assert graph_breaks() == 0


def test_numbers_that_change_with_the_size_or_the_block_stay_in_the_graph():
    """A tracer takes a number that was another one before for any number, which is no constant of the graph."""
    seen = []

    def native(q: Tensor, *args: Any, scale: float, transformer_options: dict[str, Any], **kwargs: Any) -> Tensor:
        seen.append((scale, transformer_options["block"], transformer_options["block_index"]))
        return q * scale

    comfy = Host(make_dispatcher(kernel=NATIVE_ONLY))
    comfy.native = native
    tokens, number = 0, 0

    def block(attention: Callable[..., Tensor], x: Tensor, options: dict[str, Any]) -> Tensor:
        return attention(x, x, x, 2, scale=x.shape[1] ** -0.5, enable_gqa=x.shape[1] != 7, transformer_options=options)

    in_graph = torch.compile(block, backend="aot_eager")

    def forward(attention: Callable[..., Tensor], options: dict[str, Any]) -> Tensor:
        return in_graph(
            attention, normal(1, tokens, 32), {**options, "block": ("input", number), "block_index": number}
        )

    comfy.forward_once = forward
    for tokens, number in ((16, 1), (25, 2), (36, 3), (49, 4)):  # noqa: B007
        (output,) = comfy.sample()
        assert torch.equal(output, normal(1, tokens, 32) * tokens**-0.5)
    assert seen == [
        (1 / 4, ("input", 1), 1),
        (1 / 5, ("input", 2), 2),
        (1 / 6, ("input", 3), 3),
        (1 / 7, ("input", 4), 4),
    ]
    assert graph_breaks() == 0


@pytest.mark.parametrize("filtered", [True, False], ids=["guards dropped", "guards kept"])
def test_another_node_or_other_settings_over_the_same_compiled_model_make_nothing_be_traced_again(filtered):
    first = make_dispatcher(fake_backend())
    model = Compiled(first, filtered=filtered)
    native_by_function(model.comfy).sample(SIGMAS)
    for dispatcher, expected in (
        (make_dispatcher(fake_backend()), {KERNEL: 4 * BLOCKS}),
        (make_dispatcher(kernel=NATIVE_ONLY), {"native": 4 * BLOCKS}),
        (make_dispatcher(fake_backend(), skip_blocks=frozenset({1})), {KERNEL: 4 * (BLOCKS - 1), "native": 4}),
    ):
        comfy = native_by_function(model.patched(dispatcher))
        comfy.sample(SIGMAS)
        assert served(comfy.run()) == expected
    assert (graph_breaks(), graphs()) == (0, 1)


def halving(q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
    """Native attention of these tests: one function, as ComfyUI has it, whoever calls."""
    return q / 2


def native_by_function(comfy: Host) -> Host:
    comfy.native = halving
    return comfy


def test_a_graph_serves_whoever_stands_around_the_model_call():
    """As ComfyUI drops the guards: another kernel, no node at all, the first again; nothing is traced again."""
    first = make_dispatcher(fake_backend(FakeKernel(off_by(0.0)), exact=True))
    other = make_dispatcher(
        fake_backend(
            FakeKernel(off_by(0.5)), name="other", exact=True, tolerance=Tolerance(relative_l2=1.0, cosine=0.9)
        )
    )
    model = Compiled(first, filtered=True)
    model.network.attention = native_by_function(model.comfy).attention

    def forward(dispatcher: Any) -> Tensor:
        comfy = native_by_function(model.patched(dispatcher))
        comfy.attention = model.network.attention
        return comfy.sample()[0]

    outputs = [forward(first), forward(other), forward(first)]
    alone = model.forward(ARGUMENTS[0], transformer_options={"optimized_attention_override": first.attend})
    native, _ = uncompiled_natively(model)
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(alone, native)
    assert [served(run) for run in first.snapshot()["runs"]] == [{KERNEL: BLOCKS}] * 2
    assert [served(run) for run in other.snapshot()["runs"]] == [{"other": BLOCKS}]
    assert (graph_breaks(), graphs()) == (0, 1)


def uncompiled_natively(model: Compiled) -> tuple[Tensor, None]:
    model.network.attention = lambda *args, **kwargs: halving(*args, **kwargs)
    return model.network.forward(ARGUMENTS[0], transformer_options={}), None


def test_a_graph_keeps_no_dispatcher_alive():
    model = Compiled(make_dispatcher(fake_backend()), filtered=True)
    model.comfy.sample()
    dispatcher = weakref.ref(model.comfy.dispatcher)
    del model.comfy
    model.network.attention = None
    gc.collect()
    assert dispatcher() is None


def test_models_in_two_threads_share_a_graph_and_keep_apart():
    names = ("one", "two")
    dispatchers = [make_dispatcher(fake_backend(name=name, exact=True)) for name in names]
    model = Compiled(dispatchers[0], filtered=True)
    shared = native_by_function(model.comfy)
    model.comfy.sample()
    together = threading.Barrier(2)

    def forward_once(attention: Callable[..., Tensor], transformer_options: dict[str, Any]) -> Tensor:
        together.wait(timeout=30)
        return model.forward(ARGUMENTS[0], transformer_options=transformer_options)

    def sample(dispatcher: Any) -> None:
        comfy = Host(dispatcher)
        comfy.forward_once = forward_once
        comfy.sample(SIGMAS)

    threads = [threading.Thread(target=sample, args=(dispatcher,)) for dispatcher in dispatchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared is model.comfy
    for name, dispatcher in zip(names, dispatchers, strict=True):
        assert served(dispatcher.snapshot()["runs"][-1]) == {name: 4 * BLOCKS}
    assert graph_breaks() == 0


# -- blocks that are compiled one by one


def by_block(model: Compiled) -> None:
    """The model runs eagerly, its blocks are compiled: one graph serves them all."""
    model.forward = model.network.forward
    model.network.block = model.compile(model.network.block)


@pytest.mark.parametrize(
    ("filtered", "blocks"),
    [(True, ["double 0", "double 0+1", "double 0+2"]), (False, ["double 0", "double 1", "double 2"])],
    ids=["guards dropped", "guards kept"],
)
def test_blocks_of_one_graph_are_told_apart(filtered, blocks):
    model = Compiled(make_dispatcher(fake_backend()), filtered=filtered)
    by_block(model)
    model.comfy.sample(SIGMAS)
    assert sites(model.comfy.run()) == [(site, block, 4) for site, block in enumerate(blocks)]
    assert graph_breaks() == 0
    assert graphs() == (1 if filtered else 2)  # the second takes the number as it comes


@pytest.mark.parametrize("filtered", [True, False], ids=["guards dropped", "guards kept"])
@pytest.mark.parametrize("regional", [True, False], ids=["blocks compiled", "model compiled"])
def test_skip_blocks_finds_its_block_in_graphs(filtered, regional):
    model = Compiled(make_dispatcher(fake_backend(), skip_blocks=frozenset({1})), filtered=filtered)
    if regional:
        by_block(model)
    model.comfy.sample(SIGMAS)
    assert [site["kernel"] for site in model.comfy.run()["sites"]] == [KERNEL, "native", KERNEL]
    assert graph_breaks() == 0
