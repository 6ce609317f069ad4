"""Dispatcher: the state of one patched model: plan each call, run it, fall back, record.

Entry points, called by ComfyUI: ``attend`` for every attention call, ``outer_sample`` around a run and ``apply_model``
around a forward.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.compiler import is_compiling

from .backends.base import Backend, Kernel
from .call import AttentionCall, Native, decision_key
from .comparing import lasting_obstacle, obstacle, own_control
from .compiled import GraphCalls, call_in_graph, is_compiled
from .device import RandomState, is_capturing, waiter
from .failure import GivenAway
from .forwards import Forward, Review, begin_check, check_sites, end_check
from .outputs import tensors_of
from .planning import Planner, block_key
from .plans import Place, Plans
from .policy import AUTO, NATIVE_ONLY, Policy
from .refusal import Refusal, RefusalCode
from .selection import ANY_KERNEL, NATIVE, Plan, Verdict, select
from .serving import misfit
from .session import Session
from .spec import AttentionSpec
from .stats import Run, Stats

logger = logging.getLogger("sagescope")

OVERRIDE = "optimized_attention_override"
"""Where ComfyUI looks for an attention override among the transformer_options."""
OWN_KEY = "sagescope"
"""The key of our wrappers and of the dispatcher among a model's attachments."""
MAX_KEYS = 1_000
"""Kinds of forwards whose keys are kept; sizes and conditions in a queue are fewer."""

HostContext = Callable[[], tuple["str | None", "str | None"]]
"""Asks ComfyUI for (prompt_id, node_id) of the node that is being executed."""


def nobody_said() -> Native:
    """Stands for the question for ComfyUI's attention function, where there is no ComfyUI to ask."""
    raise RuntimeError("a call came in containers, and this Dispatcher does not know ComfyUI's attention function")


class Dispatcher:
    """The attention of one patched clone; shared by every later clone of it.

    ``previous`` is the override that was on the model before: it takes the place of native attention.
    ``optimized_attention`` gives ComfyUI's current attention function, for calls in containers, which come without one;
    ``saves_memory`` says whether it holds no scores of all query and key tokens.
    """

    def __init__(
        self,
        policy: Policy,
        session: Session,
        previous: Callable[..., torch.Tensor] | None = None,
        host_context: HostContext = lambda: (None, None),
        optimized_attention: Callable[[], Native] = nobody_said,
        saves_memory: Callable[[], bool] = lambda: False,
        apply_node_id: str | None = None,
        run_opened: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.policy = policy
        self.session = session
        self.previous = previous
        self.stats = Stats(apply_node_id, run_opened)
        self._host_context = host_context
        self._optimized_attention = optimized_attention
        self._saves_memory = saves_memory
        self._skips_blocks = bool(policy.skip_blocks)
        self._planner = Planner(policy, session)
        self._plans = Plans(session)
        self._known = self._plans.known
        self._review = Review(policy, session, self._plans, self._planner.finder)
        self._failing = session.failing
        self._threads = threading.local()
        self._run: Run | None = None
        self._models: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._keys: dict[tuple[Any, ...], str] = {}
        self._in_graph = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """Itself: old ComfyUI copies model options deeply, and the copies must go on counting in one place."""
        return self

    def __copy__(self) -> Dispatcher:
        """Itself, for the same reason."""
        return self

    # -- one attention call

    def attend(self, func: Native, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The attention override: ComfyUI's arguments in, attention out."""
        if is_compiling():
            # an override that was there before may read anything from the call's transformer_options
            traced = None if self.previous is not None else call_in_graph(func, *args, **kwargs)
            return self._attend_eagerly(func, *args, **kwargs) if traced is None else traced
        forward: Forward | None = getattr(self._threads, "forward", None)
        if forward is None:
            return self._attend_outside(func, *args, **kwargs)
        plans = forward.plans
        site = len(plans)
        reason = self._block_refusal(forward, kwargs) if self._skips_blocks else forward.reason
        try:
            alike = self._known[forward.host_bound].get(decision_key(*args, **kwargs))
        except TypeError:
            plan: Plan | None = UNREADABLE
        else:
            plan = None if alike is None else alike.get((site, reason))
        fresh = plan is None
        if plan is None:
            plan = self._new_plan(forward, (site, reason), func, args, kwargs)
        plans.append(plan)
        output: Any = None
        if plan.serve is not None:
            output = plan.serve(args[0], args[1], args[2], args[4] if len(args) > 4 else kwargs.get("mask"))
            if fresh and not isinstance(output, Refusal):
                output = misfit(plan.kernel, output, args[0]) or output
            if isinstance(output, Refusal):
                plans[site] = self._after_failure(plan, output, forward, args[0].device)
                output = None
            elif self._failing:
                self.session.succeeded(plan.kernel, args[0].device)
        if forward.watch is not None:
            mask = args[4] if len(args) > 4 else kwargs.get("mask")
            forward.watch(forward, site, plans[site], (*args[:3], mask), None if fresh else output)
        if output is not None:
            return output  # type: ignore[no-any-return]
        return self._native(func, args, kwargs)

    __call__ = attend
    """What ComfyUI calls is the dispatcher itself: it looks for ``container_function`` there."""

    @property
    def memory_efficient(self) -> bool:
        """What ComfyUI may ask an override when it estimates the memory of a model call: without an answer it assumes
        the scores of all tokens. No kernel holds them, so the answer is that of what serves the other calls."""
        if self.previous is None:
            return self._saves_memory()
        return bool(getattr(self.previous, "memory_efficient", False))

    def container_function(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``attend`` for query, key and value in ComfyUI's containers, which nobody else holds: a kernel that can lets
        go of them as soon as they are quantized.

        ComfyUI does not say which function it would have run; its current one stands for it.
        """
        forward: Forward | None = None if is_compiling() else getattr(self._threads, "forward", None)
        plan: Plan | None = None
        # a kernel that cannot be captured must find its tensors still there, for native to take over
        if forward is not None and not is_capturing(query.peek().device):
            plan = self._plan_for(forward, query.peek(), key.peek(), value.peek(), *args, **kwargs)
        if forward is None or plan is None or _needs_tensors(forward, plan):
            return self.attend(self._optimized_attention(), query.take(), key.take(), value.take(), *args, **kwargs)
        forward.plans.append(plan)
        if plan.release is None:
            return self._native_of_containers((query, key, value), args, kwargs)
        device = query.peek().device
        check = None
        if forward.watch is check_sites:
            check = begin_check(forward, plan, (query.peek(), key.peek(), value.peek(), None))
        output = plan.release(query, key, value)
        if isinstance(output, Refusal):
            self._after_failure(plan, output, forward, device)
            raise GivenAway(output.detail)
        if self._failing:
            self.session.succeeded(plan.kernel, device)
        end_check(forward, len(forward.plans) - 1, plan, check, output)
        return output  # type: ignore[no-any-return]

    def _plan_for(self, forward: Forward, *args: Any, **kwargs: Any) -> Plan | None:
        """The plan of the forward's next call where it is known; ``attend`` does the same without a call for it."""
        reason = self._block_refusal(forward, kwargs) if self._skips_blocks else forward.reason
        try:
            alike = self._known[forward.host_bound].get(decision_key(*args, **kwargs))
        except TypeError:
            return None
        return None if alike is None else alike.get((len(forward.plans), reason))

    def _native_of_containers(
        self, containers: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Native attention, which may release what is in the containers as well, where it knows of them."""
        native = self._optimized_attention()
        if self.previous is None and hasattr(native, "container_function"):  # None says: ComfyUI opens them itself
            return native(*containers, *args, **kwargs)
        if (function := getattr(self.previous, "container_function", None)) is not None:
            return function(*containers, *args, **kwargs)  # type: ignore[no-any-return]
        return self._native(native, (*(held.take() for held in containers), *args), kwargs)

    def _native(self, func: Native, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        return func(*args, **kwargs) if self.previous is None else self.previous(func, *args, **kwargs)

    @torch.compiler.disable
    def _attend_eagerly(self, func: Native, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``attend`` outside the graph that torch.compile is tracing, for a call that a graph cannot express."""
        return self.attend(func, *args, **kwargs)

    def _attend_outside(self, func: Native, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``attend`` for a call that no forward stands around, or one that goes without the override."""
        if getattr(self._threads, "bare", False):
            return self._native(func, args, kwargs)
        self._plans.forget_retired()
        run = self._current_run()
        forward = self._threads.forward = Forward(run, run.exact_from_now_on)
        try:
            return self.attend(func, *args, **kwargs)
        finally:
            self._threads.forward = None
            run.record_outside(forward.plans)

    def _new_plan(
        self, forward: Forward, place: Place, func: Native, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan:
        """The plan for a call whose like was not seen before, kept for the next ones."""
        key = decision_key(*args, **kwargs)
        if key is None:
            return NOT_PLAIN
        plan = self._planner.plan(
            AttentionCall.from_comfy(*args, **kwargs),
            place[1],
            lambda: self._native(func, args, kwargs),
            describe_function(self.previous or func),
            self._plans.banned(key, place),
            forward.host_bound,
        )
        if plan.once is not None:
            if plan.once.code is RefusalCode.OUT_OF_MEMORY:
                self._leave_to_native(forward, plan.once)
            return plan
        self._plans.keep(key, place, plan, forward.host_bound)
        return plan

    def _block_refusal(self, forward: Forward, kwargs: dict[str, Any]) -> Refusal | None:
        """Why the call's forward or its block stays native; counts blocks as the forward reaches them."""
        block = block_key(kwargs)
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
            self.session.after_failure(plan.kernel, device, refusal)
            self._plans.drop(plan.kernel)
            forward.run.note(refusal.detail)
        return Plan(NATIVE, plan.spec, plan.block, (Verdict(plan.kernel, (refusal,)),), once=refusal)

    def _leave_to_native(self, forward: Forward, refusal: Refusal) -> None:
        """After running out of memory: the rest of the forward and of its run is native, the next run is not."""
        forward.reason = forward.run.exact_from_now_on = refusal
        forward.run.note(refusal.detail)
        logger.info("SageScope: %s. The rest of this run uses native attention.", refusal.detail)

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
        device = getattr(patcher, "load_device", None)
        run = self.stats.open(*self._host_context(), model=type(patcher.model).__name__, device=device)

        def count_step(step: int, *progress: Any, **named: Any) -> Any:
            run.step = int(step) + 1
            return None if callback is None else callback(step, *progress, **named)

        around, self._run = self._run, run
        status = "error"
        try:
            self._begin(run, patcher, sigmas)
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
            self.session.flush()
            logger.info("SageScope: %s", run.summary())

    def _begin(self, run: Run, patcher: Any, sigmas: Any) -> None:
        """What is known of a run before its first forward."""
        run.total_steps = max(len(sigmas) - 1, 0)
        if self._planner.finder.begin_run():
            self._plans.forget()
            self._review.forget_for_now()
        run.obstacle = lasting_obstacle(
            getattr(patcher, "model_options", {}), getattr(patcher, "object_patches", {}).keys()
        )
        if not self.policy.whole_schedule:
            # asked now, not in the node: nodes after ours may change the schedule
            sampling = patcher.get_model_object("model_sampling")
            ends = [sampling.percent_to_sigma(at) for at in (self.policy.start_percent, self.policy.end_percent)]
            # in float32 as the sampler's sigmas are, so that a step exactly at an end is inside
            first, last = torch.tensor(ends, dtype=torch.float32).tolist()
            run.window = (first, last)

    def apply_model(self, executor: Any, x: Any, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The wrapper around the model call: a forward starts and ends."""
        self._plans.forget_retired()
        run = self._current_run()
        options = kwargs.get("transformer_options") or (args[3] if len(args) > 3 else None) or {}
        override = options.get(OVERRIDE)
        if override is not self and run.replaced_by is None:
            run.replaced_by = describe_function(override)
        outside = self._whole_forward_refusal(run, t)
        # all inputs but the options, whose schedule has a length of its own
        named = [value for name, value in kwargs.items() if name != "transformer_options"]
        key = self._forward_key(executor, t.device, [x, *args[:3], *args[4:], *named], options)
        in_the_way = run.obstacle or obstacle(options, OWN_KEY)
        silent = run.silent_plans(key, outside) if in_the_way is None else None
        if silent is not None and override is self:
            run.record(silent)
            return self._run_without_override(executor, x, t, args, kwargs, options)
        reason = outside
        if reason is None and (self.policy.compare_with_native != "every run" or run.comparison_of(key) is not None):
            reason = self._review.not_faster(key)

        random = RandomState(t.device)

        def run_forward(forward: Forward) -> Any:
            while True:
                made_again = False
                try:
                    return run_once(forward)
                except GivenAway:  # the kernel is out by now, or all of the forward native
                    made_again = True
                    doubt = "" if in_the_way is None else f"; it may not be repeatable: {in_the_way}"
                    run.note(f"the forward was run again: query, key and value were gone when the kernel failed{doubt}")
                finally:
                    run.record(forward.plans, extra=forward.extra or made_again)
                forward.begin_again()

        def run_once(forward: Forward) -> Any:
            around = getattr(self._threads, "forward", None)
            self._threads.forward = forward
            random.restore_before_repeat()
            try:
                with GraphCalls(self.attend, options) as graph_calls:
                    return executor(x, t, *_own(args), **kwargs)
            finally:
                self._threads.forward = around
                self._in_graph = graph_calls.used

        def run_bare() -> Any:
            """Native as it is without the pack, for a fair comparison."""
            if override is not self:
                return run_forward(Forward(run, COMPARED, extra=True))
            run.record(forward.plans, extra=True)
            random.restore_before_repeat()
            return self._run_without_override(executor, x, t, args, kwargs, options)

        forward = Forward(run, reason, host_bound=self._review.host_bound(key))
        if reason is None and run.takes_check():
            forward.watch = check_sites
        before = self._review.settled(run)
        output = self._review.approve(forward, run_forward(forward), run_forward)
        if in_the_way is None and (bound := self._review.find_limit(forward, key, run_bare, waiter(t))) is not None:
            forward = Forward(run, reason, host_bound=bound)
            output = self._review.approve(forward, run_forward(forward), run_forward)
        if all(plan.serve is None for plan in forward.plans):
            # without a call, or where another node may leave calls out, the next forward can be a different one
            lasting = all(plan.once is None for plan in forward.plans)
            if forward.plans and lasting and in_the_way is None:
                run.silence(key, outside, forward.plans)
        elif self._review.settled(run) == before and self._review.compares(run, key, in_the_way, output):
            output = self._review.compare(forward, key, run_bare, run_forward, waiter(t), output)
        return output

    def _run_without_override(
        self, executor: Any, x: Any, t: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> Any:
        """A forward that is native at every site, without a way through us: at exactly native speed.

        Where graphs of torch.compile call us, the override stays in the options, as its absence might have them traced
        again; their operators, and the calls beside them, are native at once.
        """
        if self._in_graph:
            self._threads.bare = True
            try:
                with GraphCalls(None, options):
                    return executor(x, t, *_own(args), **kwargs)
            finally:
                self._threads.bare = False
        bare = {name: value for name, value in options.items() if name != OVERRIDE}
        if self.previous is not None:
            bare[OVERRIDE] = self.previous
        if "transformer_options" in kwargs:
            return executor(x, t, *_own(args), **{**kwargs, "transformer_options": bare})
        return executor(x, t, *_own(args)[:3], bare, *args[4:], **kwargs)

    def _forward_key(self, executor: Any, device: torch.device, inputs: list[Any], options: dict[str, Any]) -> str:
        """What makes two forwards alike: device, model, what native means, sizes of the inputs, what was chosen."""
        base_model = getattr(executor, "class_obj", None)
        network = getattr(base_model, "diffusion_model", base_model)
        model = self._models.get(network) if network is not None else ""
        if model is None:
            model = self._models[network] = _describe_model(network)
        sizes = tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(inputs))
        compiled = is_compiled(options)
        alike = (device, model, sizes, compiled, tuple(sorted(options.get("patches") or ())))
        key = self._keys.get(alike)
        if key is None:  # a text takes longer to write than a native forward may cost
            if len(self._keys) >= MAX_KEYS:
                self._keys.clear()
            described = [(tuple(shape), str(dtype)) for shape, dtype in sizes]
            native = "" if self.previous is None else f" over {describe_function(self.previous)}"
            chosen = f"{self.policy.plan_key()}{native}{' compiled' if compiled else ''} {list(alike[-1])}"
            key = self._keys[alike] = f"{self.session.device_name(device)}: {model} {described} {chosen}"
        return key

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
            for preference in self.session.order.get(self.session.environment.arch_of(device), ()):
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
            [backend],
            self.policy,
            load=lambda backend: self._load_again(backend, device),
            trial=lambda use: self.session.trial(use, spec, device) or use,
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


def _own(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments after x and t for one forward: c_concat, c_crossattn, control, ... with a control of its own."""
    return tuple(own_control(argument) if position == 2 else argument for position, argument in enumerate(args))


def _describe_model(model: Any) -> str:
    """Kind, size and dtypes of a model: models of one class come in several."""
    weights = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    dtypes = sorted({str(weight.dtype) for weight in weights})
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    return f"{kind} {sum(weight.numel() for weight in weights)} {dtypes}"


def _native_plan(code: RefusalCode, detail: str) -> Plan:
    return Plan(NATIVE, None, None, (Verdict(ANY_KERNEL, (Refusal(code, detail),)),))


def _needs_tensors(forward: Forward, plan: Plan) -> bool:
    """Whether the kernel, or who watches the forward, needs query, key and value after attention has begun."""
    if forward.watch not in (None, check_sites):
        return True
    return plan.serve is not None and plan.release is None


COMPARED = Refusal(RefusalCode.COMPARED, "the forward was run natively as well, to compare")
UNREADABLE = _native_plan(RefusalCode.UNKNOWN_ARGUMENT, "ComfyUI passed arguments in a way that is not known")
NOT_PLAIN = _native_plan(RefusalCode.TENSOR_TYPE, "query, key, value or attn_mask is no plain dense tensor")


def describe_function(function: Any) -> str:
    """Where a function comes from, for a person: module and qualified name.

    ComfyUI names the modules of a pack by its whole folder, of which the last part is enough.
    """
    if function is None:
        return "nothing"
    if isinstance(function, Dispatcher):
        return "another Apply SageAttention"
    named = function if hasattr(function, "__qualname__") else type(function)
    module = re.split(r"[/\\]", str(getattr(named, "__module__", None)))[-1]
    return f"{module}.{named.__qualname__}"
