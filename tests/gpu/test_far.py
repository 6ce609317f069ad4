"""Calls past 2**31 elements: each kernel that this machine has serves them right, or says why it does not.

Tensors are as large as they must be and attention as small as it can be; the rows that are compared with fp64 lie at
the ends and around the elements where counting in 32 bits turns over.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sage_core import BACKENDS, Dispatcher, Policy, Session, checking
from sage_core.accuracy import compare
from sage_core.backends import Backend
from sage_core.call import AttentionCall
from sage_core.environment import Environment
from sage_core.refusal import RefusalCode
from tests.gpu.test_checking import ROUNDED
from tests.gpu.test_kernels import DECLARED, GPUS, NOT_THERE, SITE_TOLERANCE, is_for_this_machine, no_native
from tests.unit.fp64 import exact

DEVICE = torch.device("cuda", 0)
DIM = 128
BEYOND = 2**31
PREVIEW = "int8_reference"

Tensors = list[torch.Tensor]


def fused() -> tuple[Tensors, int]:
    """Three narrow views into one wide tensor, whose last rows are beyond: 2 heads of 4,200 rows each. Whatever else
    is in that tensor is NaN."""
    heads, rows, width = 2, 4_200, 512_000
    wide = torch.full((1, rows, width), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    given = [wide[..., start : start + heads * DIM] for start in (0, width // 2, width - heads * DIM)]
    for seed, tensor in enumerate(given):
        tensor.copy_(drawn((1, rows, heads * DIM), seed))
    assert given[0].stride(1) * (rows - 1) > BEYOND
    return given, heads


def long() -> tuple[Tensors, int]:
    """A query of more elements than that, and so an output, on few keys: 8 heads."""
    heads, keys = 8, 256
    query = drawn((1, BEYOND // (heads * DIM) + 100, heads * DIM), 0)
    assert query.numel() > BEYOND
    return [query, drawn((1, keys, heads * DIM), 1), drawn((1, keys, heads * DIM), 2)], heads


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)


def rows_to_look_at(length: int, row: int) -> torch.Tensor:
    """The first and the last rows, and those around where elements, and bytes of 8 and 16 bits, pass 31 and 32 bits;
    ``row`` is how many elements lie between two rows."""
    turns = [limit // row for limit in (BEYOND // 2, BEYOND, 2 * BEYOND)]
    rows = [*range(16), *range(length - 16, length), *(turn + each for turn in turns for each in range(-8, 8))]
    return torch.tensor([each for each in rows if 0 <= each < length], device=DEVICE).unique()


def test_the_reference_of_a_check_is_right_past_31_bits() -> None:
    if not GPUS:
        pytest.skip("no GPU here")
    given, heads = fused()
    call = AttentionCall.from_comfy(*given, heads)
    spec, refusals = call.read(Environment.detect().arch_of(DEVICE))
    assert not refusals
    assert spec.max_offset > BEYOND
    rows = rows_to_look_at(given[0].shape[1], given[0].stride(1))
    found, expected = (checking._reference(call, spec, rows, exact=exact) for exact in (False, True))
    assert ((found - expected).norm() / expected.norm()).item() < ROUNDED


@pytest.mark.parametrize("call", [fused, long], ids=["offsets", "elements"])
@pytest.mark.parametrize("backend", BACKENDS, ids=[backend.name for backend in BACKENDS])
def test_a_call_past_31_bits_is_right(
    backend: Backend, call: Callable[[], tuple[Tensors, int]], session: Session
) -> None:
    if not GPUS:
        pytest.skip("no GPU here")
    if not is_for_this_machine(backend):
        pytest.skip(f"{backend.name} is for other GPUs")
    if backend.name == PREVIEW:
        pytest.skip("the preview in plain PyTorch would take minutes")
    given, heads = call()
    tolerance = max(SITE_TOLERANCE, backend.tolerance.relative_l2)
    dispatcher = Dispatcher(Policy(kernel=backend.name, tolerance=tolerance), session)
    with torch.inference_mode():
        output = dispatcher.attend(no_native, *given, heads)
    (run,) = dispatcher.snapshot()["runs"]
    if {entry["kernel"]: entry["calls"] for entry in run["calls_by_kernel"]} != {backend.name: 1}:
        codes = {RefusalCode(refusal["code"]) for refusal in run["refusals"]}
        text = "; ".join(refusal["detail"] for refusal in run["refusals"])
        assert codes
        assert codes <= DECLARED or codes <= NOT_THERE, text
        pytest.skip(text)
    rows = rows_to_look_at(given[0].shape[1], given[0].stride(1))
    query, key, value, output = (
        tensor.unflatten(2, (heads, DIM)).transpose(1, 2)
        for tensor in (given[0][:, rows], given[1], given[2], output[:, rows])
    )
    accuracy = compare(output, exact(query, key, value))
    assert accuracy.relative_l2 <= backend.tolerance.relative_l2, accuracy
