"""What the unit tests stand on: specs, calls, kernels and machines made up for them, and a stand-in for ComfyUI.

Tests import from here by name: ``from tests.unit.conftest import make_call``.
"""

from __future__ import annotations

import functools
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sage_core.backends.base import Backend, Kernel, Tolerance
from sage_core.backends.starting_order import Preference
from sage_core.call import AttentionCall
from sage_core.dispatcher import Dispatcher
from sage_core.environment import Device, Environment
from sage_core.policy import Policy
from sage_core.refusal import Refusal
from sage_core.session import Session
from sage_core.spec import AttentionSpec
from sage_core.support import EVERY_MASK, Support
from sage_core.timing import Stopwatch, Timing

CPU = torch.device("cpu")
KERNEL = "fake kernel"
TOLERANCE = Tolerance(relative_l2=0.02, cosine=0.999)
TRIAL_CALLS = 2
"""Calls of a kernel that its small example makes, where nothing is wrong with it."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of many small calls: threads that share them out wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, dict[str, str] | None], None]]:
    """install(name, {file: source}): a package that imports find before any real one; None makes it absent."""
    monkeypatch.syspath_prepend(tmp_path)

    def install_package(name: str, files: dict[str, str] | None) -> None:
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        if files is None:
            monkeypatch.setitem(sys.modules, name, None)
            return
        for file, source in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source), encoding="utf-8")
        importlib.invalidate_caches()
        names.append(name)

    names: list[str] = []
    yield install_package
    for name in names:
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]


def only_refusal(loaded: Kernel | tuple[Refusal, ...]) -> Refusal:
    """The one reason why a kernel could not be loaded."""
    assert not isinstance(loaded, Kernel), loaded
    (refusal,) = loaded
    return refusal


# -- calls


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_spec(**fields: Any) -> AttentionSpec:
    """A spec of a call that nothing is special about."""
    defaults: dict[str, Any] = {
        "arch": "cpu",
        "dtype": "float32",
        "batch_size": 1,
        "num_qo_heads": 2,
        "num_kv_heads": 2,
        "qo_len": 128,
        "kv_len": 128,
        "head_dim": 64,
    }
    return AttentionSpec(**{**defaults, **fields})


def comfy_arguments(
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    qo_len: int = 24,
    kv_len: int | None = None,
    head_dim: int = 16,
    skip_reshape: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **keywords: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) as ComfyUI hands them to an attention function: q, k, v and heads positional."""
    kv_heads, kv_len = kv_heads or heads, kv_len or qo_len

    def draw(count: int, length: int, number: int) -> Tensor:
        if skip_reshape:
            return normal(batch, count, length, head_dim, dtype=dtype, seed=seed + number)
        return normal(batch, length, count * head_dim, dtype=dtype, seed=seed + number)

    tensors = draw(heads, qo_len, 0), draw(kv_heads, kv_len, 1), draw(kv_heads, kv_len, 2)
    if skip_reshape:
        keywords["skip_reshape"] = True
    if kv_heads != heads:
        keywords.setdefault("enable_gqa", True)
    return (*tensors, heads), keywords


def make_call(**options: Any) -> AttentionCall:
    args, kwargs = comfy_arguments(**options)
    return AttentionCall.from_comfy(*args, **kwargs)


# -- kernels


def attention(query: Tensor, key: Tensor, value: Tensor, tensor_layout: str, sm_scale: float, mask=None) -> Tensor:
    """Exact attention in either layout, grouped heads included; the output is contiguous in that layout."""
    if tensor_layout == "NHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=sm_scale, enable_gqa=True)
    return output.transpose(1, 2).contiguous() if tensor_layout == "NHD" else output.contiguous()


class FakeKernel:
    """An exact kernel that notes how it was called, and does to each call what the test asks for.

    ``spoil`` is given the keywords of the call and its query, key, value and output, and what it returns is the output.
    """

    def __init__(self, spoil: Callable[..., Any] | None = None) -> None:
        self.spoil = spoil
        self.calls: list[dict[str, Any]] = []
        """Per call: the keywords apart from tensors, the three shapes and the three addresses."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Any:
        tensors = (query, key, value)
        noted = {name: keyword for name, keyword in keywords.items() if name != "attn_mask"}
        noted |= {"shapes": [tuple(t.shape) for t in tensors], "addresses": [t.data_ptr() for t in tensors]}
        self.calls.append(noted)
        layout, scale, mask = keywords["tensor_layout"], keywords["sm_scale"], keywords.get("attn_mask")
        if self.spoil is not None:
            return self.spoil(query, key, value, layout, scale, mask)
        return attention(query, key, value, layout, scale, mask)


class Clock:
    """Time that passes only where a ``Timed`` function says so, in milliseconds of the device and of the host."""

    def __init__(self) -> None:
        self.device_ms = 0.0
        self.host_ms = 0.0

    def perf_counter(self) -> float:
        """Seconds as a forward takes them that is bound by the device; for code that asks ``time``."""
        return self.device_ms / 1e3


class Timed:
    """A function that takes time of a Clock."""

    def __init__(self, function: Any, clock: Clock, device_ms: float, host_ms: float = 0.0) -> None:
        self.function, self.clock, self.device_ms, self.host_ms = function, clock, device_ms, host_ms

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.clock.device_ms += self.device_ms
        self.clock.host_ms += self.host_ms
        return self.function(*args, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


class ClockStopwatch(Stopwatch):
    """Reads a Clock; ``runs`` counts what it was asked to time, ``running`` says that it is timing now."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.runs = 0
        self.running = False

    def run(self, function: Callable[[], object], calls: int, expected: Timing | None = None) -> Timing | Refusal:
        self.runs += 1
        self.running = True
        try:
            return self._run(function, calls)
        finally:
            self.running = False

    def _run(self, function: Callable[[], object], calls: int) -> Timing | Refusal:
        device_ms, host_ms = self.clock.device_ms, self.clock.host_ms
        for _ in range(calls):
            output = function()
            if isinstance(output, Refusal):
                return output
        return Timing((self.clock.device_ms - device_ms) / calls, (self.clock.host_ms - host_ms) / calls)


def fake_backend(
    function: Callable[..., Any] | None = None,
    *,
    name: str = KERNEL,
    options: Sequence[str] = ("attn_mask", "enable_gqa"),
    load: Callable[..., Kernel | tuple[Refusal, ...]] | None = None,
    package: str = "",
    exact: bool = False,
    auto: bool = True,
    slower_than: Sequence[str] = (),
    tolerance: Tolerance = TOLERANCE,
    **support: Any,
) -> Backend:
    """A backend that takes everything unless ``support`` says otherwise."""
    limits = {"archs": None, "dtypes": ("float32", "float16", "bfloat16"), "mask_kinds": EVERY_MASK}
    kernel = Kernel(function or FakeKernel(), frozenset(options))
    return Backend(
        name=name,
        support=Support(**{**limits, **support}),
        tolerance=tolerance,
        load=load or (lambda environment, arch, allow_download: kernel),
        package=package,
        exact=exact,
        auto=auto,
        slower_than=tuple(slower_than),
    )


def fake_environment(arch: str | None = None, **fields: Any) -> Environment:
    """A machine with one GPU of ``arch``, or without any, whatever this one is."""
    devices = (Device(0, arch, f"Fake {arch}", 2**34),) if arch else ()
    return Environment(**{"devices": devices, "torch_version": "2.9.0", "packages": {}, **fields})


def make_session(
    *backends: Backend,
    order: Sequence[str | Preference] | None = None,
    measurements_path: Path | None = None,
    stopwatch: Stopwatch | None = None,
    **fields: Any,
) -> Session:
    """A session; ``order`` names what ``auto`` starts with on this machine, nothing when it is None."""
    preferences = [Preference(entry) if isinstance(entry, str) else entry for entry in order or ()]
    return Session(
        backends or (fake_backend(),),
        fake_environment(**fields),
        host="0.0.0",
        order={fields.get("arch") or "cpu": preferences},
        measurements_path=measurements_path,
        stopwatch=Stopwatch.for_device if stopwatch is None else lambda device: stopwatch,
    )


def make_dispatcher(
    *backends: Backend, session: Session | None = None, previous: Any = None, host_context: Any = None, **policy: Any
) -> Dispatcher:
    """A dispatcher that is told to use the first backend, unless ``kernel`` names another choice.

    Sites are not checked and forwards not compared unless the policy says so: most tests count kernel calls.
    """
    session = session or make_session(*backends)
    policy.setdefault("kernel", session.backends[0].name)
    policy.setdefault("tolerance", None)
    policy.setdefault("compare_with_native", "never")
    return Dispatcher(Policy(**policy), session, previous, host_context or (lambda: (None, None)))


# -- ComfyUI


class Native:
    """ComfyUI's own attention function: exact, with a number in its bits that tells it from any kernel's."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        self.calls += 1
        if not skip_reshape:
            head_dim = q.shape[-1] // heads
            q, k, v = (t.view(t.shape[0], t.shape[1], -1, head_dim).transpose(1, 2) for t in (q, k, v))
        if mask is not None and mask.ndim == 3:
            mask = mask.unsqueeze(1)
        gqa = bool(kwargs.get("enable_gqa"))
        output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kwargs.get("scale"), enable_gqa=gqa)
        output = output * (1 + 2**-20)
        return output if skip_output_reshape else output.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


class InterruptProcessingException(Exception):
    """Named as the exception by which ComfyUI stops a run."""


class FlowSchedule:
    """model_sampling of a flow model: sigma runs from 1 to 0."""

    def percent_to_sigma(self, percent: float) -> float:
        return 1.0 if percent <= 0.0 else 0.0 if percent >= 1.0 else 1.0 - percent


class Executor:
    """comfy.patcher_extension.WrapperExecutor around one function."""

    def __init__(self, original: Callable[..., Any], class_obj: Any = None) -> None:
        self.original = original
        self.class_obj = class_obj

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


Model = Callable[[Callable[..., Tensor], dict[str, Any]], Any]
"""model(attention, transformer_options): one forward; ``attention`` is called as models call optimized_attention."""


class FakeComfy:
    """The parts of ComfyUI that stand around attention: sampler, wrapped model call and decorated attention function.

    ``model`` is one forward. It doubles as the guider and the model patcher, of which the wrappers ask a thing or two.
    """

    def __init__(self, dispatcher: Dispatcher, model: Model | None = None) -> None:
        self.dispatcher = dispatcher
        self.forward_once = model or plain_model()
        self.native = Native()
        self.options: dict[str, Any] = {"optimized_attention_override": dispatcher}
        self.model_patcher = self
        self.model = self

    def get_model_object(self, name: str) -> FlowSchedule:
        assert name == "model_sampling"
        return FlowSchedule()

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """What comfy.ldm.modules.attention.wrap_attn makes of the attention function."""
        if "_inside_attn_wrapper" not in kwargs:
            kwargs["_inside_attn_wrapper"] = True
            override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
            if override is not None:
                return override(self.native, *args, **kwargs)
        return self.native(*args, **kwargs)

    def forward(self, sigma: float = 1.0, batch: int = 1, **options: Any) -> Any:
        """BaseModel.apply_model behind the wrapper; its transformer_options are a fresh dict each time."""

        def apply_model(x, t, c_concat, c_crossattn, control, transformer_options):
            return self.forward_once(self.attention, transformer_options)

        options = {**self.options, **options}
        x, sigmas = torch.zeros(batch, 1), torch.full((batch,), sigma)
        return self.dispatcher.apply_model(Executor(apply_model, self), x, sigmas, None, None, None, options)

    def sample(self, sigmas: Sequence[float] = (1.0, 0.0), callback: Any = None) -> list[Any]:
        """One run with one forward for each sigma but the last; the outputs of the forwards."""

        def sampler(noise, latent, sampler, sigmas, denoise_mask, callback, disable_pbar, seed, latent_shapes=None):
            outputs = []
            for step, sigma in enumerate(sigmas[:-1].tolist()):
                outputs.append(self.forward(sigma))
                if callback is not None:
                    callback(step, None, None, len(sigmas) - 1)
            return outputs

        executor = Executor(sampler, self)
        return self.dispatcher.outer_sample(
            executor, None, None, None, torch.tensor(sigmas), None, callback, False, 7, latent_shapes=None
        )

    def runs(self) -> list[dict[str, Any]]:
        return self.dispatcher.snapshot()["runs"]

    def run(self) -> dict[str, Any]:
        """The last run."""
        return self.runs()[-1]


def plain_model(calls: int = 2, **options: Any) -> Model:
    """A forward of ``calls`` equal attention calls, one per block of one kind."""
    args, kwargs = comfy_arguments(**options)

    def forward(attention: Callable[..., Tensor], transformer_options: dict[str, Any]) -> list[Tensor]:
        outputs = []
        for index in range(calls):
            transformer_options = {**transformer_options, "block_type": "double", "block_index": index}
            outputs.append(attention(*args, **kwargs, transformer_options=transformer_options))
        return outputs

    return forward


LONG: dict[str, Any] = {"heads": 2, "qo_len": 512}
"""Calls long enough to be measured."""


class Sites:
    """A model of ``calls`` attention calls whose tensors differ from site to site; returns the outputs as a list.

    ``site`` is where it is now and ``forward`` how often it was called before, so that a kernel can depend on both.
    ``change`` makes other (query, key, value) of those of a site.
    """

    def __init__(self, calls: int = 3, change: Callable[..., Any] | None = None, **options: Any) -> None:
        self.arguments = [comfy_arguments(**{**LONG, **options}, seed=10 * site) for site in range(calls)]
        self.change = change
        self.site = 0
        self.forward = -1

    def __call__(self, attention: Callable[..., Tensor], transformer_options: dict[str, Any]) -> list[Tensor]:
        self.forward += 1
        return [self.call(site, attention, transformer_options) for site in range(len(self.arguments))]

    def call(self, site: int, attention: Callable[..., Tensor], transformer_options: dict[str, Any]) -> Tensor:
        self.site = site
        (*tensors, heads), kwargs = self.arguments[site]
        if self.change is not None:
            tensors = self.change(*tensors)
        options = {**transformer_options, "block_type": "double", "block_index": site}
        return attention(*tensors, heads, **kwargs, transformer_options=options)

    def natively(self) -> list[Tensor]:
        """What native attention makes of it."""
        return self(Native(), {})


class Machine:
    """Kernels and native attention that take the time of a Clock that the test says, and models on them."""

    def __init__(self, native_ms: float = 10.0, native_host_ms: float = 0.0, path: Path | None = None) -> None:
        self.native_ms, self.native_host_ms, self.path = native_ms, native_host_ms, path
        self.clock = Clock()
        self.backends: list[Backend] = []
        self.kernels: dict[str, FakeKernel] = {}
        self.stopwatches: list[ClockStopwatch] = []

    def add(self, name: str, device_ms: float, host_ms: float = 0.0, spoil: Any = None, **fields: Any) -> FakeKernel:
        """A kernel of this name; quantized unless ``exact`` is among ``fields``."""
        kernel = self.kernels[name] = FakeKernel(spoil)
        function = Timed(kernel, self.clock, device_ms, host_ms)
        self.backends.append(fake_backend(function, name=name, **fields))
        return kernel

    def session(self, **fields: Any) -> Session:
        """A session of its own, as after a restart."""
        self.stopwatches.append(ClockStopwatch(self.clock))
        fields = {"order": [backend.name for backend in self.backends], **fields}
        return make_session(*self.backends, measurements_path=self.path, stopwatch=self.stopwatches[-1], **fields)

    def comfy(self, model: Model | None = None, session: Session | None = None, **policy: Any) -> FakeComfy:
        """A patched model; ``kernel`` is auto unless the policy says otherwise."""
        dispatcher = make_dispatcher(session=session or self.session(), **{"kernel": "auto", **policy})
        comfy = FakeComfy(dispatcher, model or Sites())
        comfy.native = Timed(comfy.native, self.clock, self.native_ms, self.native_host_ms)
        return comfy


def off_by(error: float) -> Callable[..., Tensor]:
    """A kernel whose relative L2 is ``error`` in every head."""
    return lambda *call: attention(*call) * (1 + error)


def served(run: dict[str, Any]) -> dict[str, int]:
    """Calls by kernel of a run."""
    return {entry["kernel"]: entry["calls"] for entry in run["calls_by_kernel"]}


def codes(refusals: Sequence[Refusal]) -> list[str]:
    return [refusal.code.value for refusal in refusals]


@functools.cache
def virtual_memory(elements: int) -> Tensor:
    """One-byte elements that are reserved and never touched."""
    try:
        return torch.empty(elements, dtype=torch.float8_e4m3fn)
    except RuntimeError:
        pytest.skip(f"no {elements} bytes of address space")
