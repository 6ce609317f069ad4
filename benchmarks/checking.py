"""What checking costs over a 20-step run, and what a cold run costs over a warm one.

    python -m benchmarks.checking

The model is a stand-in of random weights: as many attention calls and matrix products as a FLUX-sized one where there
is a GPU, a small one elsewhere. PyTorch's own attention stands in for a quantized kernel: fast everywhere, so that
no share is flattered by a slow one. All kinds of runs are timed in turns in one process; a share is the median over the
rounds, and the noise is what two equal runs of a round differ by. Exit code 1 when the bar is missed on a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from sage_core import Policy, Session
from sage_core.backends import Preference
from sage_core.backends.base import Backend, Kernel, Tolerance
from sage_core.device import waiter
from sage_core.dispatcher import OVERRIDE, Dispatcher
from sage_core.environment import Environment
from sage_core.policy import NATIVE_ONLY
from sage_core.support import Support

from .overhead import Executor

BAR = 0.01
"""How much of a run the checks may cost, at 4,608 tokens on a GPU."""
STEPS = 20
ROUNDS = 7
SIGMAS = torch.linspace(1.0, 0.0, STEPS + 1)


class Size(NamedTuple):
    tokens: int
    heads: int
    head_dim: int
    calls: int
    dtype: torch.dtype


ON_GPU = Size(4_608, 24, 128, 57, torch.bfloat16)
ON_CPU = Size(512, 2, 64, 4, torch.float32)


def attention(query: Any, key: Any, value: Any, tensor_layout: str, sm_scale: float, **keywords: Any) -> torch.Tensor:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return scaled_dot_product_attention(query, key, value, scale=sm_scale).transpose(1, 2)


def native(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **keywords: Any) -> torch.Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Model:
    """Blocks of one attention call and the matrix products of a transformer block with it."""

    def __init__(self, size: Size, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.size = size
        width = size.heads * size.head_dim

        def weights(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) / shape[0] ** 0.5).to(device, size.dtype)

        self.x = torch.randn(1, size.tokens, width, generator=generator).to(device, size.dtype)
        # the same weights in every block: their time is that of different ones, and they fit everywhere
        self.to_qkv, self.up, self.down = (
            weights(width, 3 * width),
            weights(width, 4 * width),
            weights(4 * width, width),
        )

    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        for block in range(self.size.calls):
            normed = torch.nn.functional.layer_norm(x, x.shape[-1:])
            q, k, v = (normed @ self.to_qkv).chunk(3, -1)
            inside = {**options, "block_type": "block", "block_index": block}
            override = options.get(OVERRIDE)
            arguments: dict[str, Any] = {"transformer_options": inside, "_inside_attn_wrapper": True}
            attended = (
                native(q, k, v, self.size.heads)
                if override is None
                else override(native, q, k, v, self.size.heads, **arguments)
            )
            x = x + attended + torch.nn.functional.gelu(normed @ self.up) @ self.down
        return x


def seconds_of_run(model: Model, dispatcher: Dispatcher) -> float:
    """One run of STEPS forwards through the dispatcher's wrappers."""
    options = {OVERRIDE: dispatcher}
    t = torch.ones(1)
    forward = Executor(lambda x, t, *given: model.forward(x, given[-1]))

    def sampler(noise: Any, latent: Any, sampler: Any, sigmas: Any, mask: Any, callback: Callable[..., Any]) -> None:
        for step in range(STEPS):
            dispatcher.apply_model(forward, model.x, t.to(model.x.device), None, None, None, options)
            callback(step)

    wait = waiter(model.x) or (lambda: None)
    wait()
    start = time.perf_counter()
    dispatcher.outer_sample(Executor(sampler), None, None, None, SIGMAS)
    wait()
    return time.perf_counter() - start


def session() -> Session:
    """A session with the one kernel, quantized by its own account."""
    backend = Backend(
        name="stand-in",
        support=Support(archs=None, dtypes=("float32", "bfloat16"), tensor_layouts=("NHD",)),
        tolerance=Tolerance(relative_l2=0.02, cosine=0.999),
        load=lambda environment, arch, allow_download: Kernel(attention),
    )
    environment = Environment.detect()
    archs = {"cpu", *(device.arch for device in environment.devices)}
    return Session([backend], environment, order={arch: (Preference(backend.name),) for arch in archs})


def dispatcher(**policy: Any) -> Dispatcher:
    chosen = {"kernel": "stand-in", "compare_with_native": "never", **policy}
    return Dispatcher(Policy(**chosen), session())


def in_turns(runs: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """The seconds of each kind of run, round by round; every second round runs backwards, so that drift hits all."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            seconds[name].append(runs[name]())
    return seconds


def main() -> int:
    on_gpu = torch.cuda.is_available()
    device, size = (torch.device("cuda", 0), ON_GPU) if on_gpu else (torch.device("cpu"), ON_CPU)
    where = torch.cuda.get_device_name(0) if on_gpu else "no GPU here: a small model on the CPU, which no bar is for"
    print(f"{where}; torch {torch.__version__}")
    print(f"{size.calls} calls of {size.tokens} tokens, {size.heads} heads of {size.head_dim}, {STEPS} steps")
    if not on_gpu:
        torch.set_num_threads(1)  # small products on several threads take as long as the machine is busy
    model = Model(size, device)

    def warm(**settings: Any) -> Callable[[], float]:
        ours = dispatcher(**settings)
        seconds_of_run(model, ours)
        return lambda: seconds_of_run(model, ours)

    everything = {"kernel": "auto", "tolerance": 0.1, "compare_with_native": "first time"}
    with torch.inference_mode():
        seconds = in_turns(
            {
                "nothing is looked at": warm(kernel=NATIVE_ONLY),
                "the same again": warm(kernel=NATIVE_ONLY),
                "outputs are looked at": warm(tolerance=None),
                "sites are checked too": warm(tolerance=0.1),
                "cold: sites are checked": lambda: seconds_of_run(model, dispatcher(tolerance=0.1)),
                "cold: auto, all of it": lambda: seconds_of_run(model, dispatcher(**everything)),
            }
        )
    base = seconds["nothing is looked at"]
    shares = {name: median(map(float.__truediv__, found, base)) - 1 for name, found in seconds.items()}
    print(f"{'20 steps':<28}{'seconds':>10}{'more':>10}")
    for name, found in seconds.items():
        print(f"{name:<28}{median(found):>10.3f}{shares[name]:>10.2%}")
    share, noise = shares["sites are checked too"], abs(shares["the same again"])
    print(f"checking costs {share:.2%} of a run, noise {noise:.2%}   bar {BAR:.0%} on a GPU at {ON_GPU.tokens} tokens")
    return int(on_gpu and share > BAR + noise)


if __name__ == "__main__":
    sys.exit(main())
