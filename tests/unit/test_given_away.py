"""A kernel that fails after query, key and value were released: the model call is run again, and nothing is lost."""

from __future__ import annotations

import pytest
import torch

from sage_core.dispatcher import UNREADABLE
from sage_core.forwards import Forward, Review
from sage_core.stats import Stats
from tests.unit.conftest import KERNEL, Executor, attention, comfy_arguments, served
from tests.unit.test_containers import CALLS, FORWARDS, STEPS, Held, equal, of_native, of_tensors, patched

pytestmark = pytest.mark.usefixtures("one_thread")

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
AGAIN = "the forward was run again: query, key and value were gone when the kernel failed"


def once(half, number, error):
    """A kernel fails at that call of that half, and never again."""
    return lambda now, count: error if (now, count) == (half, number) else None


def made(comfy):
    """Counts the calls that the model makes."""
    calls, attend = [], comfy.attention

    def counted(*args, **kwargs):
        calls.append("_inside_attn_wrapper" not in kwargs)
        return attend(*args, **kwargs)

    counted.container_function = None
    comfy.attention = counted
    return lambda: sum(calls)


@pytest.mark.parametrize("half", ["prepare", "attend"])
@pytest.mark.parametrize("at", [1, 2, 6])
def test_out_of_memory_makes_the_model_call_again_and_the_run_native(half, at):
    comfy, _ = patched(Held(), once(half, at, OUT_OF_MEMORY))
    calls = made(comfy)
    outputs = comfy.sample(STEPS)
    served_by_kernel, vain = CALLS + (at - 1) // CALLS * CALLS, (at - 1) % CALLS + 1
    run = comfy.run()
    by_kernel = {KERNEL: served_by_kernel, "native": FORWARDS * CALLS - served_by_kernel}
    assert (served(run), run["forwards"], run["comparison_calls"]) == (by_kernel, FORWARDS, vain)
    assert run["calls"] + run["comparison_calls"] == calls()
    assert [event["text"] for event in run["events"]] == [
        f"{KERNEL} raised OutOfMemoryError: CUDA out of memory",
        AGAIN,
    ]
    assert {refusal["code"] for refusal in run["refusals"]} == {"out_of_memory"}
    kept = served_by_kernel // CALLS
    assert equal(outputs, of_tensors()[:kept] + [of_native()] * (FORWARDS - kept))
    comfy.sample(STEPS)  # the kernel is not to blame
    assert served(comfy.run()) == {KERNEL: FORWARDS * CALLS}


@pytest.mark.parametrize("half", ["prepare", "attend"])
def test_a_kernel_that_raises_is_retired_and_the_model_call_native(half):
    comfy, kernel = patched(Held(), once(half, 2, ArithmeticError("in a kernel")))
    calls = made(comfy)
    outputs = comfy.sample(STEPS)
    run = comfy.run()
    assert (served(run), run["comparison_calls"]) == ({KERNEL: CALLS, "native": (FORWARDS - 1) * CALLS}, 2)
    assert run["calls"] + run["comparison_calls"] == calls()
    assert equal(outputs, of_tensors()[:1] + [of_native()] * (FORWARDS - 1))
    detail = f"{KERNEL} raised ArithmeticError: in a kernel"
    assert [event["text"] for event in run["events"]] == [detail, AGAIN]
    assert [retired["detail"] for retired in comfy.dispatcher.snapshot()["environment"]["retired"]] == [detail]
    before = len(kernel.calls), kernel.halves["prepare"]
    comfy.sample(STEPS)
    assert (len(kernel.calls), kernel.halves["prepare"]) == before


def test_a_file_error_costs_a_model_call_and_not_the_kernel():
    comfy, kernel = patched(Held(), once("attend", 2, FileNotFoundError("a cache")))
    calls = made(comfy)
    outputs = comfy.sample(STEPS)
    run = comfy.run()
    assert (served(run), run["comparison_calls"]) == ({KERNEL: FORWARDS * CALLS}, 2)
    assert run["calls"] + run["comparison_calls"] == calls()
    assert [event["text"] for event in run["events"]] == [f"{KERNEL} raised FileNotFoundError: a cache", AGAIN]
    assert equal(outputs, of_tensors())
    assert comfy.dispatcher.snapshot()["environment"]["retired"] == []
    assert kernel.halves["prepare"] == 2 + (FORWARDS - 2) * CALLS


def test_file_errors_of_every_release_end_with_the_kernel():
    """Calls that are opened go well in between, as each model call that is run again has them."""
    comfy, kernel = patched(Held(), lambda half, count: FileNotFoundError("a full disk"))
    outputs = comfy.sample(STEPS)
    run = comfy.run()
    # each second forward begins with a release, which fails, and plans anew
    assert served(run) == {KERNEL: FORWARDS * CALLS}
    assert run["comparison_calls"] == kernel.halves["prepare"] == FORWARDS - 1
    assert equal(outputs, of_tensors())


def test_file_errors_in_a_row_retire_the_kernel():
    def fails(*call):
        raise FileNotFoundError("a full disk")

    comfy, kernel = patched(Held(), lambda half, count: FileNotFoundError("a full disk"))
    comfy.sample(STEPS[:2])
    kernel.spoil, before = fails, len(kernel.calls)
    outputs = comfy.sample(STEPS)
    run = comfy.run()
    assert served(run) == {"native": FORWARDS * CALLS}
    assert run["comparison_calls"] == 1
    assert (kernel.halves["prepare"], len(kernel.calls) - before) == (1, 2)
    assert equal(outputs, [of_native()] * FORWARDS)
    assert len(comfy.dispatcher.snapshot()["environment"]["retired"]) == 1


def test_a_lost_device_is_said_and_nothing_is_run_again():
    comfy, kernel = patched(Held(), once("attend", 2, RuntimeError("CUDA error: an illegal memory access")))
    with pytest.raises(RuntimeError, match=r"The GPU context is lost.*restart ComfyUI"):
        comfy.sample(STEPS)
    assert kernel.halves["attend"] == 2
    assert comfy.run()["status"] == "error"


def test_native_attention_that_runs_out_of_memory_too_ends_the_run():
    comfy, _ = patched(Held(), once("attend", 2, OUT_OF_MEMORY))

    def short(*args, **kwargs):
        raise torch.OutOfMemoryError("native too")

    comfy.native = short
    with pytest.raises(torch.OutOfMemoryError, match="native too"):
        comfy.sample(STEPS)
    assert comfy.run()["comparison_calls"] == 2


def test_what_the_model_draws_is_drawn_again():
    def noisy(attend, options):
        drawn.append(torch.rand(2))
        return [output + drawn[-1][0] for output in model(attend, options)]

    model, drawn = Held(), []
    for fail in (once("attend", 2, FileNotFoundError("a cache")), lambda half, number: None):
        comfy, kernel = patched(model, fail)
        kernel.model, comfy.forward_once = model, noisy
        torch.manual_seed(5)
        outputs = comfy.sample(STEPS)
    failing, plain = drawn[: FORWARDS + 1], drawn[FORWARDS + 1 :]
    assert torch.equal(failing[1], failing[2])
    assert torch.equal(torch.stack([failing[0], *failing[2:]]), torch.stack(plain))
    assert len(outputs) == FORWARDS


def test_each_time_has_lists_of_controls_of_its_own():
    """UNets take the entries out of the lists that they are given."""
    model, seen = Held(), []

    def forward(attend, options, control):
        seen.append([control["output"].pop() for _ in range(2)])
        return model(attend, options)

    comfy, kernel = patched(model, once("attend", 2, OUT_OF_MEMORY))

    def apply_model(x, t, c_concat, c_crossattn, control, transformer_options):
        return forward(comfy.attention, transformer_options, control)

    for _ in range(2):
        given = {"output": [1, 2]}
        x, t = torch.zeros(1, 1), torch.ones(1)
        comfy.dispatcher.apply_model(Executor(apply_model, comfy), x, t, None, None, given, comfy.options)
    assert seen == [[2, 1]] * 3
    assert given == {"output": [1, 2]}
    assert kernel.halves["attend"] == 2


def test_a_model_call_that_may_not_be_repeatable_is_said_to():
    comfy, _ = patched(Held(), once("attend", 2, OUT_OF_MEMORY))
    comfy.options["patches_replace"] = {"dit": {("double_block", 0): lambda *given: None}}
    comfy.sample(STEPS)
    doubt = "it may not be repeatable: another node replaces blocks of the model"
    assert comfy.run()["events"][-1]["text"] == f"{AGAIN}; {doubt}"


@pytest.mark.parametrize(
    "error", [FileNotFoundError("a cache"), OUT_OF_MEMORY, ArithmeticError("in a kernel")], ids=repr
)
def test_a_comparison_with_a_call_made_again_is_not_remembered(error):
    comfy, _ = patched(Held(), once("attend", 2, error), compare_with_native="first time")
    calls = made(comfy)
    outputs = comfy.sample(STEPS[:2])
    run = comfy.run()
    assert run["comparisons"] == []
    assert served(run) == {KERNEL: CALLS}
    assert AGAIN in [event["text"] for event in run["events"]]
    assert run["calls"] + run["comparison_calls"] == calls()
    assert equal(outputs, of_tensors()[:1] if isinstance(error, FileNotFoundError) else [of_native()])
    comfy.sample(STEPS)
    again = not isinstance(error, ArithmeticError)
    assert served(comfy.run()) == {KERNEL if again else "native": FORWARDS * CALLS}
    assert [entry["remembered"] for entry in comfy.run()["comparisons"]] == [False] * again


def broken_at(site):
    """A kernel that makes NaN of a site once ``model.broken`` is set."""
    return lambda model: lambda *call: attention(*call) * (float("nan") if model.broken and model.site == site else 1)


@pytest.mark.parametrize("error", [None, FileNotFoundError("a cache")], ids=repr)
def test_a_rescue_finds_the_site_although_the_broken_model_call_released_its_tensors(error):
    """With a file error before it, what is not finite is the model call that was made again."""

    class Breaking(Held):
        broken = False

        def call(self, site, attend, options):
            self.site = site
            return super().call(site, attend, options)

    model = Breaking()
    comfy, _ = patched(model, once("attend", 2, error), broken_at(1)(model))
    model.calls_of_model = made(comfy)
    comfy.sample(STEPS, lambda step, *_: setattr(model, "broken", step == 0) if step == 0 else None)
    run = comfy.run()
    assert run["rescued_forwards"] == 1
    assert served(run) == {KERNEL: 2 * CALLS + 2 * (FORWARDS - 2), "native": CALLS + FORWARDS - 2}
    refusals = [(refusal["code"], refusal["calls"]) for refusal in run["refusals"]]
    assert refusals == [("not_finite", CALLS), ("not_finite", FORWARDS - 2)]
    assert run["forwards"] == FORWARDS + 1
    assert run["comparison_calls"] == (2 if error else 0)
    assert run["calls"] + run["comparison_calls"] == model.calls_of_model()


def test_a_second_rescue_keeps_the_tensors_too():
    """Its native calls are known by then, and are none to hand on unseen."""

    class Breaking(Held):
        broken = None

        def call(self, site, attend, options):
            self.breaks = site == self.broken
            return super().call(site, attend, options)

    model = Breaking()
    comfy, _ = patched(model, spoil=lambda *call: attention(*call) * (float("nan") if model.breaks else 1))
    comfy.sample(STEPS, lambda step, *_: setattr(model, "broken", {0: 1, 1: 2}.get(step)))
    run = comfy.run()
    assert run["rescued_forwards"] == 2
    left = [event["text"].rpartition("; ")[2] for event in run["events"]]
    assert left == [f"{KERNEL} left 1 sites"] * 2
    comfy.sample(STEPS)
    assert served(comfy.run()) == {KERNEL: FORWARDS, "native": 2 * FORWARDS}


def test_blocks_are_counted_from_the_first_one_again():
    policy = {"skip_blocks": frozenset({2})}
    comfy, _ = patched(Held(), once("attend", 2, FileNotFoundError("a cache")), **policy)
    outputs = comfy.sample(STEPS)
    assert served(comfy.run()) == {KERNEL: 2 * FORWARDS, "native": FORWARDS}
    assert equal(outputs, of_tensors(policy))


def test_what_a_forward_gathered_is_forgotten_when_it_begins_again():
    forward = Forward(Stats().open(None, None), None)
    fresh = {name: getattr(forward, name) for name in Forward.__slots__}
    forward.plans.append(UNREADABLE)
    forward.seen.append((0, UNREADABLE, torch.zeros(5)))
    forward.block, forward.block_number = ("double", 0), 3
    forward.begin_again()
    assert {name: getattr(forward, name) for name in Forward.__slots__} == {**fresh, "plans": [], "seen": []}


def test_a_call_that_was_released_and_went_well_ends_a_row_of_file_errors():
    comfy, _ = patched(Held())
    comfy.sample(STEPS)
    failing = comfy.dispatcher.session.failing
    failing[KERNEL, "cpu"] = 2  # by another model on the same kernel
    comfy.sample(STEPS[:2])
    assert served(comfy.run()) == {KERNEL: CALLS}
    assert failing == {}


def test_a_model_call_that_is_planned_again_is_made_again_as_well(monkeypatch):
    found = [None, False]

    def find_limit(review, forward, *_):
        limit = found.pop(0) if found else None
        if limit is not None:
            forward.run.made_again(forward.plans)
        return limit

    monkeypatch.setattr(Review, "find_limit", find_limit)
    comfy, _ = patched(Held(), once("attend", CALLS + 2, FileNotFoundError("a cache")))
    calls = made(comfy)
    outputs = comfy.sample(STEPS)
    run = comfy.run()
    assert (served(run), run["comparison_calls"]) == ({KERNEL: FORWARDS * CALLS}, CALLS + 2)
    assert run["calls"] + run["comparison_calls"] == calls()
    assert [event["text"] for event in run["events"]][-1] == AGAIN
    assert equal(outputs, of_tensors())


def test_operators_of_a_compiled_model_are_told_of_the_second_time():
    """A model that is partly compiled: one call in a graph, and one beside it that releases."""
    torch.compiler.reset()
    comfy, _ = patched(Held(calls=1), once("attend", 1, FileNotFoundError("a cache")))
    beside = comfy.forward_once
    (*tensors, _), _ = comfy_arguments(seed=3)

    @torch.compile(backend="eager", fullgraph=True)
    def block(query, key, value, options):
        return attend(query, key, value, 2, transformer_options=options)

    attend = comfy.attention
    comfy.forward_once = lambda attend, options: [block(*tensors, options), *beside(attend, options)]
    outputs = comfy.sample(STEPS)
    torch.compiler.reset()
    run = comfy.run()
    assert (served(run), run["comparison_calls"]) == ({KERNEL: FORWARDS * 2}, 2)
    assert all(torch.equal(first, outputs[0][0]) and torch.equal(second, outputs[0][1]) for first, second in outputs)
