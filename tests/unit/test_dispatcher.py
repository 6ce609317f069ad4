"""One patched model inside a stand-in for ComfyUI: what serves each call, what a failure does, what is counted."""

from __future__ import annotations

import copy
import gc
import json
import logging
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nested

from sage_core import planning, serving
from sage_core import plans as plans_module
from sage_core.backends.base import Kernel
from sage_core.dispatcher import Dispatcher
from sage_core.failure import DeviceLost
from sage_core.policy import NATIVE_ONLY, Policy
from sage_core.refusal import Refusal, RefusalCode
from sage_core.selection import Use
from sage_core.stats import MAX_RUNS
from tests.unit.conftest import (
    CPU,
    KERNEL,
    TRIAL_CALLS,
    Executor,
    FakeComfy,
    FakeKernel,
    InterruptProcessingException,
    Machine,
    Native,
    Sites,
    attention,
    codes,
    comfy_arguments,
    fake_backend,
    make_call,
    make_dispatcher,
    make_session,
    normal,
    plain_model,
    served,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NATIVE = "native"


def comfy_with(kernel=None, model=None, **options):
    """A ComfyUI whose model is patched with a kernel, and the kernel."""
    kernel = kernel or FakeKernel()
    backend_options = {name: options.pop(name) for name in ("options", "max_offset", "head_dims") if name in options}
    return FakeComfy(make_dispatcher(fake_backend(kernel, **backend_options), **options), model), kernel


def one_call(args, kwargs):
    """A model of one call; the forward's output is the call's."""
    return lambda attention, transformer_options: attention(*args, **kwargs, transformer_options=transformer_options)


def refusal_codes(run):
    """Refused calls by code."""
    found = Counter()
    for entry in run["refusals"]:
        found[entry["code"]] += entry["calls"]
    return dict(found)


class Fails(FakeKernel):
    """Right in its trial; of the calls after that, those numbered ``numbers`` raise, and all when none is given."""

    def __init__(self, error, *numbers):
        super().__init__()
        self.error, self.numbers = error, numbers
        self.failures = 0

    def __call__(self, *args, **keywords):
        output = super().__call__(*args, **keywords)
        number = len(self.calls) - TRIAL_CALLS
        if number <= 0 or (self.numbers and number not in self.numbers):
            return output
        self.failures += 1
        raise type(self.error)(*self.error.args)  # a new one, since errors keep the frames that they went through


# -- what serves a call


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"scale": 1.0},
        {"heads": 12, "kv_heads": 3},
        {"mask": normal(24, 24, seed=5)},
        {"mask": normal(2, 24, 24, seed=5) > 0, "batch": 2},
        {"low_precision_attention": True},
    ],
)
@pytest.mark.parametrize("options", [("attn_mask",), ("attn_mask", "enable_gqa")])
def test_a_call_that_nothing_speaks_against_is_served_by_the_kernel(skip_reshape, skip_output_reshape, extra, options):
    args, kwargs = comfy_arguments(skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **extra)
    before = [tensor.clone() for tensor in args[:3]]
    comfy, kernel = comfy_with(model=one_call(args, kwargs), options=options)
    outputs = comfy.sample((1.0, 0.5, 0.0))
    expected = Native()(*args, **kwargs)
    for output in outputs:
        assert output.shape == expected.shape
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert comfy.native.calls == 0
    assert len(kernel.calls) == TRIAL_CALLS + 2
    assert served(comfy.run()) == {KERNEL: 2}
    assert comfy.run()["refusals"] == []
    assert all(torch.equal(tensor, given) for tensor, given in zip(args, before, strict=False))


def test_a_mask_reaches_the_kernel_with_four_axes_however_it_was_passed():
    args, _ = comfy_arguments()
    mask = normal(24, 24, seed=5)
    shapes = []

    def spoil(query, key, value, layout, scale, mask):
        shapes.append(tuple(mask.shape))
        return attention(query, key, value, layout, scale, mask)

    for model in (one_call((*args, mask), {}), one_call(args, {"mask": mask})):
        comfy, _ = comfy_with(FakeKernel(spoil), model)
        comfy.sample()
        assert served(comfy.run()) == {KERNEL: 1}
    assert shapes[TRIAL_CALLS :: TRIAL_CALLS + 1] == [(1, 1, 24, 24)] * 2


def refused(**options):
    args, kwargs = comfy_arguments(**{name: options.pop(name) for name in ("dtype", "kv_heads") if name in options})
    return args, {**kwargs, **options}


def with_tensors(change):
    (q, k, v, heads), kwargs = comfy_arguments()
    return (*(change(tensor) for tensor in (q, k, v)), heads), kwargs


REFUSED_CALLS = {
    "an argument of tomorrow": (refused(window=3), "unknown_argument"),
    "too many positional arguments": (((*comfy_arguments()[0], None, None, False, False, 1), {}), "unknown_argument"),
    "low precision forbidden": (refused(low_precision_attention=False), "low_precision_forbidden"),
    "fp32 asked for": (refused(attn_precision=torch.float32), "attn_precision"),
    "fp64": (refused(dtype=torch.float64), "dtype"),
    "a scale that is a tensor": (refused(scale=torch.tensor(0.5)), "sm_scale"),
    "grouped heads that nobody announced": (refused(kv_heads=1, enable_gqa=False), "malformed_call"),
    "a mask of two meanings": (
        (comfy_arguments(batch=2)[0], {"mask": normal(2, 24) > 0}),
        "attn_mask",
    ),
    "a mask that is no tensor": (refused(mask=object()), "tensor_type"),
    "gradients": (with_tensors(lambda tensor: tensor.clone().requires_grad_()), "gradient"),
    "nested tensors": (
        with_tensors(lambda tensor: nested.nested_tensor([tensor[0]], layout=torch.jagged)),
        "tensor_type",
    ),
    "sparse tensors": (with_tensors(lambda tensor: tensor.to_sparse()), "tensor_type"),
    "mkldnn tensors": (with_tensors(lambda tensor: tensor.to_mkldnn()), "tensor_type"),
    "parameters": (with_tensors(lambda tensor: torch.nn.Parameter(tensor, requires_grad=False)), "tensor_type"),
}


@pytest.mark.parametrize(("arguments", "code"), REFUSED_CALLS.values(), ids=REFUSED_CALLS.keys())
def test_a_refused_call_reaches_comfyui_untouched_and_says_why(arguments, code):
    args, kwargs = arguments
    seen = []

    def func(*args, **kwargs):
        seen.append((args, kwargs))
        return answer

    answer = object()
    comfy, kernel = comfy_with(model=one_call(args, kwargs))
    comfy.native = func
    assert comfy.sample((1.0, 0.5, 0.0)) == [answer, answer]
    for (seen_args, seen_kwargs), through_us in zip(seen, (True, False), strict=True):
        assert all(given is arrived for given, arrived in zip(args, seen_args, strict=True))
        assert seen_kwargs.pop("_inside_attn_wrapper") is True
        # the second forward is known to be native: it has no way through us
        assert ("optimized_attention_override" in seen_kwargs.pop("transformer_options")) is through_us
        assert seen_kwargs.keys() == kwargs.keys()
        assert all(kwargs[name] is seen_kwargs[name] for name in kwargs)
    assert kernel.calls == []
    assert served(comfy.run()) == {NATIVE: 2}
    assert refusal_codes(comfy.run()) == {code: 2}


def test_autocast_around_the_model_leaves_it_to_native():
    comfy, _ = comfy_with()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        comfy.sample()
    assert refusal_codes(comfy.run()) == {"autocast": 2}
    comfy.sample()
    assert served(comfy.run()) == {KERNEL: 2}


def test_a_model_on_a_device_without_memory_is_left_to_native():
    args, kwargs = comfy_arguments()
    comfy, kernel = comfy_with(model=one_call([*(tensor.to("meta") for tensor in args[:3]), args[3]], kwargs))
    (output,) = comfy.sample()
    assert (output.device.type, output.shape) == ("meta", args[0].shape)
    assert (served(comfy.run()), refusal_codes(comfy.run())) == ({NATIVE: 1}, {"tensor_type": 1})
    assert "meta" in comfy.run()["refusals"][0]["detail"]
    assert kernel.calls == []


def test_tensors_passed_by_name_are_left_to_native():
    (q, k, v, heads), _ = comfy_arguments()
    comfy, _ = comfy_with(model=one_call((), {"q": q, "k": k, "v": v, "heads": heads}))
    (output,) = comfy.sample()
    assert torch.equal(output, Native()(q, k, v, heads))
    assert served(comfy.run()) == {NATIVE: 1}


def test_observing_changes_no_bit_and_loads_nothing():
    def load(*asked):
        raise AssertionError("loaded")

    args, kwargs = comfy_arguments()
    comfy = FakeComfy(make_dispatcher(fake_backend(load=load), kernel=NATIVE_ONLY), one_call(args, kwargs))
    assert comfy.dispatcher.prepare(CPU) == ()
    (output,) = comfy.sample()
    assert torch.equal(output, Native()(*args, **kwargs))
    assert refusal_codes(comfy.run()) == {"observe_only": 1}


def test_the_override_that_was_there_before_stands_for_native():
    args, kwargs = comfy_arguments()
    seen = []

    def previous(func, *args, **kwargs):
        seen.append(func)
        return func(*args, **kwargs) * 2

    comfy, _ = comfy_with(model=one_call(args, {**kwargs, "window": 1}), previous=previous)
    (output,) = comfy.sample()
    assert torch.equal(output, Native()(*args, **kwargs) * 2)
    assert seen == [comfy.native]
    assert comfy.dispatcher.snapshot()["previous_override"].endswith("previous")
    comfy.forward_once = one_call(args, kwargs)
    comfy.sample()
    assert len(seen) == 1
    assert served(comfy.run()) == {KERNEL: 1}


def test_a_kernel_that_fails_hands_the_call_to_the_override_before_it():
    args, kwargs = comfy_arguments()
    kernel = Fails(RuntimeError("broken"))
    comfy, _ = comfy_with(kernel, one_call(args, kwargs), previous=lambda func, *args, **kwargs: "previous")
    assert comfy.sample() == ["previous"]


def test_offsets_past_the_reach_of_a_kernel_are_copied_for_it():
    q, k, v = (normal(1, 24, 10, 16, seed=seed)[:, :, :2].transpose(1, 2) for seed in range(3))
    args, kwargs = (q, k, v, 2), {"skip_reshape": True}
    comfy, kernel = comfy_with(model=one_call(args, kwargs), max_offset=24 * 2 * 16)
    (output,) = comfy.sample()
    torch.testing.assert_close(output, Native()(*args, **kwargs), rtol=1e-4, atol=1e-5)
    assert served(comfy.run()) == {KERNEL: 1}
    assert all(address != t.data_ptr() for address, t in zip(kernel.calls[-1]["addresses"], (q, k, v), strict=True))


# -- which kernels are asked


def test_auto_on_an_unknown_arch_is_native_with_the_arch_as_the_reason():
    comfy = FakeComfy(make_dispatcher(kernel="auto", session=make_session(order=None)))
    comfy.sample()
    (entry,) = comfy.run()["refusals"]
    assert (entry["code"], entry["calls"]) == ("arch", 2)
    assert "this device is cpu" in entry["detail"]


def test_a_forced_kernel_is_used_whatever_the_starting_order_says():
    session = make_session(fake_backend(name="other"), fake_backend(), order=["other"])
    comfy = FakeComfy(make_dispatcher(session=session, kernel=KERNEL))
    comfy.sample()
    assert served(comfy.run()) == {KERNEL: 2}


@pytest.mark.parametrize(("smooth_k", "handed"), [("auto", False), ("off", False), ("on", True)])
def test_smoothing_is_what_the_person_chose(smooth_k, handed):
    kernel = FakeKernel()
    backend = fake_backend(kernel, options=("smooth_k",), smooth_k=True)
    comfy = FakeComfy(make_dispatcher(backend, smooth_k=smooth_k))
    comfy.sample()
    assert [call["smooth_k"] for call in kernel.calls] == [handed] * (TRIAL_CALLS + 2)
    assert [site["smooth_k"] for site in comfy.run()["sites"]] == [handed] * 2


# -- before a run


def test_preparing_gives_every_reason_why_a_forced_kernel_serves_nothing():
    absent = Refusal(RefusalCode.NOT_INSTALLED, "not installed")
    backend = fake_backend(load=lambda *asked: (absent,))
    assert make_dispatcher(backend).prepare(CPU) == (absent,)
    assert codes(make_dispatcher(fake_backend(archs=("sm90",)), smooth_k="on").prepare(CPU)) == ["arch", "smooth_k"]
    assert codes(make_dispatcher(fake_backend(lambda *tensors, **keywords: None)).prepare(CPU)) == ["trial"]
    assert make_dispatcher().prepare(CPU) == ()


@pytest.mark.parametrize("limits", [{"head_dims": (64, 96)}, {"max_head_dim": 64}, {"dtypes": ("float16",)}, {}])
def test_preparing_tries_a_call_that_the_kernel_declares_to_take(limits):
    kernel = FakeKernel()
    assert make_dispatcher(fake_backend(kernel, **limits)).prepare(CPU) == ()
    assert len(kernel.calls) == TRIAL_CALLS


def test_preparing_auto_loads_what_it_may_use_and_runs_nothing():
    kernel, loaded = FakeKernel(), []

    def load(environment, arch, allow_download):
        loaded.append((arch, allow_download))
        return Kernel(kernel)

    backends = [fake_backend(name=name, load=load) for name in "abc"]
    session = make_session(*backends, order="ab")
    assert make_dispatcher(session=session, kernel="auto", allow_hub_download=True).prepare(CPU) == ()
    assert loaded == [("cpu", True)] * 2
    assert kernel.calls == []


@pytest.mark.parametrize("kernel", [KERNEL, "auto"])
def test_preparing_looks_again_for_what_was_not_to_be_had(kernel):
    found = [(Refusal(RefusalCode.DOWNLOAD_FAILED, "no connection"),), Kernel(FakeKernel())]
    machine = Machine()
    machine.backends.append(fake_backend(load=lambda *asked: found.pop(0)))
    session = machine.session()
    comfy = machine.comfy(session=session, kernel=kernel)
    comfy.dispatcher.prepare(CPU)
    comfy.sample()
    assert refusal_codes(comfy.run()) == {"download_failed": 3}
    comfy = machine.comfy(session=session, kernel=kernel)
    assert comfy.dispatcher.prepare(CPU) == ()
    comfy.sample()
    assert served(comfy.run()) == {KERNEL: 3}


# -- window


@pytest.mark.parametrize(
    ("start", "end", "inside"),
    [
        (0.0, 1.0, "1111"),
        (0.0, 0.9, "1111"),
        (0.0, 0.5, "1110"),
        (0.0, 0.49, "1100"),
        (0.0, 0.0, "1000"),
        (0.25, 1.0, "0111"),
        (0.26, 1.0, "0011"),
        (0.25, 0.5, "0110"),
        (0.3, 0.4, "0000"),
        (1.0, 1.0, "0000"),
    ],
)
def test_a_window_of_the_schedule_includes_both_its_ends(start, end, inside):
    comfy, _ = comfy_with(start_percent=start, end_percent=end)
    comfy.forward_once = plain_model(calls=1)
    comfy.sample((1.0, 0.75, 0.5, 0.25, 0.0))
    run = comfy.run()
    within = inside.count("1")
    assert served(run) == {name: n for name, n in ((KERNEL, within), (NATIVE, 4 - within)) if n}
    assert refusal_codes(run) == ({"outside_window": 4 - within} if within < 4 else {})


def test_each_step_of_a_window_is_decided_by_its_own_sigma():
    comfy, kernel = comfy_with(start_percent=0.25, end_percent=0.5, model=plain_model(calls=1))
    native_calls, kernel_calls = [], []

    def note(*progress):
        native_calls.append(comfy.native.calls)
        kernel_calls.append(len(kernel.calls))

    comfy.sample((1.0, 0.75, 0.5, 0.25, 0.0), note)
    assert native_calls == [1, 1, 1, 2]
    assert kernel_calls == [0, TRIAL_CALLS + 1, TRIAL_CALLS + 2, TRIAL_CALLS + 2]


def test_without_a_window_the_schedule_is_not_asked(monkeypatch):
    comfy, _ = comfy_with()
    monkeypatch.setattr(comfy, "get_model_object", lambda name: pytest.fail("asked"))
    comfy.sample()
    assert served(comfy.run()) == {KERNEL: 2}


def test_a_window_of_one_model_leaves_forwards_outside_a_run_alone():
    comfy, _ = comfy_with(start_percent=0.5)
    comfy.forward(1.0)
    assert served(comfy.run()) == {KERNEL: 2}


# -- blocks


def model_of_blocks(blocks, calls=1):
    args, kwargs = comfy_arguments()

    def forward(attention, transformer_options):
        for block in blocks:
            for _ in range(calls):
                attention(*args, **kwargs, transformer_options={**transformer_options, **block})

    return forward


DIT = [{"block_type": kind, "block_index": index} for kind in ("double", "single") for index in range(3)]
UNET = [
    {"block": ("input", 1), "block_index": 0},
    {"block": ("input", 4), "block_index": 0},
    {"block": ("input", 4), "block_index": 1},
    {"block": ("middle", 0), "block_index": 0},
    {"block": ("output", 3), "block_index": 0},
]
WAN = [{"block_index": index} for index in range(3)]


@pytest.mark.parametrize(
    ("blocks", "skip", "names"),
    [
        (DIT, {0}, ["double 0"]),
        (DIT, {2, 3, 5}, ["double 2", "single 0", "single 2"]),
        (UNET, {1, 2, 4}, ["input 4, 0", "input 4, 1", "output 3, 0"]),
        (WAN, {1}, ["block 1"]),
        (WAN, {9}, []),
    ],
)
@pytest.mark.parametrize("calls", [1, 2])
def test_blocks_are_skipped_by_their_number_in_the_order_of_the_forward(blocks, skip, names, calls):
    comfy, _ = comfy_with(model=model_of_blocks(blocks, calls), skip_blocks=frozenset(skip))
    comfy.sample((1.0, 0.5, 0.0))
    run = comfy.run()
    skipped = [site for site in run["sites"] if site["kernel"] == NATIVE]
    assert [site["block"] for site in skipped] == [name for name in names for _ in range(calls)]
    assert all(site["reasons"] == ["skipped_block"] and site["calls"] == 2 for site in skipped)
    assert run["calls"] == 2 * calls * len(blocks)
    assert served(run).get(NATIVE, 0) == 2 * calls * len(names)


def test_calls_outside_any_block_take_no_number():
    blocks = [{}, *WAN[:2], {}]
    comfy, _ = comfy_with(model=model_of_blocks(blocks), skip_blocks=frozenset({0}))
    comfy.sample()
    assert [site["kernel"] for site in comfy.run()["sites"]] == [KERNEL, NATIVE, KERNEL, KERNEL]


def test_a_model_without_blocks_is_served_as_if_none_was_skipped():
    comfy, _ = comfy_with(model=model_of_blocks([{}, {}]), skip_blocks=frozenset({0, 1}))
    comfy.sample()
    assert served(comfy.run()) == {KERNEL: 2}


def test_a_step_outside_the_window_gives_that_reason_for_skipped_blocks_too():
    comfy, _ = comfy_with(model=model_of_blocks(WAN), skip_blocks=frozenset({0}), end_percent=0.5)
    comfy.sample((0.75, 0.25, 0.0))
    assert refusal_codes(comfy.run()) == {"skipped_block": 1, "outside_window": 3}


# -- failures


def lines(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("at", [1, 2, 4])
def test_out_of_memory_makes_the_rest_of_the_run_native_and_the_next_run_tries_again(at, caplog):
    caplog.set_level(logging.INFO, "sagescope")
    args, kwargs = comfy_arguments()
    kernel = Fails(OUT_OF_MEMORY, at)
    comfy, _ = comfy_with(kernel, plain_model(calls=3))
    outputs = [output for forward in comfy.sample((1.0, 0.5, 0.0)) for output in forward]
    run = comfy.run()
    assert kernel.failures == 1
    assert len(kernel.calls) == TRIAL_CALLS + at
    assert served(run) == {name: n for name, n in ((KERNEL, at - 1), (NATIVE, 7 - at)) if n}
    assert all(torch.equal(output, Native()(*args, **kwargs)) for output in outputs[at - 1 :])
    assert refusal_codes(run) == {"out_of_memory": 7 - at}
    assert [event["step"] for event in run["events"]] == [(at - 1) // 3 + 1]
    assert len([line for line in lines(caplog, logging.INFO) if "rest of this run" in line]) == 1
    assert run["status"] == "finished"

    comfy.sample((1.0, 0.5, 0.0))
    assert served(comfy.run()) == {KERNEL: 6}
    assert comfy.run()["events"] == []


def test_out_of_memory_at_every_call_is_met_once_a_run():
    kernel = Fails(OUT_OF_MEMORY)
    comfy, _ = comfy_with(kernel, plain_model(calls=5))
    for number in (1, 2):
        comfy.sample((1.0, 0.5, 0.0))
        assert kernel.failures == number
        assert served(comfy.run()) == {NATIVE: 10}


def test_out_of_memory_in_a_trial_counts_for_its_run_only():
    full = [True]
    trials = []

    def spoil(query, key, value, layout, scale, mask):
        trials.append(1)
        if full[0]:
            raise OUT_OF_MEMORY
        return attention(query, key, value, layout, scale, mask)

    comfy, _ = comfy_with(FakeKernel(spoil), plain_model(calls=3))
    comfy.sample((1.0, 0.5, 0.0))
    assert served(comfy.run()) == {NATIVE: 6}
    assert refusal_codes(comfy.run()) == {"out_of_memory": 6}
    assert len(trials) == 1
    full[0] = False
    comfy.sample((1.0, 0.5, 0.0))
    assert served(comfy.run()) == {KERNEL: 6}


def test_out_of_memory_outside_a_sampler_counts_until_the_next_prompt():
    prompt = ["first"]
    kernel = Fails(OUT_OF_MEMORY)
    comfy, _ = comfy_with(kernel, host_context=lambda: (prompt[0], "3"))
    for _ in range(3):
        comfy.attention(*comfy_arguments()[0], transformer_options=comfy.options)
        comfy.forward()
    assert kernel.failures == 1
    prompt[0] = "second"
    comfy.forward()
    assert kernel.failures == 2
    assert [run["prompt_id"] for run in comfy.runs()] == ["first", "second"]


def test_a_kernel_that_raises_is_never_called_again(caplog):
    args, kwargs = comfy_arguments()
    kernel = Fails(RuntimeError("no kernel image"))
    session = make_session(fake_backend(kernel))
    comfy, other = (FakeComfy(make_dispatcher(session=session), plain_model(calls=3)) for _ in range(2))
    for model in (comfy, comfy, other):
        outputs = [output for forward in model.sample((1.0, 0.5, 0.0)) for output in forward]
        assert all(torch.equal(output, Native()(*args, **kwargs)) for output in outputs)
        assert served(model.run()) == {NATIVE: 6}
        assert refusal_codes(model.run()) == {"kernel_error": 6}
    other.attention(*args, **kwargs, transformer_options=other.options)
    assert kernel.failures == 1
    assert [line for line in lines(caplog) if KERNEL in line] == [
        f"SageScope: {KERNEL} raised RuntimeError: no kernel image. It is not used again until ComfyUI restarts."
    ]
    assert [len(run["events"]) for run in comfy.runs()] == [1, 0]


@pytest.mark.parametrize("inside", [True, False])
def test_a_kernel_that_another_model_retired_is_not_called_by_the_plans_made_before(inside):
    broken = []

    def spoil(query, key, value, layout, scale, mask):
        if broken:
            broken.append(1)
            raise RuntimeError("broken")
        return attention(query, key, value, layout, scale, mask)

    session = make_session(fake_backend(FakeKernel(spoil)))
    first, second = (FakeComfy(make_dispatcher(session=session)) for _ in range(2))

    def call(comfy):
        if inside:
            comfy.forward()
        else:
            comfy.attention(*comfy_arguments()[0], transformer_options=comfy.options)

    for comfy in (first, second):
        call(comfy)
        assert NATIVE not in served(comfy.run())
    broken.append(1)
    call(first)
    call(second)
    assert len(broken) == 2
    assert "kernel_error" in refusal_codes(second.run())


def test_the_next_kernel_takes_over_from_one_that_failed():
    calls_before = []

    def spoil(*call):
        if calls_before:
            raise ValueError("bad")
        return attention(*call)

    machine = Machine()
    failing = machine.add("a", 1.0, spoil=spoil)
    machine.add("b", 2.0)
    comfy = machine.comfy()
    comfy.sample((1.0, 0.5, 0.0))
    assert served(comfy.run()) == {"a": 6}
    calls_before.append(len(failing.calls))
    comfy.sample((1.0, 0.5, 0.0))
    assert len(failing.calls) == calls_before[0] + 1
    assert served(comfy.run()) == {"b": 5, NATIVE: 1}


def test_a_lost_device_stops_the_run_with_its_cause():
    comfy, _ = comfy_with(Fails(RuntimeError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(DeviceLost, match=KERNEL):
        comfy.sample()
    assert comfy.run()["status"] == "error"
    assert comfy.run()["calls"] == 1


@pytest.mark.parametrize(
    ("error", "status"), [(InterruptProcessingException(), "interrupted"), (ValueError(), "error"), (None, "finished")]
)
def test_how_a_run_ended_is_recorded_and_its_forwards_count(error, status):
    comfy, _ = comfy_with()
    whole = comfy.forward_once

    def forward(attention, transformer_options):
        whole(attention, transformer_options)
        if error is not None:
            raise error

    comfy.forward_once = forward
    if error is None:
        comfy.sample()
    else:
        with pytest.raises(type(error)):
            comfy.sample()
    run = comfy.run()
    assert (run["status"], run["calls"], run["forwards"]) == (status, 2, 1)
    assert run["seconds"] >= 0
    comfy.forward_once = whole
    comfy.sample()
    assert (comfy.run()["status"], comfy.run()["calls"]) == ("finished", 2)


def test_an_error_of_native_attention_is_not_taken_for_the_kernels():
    comfy, _ = comfy_with(kernel=None, model=one_call(*refused(window=1)))

    def func(*args, **kwargs):
        raise torch.OutOfMemoryError("native")

    comfy.native = func
    with pytest.raises(torch.OutOfMemoryError, match="native"):
        comfy.sample()
    assert comfy.run()["events"] == []
    assert refusal_codes(comfy.run()) == {"unknown_argument": 1}


# -- what is counted


def test_calls_outside_a_forward_are_counted_before_and_after_one():
    args, kwargs = comfy_arguments()
    comfy, _ = comfy_with()
    for number in (1, 2):
        comfy.attention(*args, **kwargs, transformer_options=comfy.options)
        assert (comfy.run()["calls"], comfy.run()["forwards"]) == (3 * number - 2, number - 1)
        comfy.forward()
        assert (comfy.run()["calls"], comfy.run()["forwards"]) == (3 * number, number)
    assert len(comfy.runs()) == 1
    assert comfy.run()["model"] == "called outside a sampler"
    assert [site["site"] for site in comfy.run()["sites"]] == [0, 1, None]


def test_a_call_outside_a_forward_in_the_middle_of_a_run_belongs_to_the_run():
    args, kwargs = comfy_arguments()
    comfy, _ = comfy_with()
    comfy.sample((1.0, 0.5, 0.0), lambda *step: comfy.attention(*args, **kwargs, transformer_options=comfy.options))
    assert [(run["calls"], run["forwards"]) for run in comfy.runs()] == [(6, 2)]


def test_calls_outside_a_sampler_are_kept_apart_by_prompt_and_are_not_lost_after_many_runs():
    context = ["a", "1"]
    comfy, _ = comfy_with(host_context=lambda: tuple(context))
    comfy.forward()
    comfy.forward()
    context[:] = "b", "1"
    comfy.forward()
    assert [(run["prompt_id"], run["forwards"]) for run in comfy.runs()] == [("a", 2), ("b", 1)]
    for _ in range(MAX_RUNS):
        comfy.sample()
    comfy.forward()
    assert (comfy.run()["model"], comfy.run()["forwards"]) == ("called outside a sampler", 1)


def test_runs_are_kept_apart_by_sampler_and_bounded():
    nodes = count(1)
    comfy, _ = comfy_with(host_context=lambda: ("prompt", str(next(nodes))))
    for _ in range(MAX_RUNS + 4):
        comfy.sample()
    assert [run["node_id"] for run in comfy.runs()] == [str(number) for number in range(5, MAX_RUNS + 5)]
    assert {run["prompt_id"] for run in comfy.runs()} == {"prompt"}
    assert len({run["id"] for run in comfy.runs()}) == MAX_RUNS


def test_a_run_inside_a_run_gives_the_outer_one_back():
    comfy, _ = comfy_with()
    inner = []

    def callback(*progress):
        if not inner:
            inner.append(comfy.sample())

    comfy.sample((1.0, 0.5, 0.0), callback)
    assert [(run["forwards"], run["calls"]) for run in comfy.runs()] == [(2, 4), (1, 2)]


def test_a_run_is_given_back_after_an_error_inside_it():
    comfy, _ = comfy_with()
    whole = comfy.forward_once

    def fail(*progress):
        def forward(attention, transformer_options):
            raise ZeroDivisionError

        comfy.forward_once = forward
        with pytest.raises(ZeroDivisionError):
            comfy.sample()
        comfy.forward_once = whole

    comfy.sample((1.0, 0.5, 0.0), fail)
    assert [run["status"] for run in comfy.runs()] == ["finished", "error", "error"]
    assert comfy.runs()[0]["calls"] == 4


def test_a_forward_inside_a_forward_gives_the_outer_one_back():
    args, kwargs = comfy_arguments()
    comfy, _ = comfy_with()
    inner = plain_model(calls=2)

    def outer(attention, transformer_options):
        attention(*args, **kwargs, transformer_options=transformer_options)
        comfy.forward_once = inner
        comfy.forward()
        attention(*args, **kwargs, transformer_options=transformer_options)

    comfy.forward_once = outer
    comfy.sample()
    run = comfy.run()
    assert (run["forwards"], run["calls"]) == (2, 4)
    assert [(site["site"], site["calls"]) for site in run["sites"]] == [(0, 2), (1, 2)]


def test_steps_are_counted_and_the_callback_is_called_as_without_us():
    comfy, _ = comfy_with()
    seen = []
    comfy.sample((1.0, 0.5, 0.0), lambda *progress: seen.append(progress))
    assert seen == [(0, None, None, 2), (1, None, None, 2)]
    assert (comfy.run()["steps"], comfy.run()["total_steps"]) == (2, 2)


def test_the_sampler_gets_its_arguments_and_gives_its_result():
    dispatcher = make_dispatcher()
    seen = []

    def sampler(*args, **kwargs):
        seen.append((args, kwargs))
        return "latent"

    given = ("noise", "latent", "sampler", torch.tensor((1.0, 0.0)), "mask")
    executor = Executor(sampler, FakeComfy(dispatcher))
    assert dispatcher.outer_sample(executor, *given, None, True, 7, latent_shapes=[1]) == "latent"
    ((args, kwargs),) = seen
    assert args[:5] == given
    assert callable(args[5])
    assert args[6:] == (True, 7)
    assert kwargs == {"latent_shapes": [1]}


def test_two_threads_count_their_own_forwards():
    args, kwargs = comfy_arguments()
    barrier = threading.Barrier(2, timeout=30)
    forwards, calls = 20, 5

    def forward(attention, transformer_options):
        for _ in range(calls):
            barrier.wait()
            attention(*args, **kwargs, transformer_options=transformer_options)

    comfy, _ = comfy_with()

    def work():
        for _ in range(forwards):
            comfy.forward()

    def on_two_threads(*progress):
        comfy.forward_once = forward
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work) for _ in range(2)]:
                done.result()

    comfy.sample((1.0, 0.0), on_two_threads)
    run = comfy.run()
    assert (run["forwards"], run["calls"]) == (2 * forwards + 1, 2 * forwards * calls + 2)
    assert served(run) == {KERNEL: run["calls"]}
    by_site = {}
    for site in run["sites"]:
        by_site[site["site"]] = by_site.get(site["site"], 0) + site["calls"]
    assert by_site == {number: 2 * forwards + (number < 2) for number in range(calls)}


ACTIONS = st.lists(
    st.sampled_from(["sample", "forward", "outside", "refused", "forward that raises", "full", "broken", "thread"]),
    max_size=12,
)


@given(ACTIONS)
@settings(max_examples=40, deadline=None)
def test_calls_by_kernel_add_up_to_the_calls_that_were_made(actions):
    fault = []

    def spoil(query, key, value, layout, scale, mask):
        if fault:
            raise fault.pop()
        return attention(query, key, value, layout, scale, mask)

    comfy, _ = comfy_with(FakeKernel(spoil), end_percent=0.6)
    args, kwargs = comfy_arguments()
    made = []

    def count_calls(name):
        def counted(*args, **kwargs):
            made.append(name)
            return getattr(FakeComfy, name)(comfy, *args, **kwargs)

        return counted

    comfy.attention = count_calls("attention")
    whole = comfy.forward_once

    def raises(attention, transformer_options):
        whole(attention, transformer_options)
        raise KeyError

    for action in actions:
        if action == "sample":
            comfy.sample((1.0, 0.5, 0.25, 0.0))
        elif action == "forward":
            comfy.forward()
        elif action == "outside":
            comfy.attention(*args, **kwargs, transformer_options=comfy.options)
        elif action == "refused":
            comfy.attention(*args, **kwargs, window=1, transformer_options=comfy.options)
        elif action == "forward that raises":
            comfy.forward_once = raises
            with pytest.raises(KeyError):
                comfy.sample()
            comfy.forward_once = whole
        elif action == "thread":
            thread = threading.Thread(target=comfy.forward)
            thread.start()
            thread.join()
        else:
            fault[:] = [OUT_OF_MEMORY if action == "full" else RuntimeError("broken")]
    runs = comfy.runs()
    assert sum(run["calls"] for run in runs) == len(made)
    for run in runs:
        for table in ("calls_by_kernel", "sites", "shapes"):
            assert sum(entry["calls"] for entry in run[table]) == run["calls"]
        native = served(run).get(NATIVE, 0)
        assert sum(entry["calls"] for entry in run["refusals"]) == native
    assert sum(served(run).get(NATIVE, 0) for run in runs) == comfy.native.calls


# -- among ComfyUI's copies and other nodes


def test_copied_model_options_go_on_counting_in_one_place():
    comfy, _ = comfy_with()
    comfy.options = copy.deepcopy(comfy.options)
    comfy.sample()
    assert served(comfy.run()) == {KERNEL: 2}
    assert comfy.run()["override_replaced_by"] is None
    assert copy.deepcopy(comfy.dispatcher) is copy.copy(comfy.dispatcher) is comfy.dispatcher


@pytest.mark.parametrize("native", [True, False])
def test_it_needs_as_much_memory_as_what_serves_the_calls_that_no_kernel_does(native):
    session, policy = make_session(), Policy(kernel=KERNEL)
    assert Dispatcher(policy, session, saves_memory=lambda: native).memory_efficient is native

    def previous(func, *args, **kwargs):
        return func(*args, **kwargs)

    over = Dispatcher(policy, session, previous, saves_memory=lambda: True)
    assert over.memory_efficient is False  # it does not say
    previous.memory_efficient = native
    assert over.memory_efficient is native


def another_override(func, *args, **kwargs):
    return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        (another_override, f"{__name__}.another_override"),
        (None, "nothing"),
        (FakeKernel(), f"{FakeKernel.__module__}.FakeKernel"),
    ],
)
def test_an_override_that_took_our_place_is_named(override, name):
    comfy, _ = comfy_with()
    comfy.options = {"optimized_attention_override": override}
    comfy.forward_once = lambda attention, transformer_options: None
    comfy.sample()
    assert comfy.run()["override_replaced_by"] == name
    assert (comfy.run()["calls"], comfy.run()["forwards"]) == (0, 1)


@pytest.mark.parametrize("options", [None, {}])
def test_a_forward_without_transformer_options_runs(options):
    comfy, _ = comfy_with()
    ran = comfy.dispatcher.apply_model(
        lambda *args, **kwargs: (args, kwargs), "x", torch.ones(1), None, None, None, options
    )
    assert ran[0][5] is options
    assert comfy.run()["override_replaced_by"] == "nothing"
    ran = comfy.dispatcher.apply_model(lambda *args, **kwargs: kwargs, "x", torch.ones(1), transformer_options=options)
    assert ran == {"transformer_options": options}


def test_a_prompt_that_samples_the_model_twice_has_two_runs():
    nodes = iter(["4", "9"])
    comfy, _ = comfy_with(host_context=lambda: ("prompt", next(nodes)))
    comfy.sample((1.0, 0.5, 0.0))
    comfy.forward_once = plain_model(qo_len=48)
    comfy.sample((0.5, 0.0))
    runs = comfy.runs()
    assert [(run["prompt_id"], run["node_id"], run["calls"]) for run in runs] == [
        ("prompt", "4", 4),
        ("prompt", "9", 2),
    ]
    assert [[shape["spec"]["qo_len"] for shape in run["shapes"]] for run in runs] == [[24], [48]]


def test_the_record_is_plain_json():
    comfy, _ = comfy_with(
        model=one_call(*refused(scale=float("nan"), mask=normal(24, 24) > 0)), skip_blocks=frozenset({1})
    )
    comfy.sample()
    comfy.attention(*refused(scale=float("inf"))[0], scale=float("inf"), transformer_options=comfy.options)
    snapshot = comfy.dispatcher.snapshot()
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot


# -- memory


def count_plans(comfy):
    kept = comfy.dispatcher._plans.known.values()
    return len({plan for known in kept for alike in known.values() for plan in alike.values()})


def test_plans_do_not_grow_with_steps_or_runs():
    comfy, kernel = comfy_with(model=plain_model(calls=7))
    comfy.sample()
    plans = count_plans(comfy)
    comfy.sample([1.0 - step / 50 for step in range(51)])
    comfy.sample()
    assert count_plans(comfy) == plans == 7
    assert len(kernel.calls) == TRIAL_CALLS + 7 * 52
    assert [len(run["sites"]) for run in comfy.runs()] == [7] * 3


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plans_module, "MAX_PLANS", 5)
    monkeypatch.setattr(planning, "MAX_LOGGED", 5)
    comfy, _ = comfy_with(model=plain_model(calls=13))
    comfy.sample((1.0, 0.5, 0.0))
    assert count_plans(comfy) <= 5
    assert len(comfy.dispatcher._planner._logged) <= 5
    assert served(comfy.run()) == {KERNEL: 26}
    for length in range(30, 50):
        comfy.forward_once = plain_model(calls=1, qo_len=length)
        comfy.sample()
        assert served(comfy.run()) == {KERNEL: 1}
    assert count_plans(comfy) <= 5
    assert len(comfy.dispatcher._planner._logged) <= 5


@pytest.mark.parametrize("fault", [None, RuntimeError("broken"), OUT_OF_MEMORY], ids=str)
@pytest.mark.parametrize("keywords", [{}, {"window": 1}, {"scale": torch.tensor(0.5)}], ids=str)
@pytest.mark.parametrize("inside", [True, False])
def test_no_tensor_outlives_its_call(fault, keywords, inside):
    kernel = FakeKernel() if fault is None else Fails(fault)
    comfy, _ = comfy_with(kernel)
    kept = []

    def call(attention, transformer_options):
        args, kwargs = comfy_arguments(mask=normal(24, 24), **keywords)
        output = attention(*args, **kwargs, transformer_options=transformer_options)
        kept.extend(weakref.ref(tensor) for tensor in (*args[:3], kwargs["mask"], output))

    comfy.forward_once = call
    if inside:
        comfy.sample((1.0, 0.5, 0.0))
    else:
        call(comfy.attention, comfy.options)
    gc.collect()
    assert kept
    assert [reference() for reference in kept] == [None] * len(kept)


def test_each_shape_is_logged_once_however_often_it_is_seen(caplog):
    caplog.set_level(logging.INFO, "sagescope")
    comfy, _ = comfy_with(model=plain_model(calls=5))
    comfy.sample((1.0, 0.5, 0.0))
    comfy.sample((1.0, 0.5, 0.0))
    decided = [line for line in lines(caplog, logging.INFO) if "->" in line]
    assert decided == [f"SageScope: 1 x 2 x 24 x 16 float32 NHD -> {KERNEL}"]
    assert len([line for line in lines(caplog, logging.INFO) if "10 attention calls in 2 forwards" in line]) == 2


# -- the device


@pytest.mark.parametrize(("index", "entered"), [(0, []), (1, [1])])
@pytest.mark.parametrize("fails", [False, True])
def test_a_kernel_runs_with_the_device_of_query_current(monkeypatch, index, entered, fails):
    history = []

    class Device:
        current = 0

        def __init__(self, index):
            self.index = index

        def __enter__(self):
            history.append(self.index)
            self.before, Device.current = Device.current, self.index

        def __exit__(self, *error):
            Device.current = self.before

    class OnCuda(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda", index)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: Device.current)
    monkeypatch.setattr(torch.cuda, "device", Device)
    during = []

    def kernel(query, key, value, **keywords):
        during.append(Device.current)
        if fails:
            raise ValueError("bad")
        return query

    call = make_call()
    spec, _ = call.read("cpu")
    use = Use(fake_backend(kernel), Kernel(kernel), "NHD", False, None)
    serve = serving.server(use, call._replace(query=call.query.as_subclass(OnCuda)), spec)
    output = serve(call.query, call.key, call.value, None)
    assert isinstance(output, Refusal) is fails
    assert during == [index]
    assert history == entered
    assert Device.current == 0


# -- files that are missing, and outputs that do not fit


class Flaky:
    """A kernel that raises a file error at its calls of these numbers, the last of its small example being 0."""

    def __init__(self, *numbers):
        self.numbers, self.made = numbers, -TRIAL_CALLS

    def __call__(self, *call):
        self.made += 1
        if self.made in self.numbers:
            raise FileNotFoundError(2, "No such file or directory", "kernel.json")
        return attention(*call)


STEPS_4 = (1.0, 0.75, 0.5, 0.25, 0.0)


@pytest.mark.parametrize(
    ("numbers", "by_kernel", "retired"),
    [
        ((3,), {KERNEL: 7, "native": 1}, False),
        ((3, 4), {KERNEL: 6, "native": 2}, False),
        ((1, 2), {KERNEL: 6, "native": 2}, False),
        ((2, 3, 5, 6, 8), {KERNEL: 3, "native": 5}, False),
        ((2, 3, 4), {KERNEL: 1, "native": 7}, True),
        ((0,), {KERNEL: 7, "native": 1}, False),
        ((0, 1, 2), {"native": 8}, True),
    ],
)
def test_a_file_error_costs_its_call_and_three_in_a_row_the_kernel(numbers, by_kernel, retired, caplog):
    kernel = FakeKernel(Flaky(*numbers))
    comfy = FakeComfy(make_dispatcher(fake_backend(kernel)))
    outputs = comfy.sample(STEPS_4)
    assert served(comfy.run()) == by_kernel
    assert bool(comfy.dispatcher.session.snapshot()["retired"]) is retired
    reasons = {(entry["code"], entry["calls"]) for entry in comfy.run()["refusals"]}
    assert reasons == {("file_error", by_kernel["native"])}
    native = plain_model()(Native(), {})
    for output in (output for forward in outputs for output in forward):
        torch.testing.assert_close(output, native[0], rtol=1e-4, atol=1e-5)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1 + retired
    assert len(kernel.calls) <= TRIAL_CALLS * (1 + (0 in numbers)) + 8


def test_a_success_counts_for_its_device_and_kernel_only():
    session = make_session(fake_backend(), fake_backend(name="other"))
    error = Refusal(RefusalCode.FILE_ERROR, "gone")
    for _ in range(2):
        session.after_failure(KERNEL, torch.device("cpu"), error)
    session.succeeded("other", torch.device("cpu"))
    session.succeeded(KERNEL, torch.device("meta"))
    assert session.generation == 0
    session.after_failure(KERNEL, torch.device("cpu"), error)
    assert [entry["kernel"] for entry in session.snapshot()["retired"]] == [KERNEL]
    assert session.failing == {}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "spoil", [lambda output: output[:, :100], lambda output: output.double(), lambda output: output.repeat(1, 2, 1, 1)]
)
def test_an_output_that_does_not_fit_the_call_is_found_at_the_first_one(spoil, exact):
    """The small example is sound; the model's own size is not, and no site is checked."""

    def function(query, key, value, layout, scale, mask):
        output = attention(query, key, value, layout, scale, mask)
        return spoil(output) if query.shape[1] == 512 else output

    kernel = FakeKernel(function)
    comfy = FakeComfy(make_dispatcher(fake_backend(kernel, exact=exact)), Sites())
    (outputs,) = comfy.sample()
    assert served(comfy.run()) == {"native": 3}
    assert all(torch.equal(one, other) for one, other in zip(outputs, Sites().natively(), strict=True))
    (refusal,) = comfy.run()["refusals"]
    assert (refusal["code"], refusal["calls"]) == ("kernel_error", 3)
    assert "for query" in refusal["detail"]
    assert len(kernel.calls) == TRIAL_CALLS + 1


# -- torch.compile


def test_compiled_calls_are_all_counted_and_have_the_bits_of_eager_ones():
    args, kwargs = comfy_arguments()
    comfy, _ = comfy_with()
    options, graphs = comfy.options, []

    def block(x):
        x = x + comfy.attention(x * 3, *args[1:], **kwargs, transformer_options=options)
        x = x + comfy.attention(x / 2, *args[1:], **kwargs, transformer_options=options)
        return x * 2

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph

    expected = block(args[0])
    compiled = torch.compile(block, backend=backend)
    comfy.forward_once = lambda attention, transformer_options: compiled(args[0])
    for _ in range(2):
        outputs = comfy.sample((1.0, 0.75, 0.5, 0.0))
        assert all(torch.equal(output, expected) for output in outputs)
        run = comfy.run()
        assert (run["calls"], run["forwards"]) == (6, 3)
        assert served(run) == {KERNEL: 6}
        assert [site["calls"] for site in run["sites"]] == [3, 3]
    assert graphs, "nothing was compiled"
    assert not any("scaled_dot_product_attention" in graph for graph in graphs), "the kernel was traced into a graph"
