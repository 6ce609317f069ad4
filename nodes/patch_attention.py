"""Apply SageAttention: clones the model and puts a Dispatcher on the clone."""

from __future__ import annotations

import logging
from typing import Any

from comfy_api.latest import io

from ..sage_core import (
    AUTO,
    COMPARE_CHOICES,
    KERNEL_CHOICES,
    NORMAL_TOLERANCE,
    OVERRIDE,
    OWN_KEY,
    SMOOTH_K_CHOICES,
    STOP,
    TOLERANCES,
    UNAVAILABLE_CHOICES,
    USE_NATIVE,
    Dispatcher,
    Policy,
    PolicyError,
    describe_function,
)
from .host import SESSION, executing, optimized_attention, remember, saves_memory, schema

logger = logging.getLogger("sagescope")

WRAPPERS = ("outer_sample", "apply_model")
"""ComfyUI's names of the wrappers around a run and around a forward (comfy.patcher_extension.WrappersMP)."""


class ApplySageAttention(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="ApplySageAttention",
            display_name="Apply SageAttention",
            category="model/patch",
            description=(
                "Sends the attention of this model to the kernel that suits each call and this GPU; every other call "
                "runs exactly as without this node. Connect Attention Backend Report to see what served what."
            ),
            search_aliases=["sage", "sageattention", "attention", "sage attention", "fast attention"],
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model. Only this node's output is changed."),
                io.Combo.Input(
                    "kernel",
                    options=list(KERNEL_CHOICES),
                    default=AUTO,
                    tooltip=(
                        "auto measures the kernels on this GPU and takes the fastest that is accurate here. "
                        "'native (observe only)' changes nothing, only records. A kernel chosen by name serves what it "
                        "can; other calls stay native and the report says why."
                    ),
                ),
                io.Combo.Input(
                    "smooth_k",
                    options=list(SMOOTH_K_CHOICES),
                    default="auto",
                    tooltip=(
                        "Subtract the mean key before quantizing: helps where keys share an offset, hurts some models. "
                        "auto tries both at each site and keeps the better; with on or off, a kernel without this "
                        "switch refuses."
                    ),
                ),
                io.Float.Input(
                    "start_percent",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.001,
                    tooltip="Earliest point of the noise schedule to use a kernel at: 0 is the first step.",
                ),
                io.Float.Input(
                    "end_percent",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.001,
                    tooltip="Latest point of the noise schedule to use a kernel at: 1 is the last step.",
                ),
                io.String.Input(
                    "skip_blocks",
                    default="",
                    tooltip=(
                        "Blocks that stay native, such as 0, 1, 47-49. They are numbered from 0 in the order in which "
                        "the model runs them; the report lists them."
                    ),
                ),
                io.Combo.Input(
                    "if_unavailable",
                    options=list(UNAVAILABLE_CHOICES),
                    default=USE_NATIVE,
                    tooltip="What to do when the kernel chosen by name cannot be used on this machine.",
                ),
                io.Boolean.Input(
                    "allow_hub_download",
                    default=False,
                    tooltip=(
                        "Let 'hub: ...' kernels be downloaded from the Hugging Face Hub. They are code that runs on "
                        "this machine. When off, only what is in the local cache is used."
                    ),
                ),
                io.Combo.Input(
                    "tolerance",
                    options=list(TOLERANCES),
                    default=NORMAL_TOLERANCE,
                    tooltip=(
                        "How far a quantized kernel may be from exact attention (relative L2 of the worst head, on the "
                        "model's own tensors) to serve a site. off compares no site; NaN, Inf and wrong shapes are "
                        "caught all the same."
                    ),
                ),
                io.Combo.Input(
                    "compare_with_native",
                    options=list(COMPARE_CHOICES),
                    default=COMPARE_CHOICES[0],
                    tooltip=(
                        "When a model call is also run natively, to see what the kernels bring and what they change: "
                        "the first time for each kind of model, input size and settings of this node, in every run, or "
                        "never. With kernel on auto, kernels that did not make it faster are not used, also when this "
                        "is later set to never."
                    ),
                ),
            ],
            outputs=[io.Model.Output(display_name="model")],
            hidden=[io.Hidden.unique_id],
            # two equal nodes would share one result, and with it one record of runs
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, model: Any, **widgets: Any) -> io.NodeOutput:
        try:
            policy = Policy.from_widgets(KERNEL_CHOICES, **widgets)
        except PolicyError as error:
            # ComfyUI heads its error box with the type, and for one of ours with the path of the pack as well
            raise ValueError(str(error)) from None
        previous = _override_before(model)
        # a script may call the node without ComfyUI's executor around it
        node_id = getattr(cls.hidden, "unique_id", None)
        about = {"policy": policy.to_json(), "previous_override": previous and describe_function(previous)}
        dispatcher = Dispatcher(
            policy,
            SESSION,
            previous,
            executing,
            optimized_attention,
            saves_memory,
            node_id,
            lambda run: remember(run, about),
        )
        refusals = dispatcher.prepare(model.load_device)
        if refusals:
            reasons = "\n".join(f"- {refusal.detail} ({refusal.advice})" for refusal in refusals)
            if policy.if_unavailable == STOP:
                raise RuntimeError(f"kernel '{policy.kernel}' cannot be used on {model.load_device}:\n{reasons}")
            logger.warning("SageScope: '%s' cannot be used, native attention runs:\n%s", policy.kernel, reasons)
        return io.NodeOutput(_patched(model, dispatcher))


def _override_before(model: Any) -> Any:
    """The override that is on the model without us; an Apply SageAttention upstream is replaced, not chained.

    Raises ValueError for a MODEL that cannot be patched.
    """
    options = getattr(model, "model_options", None)
    if options is None or not hasattr(model, "clone") or not hasattr(getattr(model, "model", None), "diffusion_model"):
        raise ValueError(f"model is a {type(model).__name__} without a diffusion model; allowed: a diffusion MODEL")
    override = options.get("transformer_options", {}).get(OVERRIDE)
    if override is not None and not callable(override):
        raise ValueError(
            f"model carries an attention override of type {type(override).__name__}, which cannot be called; allowed: "
            "a model whose other patches are callable"
        )
    return override.previous if isinstance(override, Dispatcher) else override


def _patched(model: Any, dispatcher: Dispatcher) -> Any:
    """A clone of the model with the dispatcher on it."""
    patched = model.clone()
    patched.model_options.setdefault("transformer_options", {})[OVERRIDE] = dispatcher
    for name in WRAPPERS:
        patched.remove_wrappers_with_key(name, OWN_KEY)
        patched.add_wrapper_with_key(name, OWN_KEY, getattr(dispatcher, name))
    patched.set_attachments(OWN_KEY, dispatcher)
    return patched
