"""Calls whose query, key and value come in containers with one owner: released where a kernel can, native otherwise."""

from __future__ import annotations

import weakref

import pytest
import torch

from sage_core.backends.base import Kernel
from sage_core.dispatcher import describe_function
from tests.unit.conftest import (
    KERNEL,
    FakeComfy,
    FakeKernel,
    Native,
    attention,
    comfy_arguments,
    fake_backend,
    make_dispatcher,
    normal,
    off_by,
    served,
)

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
FORWARDS, CALLS = len(STEPS) - 1, 3


class Container:
    """comfy.ldm.modules.attention.AttentionTensorContainer."""

    def __init__(self, tensor):
        self.tensor = tensor

    def peek(self):
        if self.tensor is None:
            raise RuntimeError("attention tensor container has already been consumed")
        return self.tensor

    def take(self):
        tensor = self.peek()
        self.tensor = None
        return tensor


class ContainerComfy(FakeComfy):
    """A ComfyUI that knows containers; ``unopened`` counts those calls that reached its own function in them."""

    def __init__(self, dispatcher, model):
        super().__init__(dispatcher, model)
        self.unopened = 0
        self.attention = self.wrap_attn()
        dispatcher._optimized_attention = lambda: self.attention

    def wrap_attn(self):
        def func(*args, **kwargs):
            return self.native(*args, **kwargs)

        def wrapper(*args, **kwargs):
            held = args[:3] if isinstance(args[0], Container) else ()
            if "_inside_attn_wrapper" not in kwargs:
                kwargs["_inside_attn_wrapper"] = True
                override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
                if override is not None:
                    if held and hasattr(override, "container_function"):
                        return override.container_function(*args, **kwargs)
                    return override(func, *(each.take() for each in held), *args[len(held) :], **kwargs)
            self.unopened += bool(held)
            if held and wrapper.container_function is not None:
                return wrapper.container_function(*args, **kwargs)
            return self.native(*(each.take() for each in held), *args[len(held) :], **kwargs)

        wrapper.container_function, wrapper.__wrapped__ = None, func
        return wrapper


class Memory(bytearray):
    """The memory of a tensor; it goes when no tensor is left that views it."""


def in_memory(tensor):
    """The same tensor, strides too, in memory of its own, and a weak reference to that."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    memory = Memory(tensor.permute(order).contiguous().numpy().tobytes())
    placed = torch.frombuffer(memory, dtype=tensor.dtype).view([tensor.shape[axis] for axis in order])
    return placed.permute([order.index(axis) for axis in range(tensor.ndim)]), weakref.ref(memory)


class Held:
    """A forward of ``calls`` attention calls; each makes its tensors, which nobody else holds.

    ``memories`` are of the call under way. ``contained`` of False hands the same tensors over as they are; ``shared``
    views query and key in one tensor; ``strided`` puts neighbours along head_dim apart in memory.
    """

    def __init__(self, calls=CALLS, contained=True, shared=False, strided=False, by_site=None, **options):
        self.calls, self.contained, self.shared, self.strided = calls, contained, shared, strided
        self.by_site, self.options = by_site or {}, options
        self.memories = []
        self.made = []

    def __call__(self, attend, transformer_options):
        return [self.call(site, attend, transformer_options) for site in range(self.calls)]

    def given(self, site):
        (*tensors, heads), kwargs = comfy_arguments(**{**self.options, **self.by_site.get(site, {})}, seed=10 * site)
        if self.strided:
            tensors = [tensor.mT.contiguous().mT for tensor in tensors]
        if self.shared:
            both, memory = in_memory(torch.cat(tensors[:2], -1))
            (value, of_value), width = in_memory(tensors[2]), tensors[0].shape[-1]
            tensors, self.memories = [both[..., :width], both[..., width:], value], [memory, of_value]
        else:
            tensors, self.memories = zip(*map(in_memory, tensors), strict=True)
        self.made += self.memories
        return [Container(tensor) if self.contained else tensor for tensor in tensors], heads, kwargs

    def call(self, site, attend, transformer_options):
        held, heads, kwargs = self.given(site)
        options = {**transformer_options, "block_type": "double", "block_index": site}
        output = attend(*held, heads, **kwargs, transformer_options=options)
        assert not self.contained or all(each.tensor is None for each in held)
        return output + 0


class Halves(FakeKernel):
    """A kernel whose two halves can be called apart; ``fail(half, number)`` gives what the half raises that time.

    ``alive`` are, for each call that was prepared, the tensors that were there when attention began.
    """

    def __init__(self, model, fail=lambda half, number: None, spoil=None):
        super().__init__(spoil)
        self.model, self.fail = model, fail
        self.alive = []
        self.halves = {"prepare": 0, "attend": 0}

    def prepare(self, tensors, *, tensor_layout, sm_scale):
        self.begin("prepare")
        quantized = [tensor.clone() for tensor in tensors]
        tensors.clear()

        def attend():
            self.alive.append([memory() is not None for memory in self.model.memories])
            self.begin("attend")
            return (self.spoil or attention)(*quantized, tensor_layout, sm_scale, None)

        return attend

    def begin(self, half):
        self.halves[half] += 1
        error = self.fail(half, self.halves[half])
        if error is not None:
            raise error


def patched(model, fail=lambda half, number: None, spoil=None, previous=None, support=None, exact=False, **policy):
    """A ComfyUI with containers around ``model``, patched for a kernel in two halves, and the kernel."""
    kernel = Halves(model, fail, spoil)
    loaded = Kernel(kernel, frozenset({"attn_mask", "enable_gqa"}), kernel.prepare)
    backend = fake_backend(load=lambda environment, arch, allow_download: loaded, exact=exact, **(support or {}))
    return ContainerComfy(make_dispatcher(backend, previous=previous, **policy), model), kernel


def of_tensors(policy=None, **model):
    """The outputs of the same calls when they are handed over as tensors, to a kernel that never fails."""
    return patched(Held(contained=False, **model), **(policy or {}))[0].sample(STEPS)


def of_native(**model):
    """The output of native attention for a forward."""
    return Held(contained=False, **model)(Native(), {})


def equal(outputs, expected):
    assert len(outputs) == len(expected)
    return all(
        torch.equal(mine, other)
        for ours, theirs in zip(outputs, expected, strict=True)
        for mine, other in zip(ours, theirs, strict=True)
    )


LAYOUTS = {
    "one tensor each": {},
    "heads apart": {"skip_reshape": True},
    "output apart": {"skip_output_reshape": True},
    "two views of one tensor": {"shared": True, "skip_reshape": True},
    "copied for their strides": {"strided": True, "skip_reshape": True},
    "grouped heads": {"heads": 4, "kv_heads": 2},
    "a scale": {"scale": 0.25},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_are_gone_when_attention_begins_and_the_bits_are_those_of_tensors(layout):
    model = Held(**LAYOUTS[layout])
    comfy, kernel = patched(model)
    outputs = comfy.sample(STEPS)
    # the first call at each site is planned with its tensors
    assert kernel.alive == [[False] * len(model.memories)] * (FORWARDS - 1) * CALLS
    assert kernel.halves == {"prepare": (FORWARDS - 1) * CALLS, "attend": (FORWARDS - 1) * CALLS}
    assert [memory() for memory in model.made if memory() is not None] == []
    run = comfy.run()
    assert (served(run), run["forwards"], run["comparison_calls"]) == ({KERNEL: FORWARDS * CALLS}, FORWARDS, 0)
    assert (run["events"], comfy.native.calls, comfy.unopened) == ([], 0, 0)
    assert equal(outputs, of_tensors(**LAYOUTS[layout]))
    assert not equal(outputs[:1], [of_native(**LAYOUTS[layout])])


OPENED = {
    "a kernel of one piece": {"halves": False},
    "a mask": {"model": {"mask": normal(24, 24, seed=5)}},
    "a call in pieces": {"patched": {"support": {"max_offset": 24 * 16 - 1}}},
}


@pytest.mark.parametrize("name", OPENED)
def test_a_call_that_cannot_be_released_is_opened_and_served(name):
    scenario = OPENED[name]
    comfy, kernel = patched(Held(**scenario.get("model", {})), **scenario.get("patched", {}))
    if not scenario.get("halves", True):
        whole = fake_backend(kernel)
        comfy = ContainerComfy(make_dispatcher(whole), comfy.forward_once)
    outputs = comfy.sample(STEPS)
    assert kernel.halves == {"prepare": 0, "attend": 0}
    assert served(comfy.run()) == {KERNEL: FORWARDS * CALLS}
    assert comfy.native.calls == 0
    assert equal(outputs, of_tensors(scenario.get("patched"), **scenario.get("model", {})))


EIGHT_STEPS = [step / 8 for step in range(8, -1, -1)]
"""The first and the fifth are those with checks."""


def test_steps_in_which_sites_are_checked_release_the_tensors_too():
    model = Held()
    rough = {"tolerance": fake_backend().tolerance._replace(relative_l2=0.1)}
    comfy, kernel = patched(model, spoil=off_by(0.03), support=rough, tolerance=0.1)
    outputs = comfy.sample(EIGHT_STEPS)
    assert served(comfy.run()) == {KERNEL: 8 * CALLS}
    assert kernel.alive == [[False] * 3] * 7 * CALLS  # the first forward is planned with its tensors
    in_tensors, _ = patched(Held(contained=False), spoil=off_by(0.03), support=rough, tolerance=0.1)
    assert equal(outputs, in_tensors.sample(EIGHT_STEPS))
    found, expected = ([site["accuracy"] for site in run["sites"]] for run in (comfy.run(), in_tensors.run()))
    assert found == expected
    assert len(found) == CALLS
    assert all(0.02 < each["worst_head_relative_l2"] < 0.04 for each in found)


def test_a_site_that_drifts_later_in_a_run_loses_its_kernel_as_with_tensors():
    runs = []
    for contained in (True, False):
        calls = []

        def drifting(*call, calls=calls):
            calls.append(call)
            return attention(*call) * (1.5 if len(calls) > 5 * CALLS else 1.0)

        comfy, _ = patched(Held(contained=contained), spoil=drifting, tolerance=0.1)
        comfy.sample(EIGHT_STEPS)
        run = comfy.run()
        runs.append((served(run), run["refusals"], [site["accuracy"] for site in run["sites"]], run["events"]))
    assert runs[0][0]["native"] > 0
    assert [entry["code"] for entry in runs[0][1]] == ["accuracy"]
    assert runs[0] == runs[1]


def test_a_check_that_memory_is_too_short_for_is_left_out(monkeypatch):
    def short(call, spec, exact):
        raise torch.OutOfMemoryError("CUDA out of memory")

    comfy, _ = patched(Held(), tolerance=0.1)
    comfy.sample(EIGHT_STEPS)
    monkeypatch.setattr("sage_core.serving.site_check", short)
    outputs = comfy.sample(EIGHT_STEPS)
    assert served(comfy.run()) == {KERNEL: 8 * CALLS}
    assert [event["text"] for event in comfy.run()["events"]] == [
        "a check was left out: the check raised OutOfMemoryError: CUDA out of memory"
    ]
    assert len(outputs) == 8


def test_nothing_is_released_or_checked_while_a_cuda_graph_is_captured(monkeypatch):
    comfy, kernel = patched(Held(), tolerance=0.1)
    comfy.sample(EIGHT_STEPS)
    prepared, accuracies = dict(kernel.halves), [site["accuracy"] for site in comfy.run()["sites"]]
    assert None not in accuracies
    for module in ("dispatcher", "forwards"):
        monkeypatch.setattr(f"sage_core.{module}.is_capturing", lambda device: True)
    comfy.sample(EIGHT_STEPS)
    assert served(comfy.run()) == {KERNEL: 8 * CALLS}
    assert kernel.halves == prepared
    assert [site["accuracy"] and site["accuracy"]["step"] for site in comfy.run()["sites"]] == [None] * CALLS


ONE_NATIVE = {"by_site": {1: {"low_precision_attention": False}}}
"""The call in the middle of each forward is none for kernels."""


def test_a_native_call_reaches_comfyui_in_its_containers():
    comfy, _ = patched(Held(**ONE_NATIVE))
    outputs = comfy.sample(STEPS)
    assert served(comfy.run()) == {KERNEL: 2 * FORWARDS, "native": FORWARDS}
    assert (comfy.unopened, comfy.native.calls) == (FORWARDS - 1, FORWARDS)
    assert equal(outputs, of_tensors(**ONE_NATIVE))


def test_comfyuis_own_way_with_containers_serves_native_calls():
    received = []

    def own(query, key, value, heads, **kwargs):
        received.append((sorted(kwargs), query.tensor is None))
        return comfy.native(query.take(), key.take(), value.take(), heads, **kwargs)

    comfy, _ = patched(Held(**ONE_NATIVE))
    comfy.attention.container_function = own
    comfy.sample(STEPS)
    named = ["_inside_attn_wrapper", "low_precision_attention", "transformer_options"]
    assert received == [(named, False)] * (FORWARDS - 1)


def test_a_function_that_knows_no_containers_gets_tensors():
    """Another pack may have put a plain function in place of ComfyUI's."""
    comfy, _ = patched(Held(**ONE_NATIVE))
    comfy.dispatcher._optimized_attention = lambda: comfy.native
    comfy.sample(STEPS)
    assert served(comfy.run()) == {KERNEL: 2 * FORWARDS, "native": FORWARDS}
    assert (comfy.unopened, comfy.native.calls) == (0, FORWARDS)


@pytest.mark.parametrize("way", ["none", "its own", "None"])
def test_the_override_that_was_there_before_gets_native_calls_as_comfyui_would_hand_them(way):
    calls = []

    def previous(func, *args, **kwargs):
        calls.append((func in (comfy.attention, comfy.attention.__wrapped__), [type(arg).__name__ for arg in args[:3]]))
        assert kwargs["_inside_attn_wrapper"]
        return func(*args, **kwargs) * 0.5

    def in_containers(*args, **kwargs):
        assert kwargs["_inside_attn_wrapper"]
        calls.append((True, [type(arg).__name__ for arg in args[:3]]))
        return comfy.attention(*args, **kwargs) * 0.5

    if way != "none":
        previous.container_function = in_containers if way == "its own" else None
    comfy, _ = patched(Held(**ONE_NATIVE), previous=previous)
    outputs = comfy.sample(STEPS)
    opened, held = (True, ["Tensor"] * 3), (True, ["Container"] * 3)
    assert calls == [opened, *[held if way == "its own" else opened] * (FORWARDS - 1)]
    assert served(comfy.run()) == {KERNEL: 2 * FORWARDS, "native": FORWARDS}
    calls.clear()
    assert equal(outputs, of_tensors({"previous": previous}, **ONE_NATIVE))


def test_a_forward_that_is_native_everywhere_leaves_containers_to_comfyui():
    comfy, _ = patched(Held(), kernel="native (observe only)")
    comfy.sample(STEPS)
    assert served(comfy.run()) == {"native": FORWARDS * CALLS}
    assert comfy.unopened == (FORWARDS - 1) * CALLS


def test_calls_that_no_forward_stands_around_are_opened():
    model = Held()
    comfy, kernel = patched(model)
    outputs = [model(comfy.attention, comfy.options) for _ in range(3)]
    assert served(comfy.run()) == {KERNEL: 3 * CALLS}
    assert kernel.halves == {"prepare": 0, "attend": 0}
    assert equal(outputs, of_tensors()[:3])


def test_skipped_blocks_and_a_window_hold_for_containers():
    policy = {"skip_blocks": frozenset({1}), "start_percent": 0.4}
    comfy, kernel = patched(Held(), **policy)
    outputs = comfy.sample(STEPS)
    run = comfy.run()
    assert served(run) == {"native": 2 * CALLS + 3, KERNEL: 3 * 2}
    assert {refusal["code"]: refusal["calls"] for refusal in run["refusals"]} == {
        "outside_window": 2 * CALLS,
        "skipped_block": 3,
    }
    assert kernel.halves["attend"] == 2 * 2
    assert equal(outputs, of_tensors(policy))


@pytest.mark.parametrize("inside", [True, False])
def test_arguments_that_no_attention_function_has_go_to_native_as_they_are(inside):
    received = []

    def newer(*args, **kwargs):
        received.append(([type(arg).__name__ for arg in args[:3]], len(args)))
        return comfy_native(*args[:8], **kwargs)

    model = Held()
    comfy, _ = patched(model)
    comfy_native, comfy.native = comfy.native, newer
    model.call = lambda site, attend, options: attend(
        *model.given(site)[0], 2, None, None, False, False, "new", transformer_options=options
    )
    outputs = comfy.sample(STEPS) if inside else [model(comfy.attention, comfy.options)]
    assert len(received) == len(outputs) * CALLS
    assert all(call == (["Tensor"] * 3, 9) for call in received)
    assert served(comfy.run()) == {"native": len(outputs) * CALLS}
    assert {refusal["code"] for refusal in comfy.run()["refusals"]} == {"unknown_argument"}


def test_an_override_is_named_without_the_folders_of_its_pack():
    def theirs(func, *args, **kwargs):
        return func(*args, **kwargs)

    theirs.__qualname__ = "patch.<locals>.theirs"
    dispatcher = patched(Held())[0].dispatcher
    for folder in ("/home/me/ComfyUI/custom_nodes/", "C:\\Users\\me\\ComfyUI\\custom_nodes\\"):
        theirs.__module__ = f"{folder}ComfyUI-Other.nodes.sage"
        assert describe_function(theirs) == "ComfyUI-Other.nodes.sage.patch.<locals>.theirs"
    assert describe_function(dispatcher) == "another Apply SageAttention"
    assert describe_function(Held()) == "tests.unit.test_containers.Held"
    assert describe_function(None) == "nothing"


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_the_error_of_a_container_that_was_taken_comes_out(known, taken):
    model = Held()
    comfy, kernel = patched(model)
    if known:
        comfy.sample(STEPS)
    given = model.given

    def spent(site):
        held, *rest = given(site)
        held[taken].take()
        return held, *rest

    model.given = spent
    for _ in range(2):
        with pytest.raises(RuntimeError, match="already been consumed"):
            comfy.sample(STEPS)
        assert comfy.run()["calls"] == 0
    assert comfy.run()["status"] == "error"
    model.given = given
    before = kernel.halves["attend"]
    comfy.sample(STEPS)  # nothing was held against the kernel
    assert served(comfy.run()) == {KERNEL: FORWARDS * CALLS}
    assert kernel.halves["attend"] - before == (FORWARDS - (not known)) * CALLS


def test_while_a_graph_is_traced_containers_are_opened():
    torch.compiler.reset()
    comfy, kernel = patched(Held(calls=1))

    def block(query, key, value, options):
        return comfy.attention(Container(query), Container(key), Container(value), 2, transformer_options=options) + 1

    compiled = torch.compile(block, backend="eager", fullgraph=True)
    (*tensors, _), _ = comfy_arguments()
    comfy.forward_once = lambda attend, options: [compiled(*tensors, options)]
    outputs = comfy.sample(STEPS)
    torch.compiler.reset()
    assert served(comfy.run()) == {KERNEL: FORWARDS}
    assert kernel.halves == {"prepare": 0, "attend": 0}
    assert all(torch.equal(output, of_tensors(calls=1)[0][0] + 1) for (output,) in outputs)
