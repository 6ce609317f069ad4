"""An attention call in a graph of torch.compile: one operator, opaque to the compiler and live when the graph runs.

A graph outlives what it was traced with. ComfyUI drops the guards on transformer_options, so neither a changed node nor
a removed one makes it trace again, and two models may share it. So nothing of a dispatcher is in a graph: the operator
asks, each time it runs, who answers for the model call that it runs in. Where nobody does, it is native attention.

A CUDA graph that is replayed runs no Python: in one, nothing would be planned, counted or replaced when it fails. So
the operator is tagged as unsafe there. With ``mode="reduce-overhead"`` inductor makes CUDA graphs of what is between
the operators; where torch does not cut graphs, as its backend "cudagraphs", it makes none of a model that has them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, strided

from .call import KNOWN_ARGUMENTS, Native

MAX_CALLS = 10_000
"""Kinds of calls that graphs may name; a model has a few per block. Graphs keep their numbers, so none is dropped."""

NAMESPACE = "sagescope"
COMPILE_KEY = "torch.compile"
"""The key of the wrapper by which ComfyUI puts compiled modules in place for a model call."""


def is_compiled(options: dict[str, Any]) -> bool:
    """Whether ComfyUI compiles the model, or parts of it, for a model call with these transformer_options."""
    return bool(options.get("wrappers", {}).get("apply_model", {}).get(COMPILE_KEY))


class TracedCall(NamedTuple):
    """What is constant in a graph about an attention call; no tensor is in it, as it outlives every model."""

    func: Native
    attn_precision: torch.dtype | None
    skip_reshape: bool
    skip_output_reshape: bool
    extra: tuple[tuple[str, Any], ...]
    """The further keywords in their order; the transformer_options as a Block, None without any, scale as None."""


class Block(NamedTuple):
    """What models say in transformer_options about where a call is, without the numbers."""

    name: str | None
    type: str | None


_calls: list[TracedCall] = []
_numbers: dict[TracedCall, int] = {}
_places = itertools.count()
_lock = threading.Lock()
_threads = threading.local()


class GraphCalls:
    """A context: on this thread, operators in graphs hand their calls to ``attend`` of a dispatcher, None for native.

    One per run of a model: it tells apart the runs of one graph that serves several blocks. ``options`` are the
    transformer_options of the model call. ``used`` says afterwards whether there was such a call.
    """

    def __init__(self, attend: Callable[..., Tensor] | None, options: dict[str, Any]) -> None:
        self.attend = attend
        self.options = options
        self.used = False
        self._runs: dict[tuple[int | None, ...], int] = {}

    def __enter__(self) -> GraphCalls:
        self._around = getattr(_threads, "current", None)
        _threads.current = self
        return self

    def __exit__(self, *_: object) -> None:
        _threads.current = self._around

    def options_of(self, place: int, block: Block | None, index: int | None, number: int | None) -> dict[str, Any]:
        """The transformer_options of a call, with the block that the graph was traced in.

        Where blocks are compiled one by one, one graph serves them all and knows the numbers of the first: its later
        runs are told apart as "0+1", "0+2".
        """
        runs = self._runs.get((place, index, number), 0)
        self._runs[place, index, number] = runs + 1
        if block is None:
            return self.options
        named = block.name if number is None else (block.name, number)
        numbered = index if runs == 0 else f"{'' if index is None else index}+{runs}"
        return {**self.options, "block": named, "block_type": block.type, "block_index": numbered}


def call_in_graph(
    func: Native,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **extra: Any,
) -> Tensor | None:
    """While torch.compile traces: the call as one operator; None where the graph has to be left for it.

    Everything but tensors, ``heads``, scale and the numbers of the block has to be constant in the graph. Other numbers
    are not taken, as the tracer may hold any number for one that changes from size to size.
    """
    if OPERATOR is None:
        return None
    if not isinstance(func, FunctionType):  # older tracers cannot take an object or a method as a constant
        return None
    if not _is_plain(query, key, value, mask):
        return None
    if torch.is_autocast_enabled(query.device.type):  # compiled code runs with autocast off, so nobody would know
        return None
    axes = 4 if skip_reshape else 3
    if not query.ndim == key.ndim == value.ndim == axes or not query.dtype == key.dtype == value.dtype:
        return None  # what native attention makes of it is its own affair, so the shape of the output is not known
    if skip_reshape and value.shape[-1] != query.shape[-1]:
        return None
    options = extra.get("transformer_options") or {}
    named, kind, index = options.get("block"), options.get("block_type"), options.get("block_index")
    name, block_number = named if isinstance(named, tuple) and len(named) == 2 else (named, None)
    if not isinstance(name, str | None) or not isinstance(kind, str | None):
        return None
    if not isinstance(index, int | None) or not isinstance(block_number, int | None):
        return None
    located = not (named is None and kind is None and index is None)
    constants: list[tuple[str, Any]] = []
    for argument in extra:
        given = extra[argument]
        if argument not in KNOWN_ARGUMENTS:  # what it means may change from call to call
            return None
        if argument == "transformer_options":
            constants.append((argument, Block(name, kind) if located else None))
        elif argument == "scale" and isinstance(given, int | float | None):
            constants.append((argument, None))
        elif isinstance(given, bool | None):
            constants.append((argument, None if given is None else _decided(given)))
        else:
            return None
    number, place = _number_of(func, attn_precision, bool(skip_reshape), bool(skip_output_reshape), tuple(constants))
    if number is None:
        return None
    scale = extra.get("scale")
    output: Tensor = OPERATOR(query, key, value, mask, heads, scale, index, block_number, number, place)
    return output


def _decided(flag: bool) -> bool:
    """The flag as a constant of the graph; where sizes decide it, the branch has the tracer guard them."""
    if flag:  # noqa: SIM103
        return True
    return False


def _is_plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the operator may take the tensors: dense ones of no class of their own, and no gradient to compute."""
    tensors = [query, key, value] if mask is None else [query, key, value, mask]
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.layout is not strided:
            return False
        if torch.is_grad_enabled() and tensor.requires_grad:  # the operator has no derivative, native attention has
            return False
    return True


@torch.compiler.assume_constant_result
def _number_of(*described: Any) -> tuple[int | None, int]:
    """The number by which a graph names such calls, None where too many have one, and the place of this one.

    Equal calls share the number; the place is new each time, so it says which runs are of one node of one graph.
    """
    call = TracedCall(*described)
    with _lock:
        if call not in _numbers and len(_calls) < MAX_CALLS:
            _numbers[call] = len(_calls)
            _calls.append(call)
        return _numbers.get(call), next(_places)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    heads: int,
    scale: float | None,
    block_index: int | None,
    block_number: int | None,
    number: int,
    place: int,
) -> Tensor:
    """The operator when a graph runs: the call as ComfyUI would have made it without a graph."""
    call = _calls[number]
    extra = dict(call.extra)
    current: GraphCalls = getattr(_threads, "current", None) or GraphCalls(None, {})
    current.used = True
    if "scale" in extra:
        extra["scale"] = scale
    if "transformer_options" in extra:
        block = extra["transformer_options"]
        extra["transformer_options"] = current.options_of(place, block, block_index, block_number)
    arguments = (query, key, value, heads, mask, call.attn_precision, call.skip_reshape, call.skip_output_reshape)
    if current.attend is None:
        output = call.func(*arguments, **extra)
    else:
        output = current.attend(call.func, *arguments, **extra)
    # the compiler was promised memory of its own in this order; what attention gives mostly is already
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if any(output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for tensor in tensors):
        return output.clone(memory_format=torch.contiguous_format)
    return output.contiguous()


def _run_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    heads: int,
    scale: float | None,
    block_index: int | None,
    block_number: int | None,
    number: int,
    place: int,
) -> Tensor:
    """What the compiler is told of the output: its shape, in memory of its own."""
    call = _calls[number]
    if call.skip_reshape == call.skip_output_reshape:
        return query.new_empty(query.shape)
    if call.skip_reshape:
        batch_size, num_qo_heads, qo_len, head_dim = query.shape
        return query.new_empty((batch_size, qo_len, num_qo_heads * head_dim))
    batch_size, qo_len, width = query.shape
    return query.new_empty((batch_size, heads, qo_len, width // heads))


def _register() -> tuple[torch.library.Library | None, Any]:
    """The operator, and what keeps it registered; None where this torch cannot keep an operator out of CUDA graphs.

    A second copy of the pack in one process, under another name, has calls of its own and so an operator of its own.
    """
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    if unsafe is None:
        return None, None
    name = next(
        name
        for name in itertools.chain(["attend"], (f"attend_{copy}" for copy in itertools.count(2)))
        if not hasattr(getattr(torch.ops, NAMESPACE), name)
    )
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(
        f"{name}(Tensor query, Tensor key, Tensor value, Tensor? mask, SymInt heads, float? scale, "
        "SymInt? block_index, SymInt? block_number, int number, int place) -> Tensor",
        tags=(
            unsafe,
            torch.Tag.pt2_compliant_tag,
            torch.Tag.needs_exact_strides,
        ),  # the last: kernels see the memory that they see without a graph
    )
    library.impl(name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _run_fake, lib=library)
    return library, getattr(getattr(torch.ops, NAMESPACE), name).default


_LIBRARY, OPERATOR = _register()
