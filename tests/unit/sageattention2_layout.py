"""What the compiled attention functions of SageAttention 2 read, in plain PyTorch: which elements share a scale, and
where value lies, told from the places that the threads of a warp have in a tile of a tensor core.

Of a tile of scores, 8 keys wide, thread t of a warp holds the rows of equal number t // 4 modulo 8, and of each 8 keys
the two from t % 4 * 2 on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Tiles(NamedTuple):
    """The rows of query per block and per warp, the keys per step, and what the length of value is padded to."""

    query: int
    warp: int
    key: int
    value: int


TILES = {"sm89": Tiles(query=128, warp=32, key=64, value=64), "sm90": Tiles(query=64, warp=16, key=128, value=128)}
PER_WARP, PER_THREAD = 2, 3
SMALLEST = 1e-20

VALUE_ORDER = [row for t in range(4) for row in (2 * t, 2 * t + 1, 8 + 2 * t, 8 + 2 * t + 1)]
"""Which of 16 rows lies at each place: the scores that a thread has of two tiles are four in turn of one operand."""

Groups = list[list[int]]
"""For each scale, in their order, the rows that have it; none for a scale behind the end."""


def query_groups(length: int, tiles: Tiles, per_thread: bool) -> Groups:
    groups = []
    for start in range(0, padded(length, tiles.query), tiles.warp):
        rows = range(start, min(start + tiles.warp, length))
        if per_thread:
            groups += [[row for row in rows if row % 8 == thread // 4] for thread in range(0, 32, 4)]
        else:
            groups.append(list(rows))
    return groups


def key_groups(length: int, tiles: Tiles, per_thread: bool) -> Groups:
    groups = []
    for start in range(0, padded(length, tiles.key), tiles.key):
        rows = range(start, min(start + tiles.key, length))
        if per_thread:
            held = [(2 * thread, 2 * thread + 1) for thread in range(4)]
            groups += [[row for row in rows if row % 8 in pair] for pair in held]
        else:
            groups.append(list(rows))
    return groups


def padded(length: int, multiple: int) -> int:
    return math.ceil(length / multiple) * multiple


def restored_rows(codes: Tensor, scales: Tensor, groups: Groups) -> Tensor:
    """query or key from (batch, heads, seq, head_dim) in INT8, in fp64."""
    assert scales.shape[-1] == len(groups), (scales.shape, len(groups))
    of_row = torch.empty(codes.shape[2], dtype=torch.long, device=codes.device)
    for number, rows in enumerate(groups):
        of_row[rows] = number
    return codes.double() * scales.double()[:, :, of_row, None]


def restored_value(codes: Tensor, scales: Tensor) -> Tensor:
    """value with its padding as (batch, heads, seq, head_dim) from (batch, heads, head_dim, seq) in fp8, in fp64."""
    places = (codes.to(torch.float32).double() * scales.double()[..., None]).unflatten(-1, (-1, 16))
    rows = torch.empty_like(places)
    rows[..., VALUE_ORDER] = places
    return rows.flatten(-2).mT


def scale_error(scales: Tensor, original: Tensor, groups: Groups) -> float:
    """How far, relatively, a scale is from the one that makes the largest element of its rows 127."""
    worst = 0.0
    for number, rows in enumerate(groups):
        if rows:
            expected = original[:, :, rows].abs().amax((2, 3)).double().clamp(min=SMALLEST) / 127
            worst = largest(worst, ((scales[..., number].double() - expected).abs() / expected).max().item())
    return worst


def steps_off(codes: Tensor, scales: Tensor, original: Tensor, groups: Groups) -> float:
    """How many steps of INT8 an element is from what it was, at most; rounding to nearest leaves half a step."""
    head_dim = original.shape[-1]
    ones = torch.ones_like(codes)
    off = restored_rows(codes, scales, groups)[..., :head_dim] - original.double()
    return (off.abs() / restored_rows(ones, scales, groups)[..., :head_dim]).max().item()


def value_scale_error(scales: Tensor, original: Tensor, value_max: float) -> float:
    expected = original.double().abs().amax(2).clamp(min=SMALLEST) / value_max
    return ((scales[..., : original.shape[-1]].double() - expected).abs() / expected).max().item()


def value_error(codes: Tensor, scales: Tensor, original: Tensor) -> float:
    """The largest error of value, relative to the element, or to the smallest normal number where that is more.

    E4M3 has three bits behind the first: rounding to nearest is off by 2**-4 at most.
    """
    head_dim, length = original.shape[-1], original.shape[2]
    off = (restored_value(codes, scales)[:, :, :length, :head_dim] - original.double()).abs()
    smallest = 2.0**-6 * scales[..., None, :head_dim].double()
    return (off / torch.maximum(original.double().abs(), smallest)).max().item()


def largest(*errors: float) -> float:
    """max(), for which NaN is the largest."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)
