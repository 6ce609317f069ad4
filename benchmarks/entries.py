"""What is measured against what: each entry makes a MODEL out of the plain one, or says what it misses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from . import comfyui

NATIVE = "native"
AGAIN = "native again"
AUTO = "auto"
OBSERVE = "native (observe only)"
CORE_SAGE = "core sage"
CORE_KITCHEN = "core comfy-kitchen int8"
PLAIN_SAGE = "plain sageattn"
IN_GRAPH = f"{PLAIN_SAGE}, in the graph"
OUTSIDE_GRAPH = f"{PLAIN_SAGE}, outside the graph"
OVERRIDE = "optimized_attention_override"


class Missing(Exception):
    """Why an entry cannot be measured on this machine."""


Entry = Callable[[Any], Any]
"""MODEL in, a patched clone out; raises Missing."""


def entries(device: torch.device, *, compiled: bool = False) -> dict[str, Entry]:
    """Name to entry, in the order of a round: the two native ones around all others.

    For models that are ``compiled``, sageattn() is there twice: traced with the model, and called between its graphs.
    """
    plain_sage = {IN_GRAPH: plain_sageattn, OUTSIDE_GRAPH: partial(plain_sageattn, wrap=torch.compiler.disable)}
    return {
        NATIVE: plain,
        CORE_SAGE: partial(core_function, "sage", "sageattention"),
        CORE_KITCHEN: partial(core_function, "comfy_kitchen_int8", "a comfy-kitchen with INT8 attention for this GPU"),
        **(plain_sage if compiled else {PLAIN_SAGE: plain_sageattn}),
        OBSERVE: partial(the_pack, kernel=OBSERVE),
        AUTO: partial(the_pack, kernel=AUTO, compare_with_native="first time"),
        **{name: partial(the_pack, kernel=name) for name in kernels_by_name(device)},
        AGAIN: plain,
    }


def kernels_by_name(device: torch.device) -> tuple[str, ...]:
    """The kernels that the pack starts from on this GPU, and those of SageAttention that load; on a CPU the preview."""
    if device.type == "cpu":
        return ("int8_reference",)
    core, session = comfyui.pack("sage_core"), comfyui.pack("nodes.patch_attention").SESSION
    arch = session.environment.arch_of(device)
    preferred = [preference.kernel for preference in session.order.get(arch, ())]
    preferred = [name for name in preferred if not name.startswith("hub: ")]
    kernel = comfyui.pack("sage_core.backends.base").Kernel
    loads = [
        backend.name
        for backend in core.BACKENDS
        if backend.package == "sageattention"
        and arch in (backend.support.archs or ())
        and isinstance(session.load(backend, device, False), kernel)
    ]
    return tuple(dict.fromkeys([*preferred, *loads[:1]]))


def plain(model: Any) -> Any:
    return model.clone()


def the_pack(model: Any, **widgets: Any) -> Any:
    """Through the pack's own node. A kernel by name is not compared with native: the rounds do that."""
    try:
        return comfyui.apply(
            model, **{"compare_with_native": "never", "if_unavailable": "stop with an error", **widgets}
        )
    except RuntimeError as error:
        raise Missing(str(error)) from error


def core_function(name: str, needs: str, model: Any) -> Any:
    """ComfyUI's own function of that name for all attention of the model, as its command line option chooses it."""
    from comfy.ldm.modules import attention

    function = getattr(attention, "get_attention_function", lambda *_: None)(name, None)
    if function is None:
        raise Missing(f"ComfyUI {comfyui.version()} has no attention function '{name}' here: it needs {needs}")
    if hasattr(model, "set_model_optimized_attention"):
        patched = model.clone()
        patched.set_model_optimized_attention(function)
        return patched
    return _with_override(model, lambda _, *args, **kwargs: function(*args, **kwargs))


def chosen(name: str, names: Sequence[str] | None) -> bool:
    """Whether to measure an entry: native and auto always, others by name; what is before a comma names all of them."""
    return name in (NATIVE, AGAIN, AUTO) or names is None or name.partition(",")[0] in names


def plain_sageattn(model: Any, wrap: Callable[..., Any] = lambda function: function) -> Any:
    """sageattn() for every call, as the patch nodes of other packs do: it neither measures nor checks.

    Masked calls stay native: SageAttention 2 has no kernel on every GPU that honours a mask.
    """
    try:
        from sageattention import sageattn
    except Exception as error:  # a broken build raises whatever it likes
        raise Missing(f"sageattention cannot be imported: {error}") from error
    return _with_override(model, partial(_sage_override, wrap(sageattn)))


def _sage_override(
    sageattn: Callable[..., torch.Tensor],
    func: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    if mask is not None:
        given = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
        return func(q, k, v, heads, mask=mask, attn_precision=attn_precision, **given, **kwargs)
    if skip_reshape:
        layout, head_axis = "HND", 1
    else:
        layout, head_axis = "NHD", 2
        width = q.shape[-1] // heads
        q, k, v = (tensor.unflatten(-1, (-1, width)) for tensor in (q, k, v))
    if (repeats := q.shape[head_axis] // k.shape[head_axis]) > 1:
        k, v = (tensor.repeat_interleave(repeats, dim=head_axis) for tensor in (k, v))
    output = sageattn(q, k, v, tensor_layout=layout, is_causal=False, sm_scale=kwargs.get("scale"))
    if skip_output_reshape:
        return output if layout == "HND" else output.transpose(1, 2)
    return (output.transpose(1, 2) if layout == "HND" else output).flatten(2)


def _with_override(model: Any, override: Callable[..., torch.Tensor]) -> Any:
    patched = model.clone()
    patched.model_options.setdefault("transformer_options", {})[OVERRIDE] = override
    return patched


def served(model: Any) -> Mapping[str, int]:
    """Calls of the last run by kernel, as the pack's report counts them; empty without the pack."""
    dispatcher = comfyui.dispatcher_of(model)
    if dispatcher is None:
        return {}
    return {entry["kernel"]: entry["calls"] for entry in dispatcher.snapshot()["runs"][-1]["calls_by_kernel"]}
