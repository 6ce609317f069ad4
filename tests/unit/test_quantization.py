"""Quantization for SageAttention 2: what it hands over, in Triton's interpreter, and that it compiles for each GPU.

tests/unit/quantization_worker.py has the calls, tests/unit/sageattention2_layout.py what is expected of them.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sage_core.backends.sageattention import INT8_FP8, INT8_FP16
from tests.unit.sageattention2_layout import TILES, padded

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed on this platform", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sage_core.backends import quantization

ROOT = Path(__file__).parents[2]
ROUNDED = 1 + 1e-3
"""What fp32 may add to a bound: some 1e-7 each of a scale of 127 steps and of key's mean of several times a scale."""
SHARED_MEMORY = 99 * 1024
"""What a thread block has at most on sm89 and sm120; other architectures have more."""
SINCE_3_3 = "constexprs" in inspect.signature(ASTSource).parameters
"""Whether this is Triton 3.3 or newer."""


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    worker = Path(__file__).with_name("quantization_worker.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, worker], capture_output=True, text=True, timeout=600, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture
def results(printed) -> list[dict[str, Any]]:
    """What came of each call, one entry per format and case."""
    assert len(printed["results"]) == 50
    return printed["results"]


def about(result: dict[str, Any]) -> tuple[str, str]:
    return result["format"], result["case"]


# -- what the attention functions read


def test_shapes_and_types_are_those_that_the_attention_functions_take(results):
    for result in results:
        query, key, value, query_scale, key_scale, value_scale = result["shapes"]
        tiles = TILES[result["format"][:4]]
        per_query_warp, per_key_tile = (8, 4) if "per thread" in result["format"] else (1, 1)
        assert result["dtypes"] == ["int8", "int8", "float8_e4m3fn", *3 * ["float32"]], about(result)
        assert result["contiguous"], about(result)
        assert query[3] == key[3] == value[2] in (64, 128), about(result)
        assert value == [key[0], key[1], key[3], padded(key[2], tiles.value)], about(result)
        assert query_scale == [*query[:2], padded(query[2], tiles.query) // tiles.warp * per_query_warp], about(result)
        assert key_scale == [*key[:2], padded(key[2], tiles.key) // tiles.key * per_key_tile], about(result)
        assert value_scale == value[:3], about(result)


def test_a_scale_makes_the_largest_of_its_elements_the_largest_number(results):
    for result in results:
        assert max(result["scale_errors"]) <= 1e-6, (about(result), result["scale_errors"])


def test_query_and_key_are_within_half_a_step(results):
    for result in results:
        assert result["query_steps"] <= 0.5 * ROUNDED, about(result)
        assert result["key_steps"] <= 0.5 * ROUNDED, about(result)


def test_each_value_is_in_its_place_and_rounded_to_the_nearest(results):
    for result in results:
        assert result["value_error"] <= 2**-4 * ROUNDED, about(result)


def test_what_lies_behind_a_head_and_behind_the_last_value_is_zero(results):
    for result in results:
        assert result["padding"] == [0, 0, 0, 0], about(result)


def test_nothing_is_left_unwritten_or_divided_by_zero(results):
    """Memory is full of NaN before; a case has a block of zeros in query and in key and a channel of them in value."""
    for result in results:
        assert result["finite"], about(result)


def test_attention_is_within_the_tolerance(results):
    """Scores alone, with exact value, are as those of the kernels that have value in 16 bits; without smoothing the
    offset that all keys share costs more, as expected."""
    for result in results:
        assert result["error"] <= INT8_FP8.relative_l2, (about(result), result["error"])
        if result["smooth_k"]:
            assert result["scores_error"] <= INT8_FP16.relative_l2, (about(result), result["scores_error"])


def test_inputs_are_unchanged_and_the_output_is_as_query(results):
    for result in results:
        assert result["unchanged"], about(result)
        assert result["as_given"], about(result)


# -- the two halves


def test_the_halves_give_the_bits_of_the_whole_and_let_go_of_value_first(printed):
    """Which of query, key and value are there when each of two launches quantizes, and behind them."""
    held = [[True, True, True], [True, True, False], [False, False, False]]
    assert len(printed["halves"]) == 5
    for name, halves in printed["halves"].items():
        assert halves == {"same_bits": True, "held": held}, name


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_number_that_eight_bits_cannot_say_is_seen_in_the_output(printed, number):
    """As natively: in the rows of its query, and for a key or a value in all rows of the head."""
    heads = len(printed["not finite"][f"query {number}"])
    for role in ("query", "key", "value"):
        rows, *others = printed["not finite"][f"{role} {number}"]
        assert rows > 0 and others == [0] * (heads - 1), role  # noqa: PT018


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("whole", {"bfloat16": 1, "int8": 0.5, "float8_e4m3fn": 0.5}),
        ("largest", {"bfloat16": 1, "int8": 0.5, "float8_e4m3fn": 0.5}),
        ("larger", {"bfloat16": 1, "int8": 1, "float8_e4m3fn": 0.5}),
        ("halves", {"bfloat16": 1, "int8": 1, "float8_e4m3fn": 0.5}),
    ],
)
def test_no_copy_of_an_input_is_made_and_query_lies_where_the_output_goes(printed, call, expected):
    """In parts of one of the three inputs: the output, what is in 8 bits, and scales in fp32. Query has memory of its
    own only where the output is not there yet, or too large to be counted in bytes."""
    made = Counter()
    for dtype, size in printed["allocated"][call]:
        made[dtype] += size
    assert made.pop("float32") <= 0.075
    assert made == pytest.approx(expected, abs=0.02)  # value's padding to whole tiles


# -- without a GPU, as far as its machine code

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float32: "*fp32",
}


class Launches:
    """Stands for a kernel and compiles it for the arguments of each launch, where Triton would launch it."""

    def __init__(self, kernel: Any, capability: int, compiled: list[Any]) -> None:
        self.kernel, self.capability, self.compiled = kernel, capability, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, num_warps: int, **constants: Any) -> None:
        names = self.kernel.arg_names
        types = {}
        for name, given in zip(names, args, strict=False):
            if isinstance(given, torch.Tensor):
                types[name] = TYPES[given.dtype]
            elif isinstance(given, float):
                types[name] = "fp32"
            elif given == 1:  # Triton has it a constant
                constants[name] = 1
            else:
                types[name] = "i32" if given < 2**31 else "i64"
        assert {*types, *constants} == set(names)
        if SINCE_3_3:
            types = {name: types.get(name, "constexpr") for name in names}
            source = ASTSource(self.kernel, types, constexprs=constants)
        else:
            source = ASTSource(self.kernel, types, constants=constants)
        target = GPUTarget("cuda", self.capability, 32)
        self.compiled.append(triton.compile(source, target=target, options={"num_warps": num_warps}))


def compiled_for(
    monkeypatch, capability: int, blocks: quantization.Blocks, smooth_k: bool, *shapes, release: bool = False
) -> list[Any]:
    """What each launch compiles for tensors of these shapes, for the whole or for the first of two halves."""
    compiled: list[Any] = []
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    query_out = torch.empty((*shapes[0][:-1], quantization.padded_dim(tensors[0])), dtype=torch.int8, device="meta")
    with monkeypatch.context() as patch:
        for name in ("_statistics", "_quantize"):
            patch.setattr(quantization, name, Launches(getattr(quantization, name), capability, compiled))
        quantization.quantize(tensors, blocks, smooth_k, None if release else query_out)
    return compiled


def blocks_of(part: str, per_thread: bool) -> quantization.Blocks:
    tiles = TILES[part]
    return quantization.Blocks(tiles.query, tiles.warp, tiles.key, tiles.value, per_thread, 448.0)


@pytest.mark.parametrize(
    ("capability", "blocks", "smooth_k", "shapes"),
    [
        (89, blocks_of("sm89", per_thread=True), True, [(2, 4, 300, 72), (2, 2, 129, 72), (2, 2, 129, 72)]),
        (90, blocks_of("sm90", per_thread=True), True, 3 * [(2, 4, 300, 128)]),
        (100, blocks_of("sm89", per_thread=False), False, 3 * [(2, 4, 300, 64)]),
        (120, blocks_of("sm89", per_thread=False), True, 3 * [(2, 4, 300, 128)]),
        (89, blocks_of("sm89", per_thread=True), True, 3 * [(1, 1, 1, 64)]),
        (90, blocks_of("sm90", per_thread=True), False, [(1, 1, 300, 40), (1, 1, 1, 40), (1, 1, 1, 40)]),
    ],
    ids=["sm89", "sm90", "sm100", "sm120", "one of everything", "one key"],
)
def test_it_compiles_for_each_gpu(monkeypatch, tmp_path, capability, blocks, smooth_k, shapes):
    if capability >= 100 and not SINCE_3_3:
        pytest.skip(f"Triton {triton.__version__} has no code for sm_{capability}")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    statistics, quantize = compiled_for(monkeypatch, capability, blocks, smooth_k, *shapes)
    released = compiled_for(monkeypatch, capability, blocks, smooth_k, *shapes, release=True)
    assert len(released) == 3  # value goes first
    for kernel in (statistics, quantize, *released):
        assert f".target sm_{capability}" in kernel.asm["ptx"]
        assert len(kernel.asm["cubin"]) > 0
        assert kernel.metadata.shared <= SHARED_MEMORY
    # to the nearest, and never to the NaN above 448
    assert "cvt.rn.satfinite.e4m3x2" in quantize.asm["ptx"]
