"""What measuring the kernels for one kind of call costs the first time, beside calls of native attention.

    python -m benchmarks.measuring

Every kernel that loads and takes the call is timed, as in a forward that meets the call for the first time. The cost is
stated as a whole and per kernel; exit code 1 when a kernel costs more than its bar. What a second start costs, where
the measurements are read back from disk, is stated too. Nothing is left on the disk.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from sage_core.backends import BACKENDS
from sage_core.backends.base import Backend, Kernel
from sage_core.device import on_device_of
from sage_core.environment import Environment
from sage_core.failure import explain
from sage_core.measurements import Measurements
from sage_core.ranking import rank
from sage_core.spec import AttentionSpec
from sage_core.timing import HOPELESS, Stopwatch, Timing, time_candidates

NATIVE = "native"
BAR_CALLS = 5.5
"""Calls of its own that a kernel within HOPELESS of the best may cost, native included: five, and what varies."""
BAR_MS = 20.0
"""What it may cost where that is more: 15 ms for calls that take next to nothing, and what varies."""


class Shape(NamedTuple):
    """The sizes of a call; query, key and value are alike."""

    name: str
    batch_size: int
    heads: int
    length: int
    head_dim: int


GPU_SHAPES = (
    Shape("SDXL 1024 x 1024", 2, 10, 4_096, 64),
    Shape("FLUX 1024 x 1024", 1, 24, 4_608, 128),
    Shape("FLUX 2048 x 2048", 1, 24, 16_896, 128),
    Shape("Wan 14B 480p", 1, 40, 32_760, 128),
)
CPU_SHAPES = (Shape("short", 1, 2, 64, 64), Shape("SD 1.5 256 x 256", 2, 8, 1_024, 40))


def functions_for(
    shape: Shape, device: torch.device, dtype: torch.dtype, environment: Environment
) -> tuple[dict[str, Callable[[], object]], list[str]]:
    """Name to function, native first, for every kernel that takes the call, and the names of the exact ones."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch_size, shape.length, shape.heads, shape.head_dim)
    query, key, value = (torch.randn(size, generator=generator).to(device, dtype) for _ in range(3))
    heads_first = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    arch = environment.arch_of(device)
    spec = AttentionSpec(
        arch=arch,
        dtype=str(dtype).removeprefix("torch."),
        batch_size=shape.batch_size,
        num_qo_heads=shape.heads,
        num_kv_heads=shape.heads,
        qo_len=shape.length,
        kv_len=shape.length,
        head_dim=shape.head_dim,
    )

    def bound(backend: Backend, kernel: Kernel) -> Callable[[], object]:
        layout = backend.support.tensor_layouts[0]
        tensors = (query, key, value) if layout == "NHD" else heads_first
        keywords: dict[str, Any] = {"tensor_layout": layout, "sm_scale": spec.softmax_scale}
        if "smooth_k" in kernel.options:
            keywords["smooth_k"] = False

        def run() -> object:
            try:
                with on_device_of(query):
                    return kernel.function(*tensors, **keywords)
            except Exception as error:
                return explain(error, backend.name)

        return run

    functions: dict[str, Callable[[], object]] = {NATIVE: lambda: scaled_dot_product_attention(*heads_first)}
    exact = [NATIVE]
    for backend in BACKENDS:
        if backend.support.refusals(spec, backend.name):
            continue
        kernel = backend.load(environment, arch, False)
        if isinstance(kernel, Kernel):
            functions[backend.name] = bound(backend, kernel)
            exact += [backend.name] * backend.exact
    return functions, exact


def counting(function: Callable[[], object], calls: list[int]) -> Callable[[], object]:
    def run() -> object:
        calls[0] += 1
        return function()

    return run


def measure(shape: Shape, device: torch.device, dtype: torch.dtype, environment: Environment) -> bool:
    """Print what was found and what it cost; True when every kernel stayed within its bar."""
    functions, exact = functions_for(shape, device, dtype, environment)
    stopwatch = Stopwatch.for_device(device)
    for function in functions.values():  # what compiles, and what loads on a first launch, is not what is stated
        stopwatch.run(function, 1)
    calls = {name: [0] for name in functions}
    counted = {name: counting(function, calls[name]) for name, function in functions.items()}
    began = time.perf_counter()
    found = time_candidates(counted, NATIVE, stopwatch)
    total_ms = (time.perf_counter() - began) * 1e3

    native = found[NATIVE]
    if not isinstance(native, Timing):
        print(f"\n{shape.name}: {native.detail}")
        return True
    size = f"{shape.batch_size} x {shape.heads} x {shape.length} x {shape.head_dim}"
    print(f"\n{shape.name}: {size}, {total_ms:.1f} ms for all, {total_ms / native.device_ms:.1f} native calls' worth")
    print(f"  {'kernel':<36}{'device ms':>10}{'host ms':>10}{'calls':>7}{'cost ms':>10}")
    timings = {name: timing for name, timing in found.items() if isinstance(timing, Timing)}
    best = min(timing.device_ms for timing in timings.values())
    within = True
    for name, timing in found.items():
        if not isinstance(timing, Timing):
            print(f"  {name:<36}{timing.detail}")
            continue
        cost = calls[name][0] * max(timing)
        over = timing.device_ms <= HOPELESS * best and cost > max(BAR_CALLS * max(timing), BAR_MS)
        within &= not over
        print(
            f"  {name:<36}{timing.device_ms:>10.3f}{timing.host_ms:>10.3f}{calls[name][0]:>7}{cost:>10.1f}"
            f"{'   over its bar' if over else ''}"
        )
    for host_bound in (False, True):
        order = " > ".join(rank(found, exact, NATIVE, host_bound).order)
        print(f"  {'host' if host_bound else 'device'}-bound: {order}")
    state_second_start(shape, timings)
    return within


def state_second_start(shape: Shape, timings: dict[str, Timing]) -> None:
    """Print what writing the measurements costs at the end of a run, and reading them at the next start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measurements.json"
        kept = Measurements(path, "benchmark")
        began = time.perf_counter()
        kept.put("timing", shape.name, {name: timing._asdict() for name, timing in timings.items()})
        kept.flush()
        wrote = time.perf_counter()
        again = Measurements(path, "benchmark").get("timing", shape.name) or {}
        read = time.perf_counter()
    assert {name: Timing.from_json(entry) for name, entry in again.items()} == timings
    print(f"  written in {(wrote - began) * 1e3:.1f} ms, read back in {(read - wrote) * 1e3:.2f} ms")


def main() -> int:
    environment = Environment.detect()
    print(f"torch {torch.__version__}, at most {BAR_CALLS:g} calls of its own or {BAR_MS:g} ms per kernel")
    print("\non the CPU, one thread, float32")
    torch.set_num_threads(1)  # threads of calls this small wait for each other longer than they work
    within = [measure(shape, torch.device("cpu"), torch.float32, environment) for shape in CPU_SHAPES]
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        print(f"\non {torch.cuda.get_device_name(device)}, bfloat16")
        within += [measure(shape, device, torch.bfloat16, environment) for shape in GPU_SHAPES]
    else:
        print("\nGPU shapes skipped: PyTorch finds no CUDA or ROCm device here")
    print("\nwithin the bars" if all(within) else "\nover a bar")
    return int(not all(within))


if __name__ == "__main__":
    sys.exit(main())
