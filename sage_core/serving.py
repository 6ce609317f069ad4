"""How a kernel serves calls like one: ComfyUI's tensors to the kernel and its output back, and the check of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .call import AttentionCall, Tensors, four_axes, shaping
from .checking import site_check
from .device import on_device
from .failure import explain
from .pieces import Piece, pieces
from .refusal import Refusal, RefusalCode
from .selection import Use
from .spec import AttentionSpec

Serve = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], "torch.Tensor | Refusal"]
"""ComfyUI's (query, key, value, mask) -> output, or the Refusal of a kernel that raised. A plan keeps it, so no tensor
may be in it: what depends on the call is read from ``call`` before."""
Release = Callable[[Any, Any, Any], "torch.Tensor | Refusal"]
"""The same of ComfyUI's containers of query, key and value, each of which has one owner and is emptied by ``take()``:
when attention begins, the three tensors are gone."""


def server(use: Use, call: AttentionCall, spec: AttentionSpec) -> Serve:
    """The function that serves calls like ``call`` with ``use``: views in, kernel, view out."""
    split = _splitter(call, spec)
    mask = None if call.mask is None else four_axes(call.mask)
    parts = pieces(spec, split(*call[:3]), use.backend.support.max_offset, mask)
    return _server_of_pieces(use, call, spec, parts) if parts else _server_of_whole(use, call, spec)


def _server_of_whole(use: Use, call: AttentionCall, spec: AttentionSpec) -> Serve:
    to_kernel, from_kernel = shaping(call, spec, use.layout, use.expand_kv, use.backend.support.max_offset)
    function, keywords, name = use.kernel.function, use.keywords(spec), use.backend.name
    index = call.query.device.index if call.query.is_cuda else None

    def serve(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Any:
        try:
            query, key, value = to_kernel(query, key, value)
            given = keywords if mask is None else {**keywords, "attn_mask": four_axes(mask)}
            # on_device says the same, at a cost that each call would pay
            if index is None or index == torch.cuda.current_device():
                return from_kernel(function(query, key, value, **given))
            with torch.cuda.device(index):
                return from_kernel(function(query, key, value, **given))
        except Exception as error:  # whatever a kernel package may raise, the picture goes on
            return explain(error, name)

    return serve


def releaser(use: Use, call: AttentionCall, spec: AttentionSpec) -> Release | None:
    """The function that serves calls like ``call`` and lets go of query, key and value once they are quantized; None
    where the kernel cannot, and for a call that is cut, whose pieces are all of the same tensors."""
    prepare, max_offset = use.kernel.prepare, use.backend.support.max_offset
    if prepare is None or call.mask is not None or pieces(spec, _splitter(call, spec)(*call[:3]), max_offset):
        return None
    to_kernel, from_kernel = shaping(call, spec, use.layout, use.expand_kv, max_offset)
    keywords, name = use.keywords(spec), use.backend.name
    device = call.query.device

    def release(query: Any, key: Any, value: Any) -> Any:
        try:
            with on_device(device):
                # no name holds a tensor, which would live until the end: only the list that is emptied does
                attend = prepare(list(to_kernel(query.take(), key.take(), value.take())), **keywords)
                return from_kernel(attend())
        except Exception as error:  # as in _server_of_whole
            return explain(error, name)

    return release


def _server_of_pieces(use: Use, call: AttentionCall, spec: AttentionSpec, parts: list[Piece]) -> Serve:
    """``server`` for a call that is cut: what is copied for the kernel is copied piece by piece."""
    split, join, name = _splitter(call, spec), not call.skip_output_reshape, use.backend.name
    shape = (spec.batch_size, spec.qo_len, spec.num_qo_heads, spec.head_dim)
    servers = []
    for part in parts:
        query, key, value = part.of(*split(*call[:3]))
        heads = query.shape[1]
        small = spec._replace(batch_size=1, num_qo_heads=heads, num_kv_heads=key.shape[1])
        like = AttentionCall.from_comfy(query, key, value, heads, skip_reshape=True, skip_output_reshape=True)
        servers.append(_server_of_whole(use, like, small))

    def serve(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Any:
        try:
            tensors = split(query, key, value)
            output = query.new_empty(shape).transpose(1, 2)
        except Exception as error:  # memory can be too short for it
            return explain(error, name)
        for part, serve_part in zip(parts, servers, strict=True):
            place = output[part.batch, part.heads]
            served = serve_part(*part.of(*tensors), None if mask is None else part.of_mask(four_axes(mask)))
            if isinstance(served, Refusal):
                return served
            if (served.shape, served.dtype) != (place.shape, place.dtype):  # it would be cast, or repeated
                return _misfit(name, served, place)
            place.copy_(served)
        return output.transpose(1, 2).flatten(2) if join else output

    return serve


def _splitter(call: AttentionCall, spec: AttentionSpec) -> Callable[..., Tensors]:
    """The function that makes ComfyUI's query, key and value (batch, heads, seq, head_dim), as views."""
    head_dim = spec.head_dim
    if call.skip_reshape:
        return lambda query, key, value: (query, key, value)
    return lambda *tensors: tuple(tensor.unflatten(-1, (-1, head_dim)).transpose(1, 2) for tensor in tensors)


def looker(call: AttentionCall, spec: AttentionSpec) -> Callable[..., Callable[[torch.Tensor], torch.Tensor]]:
    """The function that begins the check of a call like ``call`` in the middle of a run; see ``site_check``."""
    flags = {"skip_reshape": call.skip_reshape, "skip_output_reshape": call.skip_output_reshape}
    heads = call.heads

    def look(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        return site_check(AttentionCall.from_comfy(query, key, value, heads, mask, None, **flags), spec, exact=False)

    return look


def misfit(name: str, output: torch.Tensor, query: torch.Tensor) -> Refusal | None:
    """Why an output cannot be handed on for ``query``; None when size and dtype are query's."""
    if output.dtype == query.dtype and output.numel() == query.numel():
        return None
    return _misfit(name, output, query)


def _misfit(name: str, output: torch.Tensor, query: torch.Tensor) -> Refusal:
    detail = f"{name} returned {list(output.shape)} {output.dtype} for query {list(query.shape)} {query.dtype}"
    return Refusal(RefusalCode.KERNEL_ERROR, detail)
