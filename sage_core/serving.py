"""How a kernel serves calls like one: ComfyUI's tensors to the kernel and its output back, and the check of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .call import AttentionCall, four_axes, shaping
from .checking import site_norms
from .failure import explain
from .refusal import Refusal, RefusalCode
from .selection import Use
from .spec import AttentionSpec


def server(use: Use, call: AttentionCall, spec: AttentionSpec) -> Callable[..., torch.Tensor | Refusal]:
    """The function that serves calls like ``call`` with ``use``: views in, kernel, view out."""
    to_kernel, from_kernel = shaping(call, spec, use.layout, use.expand_kv, use.backend.support.max_offset)
    function, keywords, name = use.kernel.function, use.keywords(spec), use.backend.name
    index = call.query.device.index if call.query.is_cuda else None

    def serve(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Any:
        try:
            query, key, value = to_kernel(query, key, value)
            given = keywords if mask is None else {**keywords, "attn_mask": four_axes(mask)}
            # on_device_of says the same, at a cost that each call would pay
            if index is None or index == torch.cuda.current_device():
                return from_kernel(function(query, key, value, **given))
            with torch.cuda.device(index):
                return from_kernel(function(query, key, value, **given))
        except Exception as error:  # whatever a kernel package may raise, the picture goes on
            return explain(error, name)

    return serve


def looker(call: AttentionCall, spec: AttentionSpec) -> Callable[..., torch.Tensor]:
    """The function that checks an output of calls like ``call`` in the middle of a run."""
    flags = {"skip_reshape": call.skip_reshape, "skip_output_reshape": call.skip_output_reshape}
    heads = call.heads

    def look(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, output: torch.Tensor
    ) -> torch.Tensor:
        again = AttentionCall.from_comfy(query, key, value, heads, mask, None, **flags)
        return site_norms(again, spec, output, exact=False)

    return look


def misfit(name: str, output: torch.Tensor, query: torch.Tensor) -> Refusal | None:
    """Why an output cannot be handed on for ``query``; None when size and dtype are query's."""
    if output.dtype == query.dtype and output.numel() == query.numel():
        return None
    detail = f"{name} returned {list(output.shape)} {output.dtype} for query {list(query.shape)} {query.dtype}"
    return Refusal(RefusalCode.KERNEL_ERROR, detail)
