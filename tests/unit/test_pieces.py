"""Calls beyond what a kernel can count: cut where it may be cut, whole where it need not be, right in any case."""

from __future__ import annotations

import pytest
import torch

from sage_core.pieces import pieces, smallest
from sage_core.support import MAX_OFFSET_32_BIT
from tests.unit.conftest import (
    FakeComfy,
    FakeKernel,
    Native,
    attention,
    comfy_arguments,
    fake_backend,
    make_dispatcher,
    make_spec,
    normal,
    served,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def cut(limit, **fields):
    """(batch, first and last query head, first and last key head) of each piece."""
    return [
        (piece.batch.start, piece.heads.start, piece.heads.stop, piece.kv_heads.start, piece.kv_heads.stop)
        for piece in pieces(make_spec(**fields), limit)
    ]


def test_a_call_within_reach_is_not_cut():
    fields = {"batch_size": 2, "num_qo_heads": 4, "num_kv_heads": 4, "qo_len": 10, "kv_len": 8, "head_dim": 16}
    assert cut(2 * 4 * 10 * 16 - 1, **fields) == []
    assert cut(None, **fields) == []
    assert cut(2 * 4 * 10 * 16 - 2, **fields) == [(0, 0, 4, 0, 4), (1, 0, 4, 0, 4)]


@pytest.mark.parametrize(
    ("per_piece", "expected"),
    [
        (5, [(0, 0, 5, 0, 5)]),
        (4, [(0, 0, 4, 0, 4), (0, 4, 5, 4, 5)]),
        (2, [(0, 0, 2, 0, 2), (0, 2, 4, 2, 4), (0, 4, 5, 4, 5)]),
        (1, [(0, head, head + 1, head, head + 1) for head in range(5)]),
    ],
)
def test_heads_are_cut_into_groups_as_large_as_they_may_be(per_piece, expected):
    head = 30 * 16
    fields = {"num_qo_heads": 5, "num_kv_heads": 5, "qo_len": 30, "kv_len": 20, "head_dim": 16}
    assert (cut(per_piece * head - 1, **fields) or expected) == expected


def test_query_heads_stay_with_the_key_head_that_they_share():
    fields = {"num_qo_heads": 12, "num_kv_heads": 3, "qo_len": 10, "kv_len": 10, "head_dim": 16}
    assert cut(2 * 4 * 10 * 16 - 1, **fields) == [(0, 0, 8, 0, 2), (0, 8, 12, 2, 3)]
    assert smallest(make_spec(**fields)) == 4 * 10 * 16


def test_a_long_video_is_within_reach_head_by_head():
    """56 heads of 128 over 400,000 rows: more than 2**31 elements."""
    found = cut(MAX_OFFSET_32_BIT, num_qo_heads=56, num_kv_heads=56, qo_len=400_000, kv_len=400_000, head_dim=128)
    assert found == [(0, 0, 41, 0, 41), (0, 41, 56, 41, 56)]


class Reaching(FakeKernel):
    """A kernel that is wrong about what lies beyond its reach, and notes how far its calls reached."""

    def __init__(self, limit):
        super().__init__(self.spoil_beyond)
        self.limit, self.reached = limit, []

    def spoil_beyond(self, *call):
        for tensor in call[:3]:
            strides = zip(tensor.shape, tensor.stride(), strict=True)
            self.reached.append(max(sum((size - 1) * stride for size, stride in strides), tensor.numel() - 1))
        return attention(*call)


@pytest.mark.parametrize("layouts", [("NHD",), ("HND",)])
@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize(
    ("options", "kernel_calls"),
    [
        ({"batch": 2, "heads": 5}, 2 * 3),
        ({"batch": 1, "heads": 6, "kv_heads": 3}, 3),
        ({"batch": 2, "heads": 4, "mask": normal(300, 280, seed=9)}, 2 * 2),
        ({"batch": 2, "heads": 4, "mask": normal(2, 4, 300, 280, seed=9) > 0}, 2 * 2),
        ({"batch": 2, "heads": 4, "mask": normal(2, 1, 300, 280, seed=9)}, 2 * 2),
        ({"batch": 1, "heads": 4, "mask": normal(1, 4, 300, 280, seed=9), "scale": 1.0}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("gqa", [True, False])
def test_the_pieces_give_what_the_whole_would(layouts, skip_reshape, skip_output_reshape, options, kernel_calls, gqa):
    limit = 2 * 300 * 16 - 1  # two heads
    args, keywords = comfy_arguments(
        qo_len=300, kv_len=280, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **options
    )
    before = [tensor.clone() for tensor in args[:3]]
    kernel = Reaching(limit)
    taken = ("attn_mask", "enable_gqa") if gqa else ("attn_mask",)
    backend = fake_backend(kernel, max_offset=limit, tensor_layouts=layouts, options=taken)
    comfy = FakeComfy(
        make_dispatcher(backend, tolerance=0.1),
        lambda attend, options: attend(*args, **keywords, transformer_options=options),
    )
    comfy.sample()
    del kernel.calls[:], kernel.reached[:]
    (output,) = comfy.sample()
    assert served(comfy.run()) == {"fake kernel": 1}
    assert len(kernel.calls) == kernel_calls
    assert max(kernel.reached) <= limit
    expected = Native()(*args, **keywords)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert output.is_contiguous() or skip_output_reshape
    assert all(torch.equal(one, other) for one, other in zip(args[:3], before, strict=True))


def test_views_into_a_fused_tensor_are_copied_piece_by_piece():
    heads, head_dim, rows = 6, 16, 200
    fused = normal(1, rows, 3 * heads * head_dim)
    q, k, v = (part.unflatten(-1, (heads, head_dim)).transpose(1, 2) for part in fused.chunk(3, -1))
    limit = 2 * rows * head_dim - 1
    kernel = Reaching(limit)
    arguments = {"skip_reshape": True}
    comfy = FakeComfy(
        make_dispatcher(fake_backend(kernel, max_offset=limit)),
        lambda attend, options: attend(q, k, v, heads, **arguments, transformer_options=options),
    )
    comfy.sample()
    (output,) = comfy.sample()
    assert len(kernel.calls) == 1 + 2 * 3
    assert max(kernel.reached[3:]) <= limit
    torch.testing.assert_close(output, Native()(q, k, v, heads, **arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_piece_that_fails_makes_the_call_native(failing):
    args, keywords = comfy_arguments(heads=6, qo_len=300)
    made = []

    def spoil(*call):
        made.append(1)
        if len(made) - 2 == failing:  # after the small example
            raise ValueError("bad")
        return attention(*call)

    backend = fake_backend(FakeKernel(spoil), max_offset=2 * 300 * 16 - 1)
    comfy = FakeComfy(
        make_dispatcher(backend), lambda attend, options: attend(*args, **keywords, transformer_options=options)
    )
    (output,) = comfy.sample()
    assert served(comfy.run()) == {"native": 1}
    assert torch.equal(output, Native()(*args, **keywords))
