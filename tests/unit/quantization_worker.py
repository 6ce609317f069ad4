"""Runs the quantization for SageAttention 2 on the CPU, in Triton's interpreter, and prints what came of it as JSON.

A process of its own, since triton reads TRITON_INTERPRET once, when it is imported. The compiled attention functions
are stood in for by plain PyTorch; all before and behind them is what the backends load and call on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from sage_core.accuracy import compare
from sage_core.backends import quantization
from sage_core.backends.base import Kernel
from sage_core.backends.sageattention import SAGEATTN_FP8_FUSED, SAGEATTN_FP8_SM90_FUSED
from sage_core.environment import Environment
from tests.unit import sageattention2_layout as layout
from tests.unit.fp64 import exact, normal


class Format(NamedTuple):
    part: str
    arch: str
    cuda: str
    per_thread: bool
    value_max: float


FORMATS = {
    "sm90 per thread": Format("sm90", "sm90", "12.4", True, 448.0),
    "sm90 per warp": Format("sm90", "sm120", "12.4", False, 448.0),
    "sm89 per thread": Format("sm89", "sm89", "12.4", True, 448.0),
    "sm89 per thread, sums in fp16": Format("sm89", "sm89", "12.8", True, 2.25),
    "sm89 per warp, sums in fp16": Format("sm89", "sm120", "12.8", False, 2.25),
}
BACKENDS = {"sm89": SAGEATTN_FP8_FUSED, "sm90": SAGEATTN_FP8_SM90_FUSED}


class Case(NamedTuple):
    """``memory`` is "own", "fused" for views into one tensor of all three, or "spread" for a batch of key and value
    that is one and the same; ``special`` "zeros" for rows and a channel of zeros, or "large" for values near 1e4."""

    name: str
    heads: tuple[int, int] = (2, 2)
    lengths: tuple[int, int] = (128, 128)
    head_dim: int = 64
    batch: int = 1
    layout: str = "HND"
    memory: str = "own"
    dtype: torch.dtype = torch.bfloat16
    special: str = ""


CASES = [
    Case("one tile"),
    Case("one row", lengths=(1, 1), head_dim=40),
    Case("behind a tile, grouped", heads=(4, 2), lengths=(129, 300), head_dim=128, batch=2, layout="NHD"),
    Case("fused", lengths=(300, 300), head_dim=72, layout="NHD", memory="fused"),
    Case("fused, heads first", lengths=(77, 77), head_dim=128, batch=2, memory="fused", dtype=torch.float16),
    Case("short key", heads=(2, 1), lengths=(300, 77), head_dim=40, layout="NHD", dtype=torch.float16),
    Case("one key", lengths=(77, 1), head_dim=128),
    Case("one query, spread", lengths=(1, 129), head_dim=72, batch=3, memory="spread", dtype=torch.float16),
    Case("zeros", lengths=(300, 300), special="zeros"),
    Case("large", lengths=(129, 129), head_dim=128, layout="NHD", special="large"),
]
KEY_OFFSET = 3.0
"""Shared by all keys, per channel, so that smoothing has something to subtract."""
LARGE = 1e4


def drawn(case: Case) -> list[Tensor]:
    """query, key and value in the case's layout."""
    (heads, kv_heads), (qo_len, kv_len), dim = case.heads, case.lengths, case.head_dim
    batch = 1 if case.memory == "spread" else case.batch
    shapes = [(case.batch, qo_len, heads, dim), (batch, kv_len, kv_heads, dim), (batch, kv_len, kv_heads, dim)]
    query, key, value = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    key += KEY_OFFSET * normal(dim, seed=9)
    if case.special == "zeros":
        query[:, :64], key[:, 128:256], value[..., 5] = 0, 0, 0
    if case.special == "large":
        query, key, value = (LARGE * tensor for tensor in (query, key, value))
    tensors = [tensor.to(case.dtype) for tensor in (query, key, value)]
    if case.memory == "fused":
        tensors = list(torch.stack(tensors, dim=2).unbind(2))
    elif case.layout == "HND":
        tensors = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
    if case.memory == "spread":
        tensors[1:] = [tensor.expand(case.batch, -1, -1, -1) for tensor in tensors[1:]]
    return [tensor.transpose(1, 2) for tensor in tensors] if (case.memory, case.layout) == ("fused", "HND") else tensors


class Compiled:
    """A compiled attention function in plain PyTorch; keeps what it was handed the last time."""

    def __init__(self, part: str) -> None:
        self.tiles = layout.TILES[part]
        self.given: tuple[Tensor, ...] = ()

    def __call__(self, query, key, value, output, query_scale, key_scale, value_scale, *codes: Any) -> None:
        # a copy of query, which may lie where the output goes
        self.given = (query.clone(), key, value, query_scale, key_scale, value_scale)
        _, _, granularity, sm_scale, _ = codes
        per_thread = granularity == layout.PER_THREAD
        query = layout.restored_rows(query, query_scale, layout.query_groups(query.shape[2], self.tiles, per_thread))
        key = layout.restored_rows(key, key_scale, layout.key_groups(key.shape[2], self.tiles, per_thread))
        value = layout.restored_value(value, value_scale)[:, :, : key.shape[2]]
        self.query, self.key = query, key
        output.copy_(exact(query, key, value, sm_scale))


def installed(part: str) -> tuple[Compiled, Compiled]:
    """A sageattention with this compiled part; its two functions."""
    functions = Compiled(part), Compiled(part)
    compiled = ModuleType(f"sageattention._qattn_{part}")
    compiled.qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf = functions[0]
    if part == "sm89":
        compiled.qk_int8_sv_f8_accum_f16_fuse_v_scale_attn_inst_buf = functions[1]
    package = ModuleType("sageattention")
    package.__path__ = []
    sys.modules |= {"sageattention": package, compiled.__name__: compiled}
    return functions


def loaded(form: Format) -> tuple[Kernel, Compiled]:
    in_fp32, in_fp16 = installed(form.part)
    kernel = BACKENDS[form.part].load(Environment(cuda=form.cuda), form.arch, False)
    assert isinstance(kernel, Kernel), kernel
    return kernel, in_fp32 if form.value_max == 448.0 else in_fp16


def measured(form: Format, case: Case, smooth_k: bool) -> dict[str, Any]:
    kernel, compiled = loaded(form)
    tensors = drawn(case)
    copies = [tensor.clone() for tensor in tensors]
    sm_scale = 1.2 * case.head_dim**-0.5 / (LARGE**2 if case.special == "large" else 1)
    output = kernel.function(*tensors, tensor_layout=case.layout, sm_scale=sm_scale, smooth_k=smooth_k)
    query, key, value, query_scale, key_scale, value_scale = compiled.given

    q, k, v = (heads_first(copy, case).double() for copy in copies)
    expected = exact(q, k, v, sm_scale)
    if smooth_k:
        k = k - k.mean(2, keepdim=True)
    (qo_len, kv_len), dim = case.lengths, case.head_dim
    rows = layout.query_groups(qo_len, compiled.tiles, form.per_thread)
    keys = layout.key_groups(kv_len, compiled.tiles, form.per_thread)
    scores_only = exact(compiled.query[..., :dim], compiled.key[..., :dim], v, sm_scale)
    behind = layout.restored_value(value, value_scale)[:, :, kv_len:]
    return {
        "shapes": [list(tensor.shape) for tensor in compiled.given],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in compiled.given],
        "contiguous": all(tensor.is_contiguous() for tensor in compiled.given[1:]),
        "scale_errors": [
            layout.scale_error(query_scale, q, rows),
            layout.scale_error(key_scale, k, keys),
            layout.value_scale_error(value_scale, v, form.value_max),
        ],
        "query_steps": layout.steps_off(query, query_scale, q, rows),
        "key_steps": layout.steps_off(key, key_scale, k, keys),
        "value_error": layout.value_error(value, value_scale, v),
        "padding": [
            part.double().abs().sum().item() for part in (query[..., dim:], key[..., dim:], value[:, :, dim:], behind)
        ],
        "finite": all(tensor.float().isfinite().all().item() for tensor in (*compiled.given, output)),
        "scores_error": compare(scores_only, expected).relative_l2,
        "error": compare(heads_first(output, case), expected).relative_l2,
        "unchanged": all(map(torch.equal, tensors, copies)),
        "as_given": output.shape == tensors[0].shape and output.dtype == case.dtype,
    }


def heads_first(tensor: Tensor, case: Case) -> Tensor:
    return tensor.transpose(1, 2) if case.layout == "NHD" else tensor


def halved(form: Format) -> dict[str, Any]:
    """One call whole and in its two halves."""
    kernel, _ = loaded(form)
    tensors = drawn(CASES[0])
    keywords = {"tensor_layout": "HND", "sm_scale": 0.1, "smooth_k": True}
    whole = kernel.function(*tensors, **keywords)
    held = [weakref.ref(tensor) for tensor in tensors]
    held_then = []
    launched = quantization._quantize
    quantization._quantize = Noted(launched, lambda: held_then.append([tensor() is not None for tensor in held]))
    attend = kernel.prepare(tensors, **keywords)
    quantization._quantize = launched
    held_then.append([tensor() is not None for tensor in held])
    return {"same_bits": torch.equal(whole, attend()), "held": held_then}


class Noted:
    """A kernel that calls ``note`` before each launch."""

    def __init__(self, kernel: Any, note: Callable[[], None]) -> None:
        self.kernel, self.note = kernel, note

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.note()
        return self.kernel[grid]


def broken(form: Format, role: int, number: float) -> list[int]:
    """The rows of an output that are not finite when one row of query (0), key (1) or value (2) has such a number."""
    kernel, _ = loaded(form)
    tensors = drawn(CASES[0])
    tensors[role][0, 0, 3, 5] = number
    output = kernel.function(*tensors, tensor_layout="HND", sm_scale=0.1, smooth_k=True)
    return (~output.isfinite().all(-1)).sum(-1).flatten().tolist()


def convert(data: numpy.ndarray, from_dtype: Any, to_dtype: Any, rounding: Any) -> numpy.ndarray:
    """The interpreter's conversion, with PyTorch's for E4M3: its own makes 64 of 127.9, as it loses what is carried
    when a mantissa is rounded up to the next power of two, and rounds what is below the normal numbers to zero."""
    if to_dtype != interpreter.tl.float8e4nv:
        return converted(data, from_dtype, to_dtype, rounding)
    return torch.tensor(data, dtype=torch.float32).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


converted = interpreter._convert_float


class Allocations(TorchDispatchMode):
    """Counts the tensors that are made."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.storages = [tensor.untyped_storage() for tensor in known]
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        storage = result.untyped_storage()
        if storage._cdata not in {known._cdata for known in self.storages}:
            self.storages.append(storage)
            self.made.append((str(result.dtype).removeprefix("torch."), storage.nbytes()))
        return result


class NoLaunch:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **keywords: None


def allocated(kernel: Callable[..., Any], length: int) -> list[tuple[str, float]]:
    """What is allocated around the launches, of which none happens, for tensors that have no memory: in bytes, as part
    of those of one of the three."""
    tensors = [torch.empty(1, length, 4, 128, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    size = tensors[0].nbytes
    kept = quantization._statistics, quantization._quantize, Compiled.__call__
    quantization._statistics = quantization._quantize = NoLaunch()
    Compiled.__call__ = lambda *given: None
    with Allocations(*tensors) as mode:
        kernel(tensors, tensor_layout="NHD", sm_scale=0.1, smooth_k=True)
    quantization._statistics, quantization._quantize, Compiled.__call__ = kept
    return [(dtype, made / size) for dtype, made in mode.made]


def allocations(form: Format) -> dict[str, list[tuple[str, float]]]:
    """For a call whole, for one so large that strides of its output in bytes pass 32 bits, and in two halves."""
    kernel, _ = loaded(form)

    def whole(tensors: list[Tensor], **keywords: Any) -> Tensor:
        return kernel.function(*tensors, **keywords)

    def halves(tensors: list[Tensor], **keywords: Any) -> Tensor:
        return kernel.prepare(tensors, **keywords)()

    largest = (2**31 - 1) // (2 * 4 * 128)
    return {
        "whole": allocated(whole, 4_001),
        "largest": allocated(whole, largest),
        "larger": allocated(whole, largest + 1),
        "halves": allocated(halves, 4_001),
    }


def full_of_nan(*args: Any, **keywords: Any) -> Tensor:
    """torch.empty() in memory that was used: each byte is 0xFF, which is NaN in every float format."""
    tensor = empty(*args, **keywords)
    if tensor.device.type == "cpu":
        tensor.view(torch.uint8).fill_(0xFF)
    return tensor


empty = torch.empty


def main() -> None:
    torch.empty, interpreter._convert_float = full_of_nan, convert
    results = []
    for number, (name, form) in enumerate(FORMATS.items()):
        for case in CASES:
            smooth_k = number % 2 == 0  # so that the layouts of both parts are smoothed and not
            results.append({"format": name, "case": case.name, "smooth_k": smooth_k, **measured(form, case, smooth_k)})
    halves = {name: halved(form) for name, form in FORMATS.items()}
    names = {"query": 0, "key": 1, "value": 2}
    numbers = {"nan": float("nan"), "inf": float("inf")}
    not_finite = {
        f"{role} {number}": broken(FORMATS["sm90 per thread"], names[role], numbers[number])
        for role in names
        for number in numbers
    }
    print(
        json.dumps(
            {
                "results": results,
                "halves": halves,
                "not finite": not_finite,
                "allocated": allocations(FORMATS["sm90 per thread"]),
            }
        )
    )


if __name__ == "__main__":
    main()
