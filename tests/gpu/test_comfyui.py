"""The pack on a GPU inside a real ComfyUI: what tests/comfyui/test_queue.py shows on a CPU, and what only a GPU has.

ComfyUI is the one in COMFYUI_PATH, else the first that dev.py has unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks import comfyui
from sage_core import AUTO, BACKENDS
from tests.gpu.processes import Missing, Processes, Scenario

NATIVE = "native"
GPU = torch.cuda.is_available()
MIB = 1024 * 1024
GROWN_MIB = 64
"""How much more memory the process may have after ten runs: what a leak of the size of a model's part would need."""
PEAK = 1.005
"""How much of native's peak of memory auto may have."""
ROUNDING = 2.0
"""Weights that were copied elsewhere can be multiplied in another order: natively, and with kernels no more than that
and as much again."""

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, note: Callable[[str], None]) -> Iterator[Processes]:
    try:
        root = comfyui.find(None)
    except SystemExit as absent:
        pytest.skip(str(absent))
    parameters = [getattr(item, "callspec", None) and item.callspec.params for item in request.session.items]
    scenarios = [each["facts"] for each in parameters if each and isinstance(each.get("facts"), Scenario)]
    with Processes(root, [each for each in scenarios if GPU or not each.needs_gpu], cpu=not GPU) as processes:
        yield processes
    note("seconds of each scenario:")
    for each, seconds in processes.seconds.items():
        note(f"- {each.title}: {seconds:.1f}")


@pytest.fixture
def facts(request: pytest.FixtureRequest, processes: Processes) -> Facts:
    """What the test's scenario found."""
    scenario: Scenario = request.param
    if scenario.needs_gpu and not GPU:
        pytest.skip(f"no GPU: {scenario.needs_gpu}")
    try:
        return processes.run(scenario)
    except Missing as missing:
        pytest.skip(str(missing))


def scenario(function: str, **fields: Any) -> Any:
    return pytest.mark.parametrize(
        "facts", [Scenario(function, **fields)], indirect=True, ids=[function.partition(":")[2]]
    )


def shown(kernel: str, facts: Facts) -> str:
    return f"{kernel}: {facts}"


def serves_alike(by_run: list[dict[str, int]], calls: int, kernel: str) -> bool:
    """Each run's calls were served as the first's, all were counted, and a kernel by name served."""
    if any(sum(served.values()) != calls or served != by_run[0] for served in by_run):
        return False
    return kernel == AUTO or by_run[0].get(kernel, 0) > 0


# -- memory

WEIGHTS = "on a CPU no weight is moved to where it is used"
NO_ROOM = ("--reserve-vram", "100000")
"""More than any GPU has, in gigabytes: ComfyUI leaves all weights on the host."""
SHORT = {
    "one after the other": Scenario(
        "scenarios_memory:short_of_memory",
        (*NO_ROOM, "--disable-async-offload", "--disable-dynamic-vram"),
        needs_gpu=WEIGHTS,
    ),
    "on two streams": Scenario(
        "scenarios_memory:short_of_memory",
        ("--lowvram", *NO_ROOM, "--async-offload", "2", "--disable-dynamic-vram"),
        needs_gpu=WEIGHTS,
    ),
    "dynamic": Scenario("scenarios_memory:short_of_memory", dynamic_vram=True, needs_gpu=WEIGHTS),
    "dynamic, no room": Scenario(
        "scenarios_memory:short_of_memory", ("--vram-headroom", "100000"), dynamic_vram=True, needs_gpu=WEIGHTS
    ),
}


@pytest.mark.parametrize("facts", SHORT.values(), ids=SHORT.keys(), indirect=True)
def test_weights_that_stream_from_the_host_change_no_call_and_no_bit(
    facts: Facts, request: pytest.FixtureRequest
) -> None:
    asked: Scenario = request.node.callspec.params["facts"]
    states = facts["states"]
    loaded = {state: {round(entry["loaded"], 3) for entry in of.values()} for state, of in states.items()}
    assert loaded["full"] == {1.0}
    if not asked.dynamic_vram:
        assert facts["offload streams"] == (2 if "--async-offload" in asked.options else 0)
        assert loaded["full again"] == {1.0}
        assert max(loaded["streamed"]) < 0.1  # what cannot stream is loaded all the same
        assert all(0.1 < share < 0.9 for share in loaded["half"])
    if "--vram-headroom" in asked.options:
        assert max(loaded["dynamic"]) < 1
    first = states["full"]
    for state, entries in states.items():
        for kernel, entry in entries.items():
            if kernel == NATIVE:
                continue
            assert serves_alike([first[kernel]["served"], entry["served"]], facts["calls"], kernel), (state, entry)
            assert entry["distance"] <= ROUNDING * entries[NATIVE]["distance"], (state, kernel, entry)
            assert entry["events"] == []
    assert facts["retired"] == []


@scenario("scenarios_memory:unloaded_and_reloaded")
def test_a_model_that_was_out_of_memory_is_served_as_before_and_leaves_nothing_there(facts: Facts) -> None:
    assert len(facts["allocated"]) == 1 + 4 * len(facts["models"])
    assert set(facts["allocated"]) == {facts["allocated"][0]}, "\n".join([str(facts["allocated"]), *facts["left"]])
    assert len(facts["models"]) == 2
    for kernel, of in facts["models"].items():
        assert [size == 0 for size in of["loaded"]] == [False, True] * 3
        assert of["distances"] == [0.0] * 3
        assert of["plans"] > 0
        assert of["same plans"] == [True] * 3
        assert of["same measurements"] == [True] * 3
        assert serves_alike(of["served"], facts["calls"], kernel), shown(kernel, of)


@scenario("scenarios_memory:in_a_row")
def test_runs_in_a_row_take_no_more_memory(facts: Facts) -> None:
    assert len(facts["models"]) == 2
    for kernel, of in facts["models"].items():
        assert len(of["allocated"]) >= 12
        assert set(of["allocated"]) == {of["allocated"][0]}, shown(kernel, of)
        resident = [size for size in of["resident_mib"] if size is not None]
        assert not resident or resident[-1] - resident[1] < GROWN_MIB
        assert set(of["distances"]) == {0.0}
        assert serves_alike(of["served"], facts["calls"], kernel), shown(kernel, of)


@scenario("scenarios_memory:peaks", needs_gpu="PyTorch counts no memory of the CPU")
def test_auto_needs_no_more_memory_than_native(facts: Facts, note: Callable[[str], None]) -> None:
    native = facts[NATIVE]["peak"]
    note("most memory in use in a warm run of two layers of Wan 14B, 11 latent frames of 480p:")
    for kernel, entry in facts.items():
        serves = ", ".join(f"{name} {calls}" for name, calls in entry["served"].items()) or NATIVE
        note(
            f"- {kernel}: {entry['peak'] / MIB:.1f} MiB, {entry['peak'] / native:.4f} of native's, "
            f"{entry['before'] / MIB:.1f} MiB before the run; calls: {serves}"
        )
    assert len(facts) > 2
    for kernel, entry in facts.items():
        assert kernel in (NATIVE, AUTO) or entry["served"].get(kernel, 0) > 0, shown(kernel, entry)
    assert facts[AUTO]["peak"] <= PEAK * native


# -- models in turns, streams


@scenario("scenarios_streams:alternating")
def test_models_in_turns_keep_their_plans_and_their_bits(facts: Facts) -> None:
    assert len(facts["models"]) == 6
    for name, of in facts["models"].items():
        _, _, kernel = name.partition(" ")
        assert of["distances"] == [0.0] * 4, shown(name, of)
        assert of["same plans"] == [True] * 4
        assert of["plans"] > 0
        assert serves_alike(of["served"], of["calls"], kernel), shown(name, of)
    assert facts["apart"]
    names = {name.partition(" ")[0]: models for name, models in facts["named"].items()}
    assert names == {"flux": ["Flux"], "sdxl": ["SDXL"], "wan": ["WAN21"]}


@scenario("scenarios_streams:on_another_stream", needs_gpu="a CPU has no streams")
def test_sampling_on_another_stream_gives_the_same_bits(facts: Facts) -> None:
    assert len(facts["models"]) == 4
    for name, of in facts["models"].items():
        assert len(of["distances"]) == 4
        assert max(of["distances"]) <= ROUNDING * facts[NATIVE], shown(name, of)
        assert serves_alike(of["served"], facts["calls"], name.partition(",")[0]), shown(name, of)
    assert facts["retired"] == []


# -- CUDA graphs

GRAPHS = "a CPU has no CUDA graphs"
BF16 = 0.01
"""How far exact attention in bf16 may be from another one, which rounds in other places."""
APART = {NATIVE: BF16, **{backend.name: backend.tolerance.relative_l2 + BF16 for backend in BACKENDS}}


@scenario("scenarios_streams:cuda_graphs", needs_gpu=GRAPHS)
def test_a_call_that_has_its_plan_is_right_in_a_graph_and_after_one(facts: Facts, note: Callable[[str], None]) -> None:
    for kernel, of in facts["planned"].items():
        served, again = of["kernels"]
        bound = APART[served[0]]
        replays = [of[f"replay {seed}"] for seed in (1, 2)] if of["error"] is None else []
        if of["error"] is not None:
            note(f"{kernel}: no CUDA graph can be captured ({of['error']})")
        elif all(replay["eager"] == 0.0 for replay in replays):
            note(f"{kernel}: in a CUDA graph as without one")
            assert all(replay["native"] < bound for replay in replays), shown(kernel, of)
            assert "stream_capture" not in of["codes"]
        else:
            note(f"{kernel}: a CUDA graph has native attention in its place")
            assert all(replay["native"] == 0.0 for replay in replays), shown(kernel, of)
            assert "stream_capture" in of["codes"]
        assert of["after"] < bound, shown(kernel, of)
        assert served == again, shown(kernel, of)
        assert kernel == AUTO or served == [kernel], shown(kernel, of)
        assert of["retired"] == [], shown(kernel, of)
    assert len(facts["planned"]) > 1


@scenario("scenarios_streams:cuda_graphs", needs_gpu=GRAPHS)
def test_a_call_that_is_captured_without_a_plan_is_native_and_planned_later(facts: Facts) -> None:
    facts = facts["unplanned"]
    assert len(facts) == 2
    for kernel, of in facts.items():
        assert of["error"] is None, shown(kernel, of)
        assert of["replay"] == 0.0
        assert of["codes"] == ["stream_capture"]
        assert not of["measured"]
        assert of["retired"] == []
        assert of["plans"] == 1
        assert of["after"] < APART[of["kernels after"][0]]
        assert kernel == AUTO or of["kernels after"] == [kernel]
