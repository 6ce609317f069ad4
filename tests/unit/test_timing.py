"""Timing: what the numbers mean on a simulated GPU, what measuring costs, and what disturbs it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_core import timing
from sage_core.refusal import Refusal, RefusalCode
from sage_core.timing import ClockStopwatch, EventStopwatch, Stopwatch, Timing, time_candidates

BROKE = Refusal(RefusalCode.OUT_OF_MEMORY, "fake raised OutOfMemoryError")
GPU = torch.device("cuda:0")


class FakeGpu:
    """A host and a device with clocks of their own, in milliseconds: launches return before their work is done."""

    def __init__(self, cycles_per_ms=2e6, drift_per_ms=0.0):
        self.now = 0.0
        self.free = 0.0
        """When the device has done all that it was given."""
        self.cycles_per_ms = cycles_per_ms
        self.spun = False
        self.drift_per_ms = drift_per_ms
        self.alive = self.most_alive = 0
        self.log = []

    def work(self, device_ms):
        self.free = max(self.free, self.now) + device_ms

    def spin(self, cycles):
        self.now += 0.005 if self.spun else 7.0  # the first launch loads the kernel
        self.spun = True
        self.work(cycles / self.cycles_per_ms)

    @contextmanager
    def patched(self, spin=True):
        gpu = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                self.at = max(gpu.free, gpu.now)

            def synchronize(self):
                gpu.now = max(gpu.now, self.at)

            def elapsed_time(self, end):
                return end.at - self.at

        @contextmanager
        def device(chosen):
            assert chosen == GPU
            yield

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "Event", Event)
            patch.setattr(torch.cuda, "device", device)
            patch.setattr(timing, "_spin", gpu.spin if spin else None)
            patch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: gpu.now / 1e3))
            yield EventStopwatch(GPU)


class Output:
    def __init__(self, gpu):
        self.gpu = gpu
        gpu.alive += 1
        gpu.most_alive = max(gpu.most_alive, gpu.alive)

    def __del__(self):
        self.gpu.alive -= 1


class FakeKernel:
    def __init__(self, gpu, name, device_ms, host_ms, compile_ms=0.0, breaks_at=None):
        self.gpu, self.name, self.device_ms, self.host_ms = gpu, name, device_ms, host_ms
        self.compile_ms, self.breaks_at = compile_ms, breaks_at
        self.calls = 0

    def __call__(self):
        gpu, self.calls = self.gpu, self.calls + 1
        gpu.log.append(self.name)
        if self.calls == self.breaks_at:
            return BROKE
        gpu.now += self.host_ms + (self.compile_ms if self.calls == 1 else 0.0)
        gpu.work(self.device_ms * (1 + gpu.drift_per_ms * gpu.now))
        return Output(gpu)


def measure(kernels, gpu=None, spin=True, **fake):
    """time_candidates on a simulated GPU; ``kernels`` is name to (device_ms, host_ms, ...), native the baseline."""
    gpu = gpu or FakeGpu(**fake)
    functions = {name: FakeKernel(gpu, name, *numbers) for name, numbers in kernels.items()}
    with gpu.patched(spin) as stopwatch:
        found = time_candidates(functions, "native", stopwatch)
    return found, functions, gpu


# -- the stopwatch


def test_device_time_is_told_from_launch_time():
    gpu = FakeGpu()
    with gpu.patched() as stopwatch:
        for device_ms, host_ms in ((0.31, 0.031), (0.05, 0.25), (4.6, 0.17), (62.0, 0.04)):
            kernel = FakeKernel(gpu, "any", device_ms, host_ms)
            for calls in (1, 5):
                measured = stopwatch.run(kernel, calls, Timing(device_ms, host_ms))
                assert measured == pytest.approx((device_ms, host_ms))


def test_without_a_head_start_the_wait_for_the_first_launch_is_included():
    gpu = FakeGpu()
    with gpu.patched() as stopwatch:
        assert stopwatch.run(FakeKernel(gpu, "any", 0.3, 0.1), 1) == pytest.approx((0.4, 0.1))
    with gpu.patched(spin=False) as stopwatch:
        kernel = FakeKernel(gpu, "any", 0.3, 0.1)
        assert stopwatch.run(kernel, 10, Timing(0.3, 0.1)) == pytest.approx((0.31, 0.1))


@pytest.mark.parametrize("cycles_per_ms", [1e5, 2e6, 3e6])
def test_the_head_start_is_as_long_on_every_counter(cycles_per_ms):
    gpu = FakeGpu(cycles_per_ms)
    with gpu.patched() as stopwatch:
        kernel = FakeKernel(gpu, "any", 0.2, 0.1)
        stopwatch.run(kernel, 1, Timing(0.2, 0.1))
        before = gpu.now
        stopwatch.run(kernel, 4, Timing(0.2, 0.1))
        assert gpu.now - before == pytest.approx(timing.HEAD_START * 0.4 + 0.8 + 0.005, rel=0.03)


def test_a_call_that_compiled_asks_for_no_long_head_start():
    gpu = FakeGpu()
    with gpu.patched() as stopwatch:
        stopwatch.run(FakeKernel(gpu, "any", 0.2, 0.1), 1, Timing(9_000.0, 9_000.0))
    assert 7 < gpu.now < 7 + timing.MAX_HEAD_START_MS + 2


def test_the_stopwatch_stops_at_the_first_refusal_and_keeps_one_output_at_a_time():
    gpu = FakeGpu()
    kernel = FakeKernel(gpu, "any", 0.1, 0.1, breaks_at=4)
    with gpu.patched() as stopwatch:
        assert stopwatch.run(kernel, 3) == pytest.approx((0.1 + 0.1 / 3, 0.1))
        assert stopwatch.run(kernel, 9) == BROKE
    assert kernel.calls == 4
    assert (gpu.most_alive, gpu.alive) == (1, 0)


def test_on_a_device_to_wait_for_the_clock_tells_the_two_times_apart(monkeypatch):
    gpu = FakeGpu()
    gpu.work(50.0)  # of someone else, before

    def wait():
        gpu.now = max(gpu.now, gpu.free)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: gpu.now / 1e3))
    stopwatch = ClockStopwatch(wait)
    assert stopwatch.run(FakeKernel(gpu, "any", 1.0, 0.1), 10) == pytest.approx((1.01, 0.1))
    assert stopwatch.run(lambda: BROKE, 10) == BROKE


def test_on_a_cpu_device_time_is_host_time():
    calls = []
    measured = Stopwatch.for_device(torch.device("cpu")).run(lambda: calls.append(time.sleep(0.001)), 3)
    assert len(calls) == 3
    assert 1.0 <= measured.device_ms == measured.host_ms


def test_every_kind_of_device_has_its_stopwatch(monkeypatch):
    assert isinstance(Stopwatch.for_device(GPU), EventStopwatch)
    waited = []
    monkeypatch.setattr(torch.xpu, "synchronize", lambda: waited.append(1))
    Stopwatch.for_device(torch.device("xpu:0")).run(lambda: None, 1)
    assert len(waited) == 2
    unknown = Stopwatch.for_device(SimpleNamespace(type="one that torch has no module for"))
    assert isinstance(unknown.run(lambda: None, 1), Timing)


# -- the candidates


def test_each_is_warmed_up_and_timed_and_the_baseline_is_first():
    found, functions, gpu = measure({"a": (50.0, 0.1, 900.0), "native": (60.0, 0.1), "b": (70.0, 0.1)})
    assert gpu.log == ["native", "native", "a", "a", "b", "b", "b", "a", "native"]
    assert list(found) == ["a", "native", "b"]
    assert found == {name: pytest.approx((kernel.device_ms, 0.1)) for name, kernel in functions.items()}


def test_short_calls_are_timed_many_times_in_turns():
    found, functions, gpu = measure({"native": (0.27, 0.03), "a": (0.26, 0.03), "b": (0.249, 0.31)})
    assert found == {name: pytest.approx((kernel.device_ms, kernel.host_ms)) for name, kernel in functions.items()}
    rounds = gpu.log[6:]
    turns = [name for name, before in zip(rounds, [None, *rounds], strict=False) if name != before]
    # two rounds that meet make one turn of the kernel at their border
    assert turns == ["b", "a", "native", "a", "b", "a", "native", "a", "b"]
    assert [functions[name].calls for name in ("native", "a", "b")] == [2 + 4 * 5, 2 + 4 * 5, 2 + 4 * 4]


def test_a_kernel_that_is_told_from_the_best_after_two_rounds_is_timed_no_further():
    found, functions, _ = measure({"native": (0.30, 0.03), "a": (0.25, 0.03), "b": (0.26, 0.03)})
    assert [functions[name].calls for name in ("native", "a", "b")] == [2 + 2 * 5, 2 + 4 * 6, 2 + 4 * 5]
    found, functions, _ = measure({"native": (12.0, 0.03), "a": (10.0, 0.03), "b": (10.5, 0.03)})
    assert [functions[name].calls for name in ("native", "a", "b")] == [3, 5, 5]
    assert found == {name: pytest.approx((kernel.device_ms, 0.03)) for name, kernel in functions.items()}


def test_what_a_round_tells_counts_more_than_the_first_timed_call():
    _, functions, _ = measure({"native": (0.1, 0.02), "a": (0.095, 0.09)}, spin=False)  # 0.185 ms with its first launch
    assert functions["a"].calls == 2 + 4 * 8


def test_a_hopeless_kernel_is_not_timed_further():
    found, functions, _ = measure({"native": (0.4, 0.03), "slow": (0.81, 0.03), "fair": (0.79, 0.03)})
    assert functions["slow"].calls == 2
    assert functions["fair"].calls > 2
    assert found["slow"] == pytest.approx((0.81, 0.03))


def test_nothing_is_timed_further_when_one_is_far_ahead_or_calls_are_long():
    _, functions, _ = measure({"native": (10.0, 0.03), "fast": (4.0, 0.03)})
    assert [kernel.calls for kernel in functions.values()] == [2, 2]
    _, functions, _ = measure({"native": (250.0, 0.03), "fast": (220.0, 0.03)})
    assert [kernel.calls for kernel in functions.values()] == [2, 2]
    _, functions, _ = measure({"native": (0.1, 0.03)})
    assert functions["native"].calls == 2


@pytest.mark.parametrize("name", ["native", "a"])
@pytest.mark.parametrize("disturbed", [1, 2, 3, 8, 14])
def test_one_disturbed_call_does_not_count(name, disturbed):
    gpu = FakeGpu()
    functions = {"native": FakeKernel(gpu, "native", 0.31, 0.02), "a": FakeKernel(gpu, "a", 0.3, 0.02)}
    kernel = functions[name]

    def run():
        if kernel.calls + 1 == disturbed:  # the process lost the CPU, and another used the GPU
            gpu.now += 30
            gpu.work(30)
        return kernel()

    with gpu.patched() as stopwatch:
        found = time_candidates({**functions, name: run}, "native", stopwatch)
    assert found == {"native": pytest.approx((0.31, 0.02)), "a": pytest.approx((0.3, 0.02))}


@pytest.mark.parametrize(("device_ms", "drift"), [(0.3, 5e-3), (0.05, 5e-3), (8.0, 1e-3), (60.0, 2e-4)])
def test_steady_drift_hits_all_alike(device_ms, drift):
    """Over one measurement the device gets slower by a tenth and more, yet equal kernels look equal."""
    kernels = dict.fromkeys(("native", "a", "b", "c"), (device_ms, 0.02))
    found, _, gpu = measure(kernels, drift_per_ms=drift)
    assert gpu.now * drift > 0.1
    times = [timing.device_ms for timing in found.values()]
    assert max(times) / min(times) < 1.02


@pytest.mark.parametrize("breaks_at", [1, 2, 3, 12])
@pytest.mark.parametrize("name", ["native", "a"])
def test_a_refusal_at_any_point_is_the_result_and_the_others_go_on(name, breaks_at):
    kernels = {"native": (0.32, 0.02), "a": (0.3, 0.02), "b": (0.31, 0.02)}
    kernels[name] = (*kernels[name], 0.0, breaks_at)
    found, functions, _ = measure(kernels)
    assert found.pop(name) == BROKE
    assert functions[name].calls == breaks_at
    assert found == {name: pytest.approx((functions[name].device_ms, 0.02)) for name in found}


def test_when_all_refuse_all_are_refused():
    found, _, _ = measure(dict.fromkeys(("native", "a"), (1.0, 0.1, 0.0, 1)))
    assert found == {"native": BROKE, "a": BROKE}


def test_no_kernel_is_begun_once_the_seconds_are_spent_and_compiling_is_not_counted():
    names = ("native", "a", "b", "c", "d")
    found, functions, _ = measure(dict.fromkeys(names, (800.0, 0.1, 20_000.0)))
    assert [kernel.calls for kernel in functions.values()] == [2, 2, 2, 0, 0]
    assert found["c"] == Refusal(RefusalCode.NOT_WORTHWHILE, "c was not timed: the kernels timed before it took 3.2 s")


def test_the_same_clock_gives_the_same_measurement():
    kernels = {"a": (0.2, 0.05), "native": (0.3, 0.03), "b": (0.29, 0.03)}
    assert measure(kernels)[0] == measure(kernels)[0]


milliseconds = st.one_of(st.floats(0.001, 2), st.floats(0.001, 300), st.floats(0.001, 3_000))
host = st.one_of(st.floats(0.005, 0.3), st.floats(0.005, 20))


@settings(max_examples=150, deadline=None)
@given(
    native=st.tuples(milliseconds, host),
    others=st.lists(st.tuples(milliseconds, host, st.sampled_from([0.0, 5_000.0])), max_size=6),
    spin=st.booleans(),
)
def test_what_measuring_costs_is_bounded(native, others, spin):
    kernels = {"native": native} | {f"kernel {number}": numbers for number, numbers in enumerate(others)}
    found, functions, gpu = measure(kernels, spin=spin)
    best = min(kernel.device_ms for kernel in functions.values() if kernel.calls)
    bound = 7.4  # for the first head start
    head_starts = timing.HEAD_START * max(kernel.host_ms for kernel in functions.values())
    sharp = spin and head_starts <= timing.MAX_HEAD_START_MS  # otherwise launch times blur the device times
    for kernel in functions.values():
        compiled = kernel.compile_ms if kernel.calls else 0.0
        own = max(kernel.device_ms, kernel.host_ms) + min(kernel.device_ms, kernel.host_ms)
        few = timing.ROUNDS * (max(timing.ROUND_MS, own) + max(timing.MAX_HEAD_START_MS, timing.ROUND_MS))
        near = 3 if not sharp or kernel.device_ms <= timing.NEAR * best * 1.001 else 1
        further = few if best < timing.ROUND_MS else near * (own + timing.MAX_HEAD_START_MS)
        if best >= timing.LONG_MS or (sharp and kernel.device_ms > 1.001 * timing.HOPELESS * best):
            further = 0.0
        bound += compiled + (2 * own + timing.MAX_HEAD_START_MS + further) * bool(kernel.calls)
    assert gpu.now <= bound
    begun = [kernel for name, kernel in functions.items() if kernel.calls and name != "native"]
    seconds = sum(2 * kernel.device_ms for kernel in begun[:-1])
    assert seconds < timing.MAX_CANDIDATES_MS
    assert all(isinstance(result, (Timing, Refusal)) for result in found.values())


def test_what_an_ordinary_call_costs_is_three_native_calls_or_a_few_milliseconds():
    for native in (0.3, 0.83, 10.2, 62.0, 150.0):
        kernels = {"native": (native, 0.03), "a": (native * 0.6, 0.1), "b": (native * 0.65, 0.17), "c": (native, 0.25)}
        _, _, gpu = measure(kernels)
        assert gpu.now - 7 <= len(kernels) * max(3.1 * native + 1, 9.0)


# -- kept as JSON


def test_a_timing_comes_back_from_json():
    assert Timing.from_json(Timing(0.41, 0.031)._asdict()) == Timing(0.41, 0.031)
    assert Timing.from_json({"device_ms": 1, "host_ms": 0}) == Timing(1.0, 0.0)


@pytest.mark.parametrize(
    "value",
    [
        *(None, 1, "text", [], [0.4, 0.1], {}, {"device_ms": 0.4}),
        {"device_ms": 0.4, "host_ms": 0.1, "more": 1},
        {"device_ms": "0.4", "host_ms": 0.1},
        {"device_ms": 0.4, "host_ms": True},
        {"device_ms": float("nan"), "host_ms": 0.1},
        {"device_ms": float("inf"), "host_ms": 0.1},
        {"device_ms": -0.1, "host_ms": 0.1},
        {"device_ms": None, "host_ms": 0.1},
    ],
)
def test_anything_else_is_no_timing(value):
    assert Timing.from_json(value) is None


# -- the real thing


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use")
def test_on_a_real_gpu_device_time_is_neither_launch_time_nor_zero():
    stopwatch = Stopwatch.for_device(torch.device("cuda", torch.cuda.current_device()))
    tensor = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)

    def small():
        time.sleep(0.0005)  # a launch that costs far more than its work
        return tensor[:64, :64] + 1

    warm = stopwatch.run(small, 1)
    timed = stopwatch.run(small, 3, stopwatch.run(small, 1, warm))
    assert timed.host_ms > 0.5
    assert 0 < timed.device_ms < 0.1
    product = stopwatch.run(lambda: tensor @ tensor, 5, Timing(0.2, 0.05))
    assert product.device_ms > 0.05
