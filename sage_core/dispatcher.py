"""Dispatcher: the state of one patched model: plan each call, run it, fall back, record.

Entry points, called by ComfyUI: ``attend`` for every attention call, ``outer_sample`` around a run and ``apply_model``
around a forward.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.compiler import is_compiling

from .backends import STARTING_ORDER, Preference
from .backends.base import Backend, Kernel
from .call import AttentionCall, CallKey, Native, decision_key, four_axes, shaping
from .failure import explain
from .policy import AUTO, NATIVE_ONLY, Policy
from .refusal import Refusal, RefusalCode
from .selection import ANY_KERNEL, NATIVE, Plan, Use, Verdict, select
from .session import Session
from .spec import AttentionSpec
from .stats import Run, Stats

logger = logging.getLogger("sagescope")

MAX_PLANS = 20_000
"""Plans kept per model; a queue with ever new resolutions starts afresh beyond it."""

HostContext = Callable[[], tuple["str | None", "str | None"]]
"""Asks ComfyUI for (prompt_id, node_id) of the node that is being executed."""


class Forward:
    """One call of the diffusion model on one thread: the plans of its calls so far, in order."""

    __slots__ = ("block", "block_number", "plans", "reason", "run")

    def __init__(self, run: Run, reason: Refusal | None) -> None:
        self.run = run
        self.reason = reason
        self.plans: list[Plan] = []
        self.block: tuple[Any, ...] | None = None
        self.block_number = -1


class Dispatcher:
    """The attention of one patched clone; shared by every later clone of it.

    ``previous`` is the override that was on the model before: it takes the place of native attention.
    """

    def __init__(
        self,
        policy: Policy,
        session: Session,
        previous: Callable[..., torch.Tensor] | None = None,
        host_context: HostContext = lambda: (None, None),
    ) -> None:
        self.policy = policy
        self.session = session
        self.previous = previous
        self.stats = Stats()
        self._host_context = host_context
        self._skips_blocks = bool(policy.skip_blocks)
        self._plans: dict[CallKey | None, Plan] = {}
        self._generation = session.generation
        self._threads = threading.local()
        self._run: Run | None = None
        self._logged: set[tuple[Any, ...]] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """Itself: old ComfyUI copies model options deeply, and the copies must go on counting in one place."""
        return self

    # -- one attention call

    def attend(self, func: Native, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The attention override: ComfyUI's arguments in, attention out."""
        if is_compiling():
            return self._attend_eagerly(func, *args, **kwargs)  # type: ignore[no-any-return]
        forward: Forward | None = getattr(self._threads, "forward", None)
        if forward is None:
            return self._attend_outside(func, *args, **kwargs)
        plans = forward.plans
        site = len(plans)
        reason = self._block_refusal(forward, kwargs) if self._skips_blocks else forward.reason
        try:
            plan = self._plans.get(decision_key((site, reason), *args, **kwargs))
        except TypeError:
            plan = UNREADABLE
        if plan is None:
            plan = self._new_plan(forward, (site, reason), args, kwargs)
        plans.append(plan)
        if plan.serve is not None:
            output: torch.Tensor | Refusal = plan.serve(
                args[0], args[1], args[2], args[4] if len(args) > 4 else kwargs.get("mask")
            )
            if not isinstance(output, Refusal):
                return output
            plans[site] = self._after_failure(plan, output, forward, args[0].device)
        return func(*args, **kwargs) if self.previous is None else self.previous(func, *args, **kwargs)

    @torch.compiler.disable
    def _attend_eagerly(self, func: Native, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``attend`` outside the graph that torch.compile is tracing, so that every call is counted."""
        return self.attend(func, *args, **kwargs)

    def _attend_outside(self, func: Native, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``attend`` for a call that no forward stands around."""
        self._forget_retired()
        run = self._current_run()
        forward = self._threads.forward = Forward(run, run.exact_from_now_on)
        try:
            return self.attend(func, *args, **kwargs)
        finally:
            self._threads.forward = None
            run.record_outside(forward.plans)

    def _new_plan(
        self, forward: Forward, place: tuple[int, Refusal | None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan:
        """The plan for a call whose like was not seen before, kept for the next ones."""
        key = decision_key(place, *args, **kwargs)
        if key is None:
            return NOT_PLAIN
        plan = self._make_plan(AttentionCall.from_comfy(*args, **kwargs), place[1])
        full = next((refusal for _, refusal in plan.reasons() if refusal.code is RefusalCode.OUT_OF_MEMORY), None)
        if full is not None and full is not place[1]:  # met by a trial just now: the next run tries again
            self._leave_to_native(forward, full)
            return plan
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _make_plan(self, call: AttentionCall, reason: Refusal | None) -> Plan:
        device = call.query.device
        spec, refusals = call.read(self.session.environment.arch_of(device))
        block = _describe_block(call.extra)
        if reason is not None:
            refusals = (reason,)
        if self.policy.kernel == NATIVE_ONLY:
            refusals = (Refusal(RefusalCode.OBSERVE_ONLY, f"kernel is '{NATIVE_ONLY}'"),)
        if spec is None or refusals:
            return Plan(NATIVE, spec, block, (Verdict(ANY_KERNEL, refusals),))
        use, verdicts = select(
            spec,
            self._candidates(spec),
            self.policy,
            load=lambda backend: self.session.load(backend, device, self.policy.allow_hub_download),
            trial=lambda use: self.session.trial(use, spec, device),
        )
        if not verdicts:
            detail = f"this device is {spec.arch}; no kernel is known to be faster than native there"
            verdicts = (Verdict(ANY_KERNEL, (Refusal(RefusalCode.ARCH, detail),)),)
        self._log_once(spec, use, verdicts)
        if use is None:
            return Plan(NATIVE, spec, block, verdicts)
        return Plan(use.backend.name, spec, block, verdicts, use.smooth_k, _server(use, call, spec))

    def _candidates(self, spec: AttentionSpec) -> Iterator[tuple[Backend, Preference | None]]:
        if self.policy.kernel != AUTO:
            yield self.session.backend(self.policy.kernel), None
            return
        for preference in STARTING_ORDER.get(spec.arch, ()):
            yield self.session.backend(preference.kernel), preference

    def _block_refusal(self, forward: Forward, kwargs: dict[str, Any]) -> Refusal | None:
        """Why the call's forward or its block stays native; counts blocks as the forward reaches them."""
        block = _block_key(kwargs)
        if block is None or forward.reason is not None:
            return forward.reason
        if block != forward.block:
            forward.block = block
            forward.block_number += 1
        if forward.block_number not in self.policy.skip_blocks:
            return None
        return Refusal(RefusalCode.SKIPPED_BLOCK, f"block {forward.block_number} is in skip_blocks")

    def _after_failure(self, plan: Plan, refusal: Refusal, forward: Forward, device: torch.device) -> Plan:
        """The native plan that takes over a call whose kernel raised; keeps the kernel from failing again."""
        if refusal.code is RefusalCode.OUT_OF_MEMORY:
            self._leave_to_native(forward, refusal)
        else:
            self.session.retire(plan.kernel, device, refusal)
            self._forget_retired()
            logger.warning("SageScope: %s. It is not used again until ComfyUI restarts.", refusal.detail)
            forward.run.note(refusal.detail)
        return Plan(NATIVE, plan.spec, plan.block, (Verdict(plan.kernel, (refusal,)),))

    def _leave_to_native(self, forward: Forward, refusal: Refusal) -> None:
        """After running out of memory: the rest of the forward and of its run is native, the next run is not."""
        forward.reason = forward.run.exact_from_now_on = refusal
        forward.run.note(refusal.detail)
        logger.info("SageScope: %s. The rest of this run uses native attention.", refusal.detail)

    def _forget_retired(self) -> None:
        """Drop the plans made before a kernel was retired, by this model or another: they may name it."""
        generation = self.session.generation
        if self._generation != generation:
            self._generation = generation
            self._plans.clear()

    def _log_once(self, spec: AttentionSpec, use: Use | None, verdicts: tuple[Verdict, ...]) -> None:
        entry = (spec, use.backend.name if use else NATIVE)
        if entry in self._logged or len(self._logged) >= MAX_PLANS:
            return
        self._logged.add(entry)
        reasons = "; ".join(refusal.detail for verdict in verdicts for refusal in verdict.refusals)
        logger.info("SageScope: %s -> %s%s", spec.describe(), entry[1], f" ({reasons})" if reasons else "")

    # -- one run, one forward

    def _current_run(self) -> Run:
        """The run that is being sampled; one of its own for calls that no sampler stands around."""
        return self._run or self.stats.outside(*self._host_context())

    def outer_sample(
        self,
        executor: Any,
        noise: Any,
        latent_image: Any,
        sampler: Any,
        sigmas: Any,
        denoise_mask: Any = None,
        callback: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The wrapper around the sampler: a run starts and ends."""
        patcher = executor.class_obj.model_patcher
        run = self.stats.open(*self._host_context(), model=type(patcher.model).__name__)
        run.total_steps = max(len(sigmas) - 1, 0)
        if not self.policy.whole_schedule:
            # asked now, not in the node: nodes after ours may change the schedule
            sampling = patcher.get_model_object("model_sampling")
            ends = [sampling.percent_to_sigma(at) for at in (self.policy.start_percent, self.policy.end_percent)]
            # in float32 as the sampler's sigmas are, so that a step exactly at an end is inside
            first, last = torch.tensor(ends, dtype=torch.float32).tolist()
            run.window = (first, last)

        def count_step(step: int, *progress: Any) -> Any:
            run.step = step + 1
            return None if callback is None else callback(step, *progress)

        around, self._run = self._run, run
        status = "error"
        try:
            result = executor(noise, latent_image, sampler, sigmas, denoise_mask, count_step, *args, **kwargs)
            status = "finished"
            return result
        except BaseException as error:
            if type(error).__name__ == "InterruptProcessingException":
                status = "interrupted"
            raise
        finally:
            self._run = around
            run.close(status)
            logger.info("SageScope: %s", run.summary())

    def apply_model(self, executor: Any, x: Any, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The wrapper around the model call: a forward starts and ends."""
        self._forget_retired()
        run = self._current_run()
        options = kwargs.get("transformer_options") or (args[3] if len(args) > 3 else None) or {}
        override = options.get("optimized_attention_override")
        if override != self.attend and run.replaced_by is None:
            run.replaced_by = describe_function(override)
        forward = Forward(run, self._whole_forward_refusal(run, t))
        around = getattr(self._threads, "forward", None)
        self._threads.forward = forward
        try:
            return executor(x, t, *args, **kwargs)
        finally:
            self._threads.forward = around
            run.record(forward.plans)

    def _whole_forward_refusal(self, run: Run, t: torch.Tensor) -> Refusal | None:
        if run.exact_from_now_on is not None:
            return run.exact_from_now_on
        if run.window is None:
            return None
        sigma = float(t.flatten()[0])  # waits for the device, which only a window makes necessary
        first, last = run.window
        if last <= sigma <= first:
            return None
        start, end = self.policy.start_percent, self.policy.end_percent
        return Refusal(
            RefusalCode.OUTSIDE_WINDOW, f"the step is outside start_percent {start:g} to end_percent {end:g}"
        )

    # -- for the nodes

    def prepare(self, device: torch.device) -> tuple[Refusal, ...]:
        """Load what this policy may use on ``device``, so that nothing is found missing in the middle of a run.

        Returns every reason why the kernel chosen by name cannot serve any call there; empty for auto and native.
        """
        if self.policy.kernel == NATIVE_ONLY:
            return ()
        if self.policy.kernel == AUTO:
            for preference in STARTING_ORDER.get(self.session.environment.arch_of(device), ()):
                self._load_again(self.session.backend(preference.kernel), device)
            return ()
        backend = self.session.backend(self.policy.kernel)
        support = backend.support
        spec = AttentionSpec(
            arch=self.session.environment.arch_of(device),
            # what every GPU kernel takes; float32, where declared at all, is for CPUs
            dtype="bfloat16" if "bfloat16" in support.dtypes else support.dtypes[-1],
            batch_size=1,
            num_qo_heads=1,
            num_kv_heads=1,
            qo_len=256,
            kv_len=256,
            head_dim=support.head_dims[-1] if support.head_dims else min(128, support.max_head_dim or 128),
        )
        _, (verdict,) = select(
            spec,
            [(backend, None)],
            self.policy,
            load=lambda backend: self._load_again(backend, device),
            trial=lambda use: self.session.trial(use, spec, device),
        )
        return verdict.refusals

    def _load_again(self, backend: Backend, device: torch.device) -> Kernel | tuple[Refusal, ...]:
        return self.session.load(backend, device, self.policy.allow_hub_download, again=True)

    def snapshot(self) -> dict[str, Any]:
        """The report's data in plain JSON types; runs oldest first."""
        return {
            "environment": self.session.snapshot(),
            "policy": self.policy.to_json(),
            "previous_override": None if self.previous is None else describe_function(self.previous),
            "runs": self.stats.snapshot(),
        }


def _server(use: Use, call: AttentionCall, spec: AttentionSpec) -> Callable[..., torch.Tensor | Refusal]:
    """The function that serves calls like ``call`` with ``use``: views in, kernel, view out."""
    to_kernel, from_kernel = shaping(call, spec, use.layout, use.expand_kv, use.backend.support.max_offset)
    function, keywords, name = use.kernel.function, use.keywords(spec), use.backend.name
    index = call.query.device.index if call.query.is_cuda else None

    def serve(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Any:
        try:
            query, key, value = to_kernel(query, key, value)
            given = keywords if mask is None else {**keywords, "attn_mask": four_axes(mask)}
            if index is None or index == torch.cuda.current_device():
                return from_kernel(function(query, key, value, **given))
            with torch.cuda.device(index):
                return from_kernel(function(query, key, value, **given))
        except Exception as error:  # whatever a kernel package may raise, the picture goes on
            return explain(error, name)

    return serve


def _native_plan(code: RefusalCode, detail: str) -> Plan:
    return Plan(NATIVE, None, None, (Verdict(ANY_KERNEL, (Refusal(code, detail),)),))


UNREADABLE = _native_plan(RefusalCode.UNKNOWN_ARGUMENT, "ComfyUI passed arguments in a way that is not known")
NOT_PLAIN = _native_plan(RefusalCode.TENSOR_TYPE, "query, key, value or attn_mask is no plain dense tensor")


def _block_key(keywords: dict[str, Any]) -> tuple[Any, ...] | None:
    """What the model says about the block that a call is in; None when it says nothing."""
    options = keywords.get("transformer_options") or {}
    block = (options.get("block"), options.get("block_type"), options.get("block_index"))
    return None if block == (None, None, None) else block


def _describe_block(keywords: dict[str, Any]) -> str | None:
    """The block as people name it: "double 3", "input 4, 0", "block 5"."""
    key = _block_key(keywords)
    if key is None:
        return None
    block, block_type, index = key
    if isinstance(block, tuple):
        return " ".join(map(str, block)) + ("" if index is None else f", {index}")
    return f"{block_type or 'block'} {index}"


def describe_function(function: Any) -> str:
    """Where a function comes from, for a person: module and qualified name."""
    if function is None:
        return "nothing"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
