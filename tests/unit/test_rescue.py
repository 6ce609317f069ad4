"""A forward whose output is not finite: run again natively before anything sees it, and the guilty sites leave."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from tests.unit.conftest import (
    TRIAL_CALLS,
    FakeKernel,
    Machine,
    Native,
    Sites,
    attention,
    fake_backend,
    make_dispatcher,
    served,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NATIVE = "native"
STEPS = (1.0, 0.75, 0.5, 0.25, 0.0)


class Sick:
    """A kernel that makes NaN of one head at one site from one forward on."""

    def __init__(self, model, site=1, forward=0):
        self.model, self.site, self.forward = model, site, forward

    def __call__(self, *call):
        output = attention(*call)
        if self.model.site == self.site and self.model.forward >= self.forward:
            output[:, 300, 1, 3] = math.nan  # one head of one row
        return output


def patched(model, site=1, forward=2, **policy):
    machine = Machine()
    kernel = machine.add("a", 1.0, spoil=Sick(model, site, forward))
    return machine.comfy(model, kernel="a", **policy), kernel


def kernels_of(run, site):
    """Calls by kernel of one site, whatever the plans."""
    found = Counter()
    for row in run["sites"]:
        if row["site"] == site:
            found[row["kernel"]] += row["calls"]
    return found


def same_bits(output, expected):
    return all(torch.equal(one, other) for one, other in zip(output, expected, strict=True))


@pytest.mark.parametrize("tolerance", [0.1, None])
def test_a_broken_forward_is_natives_and_only_the_guilty_site_leaves(tolerance, caplog):
    caplog.set_level(logging.INFO, "sagescope")
    model = Sites()
    comfy, _ = patched(model, tolerance=tolerance)
    outputs = comfy.sample(STEPS)
    native = model.natively()
    assert same_bits(outputs[2], native)
    assert not torch.equal(outputs[1][1], native[1])
    for output in (outputs[1], outputs[3]):
        assert not torch.equal(output[0], native[0])
        assert not torch.equal(output[2], native[2])
    assert torch.equal(outputs[3][1], native[1])
    run = comfy.run()
    assert run["rescued_forwards"] == 1
    # of five forwards, one broken and one native in its place
    assert kernels_of(run, 0) == kernels_of(run, 2) == {"a": 4, NATIVE: 1}
    assert kernels_of(run, 1) == {"a": 3, NATIVE: 2}
    assert (run["forwards"], run["calls"]) == (5, 15)
    (event,) = run["events"]
    assert event["step"] == 3
    assert "a left 1 sites" in event["text"]
    assert len([record for record in caplog.records if "not finite" in record.getMessage()]) == 1
    comfy.sample(STEPS)
    assert comfy.run()["rescued_forwards"] == 0
    assert kernels_of(comfy.run(), 1) == {NATIVE: 4}
    assert kernels_of(comfy.run(), 0) == {"a": 4}


def test_a_site_that_breaks_the_first_forward_ever_is_found_too():
    model = Sites()
    # not seen by the check of the site, as nothing is checked
    comfy, _ = patched(model, forward=0, tolerance=None)
    outputs = comfy.sample(STEPS)
    assert same_bits(outputs[0], model.natively())
    assert comfy.run()["rescued_forwards"] == 1
    assert served(comfy.run()) == {"a": 3 + 2 * 3, NATIVE: 3 + 3}


def test_two_sites_at_once_and_one_later():
    model = Sites(calls=4)
    machine = Machine()

    def spoil(*call):
        broken = (model.site in (0, 3) and model.forward >= 1) or (model.site == 2 and model.forward >= 4)
        return attention(*call) * (math.inf if broken else 1)

    machine.add("a", 1.0, spoil=spoil)
    comfy = machine.comfy(model, kernel="a")
    outputs = comfy.sample((1.0, 0.8, 0.6, 0.4, 0.2, 0.0))
    native = model.natively()
    assert all(tensor.isfinite().all() for output in outputs for tensor in output)
    assert same_bits(outputs[1], native)
    assert comfy.run()["rescued_forwards"] == 2
    assert [event["text"][-12:] for event in comfy.run()["events"]] == ["left 2 sites", "left 1 sites"]
    assert torch.equal(outputs[-1][3], native[3])
    assert not torch.equal(outputs[-1][1], native[1])


def test_the_next_kernel_takes_the_guilty_site():
    model = Sites()
    machine = Machine()
    machine.add("a", 1.0, spoil=Sick(model, forward=2))
    machine.add("b", 2.0)
    comfy = machine.comfy(model)
    comfy.sample(STEPS)
    assert kernels_of(comfy.run(), 1) == {"a": 3, NATIVE: 1, "b": 1}


def test_a_forward_in_a_graph_of_sites_finds_the_one_that_began_it():
    """The NaN of a site reaches every later one: they are not guilty."""
    model = Sites(calls=4)

    class Chain:
        def __call__(self, attention, options):
            model.forward += 1
            x = 0
            for site in range(4):
                model.change = lambda query, key, value, x=x: [query + x, key, value]
                x = model.call(site, attention, options)
            return x

    machine = Machine()
    machine.add("a", 1.0, spoil=Sick(model, site=1, forward=1))
    comfy = machine.comfy(Chain(), kernel="a")
    outputs = comfy.sample(STEPS)
    assert torch.equal(outputs[1], Chain()(Native(), {}))
    assert comfy.run()["rescued_forwards"] == 1
    assert {site: set(kernels_of(comfy.run(), site)) for site in range(4)} == {site: {"a", NATIVE} for site in range(4)}
    comfy.sample()
    assert [kernels_of(comfy.run(), site) for site in range(4)] == [{"a": 1}, {NATIVE: 1}, {"a": 1}, {"a": 1}]


# -- not the kernels


def test_a_model_that_makes_nan_itself_is_handed_on_and_said_once(caplog):
    model = Sites()

    def sick(attention, options):
        return [*model(attention, options), torch.full((3,), math.nan)]

    machine = Machine()
    kernel = machine.add("a", 1.0)
    comfy = machine.comfy(sick, kernel="a")
    outputs = comfy.sample(STEPS)
    assert same_bits(outputs[0][:3], model.natively())
    assert outputs[0][3].isnan().all()
    run = comfy.run()
    assert run["rescued_forwards"] == 1
    # one forward twice; as nothing of ours helps, the rest of the run is native and nothing is run twice again
    assert (run["forwards"], served(run)) == (5, {"a": 3, NATIVE: 12})
    assert [event["text"][:16] for event in run["events"]] == ["the model itself"]
    assert len([record for record in caplog.records if "the model itself" in record.getMessage()]) == 1
    looking = 3
    assert len(kernel.calls) == TRIAL_CALLS + 3 + looking
    comfy.sample(STEPS)
    assert (comfy.run()["rescued_forwards"], comfy.run()["forwards"]) == (1, 5)


def test_what_overflows_behind_attention_takes_every_quantized_site_out():
    model = Sites()
    machine = Machine()
    kernel = machine.add("a", 1.0, spoil=lambda *call: attention(*call) * 1.01, tolerance=fake_backend().tolerance)
    machine.add("exact", 5.0, exact=True)

    def overflows(attention, options):
        outputs = model(attention, options)
        bound = model.natively()[0].abs().max()
        model.forward -= 1
        return torch.where(outputs[0].abs().max() > bound * 1.005, math.inf, outputs[0])

    comfy = machine.comfy(overflows)
    outputs = comfy.sample(STEPS)
    assert all(output.isfinite().all() for output in outputs)
    assert torch.equal(outputs[0], model.natively()[0])
    run = comfy.run()
    assert run["rescued_forwards"] == 1
    assert "a left 3 sites" in run["events"][0]["text"]
    assert served(run) == {"a": 3, NATIVE: 3, "exact": 9}
    assert len(kernel.calls) > 0


class NestedTensor:
    """As comfy.nested_tensor.NestedTensor."""

    def __init__(self, tensors):
        self.tensors = tensors


@pytest.mark.parametrize("container", [tuple, list, NestedTensor, lambda outputs: (outputs[0], {"x": 1}, outputs[1:])])
def test_every_tensor_that_a_model_returns_is_looked_at(container):
    model = Sites()
    machine = Machine()
    machine.add("a", 1.0, spoil=Sick(model, site=2, forward=2))
    comfy = machine.comfy(lambda *given: container(model(*given)), kernel="a")
    output = comfy.sample(STEPS)[2]
    assert comfy.run()["rescued_forwards"] == 1
    given = container(model.natively())
    assert type(output) is type(given)
    tensors, expected = (getattr(value, "tensors", value) for value in (output, given))
    assert torch.equal(tensors[0], expected[0])


def test_a_model_that_returns_no_tensor_runs():
    model = Sites()
    machine = Machine()
    machine.add("a", 1.0)
    comfy = machine.comfy(
        lambda *given: SimpleNamespace(outputs=model(*given)), kernel="a", compare_with_native="first time"
    )
    assert len(comfy.sample(STEPS)) == 4
    assert served(comfy.run()) == {"a": 12}
    assert comfy.run()["comparisons"] == []
    assert [event["text"] for event in comfy.run()["events"]] == [
        "not compared with native: the model returns no tensor"
    ]


@pytest.mark.parametrize(("kernel", "looks"), [("a", 20), ("exact", 4), ("native (observe only)", 0)])
def test_every_forward_with_a_quantized_kernel_is_looked_at_and_those_with_exact_ones_where_sites_are_checked(
    kernel, looks, monkeypatch
):
    looked = []
    isfinite = torch.isfinite
    machine = Machine()
    machine.add("exact", 5.0, exact=True)
    machine.add("a", 1.0)
    comfy = machine.comfy(kernel=kernel, tolerance=None)
    comfy.dispatcher.prepare(torch.device("cpu"))
    comfy.sample()
    monkeypatch.setattr(torch, "isfinite", lambda tensor: looked.append(1) or isfinite(tensor))
    comfy.sample([1.0 - step / 20 for step in range(21)])
    assert len(looked) == 3 * looks


@pytest.mark.parametrize("policy", [{"kernel": "exact"}, {"kernel": "auto"}])
def test_an_exact_kernel_that_breaks_a_forward_leaves_its_site_too(policy):
    model = Sites()
    machine = Machine()
    machine.add("exact", 1.0, exact=True, spoil=Sick(model, forward=2))  # all four forwards are checked
    comfy = machine.comfy(model, **policy, compare_with_native="never")
    outputs = comfy.sample(STEPS)
    assert same_bits(outputs[2], model.natively())
    assert all(output.isfinite().all() for forward in outputs for output in forward)
    run = comfy.run()
    assert (run["rescued_forwards"], kernels_of(run, 1)) == (1, {"exact": 3, NATIVE: 2})
    assert kernels_of(run, 0) == {"exact": 4, NATIVE: 1}


def test_calls_outside_a_forward_have_no_output_to_look_at():
    kernel = FakeKernel()
    dispatcher = make_dispatcher(fake_backend(kernel))
    model = Sites()
    model(lambda *args, **kwargs: dispatcher.attend(Native(), *args, **kwargs), {})
    assert len(kernel.calls) == TRIAL_CALLS + 3


def test_a_broken_forward_does_not_disturb_one_on_another_thread():
    model, other = Sites(), Sites(calls=2, qo_len=640)
    comfy, _ = patched(model, forward=1)
    comfy.forward()
    threads = []

    def with_another(attention, options):
        if model.forward == 1:
            comfy.forward_once = other
            threads.append(threading.Thread(target=comfy.forward))
            threads[-1].start()
            threads[-1].join()
            comfy.forward_once = with_another
        return model(attention, options)

    comfy.forward_once = with_another
    output = comfy.forward()
    assert same_bits(output, model.natively())
    assert comfy.run()["rescued_forwards"] == 1
