"""What a patched model and the session keep for later holds no tensor: on a GPU each would be memory taken away."""

from __future__ import annotations

import functools
import gc
import types
import weakref

import pytest
import torch

from sage_core import comparing
from sage_core.live import Live
from tests.unit.conftest import (
    LONG,
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

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = (1.0, 0.75, 0.5, 0.25, 0.0)
STOP_AT = (types.ModuleType, type, torch.dtype, torch.device, FakeKernel, Machine)
"""What is not the pack's, or the whole program."""


class Drawn:
    """A forward of two calls whose tensors are made for it; remembers them weakly, their outputs too."""

    def __init__(self, **options):
        self.options = {**LONG, **options}
        self.made = []

    def __call__(self, attend, transformer_options):
        outputs = []
        for site in range(2):
            args, keywords = comfy_arguments(seed=site, **self.options)
            if keywords.get("mask") is not None:
                keywords["mask"] = keywords["mask"].clone()
            options = {**transformer_options, "block_type": "double", "block_index": site}
            output = attend(*args, **keywords, transformer_options=options)
            outputs.append(output + 0)
            given = (*args[:3], output, outputs[-1], *filter(torch.is_tensor, (keywords.get("mask"),)))
            self.made += [weakref.ref(tensor) for tensor in given]
        return outputs


def reachable(*roots):
    """(path, tensor) of every tensor that can be reached from what the pack keeps; closures and partials count."""
    found, seen, ahead = [], set(), [(type(root).__name__, root) for root in roots]
    while ahead:
        path, thing = ahead.pop()
        if id(thing) in seen or isinstance(thing, STOP_AT):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append((path, tuple(thing.shape)))
            continue
        # a function leads to its module, and so to everything
        parts = gc.get_referents(thing)
        if isinstance(thing, types.FunctionType):
            parts = [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
        ahead += [(f"{path} > {type(part).__name__}", part) for part in parts]
    return found


def kept_by(comfy, *more):
    dispatcher = comfy.dispatcher
    return reachable(dispatcher, dispatcher.session, *more)


def fails_once(error, after):
    """A kernel that raises at one call; an error that it kept would keep the call's frames."""
    calls = iter(range(10**6))

    def spoil(*call):
        if next(calls) == after:
            raise error("in a kernel")
        return off_by(0.01)(*call)

    return spoil


def broken_at(number):
    calls = iter(range(10**6))
    return lambda *call: attention(*call) * (float("nan") if next(calls) == number else 1)


def off_at_the_site(*call):
    """Right for the small example, which is shorter."""
    return attention(*call) * (1.5 if call[0].numel() == 2 * 512 * 16 else 1)


FAST = {"fast": 8}
SCENARIOS = {
    "a kernel by name": (FAST, FAST, {"policy": {"kernel": "fast", "tolerance": None}}),
    "measured and checked": (FAST, FAST, {}),
    "compared with native": (FAST, FAST, {"policy": {"compare_with_native": "every run"}}),
    "with a mask": (FAST, FAST, {"model": {"mask": normal(512, 512, seed=5)}}),
    "grouped heads that are repeated": (
        FAST,
        FAST,
        {"model": {"heads": 4, "kv_heads": 2}, "support": {"options": ("smooth_k",), "smooth_k": True}},
    ),
    "in pieces": (FAST, FAST, {"support": {"max_offset": 512 * 16 - 1}}),
    "in pieces, heads apart": (FAST, FAST, {"support": {"max_offset": 512 * 16 - 1}, "model": {"skip_reshape": True}}),
    "in pieces, output apart": (
        FAST,
        FAST,
        {"support": {"max_offset": 512 * 16 - 1}, "model": {"skip_output_reshape": True}},
    ),
    "out of memory": (
        {"fast": 3, "native": 5},
        FAST,
        {"policy": {"kernel": "fast"}, "spoil": lambda: fails_once(torch.OutOfMemoryError, TRIAL_CALLS + 5)},
    ),
    "out of memory while it is tried": (
        {"native": 8},
        FAST,
        {"spoil": lambda: fails_once(torch.OutOfMemoryError, 0)},
    ),
    "a kernel that raises": (
        {"fast": 3, "native": 5},
        {"native": 8},
        {"policy": {"kernel": "fast"}, "spoil": lambda: fails_once(ArithmeticError, TRIAL_CALLS + 5)},
    ),
    "a file error": (
        {"fast": 7, "native": 1},
        FAST,
        {"policy": {"kernel": "fast"}, "spoil": lambda: fails_once(FileNotFoundError, TRIAL_CALLS + 5)},
    ),
    "not finite": (
        {"fast": 4, "native": 6},  # the broken forward and the one that replaced it both count
        {"native": 8},
        {"policy": {"kernel": "fast"}, "spoil": lambda: broken_at(TRIAL_CALLS + 4)},
    ),
    "out of tolerance": ({"native": 8}, {"native": 8}, {"spoil": lambda: off_at_the_site}),
    "observed": ({"native": 8}, {"native": 8}, {"policy": {"kernel": "native (observe only)"}}),
}
"""Who serves the calls of two runs, and what of model, policy and kernel is special."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_tensor_outlives_a_run(name, tmp_path, monkeypatch):
    """Nor is one left to the garbage collector, which may come late: nothing of it runs here."""
    *expected, scenario = SCENARIOS[name]
    machine = Machine(path=tmp_path / "measurements.json")
    monkeypatch.setattr(comparing, "time", machine.clock)
    spoil = scenario.get("spoil", lambda: off_by(0.01))()
    machine.add("fast", 1.0, spoil=spoil, **scenario.get("support", {}))
    live = Live(lambda status: None)
    model = Drawn(**scenario.get("model", {}))
    comfy = machine.comfy(model, **{"tolerance": 0.1, **scenario.get("policy", {})})
    comfy.dispatcher.stats._opened = lambda run: live.add(run, None, {})
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            comfy.sample(STEPS)
        alive = [reference() for reference in model.made if reference() is not None]
        holders = [[type(holder).__name__ for holder in gc.get_referrers(tensor)] for tensor in alive]
    finally:
        gc.enable()
    assert [served(run) for run in comfy.runs()] == expected
    assert holders == []
    assert kept_by(comfy, live) == []
    assert len(model.made) >= 2 * 4 * 2 * 5
    assert len(live.newest_first()) == 2


def test_an_error_of_the_model_leaves_no_tensor_behind():
    args, keywords = comfy_arguments(**LONG)
    made = []

    def fail(attend, options):
        made.append(weakref.ref(attend(*args, **keywords, transformer_options=options)))
        raise RuntimeError("in the model")

    comfy = FakeComfy(make_dispatcher(fake_backend(), tolerance=0.1), fail)
    with pytest.raises(RuntimeError, match="in the model"):
        comfy.sample(STEPS)
    assert [reference() for reference in made] == [None]
    assert kept_by(comfy) == []
    comfy.forward_once = Drawn()
    comfy.sample(STEPS)
    assert served(comfy.run()) == {"fake kernel": 8}


@pytest.mark.parametrize("hidden", ["closure", "partial", "default", "list"])
def test_a_tensor_in_a_kept_function_is_found(hidden):
    tensor = torch.zeros(3)
    ways = {
        "closure": lambda: tensor,
        "partial": functools.partial(torch.add, tensor),
        "default": lambda given=tensor: given,
        "list": [tensor],
    }
    comfy = FakeComfy(make_dispatcher(fake_backend()))
    assert kept_by(comfy) == []
    comfy.dispatcher.session.kept = ways[hidden]
    assert [shape for _, shape in kept_by(comfy)] == [(3,)]
