"""Forwards run more than once, to compare, to rescue or after a failed check: each as if it were the only one."""

from __future__ import annotations

import math

import pytest
import torch

from sage_core import planning, serving
from sage_core.comparing import Comparison, lasting_obstacle, own_control
from sage_core.dispatcher import Dispatcher
from sage_core.outputs import all_finite
from tests.unit.conftest import (
    KERNEL,
    Executor,
    FakeComfy,
    FakeKernel,
    attention,
    comfy_arguments,
    fake_backend,
    make_dispatcher,
    make_session,
    plain_model,
    served,
)

ARGUMENTS, KEYWORDS = comfy_arguments()


def dispatcher_that_compares(kernel=None) -> Dispatcher:
    return make_dispatcher(fake_backend(kernel), compare_with_native="every run")


def run_one(dispatcher: Dispatcher, model, *, control=None, **options):
    """One forward of ``model(attention, control)`` inside a run; its output."""
    comfy = FakeComfy(dispatcher)
    comfy.options |= options

    def apply_model(x, t, c_concat, c_crossattn, given, transformer_options):
        def attend(*args, **kwargs):
            return comfy.attention(*args, **kwargs, transformer_options=transformer_options)

        return model(attend, given)

    def sampler(*args, **kwargs):
        options = dict(comfy.options)
        return dispatcher.apply_model(Executor(apply_model, comfy), None, torch.ones(1), None, None, control, options)

    return dispatcher.outer_sample(Executor(sampler, comfy), None, None, None, torch.ones(2))


def test_every_repeat_has_the_controls_that_the_first_forward_took_out():
    seen = []

    def unet(attend, control):
        seen.append([control[name].pop() for name in ("input", "middle")])
        return attend(*ARGUMENTS, **KEYWORDS)

    dispatcher = dispatcher_that_compares()
    run_one(dispatcher, unet, control={"input": [1, 2], "middle": [3], "other": None})
    assert len(seen) > 2
    assert seen == [[2, 3]] * len(seen)


def test_a_control_that_is_no_dict_is_handed_on_as_it_is():
    assert own_control(None) is None
    assert own_control((1, 2)) == (1, 2)


def test_repeats_draw_the_same_numbers_and_leave_the_generator_where_one_forward_does():
    drawn = []

    def model(attend, control):
        drawn.append(float(torch.rand(())))
        return attend(*ARGUMENTS, **KEYWORDS)

    torch.manual_seed(5)
    run_one(make_dispatcher(), model)
    after_one = torch.get_rng_state()
    torch.manual_seed(5)
    run_one(dispatcher_that_compares(), model)
    assert len(drawn) > 3
    assert len(set(drawn)) == 1
    assert torch.equal(torch.get_rng_state(), after_one)


def test_running_out_of_memory_natively_while_comparing_costs_the_comparison_only():
    forwards = []

    def model(attend, control):
        forwards.append(1)
        if len(forwards) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return attend(*ARGUMENTS, **KEYWORDS)

    dispatcher = dispatcher_that_compares()
    output = run_one(dispatcher, model)
    assert isinstance(output, torch.Tensor)
    (run,) = dispatcher.snapshot()["runs"]
    assert (run["status"], run["comparisons"], served(run)) == ("finished", [], {KERNEL: 1})
    assert "not compared with native" in run["events"][0]["text"]


@pytest.mark.parametrize("failing", [1, 2])
def test_running_out_of_memory_in_a_check_does_not_cost_the_run(failing, monkeypatch):
    """In the check before a kernel serves (1), and in one in the middle of a run (2)."""
    checks = []

    def short_of_memory(check):
        def checking(*args, **kwargs):
            checks.append(1)
            if len(checks) == failing:
                raise torch.OutOfMemoryError("out of memory")
            return check(*args, **kwargs)

        return checking

    monkeypatch.setattr(planning, "site_norms", short_of_memory(planning.site_norms))
    monkeypatch.setattr(serving, "site_check", short_of_memory(serving.site_check))
    comfy = FakeComfy(make_dispatcher(fake_backend(), tolerance=0.1), plain_model(calls=1))
    for _ in range(3):
        comfy.sample((1.0, 0.0))
        assert comfy.run()["status"] == "finished"
    assert len(checks) >= failing
    assert served(comfy.run()) == {KERNEL: 1}


def test_the_first_check_of_a_run_comes_where_its_window_begins():
    wrong = []

    def spoil(query, key, value, layout, scale, mask):
        return attention(query, key, value, layout, scale, mask) * (3.0 if wrong else 1.0)

    policy = {"tolerance": 0.1, "start_percent": 0.5, "end_percent": 0.6}
    comfy = FakeComfy(make_dispatcher(fake_backend(FakeKernel(spoil)), **policy), plain_model(calls=1))
    sigmas = [1.0 - step / 20 for step in range(21)]
    first = comfy.sample(sigmas)
    assert served(comfy.run())[KERNEL] > 0
    wrong.append(1)
    second = comfy.sample(sigmas)
    for right, repaired in zip(first, second, strict=True):
        torch.testing.assert_close(right[0], repaired[0], rtol=1e-3, atol=1e-4)
    assert "tolerance" in comfy.run()["events"][0]["text"]


def test_a_forward_that_another_node_changes_is_not_counted_by_one_that_it_did_not():
    comfy = FakeComfy(make_dispatcher(kernel="native (observe only)"))
    made = []
    model = comfy.forward_once

    def counted(attention, options):
        def attend(*args, **kwargs):
            made.append(1)
            return attention(*args, **kwargs)

        if options.get("patches_replace"):
            return attend(*ARGUMENTS, **KEYWORDS, transformer_options=options)
        return model(attend, options)

    comfy.forward_once = counted

    def guided(step, *progress):
        comfy.forward(1.0, patches_replace={"attn1": {("input", 1): "f"}})

    comfy.sample((1.0, 0.7, 0.3, 0.0), guided)
    assert comfy.run()["calls"] == len(made)


@pytest.mark.parametrize(
    ("options", "patches", "why"),
    [
        ({}, [], None),
        ({"model_function_wrapper": "f"}, [], "wraps the model function"),
        ({}, ["model_sampling"], None),
        ({}, ["diffusion_model.forward_orig"], "diffusion_model.forward_orig"),
    ],
)
def test_what_keeps_every_forward_of_a_run_from_being_repeated(options, patches, why):
    found = lasting_obstacle(options, patches)
    assert found is None if why is None else why in found


def test_two_sizes_of_one_model_are_compared_each_of_its_own():
    dispatcher = dispatcher_that_compares()
    comfy = FakeComfy(dispatcher)
    keys = set()
    for width in (4, 8):
        comfy.diffusion_model = torch.nn.Linear(width, width)
        keys.add(dispatcher._forward_key(Executor(None, comfy), torch.device("cpu"), [torch.ones(1)], {}))
    assert len(keys) == 2


@pytest.mark.parametrize("value", [0, -1.0])
def test_a_remembered_comparison_without_time_is_none(value):
    times = {"native_ms": 2.0, "plan_ms": 1.0, "noise": 0.0}
    good = {**times, "relative_l2": 0.1, "cosine": 1.0, "psnr": None}
    assert Comparison.from_json(good) == Comparison(**good)
    assert Comparison.from_json({**good, "plan_ms": value}) is None


def test_nan_in_a_dict_is_seen():
    assert not all_finite({"video": torch.ones(2), "audio": [torch.tensor(math.nan)]})


def test_a_callback_may_be_called_by_name():
    seen = []
    comfy = FakeComfy(make_dispatcher())

    def sampler(noise, latent, sampler, sigmas, mask, callback, *rest, **named):
        callback(torch.tensor(0), x0=1, x=2, total_steps=1)

    comfy.dispatcher.outer_sample(
        Executor(sampler, comfy), None, None, None, torch.ones(2), None, lambda step, **named: seen.append(named)
    )
    assert seen == [{"x0": 1, "x": 2, "total_steps": 1}]
    assert comfy.run()["steps"] == 1


def test_a_run_that_cannot_begin_is_closed():
    comfy = FakeComfy(make_dispatcher(session=make_session()))
    with pytest.raises(TypeError):
        comfy.dispatcher.outer_sample(Executor(None, comfy), None, None, None, None)
    assert comfy.run()["status"] == "error"
