"""How a kernel serves calls like one: ComfyUI's tensors to the kernel and its output back, and the check of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .call import AttentionCall, four_axes, shaping
from .checking import site_norms
from .failure import explain
from .pieces import Piece, pieces
from .refusal import Refusal, RefusalCode
from .selection import Use
from .spec import AttentionSpec


def server(use: Use, call: AttentionCall, spec: AttentionSpec) -> Callable[..., torch.Tensor | Refusal]:
    """The function that serves calls like ``call`` with ``use``: views in, kernel, view out."""
    if parts := pieces(spec, use.backend.support.max_offset):
        return _server_of_pieces(use, call, spec, parts)
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


def _server_of_pieces(
    use: Use, call: AttentionCall, spec: AttentionSpec, parts: list[Piece]
) -> Callable[..., torch.Tensor | Refusal]:
    """``server`` for a call that is beyond the kernel's reach as a whole; what is copied is copied piece by piece."""
    shape = (spec.batch_size, spec.qo_len, spec.num_qo_heads, spec.head_dim)

    def heads_first(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if call.skip_reshape else tensor.unflatten(-1, (-1, spec.head_dim)).transpose(1, 2)

    servers = []
    for part in parts:
        query, key, value = part.of(*map(heads_first, call[:3]))
        heads = query.shape[1]
        small = spec._replace(batch_size=1, num_qo_heads=heads, num_kv_heads=key.shape[1])
        like = AttentionCall.from_comfy(query, key, value, heads, skip_reshape=True, skip_output_reshape=True)
        servers.append(server(use, like, small))

    def serve(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Any:
        try:
            tensors = heads_first(query), heads_first(key), heads_first(value)
            output = query.new_empty(shape).transpose(1, 2)
        except Exception as error:  # memory can be too short for it
            return explain(error, use.backend.name)
        for part, serve_part in zip(parts, servers, strict=True):
            given = None if mask is None else part.of_mask(four_axes(mask))
            served = serve_part(*part.of(*tensors), given)
            if isinstance(served, Refusal):
                return served
            output[part.batch, part.heads] = served
        return output if call.skip_output_reshape else output.transpose(1, 2).flatten(2)

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
