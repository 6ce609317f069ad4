"""Quantization of query, key and value for SageAttention 2's attention kernels, in two launches, apart from attention.

SageAttention's own functions take up to eight launches, with a 16-bit copy each of smoothed key and of padded and of
transposed value, and hold all of it to the end. Here each tensor is read where it lies and written once, in 8 bits.

Imports triton, which is not everywhere: import this module where a kernel is loaded.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .base import KernelFunction, Prepare

TILE = 128
"""Rows of query, key or value that one program quantizes: a multiple of every block that shares a scale."""
ROWS_AT_ONCE = 32
CHUNKS = 16
"""Parts of a head that key's mean and value's maxima are first taken over."""
MAX_STRIDE = 2**31 - 1
"""The attention functions take strides in 32 bits."""
HND, NOT_CAUSAL, NO_LSE = 1, 0, 0
PER_WARP, PER_THREAD = 2, 3
"""The codes of tensor_layout, is_causal, return_lse and qk_quant_gran in the attention functions."""
SMALLEST = tl.constexpr(1e-20)
"""What a scale is at least, before it is divided: a block of zeros stays zeros."""


class Blocks(NamedTuple):
    """Which elements share a scale, and how value is laid out: what an attention kernel of SageAttention 2 expects.

    ``query_tile`` and ``key_tile`` are the rows that one of its thread blocks takes at a time (CTA_Q and CTA_K of its
    source), ``query_warp`` those of one warp. ``per_thread`` has query rows of equal number modulo 8 share a scale and
    key rows of equal pair modulo 4; without, all rows of the warp and of the key tile do. ``value_max`` is what the
    largest value of a channel becomes, ``value_tile`` what the padded length of value is a multiple of.
    """

    query_tile: int
    query_warp: int
    key_tile: int
    value_tile: int
    per_thread: bool
    value_max: float


class Quantized(NamedTuple):
    """query and key in INT8 as (batch, heads, seq, head_dim), value in fp8 E4M3 as (batch, heads, head_dim, seq), key
    and value contiguous, head_dim padded to 64 or 128, value's seq padded and its order within 16 rows as the kernels
    want it; the factors to multiply with, in fp32."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_scale: torch.Tensor
    key_scale: torch.Tensor
    value_scale: torch.Tensor


def whole(function: Callable[..., Any], blocks: Blocks) -> KernelFunction:
    """The kernel: ``quantize``, and the compiled attention ``function`` on what came of it.

    A row of query is quantized into the first bytes of its row of the output, which takes no memory then: each thread
    block of ``function`` has read its rows of query before it writes them.
    """

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        tensor_layout: str,
        sm_scale: float,
        smooth_k: bool,
    ) -> torch.Tensor:
        output = torch.empty((*query.shape[:-1], padded_dim(query)), dtype=query.dtype, device=query.device)
        query_out = output.view(torch.int8)[..., : output.shape[-1]]
        if output.nbytes > MAX_STRIDE:
            query_out = torch.empty(query_out.shape, dtype=torch.int8, device=query.device)
        tensors = [heads_first(tensor, tensor_layout) for tensor in (query, key, value)]
        quantized = quantize(tensors, blocks, smooth_k, heads_first(query_out, tensor_layout))
        _attend(function, blocks, quantized, heads_first(output, tensor_layout), sm_scale)
        return output[..., : query.shape[-1]]

    return kernel


def in_two(function: Callable[..., Any], blocks: Blocks) -> Prepare:
    """The same in two halves, of which the first lets go of value, and then of query and key."""

    def prepare(
        tensors: list[torch.Tensor], *, tensor_layout: str, sm_scale: float, smooth_k: bool
    ) -> Callable[[], torch.Tensor]:
        query = tensors[0]
        shape, dtype, head_dim = (*query.shape[:-1], padded_dim(query)), query.dtype, query.shape[-1]
        del query
        tensors[:] = [heads_first(tensor, tensor_layout) for tensor in tensors]
        quantized = quantize(tensors, blocks, smooth_k)

        def attend() -> torch.Tensor:
            output = torch.empty(shape, dtype=dtype, device=quantized.key.device)
            _attend(function, blocks, quantized, heads_first(output, tensor_layout), sm_scale)
            return output[..., :head_dim]

        return attend

    return prepare


def padded_dim(query: torch.Tensor) -> int:
    """The head_dim that the attention functions are compiled for."""
    return 64 if query.shape[-1] <= 64 else 128


def heads_first(tensor: torch.Tensor, tensor_layout: str) -> torch.Tensor:
    return tensor.transpose(1, 2) if tensor_layout == "NHD" else tensor


def _attend(
    function: Callable[..., Any], blocks: Blocks, quantized: Quantized, output: torch.Tensor, sm_scale: float
) -> None:
    granularity = PER_THREAD if blocks.per_thread else PER_WARP
    query, key, value, *scales = quantized
    function(query, key, value, output, *scales, HND, NOT_CAUSAL, granularity, sm_scale, NO_LSE)


def quantize(
    tensors: list[torch.Tensor], blocks: Blocks, smooth_k: bool, query_out: torch.Tensor | None = None
) -> Quantized:
    """``Quantized`` of query, key and value, which are (batch, heads, seq, head_dim) with any strides but the last.

    ``smooth_k`` subtracts key's mean over the sequence, in fp32. head_dim is at most 128; fewer key heads than query
    heads are fine. ``tensors`` is emptied: without ``query_out``, which is where query goes, value is let go before
    there is memory for query and key in 8 bits.
    """
    query, key, value = tensors
    tensors.clear()
    batch, heads, qo_len, head_dim = query.shape
    kv_heads, kv_len, dim = key.shape[1], key.shape[2], padded_dim(query)
    padded_len = _up(kv_len, blocks.value_tile)
    query_groups = _up(qo_len, blocks.query_tile) // blocks.query_warp * (8 if blocks.per_thread else 1)
    key_groups = _up(kv_len, blocks.key_tile) // blocks.key_tile * (4 if blocks.per_thread else 1)
    query_tiles, key_tiles = triton.cdiv(qo_len, TILE), triton.cdiv(kv_len, TILE)
    query_programs, key_programs = batch * heads * query_tiles, batch * kv_heads * key_tiles
    common = {"HEAD_DIM": head_dim, "PADDED_DIM": dim, "CHUNKS": CHUNKS, "num_warps": 4}
    device = query.device

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def launch(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_out: torch.Tensor, key_out: torch.Tensor,
        query_programs: int, key_programs: int, value_programs: int,
    ) -> None:  # fmt: skip
        _quantize[(query_programs + key_programs + value_programs,)](
            query, key, value, query_out, key_out, value_out, *scales, sums, maxima,
            query_programs, key_programs, query_tiles, key_tiles,
            heads, kv_heads, qo_len, kv_len, padded_len, query_groups, key_groups, blocks.value_max,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *query_out.stride()[:3],
            TILE=TILE, QUERY_WARP=blocks.query_warp, KEY_TILE=blocks.key_tile, PER_THREAD=blocks.per_thread,
            **common,
        )  # fmt: skip

    sums, maxima = empty(batch, kv_heads, CHUNKS, dim), empty(batch, kv_heads, CHUNKS, dim)
    _statistics[(CHUNKS, kv_heads, batch)](
        key, value, sums, maxima, kv_len, triton.cdiv(kv_len, CHUNKS), kv_heads, smooth_k,
        *key.stride()[:3], *value.stride()[:3],
        ROWS=ROWS_AT_ONCE, **common,
    )  # fmt: skip
    scales = (
        empty(batch, heads, query_groups),
        empty(batch, kv_heads, key_groups),
        empty(batch, kv_heads, dim),
    )
    value_out = empty(batch, kv_heads, dim, padded_len, dtype=torch.float8_e4m3fn)
    value_programs = key_programs
    if query_out is None:
        # nothing is read of query and key, nor of value in the next launch; only a tensor's dtype counts then
        in_8_bits = value_out.view(torch.int8)
        launch(query, key, value, in_8_bits, in_8_bits, 0, 0, value_programs)
        del value
        value, value_programs = key, 0
        query_out = empty(batch, heads, qo_len, dim, dtype=torch.int8)
    key_out = empty(batch, kv_heads, kv_len, dim, dtype=torch.int8)
    launch(query, key, value, query_out, key_out, query_programs, key_programs, value_programs)
    return Quantized(query_out, key_out, value_out, *scales)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


LENGTHS = (
    *("kv_len", "chunk", "qo_len", "padded_len", "heads", "kv_heads", "query_groups", "key_groups", "smooth_k"),
    *("query_programs", "key_programs", "query_tiles", "key_tiles"),
)
"""What changes from call to call: compiled once for all values, unlike strides, whose alignment makes loads fast."""


@triton.jit(do_not_specialize=LENGTHS)
def _statistics(
    key, value, sums, maxima, kv_len, chunk, kv_heads, smooth_k,
    key_batch, key_head, key_row, value_batch, value_head, value_row,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of key and largest absolute values of value by channel, over one chunk of one head's rows."""
    part, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channels = tl.arange(0, PADDED_DIM)
    in_head = channels[None, :] < HEAD_DIM
    key += batch * key_batch + head.to(tl.int64) * key_head
    value += batch * value_batch + head.to(tl.int64) * value_head
    total = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    largest = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    end = tl.minimum((part + 1) * chunk, kv_len)
    for start in range(part * chunk, end, ROWS):
        rows = (start + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (rows < end) & in_head
        smoothed = inside & (smooth_k != 0)  # without smoothing key is not read, and its mean is 0
        total += tl.load(key + rows * key_row + channels[None, :], mask=smoothed, other=0.0).to(tl.float32)
        loaded = tl.load(value + rows * value_row + channels[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.abs(loaded.to(tl.float32)))
    place = ((batch * kv_heads + head) * CHUNKS + part) * PADDED_DIM + channels
    tl.store(maxima + place, tl.max(largest, axis=0))
    tl.store(sums + place, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=LENGTHS)
def _quantize(
    query, key, value, query_out, key_out, value_out, query_scale, key_scale, value_scale, sums, maxima,
    query_programs, key_programs, query_tiles, key_tiles,
    heads, kv_heads, qo_len, kv_len, padded_len, query_groups, key_groups, value_max,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    out_batch, out_head, out_row,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, CHUNKS: tl.constexpr,
    TILE: tl.constexpr, QUERY_WARP: tl.constexpr, KEY_TILE: tl.constexpr, PER_THREAD: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one head: first all of query's, then key's, then value's."""
    program = tl.program_id(0)
    if program < query_programs:
        at = (program // query_tiles).to(tl.int64)
        _quantize_rows(
            query + at // heads * query_batch + at % heads * query_head, query_row,
            query_out + at // heads * out_batch + at % heads * out_head, out_row, query_scale + at * query_groups, sums,
            program % query_tiles, qo_len, query_groups,
            HEAD_DIM, PADDED_DIM, CHUNKS, False, TILE, QUERY_WARP, 8 if PER_THREAD else 1, 1,
        )  # fmt: skip
    elif program < query_programs + key_programs:
        at = ((program - query_programs) // key_tiles).to(tl.int64)
        _quantize_rows(
            key + at // kv_heads * key_batch + at % kv_heads * key_head, key_row,
            key_out + at * kv_len * PADDED_DIM, PADDED_DIM, key_scale + at * key_groups,
            sums + at * CHUNKS * PADDED_DIM, (program - query_programs) % key_tiles, kv_len, key_groups,
            HEAD_DIM, PADDED_DIM, CHUNKS, True, TILE, KEY_TILE, 4 if PER_THREAD else 1, 2 if PER_THREAD else 1,
        )  # fmt: skip
    else:
        at = ((program - query_programs - key_programs) // key_tiles).to(tl.int64)
        _quantize_value(
            value + at // kv_heads * value_batch + at % kv_heads * value_head, value_row,
            value_out + at * PADDED_DIM * padded_len, value_scale + at * PADDED_DIM, maxima + at * CHUNKS * PADDED_DIM,
            (program - query_programs - key_programs) % key_tiles, kv_len, padded_len, value_max,
            HEAD_DIM, PADDED_DIM, CHUNKS, TILE,
        )  # fmt: skip


@triton.jit
def _quantize_rows(
    source, row_stride, out, out_stride, scales, sums, tile, length, groups,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, CHUNKS: tl.constexpr, SUBTRACT_MEAN: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """A tile of one head of query or key, in INT8: of each ``BLOCK`` rows, ``ALIKE`` in turn go to one of ``GROUPS``,
    whose rows share a scale. Halves are rounded away from zero, as upstream's quantization has it."""
    channels = tl.arange(0, PADDED_DIM)
    rows = tile * TILE + tl.arange(0, TILE)
    inside = (rows < length)[:, None]
    places = rows[:, None].to(tl.int64) * row_stride + channels[None, :]
    loaded = tl.load(source + places, mask=inside & (channels[None, :] < HEAD_DIM), other=0.0).to(tl.float32)
    if SUBTRACT_MEAN:
        parts = tl.arange(0, CHUNKS)[:, None] * PADDED_DIM + channels[None, :]
        loaded = tl.where(inside, loaded - (tl.sum(tl.load(sums + parts), axis=0) / length)[None, :], 0.0)
    BLOCKS: tl.constexpr = TILE // BLOCK
    REPEATS: tl.constexpr = BLOCK // GROUPS // ALIKE
    largest = tl.reshape(tl.max(tl.abs(loaded), axis=1), (BLOCKS, REPEATS, GROUPS, ALIKE))
    # maxima pass NaN and Inf over, which 8 bits cannot say: a block that has one gets a scale that does
    broken = tl.reshape(tl.sum(loaded * 0.0, axis=1), (BLOCKS, REPEATS, GROUPS, ALIKE))
    scale = tl.maximum(tl.max(tl.max(largest, axis=3), axis=1), SMALLEST) / 127.0 + tl.sum(
        tl.sum(broken, axis=3), axis=1
    )
    group = tile * (BLOCKS * GROUPS) + tl.arange(0, BLOCKS * GROUPS)
    tl.store(scales + group, tl.reshape(scale, (BLOCKS * GROUPS,)), mask=group < groups)
    of_row = tl.broadcast_to(tl.reshape(scale, (BLOCKS, 1, GROUPS, 1)), (BLOCKS, REPEATS, GROUPS, ALIKE))
    scaled = loaded / tl.reshape(of_row, (TILE,))[:, None]
    rounded = (scaled + tl.where(scaled >= 0, 0.5, -0.5)).to(tl.int8)
    tl.store(out + rows[:, None].to(tl.int64) * out_stride + channels[None, :], rounded, mask=inside)


@triton.jit
def _quantize_value(
    source, row_stride, out, scales, maxima, tile, length, padded_length, value_max,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of one head of value, in fp8 E4M3, transposed, zeros behind its end."""
    channels = tl.arange(0, PADDED_DIM)
    rows = tile * TILE + tl.arange(0, TILE)
    padded_length = tl.multiple_of(padded_length, 16)  # as every value_tile is: 16 bytes are stored at once
    # within 16 rows, tensor cores take two of the first eight, then two of the last eight, and so on
    in_16 = rows % 16
    row = rows - in_16 + in_16 % 4 // 2 * 8 + in_16 // 4 * 2 + in_16 % 2
    inside = (row < length)[:, None] & (channels[None, :] < HEAD_DIM)
    loaded = tl.load(source + row[:, None].to(tl.int64) * row_stride + channels[None, :], mask=inside, other=0.0)
    parts = tl.arange(0, CHUNKS)[:, None] * PADDED_DIM + channels[None, :]
    scale = tl.maximum(tl.max(tl.load(maxima + parts), axis=0), SMALLEST) / value_max
    if tile == 0:
        tl.store(scales + channels, scale)
    scaled = (loaded.to(tl.float32) / scale[None, :]).to(tl.float8e4nv)
    places = channels[None, :].to(tl.int64) * padded_length + rows[:, None]
    tl.store(out + places, scaled, mask=(rows < padded_length)[:, None])
