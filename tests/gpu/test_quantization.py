"""SageAttention 2's attention functions behind quantization of our own, on a GPU that has them: each compiled part that
runs here, in each way to share scales and to sum, against fp64, and what memory it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sage_core.accuracy import compare
from sage_core.backends import Backend
from sage_core.backends.base import Kernel
from sage_core.backends.sageattention import (
    SAGEATTN_FP8,
    SAGEATTN_FP8_FUSED,
    SAGEATTN_FP8_SM90,
    SAGEATTN_FP8_SM90_FUSED,
    sums_in_fp16,
)
from sage_core.environment import Environment
from tests.unit import sageattention2_layout as layout
from tests.unit.fp64 import exact, normal

DEVICE = torch.device("cuda", 0)
RUNS_ON = {"sm89": ("sm89", "sm90", "sm100", "sm120", "sm121"), "sm90": ("sm90",)}
"""A build for sm90 has both parts."""
FUSED = {"sm89": SAGEATTN_FP8_FUSED, "sm90": SAGEATTN_FP8_SM90_FUSED}
OWN = {"sm89": SAGEATTN_FP8, "sm90": SAGEATTN_FP8_SM90}
KEY_OFFSET = 3.0
"""Shared by all keys, per channel, so that smoothing has something to subtract."""
PEAK = {"sm90": 0.49, "sm89": 0.63}
"""At most this part of what the package's own function needs, in copies of one tensor in 16 bits: 2 (key and value in
8, the output) of 4.5, that has query in 8 and value padded and transposed in 16 beside them; for sm89 it pads while it
transposes, 2 of 3.5. A tenth is for scales and for what the allocator rounds."""
RELEASED_PEAK = 0.55
"""What the halves need beside the three tensors, of one of them: value in 8 bits, with as much for the rest."""
ROUNDED_TWICE = 1 + 2**-6
"""sm89 goes from fp32 to E4M3 over fp16, which first cuts it by up to 2**-10; 2**-4 is from rounding to nearest."""

DIVIDED = 2e-6
"""Triton divides in fp32 to within two units in the last place, and key's mean is summed in fp32."""


class Format(NamedTuple):
    part: str
    per_thread: bool = True
    in_fp16: bool = False

    def __str__(self) -> str:
        return (
            f"{self.part}, per {'thread' if self.per_thread else 'warp'}, sums in {'fp16' if self.in_fp16 else 'fp32'}"
        )


FORMATS = [
    *(Format("sm90"), Format("sm90", per_thread=False)),
    *(Format("sm89"), Format("sm89", per_thread=False)),
    *(Format("sm89", in_fp16=True), Format("sm89", per_thread=False, in_fp16=True)),
]
EACH_FORMAT = pytest.mark.parametrize("form", FORMATS, ids=str)


class Case(NamedTuple):
    name: str
    lengths: tuple[int, int]
    head_dim: int = 128
    heads: tuple[int, int] = (4, 4)
    layout: str = "NHD"
    dtype: torch.dtype = torch.bfloat16
    fused: bool = False
    """query, key and value are views into one tensor."""


CASES = [
    Case("long", (4_001, 4_001)),
    Case("fused", (1_024, 1_024), fused=True),
    Case("cross, grouped", (300, 77), heads=(4, 2), head_dim=64, layout="HND", dtype=torch.float16),
    Case("padded head", (129, 257), head_dim=72, layout="HND"),
    Case("one row", (1, 129), head_dim=40, dtype=torch.float16),
]


def loaded(backend: Backend, form: Format) -> Kernel:
    """The kernel in this format; a skip where it is not to be had."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    environment = Environment.detect()
    arch = environment.arch_of(DEVICE)
    if arch not in RUNS_ON[form.part]:
        pytest.skip(f"this device is {arch}; the {form.part} part runs on {', '.join(RUNS_ON[form.part])}")
    if not form.in_fp16:
        environment = replace(environment, cuda="12.4")
    elif not sums_in_fp16(environment):
        pytest.skip(f"CUDA {environment.cuda} does not sum fp8 products in fp16")
    kernel = backend.load(environment, form.part if form.per_thread else "sm120", False)
    if not isinstance(kernel, Kernel):
        pytest.skip("; ".join(refusal.detail for refusal in kernel))
    return kernel


def drawn(case: Case) -> list[Tensor]:
    """query, key and value in the case's layout."""
    (heads, kv_heads), (qo_len, kv_len), dim = case.heads, case.lengths, case.head_dim
    shapes = [(2, qo_len, heads, dim), (2, kv_len, kv_heads, dim), (2, kv_len, kv_heads, dim)]
    query, key, value = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    key += KEY_OFFSET * normal(dim, seed=9)
    tensors = [tensor.to(DEVICE, case.dtype) for tensor in (query, key, value)]
    if case.fused:
        return list(torch.stack(tensors, dim=2).unbind(2))
    return [tensor.transpose(1, 2).contiguous() for tensor in tensors] if case.layout == "HND" else tensors


def heads_first(tensor: Tensor, case: Case) -> Tensor:
    return tensor.transpose(1, 2) if case.layout == "NHD" else tensor


def keywords(case: Case) -> dict[str, object]:
    return {"tensor_layout": case.layout, "sm_scale": case.head_dim**-0.5, "smooth_k": True}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@EACH_FORMAT
def test_attention_is_within_the_tolerance_and_changes_no_input(form, case):
    backend = FUSED[form.part]
    kernel = loaded(backend, form)
    tensors = drawn(case)
    copies = [tensor.clone() for tensor in tensors]
    output = kernel.function(*tensors, **keywords(case))
    expected = exact(*(heads_first(copy, case) for copy in copies))
    accuracy = compare(heads_first(output, case), expected)
    assert output.dtype == case.dtype
    assert accuracy.relative_l2 <= backend.tolerance.relative_l2, accuracy
    assert accuracy.cosine >= backend.tolerance.cosine, accuracy
    assert all(map(torch.equal, tensors, copies))


@EACH_FORMAT
def test_each_element_is_in_its_place_and_rounded_to_the_nearest(form):
    loaded(FUSED[form.part], form)  # or a skip
    from sage_core.backends.quantization import Blocks, quantize

    value_max = 2.25 if form.in_fp16 else 448.0
    tiles = layout.TILES[form.part]
    case = Case("uneven", (300, 333), heads=(4, 2), head_dim=72)
    query, key, value = (heads_first(tensor, case) for tensor in drawn(case))
    written = quantize([query, key, value], Blocks(*tiles, form.per_thread, value_max), smooth_k=True)
    smooth = key.double() - key.double().mean(2, keepdim=True)
    rows = layout.query_groups(300, tiles, form.per_thread)
    keys = layout.key_groups(333, tiles, form.per_thread)
    assert layout.scale_error(written.query_scale, query, rows) <= DIVIDED
    assert layout.scale_error(written.key_scale, smooth, keys) <= DIVIDED
    assert layout.value_scale_error(written.value_scale, value, value_max) <= DIVIDED
    assert layout.steps_off(written.query, written.query_scale, query, rows) <= 0.5 * (1 + 1e-3)
    assert layout.steps_off(written.key, written.key_scale, smooth, keys) <= 0.5 * (1 + 1e-3)
    assert layout.value_error(written.value, written.value_scale, value) <= 2**-4 * ROUNDED_TWICE
    behind = layout.restored_value(written.value, written.value_scale)
    assert behind[:, :, 333:].abs().sum().item() == behind[..., 72:].abs().sum().item() == 0


@EACH_FORMAT
def test_the_halves_give_the_bits_of_the_whole(form):
    kernel = loaded(FUSED[form.part], form)
    for case in CASES:
        tensors = drawn(case)
        attend = kernel.prepare(list(tensors), **keywords(case))
        assert torch.equal(attend(), kernel.function(*tensors, **keywords(case))), case.name


# -- memory


def large() -> list[Tensor]:
    """24 MiB each, which the allocator gives in a block of their own."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (1, 4_001, 24, 128)
    return [torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]


LARGE = {"tensor_layout": "NHD", "sm_scale": 128**-0.5, "smooth_k": True}


def peak_of(function: Callable[..., Tensor], tensors: list[Tensor]) -> int:
    """The bytes that the second of two calls takes beside its inputs, the output among them."""
    function(*tensors, **LARGE)
    torch.cuda.synchronize(DEVICE)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    function(*tensors, **LARGE)
    torch.cuda.synchronize(DEVICE)
    return torch.cuda.max_memory_allocated(DEVICE) - before


@EACH_FORMAT
def test_it_needs_less_memory_than_the_packages_own_quantization(form):
    fused, own = loaded(FUSED[form.part], form), loaded(OWN[form.part], form)
    tensors = large()
    ours, theirs = peak_of(fused.function, tensors), peak_of(own.function, tensors)
    assert ours <= PEAK[form.part] * theirs, f"{ours} of {theirs} bytes, {ours / theirs:.3f}"


@EACH_FORMAT
def test_each_input_is_released_once_it_is_quantized(form):
    kernel = loaded(FUSED[form.part], form)
    expected = kernel.function(*large(), **LARGE)
    tensors = large()
    size = tensors[0].nbytes
    torch.cuda.synchronize(DEVICE)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    output = kernel.prepare(tensors, **LARGE)()
    torch.cuda.synchronize(DEVICE)
    assert torch.cuda.max_memory_allocated(DEVICE) - before <= RELEASED_PEAK * size
    assert torch.cuda.memory_allocated(DEVICE) - before <= -1.9 * size
    assert torch.equal(output, expected)
