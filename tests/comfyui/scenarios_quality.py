"""Scenarios about quality and speed: kernels of the tests' own that go wrong or are slow, in a real sampler.

Time is what the scenario says: kernels are timed, and forwards compared, by a clock that only attention calls move.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import comfy.ldm.modules.attention as attention
import comfy.sample
import torch
from comfy.patcher_extension import WrappersMP

import inside
from patched import NATIVE, OVERRIDE, calls_counted, digest, report
from stand_ins import tiny_models

LARGE = {"wan": (1, 16, 2, 32, 32), "flux": (1, 16, 48, 48)}
"""Latents of so many tokens, 512 and 584 with the text, that auto times kernels."""
NATIVE_MS = 1000.0
"""So long that a forward is compared in one round."""

Change = Callable[["Bench", torch.Tensor], torch.Tensor]


class Bench:
    """A tiny model whose attention calls are numbered, kernels that know which one they serve, and a clock.

    ``site`` numbers the calls of a forward, ``step`` the time steps of a run, both from 0. Every attention call takes
    NATIVE_MS, unless a kernel serves it that takes another time.
    """

    def __init__(self, model: str, calls: Callable[[], int], large: bool = False) -> None:
        tiny = tiny_models.ALL[model]()
        self.tiny = replace(tiny, latent=LARGE[model]) if large else tiny
        self.calls = calls
        self.backends: list[Any] = []
        self.timed: list[str] = []
        """The kernels in the order of their calls while they were timed alone."""
        self.timing = False
        self.overrides: list[Any] = []
        """Per forward of the model itself: the override that its calls go to."""
        self.run = self.step = -1
        self._first_call = 0
        self._timestep: float | None = None
        self._ahead_ms = 0.0
        self._diffusion_model.register_forward_pre_hook(self._count_forward, with_kwargs=True)

    @property
    def _diffusion_model(self) -> torch.nn.Module:
        return self.tiny.model.model.diffusion_model

    @property
    def site(self) -> int:
        return self.calls() - self._first_call - 1

    def _count_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._first_call = self.calls()
        timestep = float(args[1].flatten()[0])
        self.step += timestep != self._timestep
        self._timestep = timestep
        self.overrides.append(kwargs["transformer_options"].get(OVERRIDE))

    def perf_counter(self) -> float:
        """Seconds; for what asks ``time``."""
        return (NATIVE_MS * self.calls() + self._ahead_ms) / 1e3

    # -- kernels

    def add(
        self,
        name: str,
        ms: float = 10.0,
        change: Change | None = None,
        *,
        forward_ms: float | None = None,
        int8: bool = True,
        exact: bool = False,
    ) -> None:
        """A kernel with the numerics of INT8, or with the bits of native attention; quantized unless it is ``exact``.

        ``change`` is given this object and an output, and makes another of it. ``forward_ms`` is what a call takes
        when the kernel is not timed alone.
        """
        base, limits = inside.pack_module("sage_core.backends.base"), inside.pack_module("sage_core.support")
        compute = _int8 if int8 and not exact else _native

        def kernel(query: Any, key: Any, value: Any, **options: Any) -> Any:
            alone_ms = ms if self.timing or forward_ms is None else forward_ms
            self._ahead_ms += alone_ms - NATIVE_MS
            if self.timing:
                self.timed.append(name)
            output = compute(query, key, value, **options)
            return output if change is None else change(self, output)

        self.backends.append(
            base.Backend(
                name=name,
                support=limits.Support(archs=None, dtypes=("float32",), mask_kinds=limits.EVERY_MASK),
                # the small example is not what is tested here
                tolerance=base.Tolerance(relative_l2=math.inf, cosine=-math.inf),
                load=lambda environment, arch, allow_download: base.Kernel(kernel, frozenset({"attn_mask"})),
                exact=exact,
            )
        )

    def session(self, path: Path | None = None) -> Any:
        """A session of its own, as after a restart."""
        core, backends = inside.pack_module("sage_core"), inside.pack_module("sage_core.backends")
        order = {"cpu": tuple(backends.Preference(backend.name) for backend in self.backends)}
        stopwatch = _stopwatch(self)
        return core.Session(self.backends, order=order, measurements_path=path, stopwatch=lambda device: stopwatch)

    # -- models

    def patched(
        self, kernel: str, *, session: Any = None, model: Any = None, previous: Any = None, **policy: Any
    ) -> Any:
        core, patch = inside.pack_module("sage_core"), inside.pack_module("nodes.patch_attention")
        policy = core.Policy(kernel=kernel, **{"compare_with_native": "never", **policy})
        dispatcher = core.Dispatcher(policy, session or self.session(), previous)
        return patch._patched(model or self.tiny.model, dispatcher)

    def sample(self, model: Any = None, **how: Any) -> torch.Tensor:
        """A run, with its steps counted from 0; without ``model``, of the model without the pack."""
        self.run += 1
        self.step, self._timestep = -1, None
        return self.tiny.sample(model, **how)


@contextmanager
def bench(model: str, large: bool = False) -> Iterator[Bench]:
    comparing = inside.pack_module("sage_core.comparing")
    with calls_counted() as calls:
        made = Bench(model, calls, large)
        clock, comparing.time = comparing.time, made
        try:
            yield made
        finally:
            comparing.time = clock


def _native(query: Any, key: Any, value: Any, *, tensor_layout: str, sm_scale: float, attn_mask: Any = None) -> Any:
    """The bits of native attention, where the model hands over tensors of three dimensions."""
    heads, head_dim = query.shape[2:]
    query, key, value = (tensor.flatten(2) for tensor in (query, key, value))
    marked = {"mask": attn_mask, "_inside_attn_wrapper": True}  # no call of the model, so not to be counted
    return attention.optimized_attention(query, key, value, heads, **marked).unflatten(2, (heads, head_dim))


def _int8(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Native attention over query and key in 8 bits with a scale per token and head."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        scale = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return (tensor / scale).round() * scale

    return _native(rounded(query), rounded(key), value, **options)


def _stopwatch(owner: Bench) -> Any:
    """Times what is called by the clock of ``owner``."""
    timing = inside.pack_module("sage_core.timing")
    refusal = inside.pack_module("sage_core.refusal").Refusal

    class ByTheClock(timing.Stopwatch):
        def run(self, function: Any, calls: int, expected: Any = None) -> Any:
            before, owner.timing = owner._ahead_ms, True
            try:
                output = function()
            finally:
                owner.timing = False
            if isinstance(output, refusal):
                return output
            took, owner._ahead_ms = NATIVE_MS + owner._ahead_ms - before, before
            return timing.Timing(took, 0.01)

    return ByTheClock()


# -- what kernels do wrong


def at(change: Change, sites: tuple[int, ...] = (), first_step: int = 0, first_run: int = 0) -> Change:
    """``change`` at these sites (none: at all), from a step of a run on."""

    def changed(where: Bench, output: torch.Tensor) -> torch.Tensor:
        meant = not sites or where.site in sites
        late = (where.run, where.step) >= (first_run, first_step) and where.step >= first_step
        return change(where, output) if meant and late else output

    return changed


def nan_in_one_head(where: Bench, output: torch.Tensor) -> torch.Tensor:
    output = output.clone()
    output[0, 5, 1, 3] = math.nan  # one number of one row of one head
    return output


def wrong(where: Bench, output: torch.Tensor) -> torch.Tensor:
    return output * 1.5


# -- the forwards of a run


class Forwards:
    """Every forward that the sampler asks a model for: what it gave and what it got."""

    def __init__(self, model: Any) -> None:
        self.model = model.clone()
        self.model.set_model_unet_function_wrapper(self._record)
        self._seen: list[tuple[Any, Any, dict[str, Any], torch.Tensor]] = []

    def _record(self, apply_model: Any, given: dict[str, Any]) -> torch.Tensor:
        x, t, conditions = given["input"].clone(), given["timestep"].clone(), dict(given["c"])
        output = apply_model(given["input"], given["timestep"], **given["c"])
        self._seen.append((x, t, conditions, output.clone()))
        return output

    def native(self) -> list[bool]:
        """Which forwards gave the bits that the model gives without the pack."""
        return [self._same(*seen) for seen in self._seen]

    def _same(self, x: torch.Tensor, t: torch.Tensor, conditions: dict[str, Any], output: torch.Tensor) -> bool:
        with torch.inference_mode():
            expected = self.model.model.apply_model(x, t, **{**conditions, "transformer_options": {}})
        return torch.equal(output, expected)


# -- rescue


def rescued(
    sites: list[int], first_step: int, int8: bool, steps: int = 4, tolerance: float | None = 0.1
) -> dict[str, Any]:
    """A kernel that gives NaN in one head of some sites (none: of all) from a step on; twice."""
    with bench("wan") as made:
        made.add("sick", change=at(nan_in_one_head, tuple(sites), first_step), int8=int8)
        forwards = Forwards(made.patched("sick", tolerance=tolerance))
        latents, texts = [], []
        for _ in range(2):
            latents.append(made.sample(forwards.model, steps=steps))
            texts.append(inside.execute("AttentionBackendReport", model=forwards.model).args[1])
        return {
            "finite": [bool(latent.isfinite().all()) for latent in latents],
            "latents": list(map(digest, latents)),
            "native": digest(made.sample(steps=steps)),
            "native forwards": forwards.native(),
            "runs": report(forwards.model)["runs"],
            "texts": texts,
        }


def model_with_nan(weight: str, steps: int) -> dict[str, Any]:
    """A model with NaN in one weight: its own doing, whatever attention does."""
    with bench("wan") as made:
        made.add("int8")
        made._diffusion_model.get_parameter(weight).data.view(-1)[0] = math.nan
        patched = made.patched("int8")
        latent, native = made.sample(patched, steps=steps), made.sample(steps=steps)
        return {
            "same": latent.isnan().equal(native.isnan()) and latent.nan_to_num().equal(native.nan_to_num()),
            "nan": int(native.isnan().sum()),
            "of": native.numel(),
            "run": report(patched)["runs"][0],
        }


# -- check


def wrong_at_a_site(
    site: int, first_step: int, first_run: int, runs: int, steps: int, int8: bool = True
) -> dict[str, Any]:
    """A kernel that is wrong at one site from a step of a run on, beside one that was wrong there from the start."""
    with bench("wan") as made:
        made.add("late", change=at(wrong, (site,), first_step, first_run), int8=int8)
        made.add("never", change=at(wrong, (site,)), int8=int8)
        late, never = made.patched("late"), made.patched("never")
        latents = [digest(made.sample(late, steps=steps)) for _ in range(runs)]
        return {
            "latents": latents,
            "never there": digest(made.sample(never, steps=steps)),
            "native": digest(made.sample(steps=steps)),
            "runs": report(late)["runs"],
        }


# -- measured auto


def measured(model: str) -> dict[str, Any]:
    """The fastest kernel is inaccurate, the next one serves; cold, warm, and in two later processes over the file."""
    with bench(model, large=True) as made, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measurements.json"
        made.add("exact", 600.0, exact=True)
        made.add("good", 200.0)
        made.add("wrong", 100.0, wrong)
        made.add("slow", 5000.0)
        session = made.session(path)
        latents, timed, runs = [], [], []
        cold = made.patched("auto", session=session)
        again, restarted = made.patched("auto", session=session), made.patched("auto", session=made.session(path))
        third = made.patched("auto", session=made.session(path))
        for patched in (cold, cold, again, restarted, third):
            del made.timed[:]
            latents.append(digest(made.sample(patched, steps=2)))
            timed.append(sorted(set(made.timed)))
            runs.append(report(patched)["runs"][-1])
        return {
            "latents": latents,
            "chosen by name": digest(made.sample(made.patched("good"), steps=2)),
            "native": digest(made.sample(steps=2)),
            "timed": timed,
            "runs": runs,
            "kept": path.exists(),
        }


# -- comparison


def compared(when: str, kernel: str, forward_ms: float) -> dict[str, Any]:
    """Two runs, and one after a restart, with a kernel that takes 200 ms when it is timed alone."""
    with bench("wan", large=True) as made, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measurements.json"
        made.add("good", 200.0, forward_ms=forward_ms)
        session = made.session(path)
        latents, runs = [], []
        for restarted in (session, made.session(path)):
            patched = made.patched(kernel, session=restarted, compare_with_native=when)
            latents += [digest(made.sample(patched, steps=2)) for _ in range(2 if restarted is session else 1)]
            runs += report(patched)["runs"]
        return {
            "latents": latents,
            "never compared": digest(made.sample(made.patched(kernel), steps=2)),
            "native": digest(made.sample(steps=2)),
            "runs": runs,
            "text": inside.execute("AttentionBackendReport", model=patched).args[1],
        }


def disturbed(how: str, before: bool) -> dict[str, Any]:
    """Another node that wraps the model call or replaces a block, put on before or after ours."""
    seen = 0

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        return executor(*args, **kwargs)

    def replacement(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        nonlocal seen
        seen += 1
        return extra["original_block"](args)

    def put(model: Any) -> Any:
        clone = model.clone()
        if how == "replaced block":
            clone.set_model_patch_replace(replacement, "dit", "double_block", 0)
        else:
            clone.add_wrapper_with_key({"apply": WrappersMP.APPLY_MODEL, "diffusion": WrappersMP.DIFFUSION_MODEL}[how],
                                       "other", wrapper)  # fmt: skip
        return clone

    with bench("wan") as made:
        made.add("int8")
        how_often = {"compare_with_native": "first time"}
        if before:
            patched = made.patched("int8", model=put(made.tiny.model), **how_often)
        else:
            patched = put(made.patched("int8", **how_often))
        latent = digest(made.sample(patched))
        quantized = seen
        native_model = made.patched(NATIVE, model=put(made.tiny.model))
        native = digest(made.sample(native_model))
        return {
            "latent": latent,
            "alone": digest(made.sample(made.patched("int8"))),
            "native": native,
            "native without": digest(made.sample()),
            "seen": [quantized, seen - quantized],
            "run": report(patched)["runs"][0],
            "native run": report(native_model)["runs"][0],
        }


# -- the way past us


def halved(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs) * 0.5


def _kinds(overrides: list[Any]) -> list[str]:
    names = {"halved": "previous", "Dispatcher": "ours"}
    return ["none" if override is None else names[_name(override)] for override in overrides]


def _name(override: Any) -> str:
    return str(getattr(override, "__name__", type(override).__name__))


def past_us(model: str, previous: bool) -> dict[str, Any]:
    """Runs that are native at every site: to which override the calls of each forward go, and how many there are."""
    with bench(model) as made:
        patched = made.patched(NATIVE, previous=halved if previous else None)
        other = made.tiny.model.clone()
        if previous:
            other.model_options["transformer_options"][OVERRIDE] = halved
        facts: dict[str, Any] = {"latents": [], "overrides": [], "calls": []}
        for _ in range(2):
            before, made.overrides = made.calls(), []
            facts["latents"].append(digest(made.sample(patched)))
            facts["overrides"].append(_kinds(made.overrides))
            facts["calls"].append(made.calls() - before)
        return {**facts, "native": digest(made.sample(other)), "runs": report(patched)["runs"]}


def past_us_and_back(large_first: bool) -> dict[str, Any]:
    """A size at which nothing pays off and one at which a kernel serves, in turns through one patched model."""
    with bench("wan") as made:
        made.add("good", 200.0)
        patched = made.patched("auto")
        small, large = made.tiny, replace(made.tiny, latent=LARGE["wan"])
        facts: dict[str, Any] = {"latents": [], "native": [], "overrides": [], "calls": []}
        for made.tiny in (large, small, large) if large_first else (small, large, small):
            before, made.overrides = made.calls(), []
            facts["latents"].append(digest(made.sample(patched)))
            facts["overrides"].append(_kinds(made.overrides))
            facts["calls"].append(made.calls() - before)
            facts["native"].append(digest(made.sample()))
        return {**facts, "runs": report(patched)["runs"]}


def past_us_outside_the_window() -> dict[str, Any]:
    """A window over the middle of the run; the same where no call can go past us, as another override is on top."""
    with bench("wan") as made:
        made.add("int8")
        window = {"start_percent": 0.4, "end_percent": 0.6}
        patched = made.patched("int8", **window)
        latent = digest(made.sample(patched, steps=8))
        kinds = _kinds(made.overrides)
        on_top = made.patched("int8", **window).clone()
        options = on_top.model_options["transformer_options"]
        options[OVERRIDE] = partial(_handed_on, options[OVERRIDE])
        return {
            "latent": latent,
            "overrides": kinds,
            "never past us": digest(made.sample(on_top, steps=8)),
            "runs": [report(patched)["runs"][0], report(on_top)["runs"][0]],
        }


def _handed_on(ours: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    return ours(func, *args, **kwargs)


def past_us_with_conditions_apart() -> dict[str, Any]:
    """Conditions of two lengths, a forward each: each kind of forward goes past us after its first."""
    with bench("wan") as made:
        patched = made.patched(NATIVE)
        positive, negative = (tiny_models.conditioning(tokens, 4096, 64, tokens) for tokens in (8, 7))
        latent, latents, calls = torch.zeros(made.tiny.latent), [], []
        for model in (patched, made.tiny.model):
            before = made.calls()
            with torch.inference_mode():
                noise = comfy.sample.prepare_noise(latent, 1)
                latents.append(digest(comfy.sample.sample(model, noise, 3, 3.0, "euler", "simple", positive, negative,
                                                          latent, disable_pbar=True)))  # fmt: skip
            calls.append(made.calls() - before)
        kinds = _kinds(made.overrides)
        return {"latents": latents, "overrides": kinds, "calls": calls, "run": report(patched)["runs"][0]}


# -- out of memory


def out_of_memory(step: int, site: int) -> dict[str, Any]:
    """A kernel that runs out of memory once, in the middle of a run; twice."""
    raised = []

    def fail_once(where: Bench, output: torch.Tensor) -> torch.Tensor:
        if (where.run, where.step, where.site) == (0, step, site) and not raised:
            raised.append(where.site)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return output

    with bench("wan") as made:
        made.add("full", change=fail_once)
        made.add("healthy")
        forwards = Forwards(made.patched("full"))
        latents = [digest(made.sample(forwards.model, steps=4)) for _ in range(2)]
        given = report(forwards.model)
        return {
            "latents": latents,
            "healthy": digest(made.sample(made.patched("healthy"), steps=4)),
            "native forwards": forwards.native(),
            "raised": raised,
            "runs": given["runs"],
            "retired": given["environment"]["retired"],
        }


# -- files that are missing


def flaky(failing: list[list[int]]) -> dict[str, Any]:
    """A kernel with native's bits that raises a file error at these (step, site) of its first run; twice."""

    def fail(where: Bench, output: torch.Tensor) -> torch.Tensor:
        if where.run == 0 and [where.step, where.site] in failing:
            raise FileNotFoundError(2, "No such file or directory", "kernel.json")
        return output

    with bench("wan") as made:
        made.add("flaky", change=fail, int8=False)
        patched = made.patched("flaky", tolerance=None)
        latents = [digest(made.sample(patched, steps=4)) for _ in range(2)]
        given = report(patched)
        return {
            "latents": latents,
            "native": digest(made.sample(steps=4)),
            "runs": given["runs"],
            "retired": [entry["kernel"] for entry in given["environment"]["retired"]],
        }
