"""Calls beyond what a kernel can count: cut where it may be cut, whole where it need not be, right in any case."""

from __future__ import annotations

import pytest
import torch

from sage_core.backends.base import Kernel
from sage_core.call import AttentionCall, largest_offset, last_offset
from sage_core.pieces import COPIED_SHARE, pieces, smallest
from sage_core.selection import Use
from sage_core.serving import server
from sage_core.support import MAX_OFFSET_32_BIT
from tests.unit.conftest import (
    TRIAL_CALLS,
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
    virtual_memory,
)

pytestmark = pytest.mark.usefixtures("one_thread")

QO_LEN, KV_LEN, HEAD_DIM = 40, 36, 80
HEAD = QO_LEN * HEAD_DIM
"""Elements of a head of query in the calls here."""


def cut(limit, query, key=None):
    """(batch, first and last query head, first and last key head) of each piece of a call of these tensors."""
    key = query if key is None else key
    call = AttentionCall.from_comfy(query, key, key, query.shape[1], skip_reshape=True, enable_gqa=True)
    spec, _ = call.read("cpu")
    return [
        (piece.batch.start, piece.heads.start, piece.heads.stop, piece.kv_heads.start, piece.kv_heads.stop)
        for piece in pieces(spec, (query, key, key), limit)
    ]


def heads(query, *ends, entry=0):
    """The pieces of one batch entry, as many query heads as key heads."""
    return [(entry, first, last, first, last) for first, last in zip((0, *ends), ends, strict=False)]


def test_a_call_within_reach_is_not_cut():
    query, key = normal(2, 4, QO_LEN, HEAD_DIM), normal(2, 4, KV_LEN, HEAD_DIM)
    assert cut(2 * 4 * HEAD - 1, query, key) == []
    assert cut(None, query, key) == []
    assert cut(2 * 4 * HEAD - 2, query, key) == [*heads(query, 4), *heads(query, 4, entry=1)]


@pytest.mark.parametrize(
    ("per_piece", "ends"), [(5, ()), (4, (2, 5)), (3, (2, 5)), (2, (1, 3, 5)), (1, (1, 2, 3, 4, 5))]
)
def test_heads_are_cut_into_few_groups_of_about_equal_size(per_piece, ends):
    query = normal(1, 5, QO_LEN, HEAD_DIM)
    assert cut(per_piece * HEAD - 1, query) == heads(query, *ends)


def test_query_heads_stay_with_the_key_head_that_they_share():
    query, key = normal(1, 12, QO_LEN, HEAD_DIM), normal(1, 3, QO_LEN, HEAD_DIM)
    assert cut(2 * 4 * HEAD - 1, query, key) == [(0, 0, 4, 0, 1), (0, 4, 12, 1, 3)]
    assert smallest(make_spec(num_qo_heads=12, num_kv_heads=3, qo_len=QO_LEN, head_dim=HEAD_DIM)) == 4 * 128 * HEAD_DIM


def test_batch_entries_that_are_within_reach_one_by_one_are_not_cut_further():
    """Views into a fused tensor: as a whole too far, each entry not."""
    query = normal(3, QO_LEN, 4 * HEAD_DIM * 3)[..., : 4 * HEAD_DIM].unflatten(-1, (4, HEAD_DIM)).transpose(1, 2)
    limit = largest_offset(query[:1])
    assert largest_offset(query) > limit
    assert cut(limit, query) == [piece for entry in range(3) for piece in heads(query, 4, entry=entry)]


def test_what_has_to_be_copied_is_cut_finer():
    """Rows too far apart even for one head."""
    query = normal(1, QO_LEN, 40 * HEAD_DIM)[..., : 6 * HEAD_DIM].unflatten(-1, (6, HEAD_DIM)).transpose(1, 2)
    limit = COPIED_SHARE * 2 * HEAD - 1
    assert query.numel() <= limit < largest_offset(query[:, :1])
    assert cut(limit, query) == heads(query, 2, 4, 6)
    assert cut(limit, query[:, :1]) == []  # the only piece is the whole


def test_a_long_video_is_within_reach_by_groups_of_heads():
    """56 heads of 128 over 400,000 rows, heads first in memory: more than 2**31 elements."""
    query = virtual_memory(56 * 400_000 * 128).view(1, 56, 400_000, 128)
    assert cut(MAX_OFFSET_32_BIT, query) == heads(query, 28, 56)


def test_a_long_video_in_a_fused_tensor_is_copied_by_groups_of_heads():
    """56 heads of 128 over 99,866 rows 21,504 apart: a third of 2**31 elements, the last of them beyond it."""
    fused = virtual_memory(99_866 * 21_504).view(1, 99_866, 21_504)
    query = fused[..., : 56 * 128].unflatten(-1, (56, 128)).transpose(1, 2)
    assert cut(MAX_OFFSET_32_BIT, query) == heads(query, 18, 37, 56)


class Reaching(FakeKernel):
    """A kernel that notes how far its calls reached, and how many of their tensors lie in the caller's memory."""

    def __init__(self, *given):
        super().__init__(self.note)
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.reached, self.views = [], 0

    def note(self, *call):
        self.reached += map(largest_offset, call[:3])
        self.views += sum(tensor.untyped_storage().data_ptr() in self.given for tensor in call[:3])
        return attention(*call)


def serve(kernel, args, keywords, limit, **fields):
    """The output of a second run with the kernel, whose plan the first one made; the calls noted are the second's."""
    backend = fake_backend(kernel, max_offset=limit, **fields)
    comfy = FakeComfy(
        make_dispatcher(backend, tolerance=0.1),
        lambda attend, options: attend(*args, **keywords, transformer_options=options),
    )
    comfy.sample()
    del kernel.calls[:], kernel.reached[:]
    kernel.views = 0
    (output,) = comfy.sample()
    assert served(comfy.run()) == {"fake kernel": 1}
    return output


CALLS = {
    "odd heads": ({"batch": 2, "heads": 5}, 2 * 3, 2 * 5),
    "grouped heads": ({"batch": 1, "heads": 6, "kv_heads": 3}, 3, 3),
    "grouped heads in a batch": ({"batch": 3, "heads": 4, "kv_heads": 2}, 3 * 2, 3 * 2),
    "a mask for all": ({"batch": 2, "heads": 4, "mask": normal(QO_LEN, KV_LEN, seed=9)}, 2 * 2, 2 * 4),
    "a mask by head": ({"batch": 2, "heads": 4, "mask": normal(2, 4, QO_LEN, KV_LEN, seed=9) > 0}, 2 * 2, 2 * 4),
    "a mask by batch": ({"batch": 2, "heads": 4, "mask": normal(2, 1, QO_LEN, KV_LEN, seed=9)}, 2 * 2, 2 * 4),
    "a mask of three axes": ({"batch": 2, "heads": 4, "mask": normal(2, QO_LEN, KV_LEN, seed=9)}, 2 * 2, 2 * 4),
    "a mask by grouped head": (
        {"batch": 1, "heads": 6, "kv_heads": 3, "mask": normal(1, 6, QO_LEN, KV_LEN, seed=9)},
        3,
        3,
    ),
    "a scale": ({"batch": 1, "heads": 4, "mask": normal(1, 4, 1, KV_LEN, seed=9), "scale": 1.0}, 2, 4),
}
"""Options of a call, and the kernel calls that it takes two heads at a time, as views and as copies."""


@pytest.mark.parametrize("layouts", [("NHD",), ("HND",)], ids=["NHD", "HND"])
@pytest.mark.parametrize("skip_reshape", [False, True], ids=["joined", "heads apart"])
@pytest.mark.parametrize("skip_output_reshape", [False, True], ids=["joined output", "output apart"])
@pytest.mark.parametrize("gqa", [True, False], ids=["takes gqa", "expanded"])
@pytest.mark.parametrize("name", CALLS)
def test_the_pieces_give_what_the_whole_would(layouts, skip_reshape, skip_output_reshape, gqa, name):
    options, as_views, as_copies = CALLS[name]
    limit = 2 * HEAD - 1
    args, keywords = comfy_arguments(
        qo_len=QO_LEN,
        kv_len=KV_LEN,
        head_dim=HEAD_DIM,
        skip_reshape=skip_reshape,
        skip_output_reshape=skip_output_reshape,
        **options,
    )
    before = [tensor.clone() for tensor in args[:3]]
    kernel = Reaching(*args[:3])
    taken = ("attn_mask", "enable_gqa") if gqa else ("attn_mask",)
    output = serve(kernel, args, keywords, limit, tensor_layouts=layouts, options=taken)
    # with the heads joined, the rows of a head lie too far apart
    assert len(kernel.calls) == (as_views if skip_reshape else as_copies)
    assert max(kernel.reached) <= limit
    expands = not gqa and "kv_heads" in options
    if skip_reshape:
        assert kernel.views == len(kernel.calls) * (1 if expands else 3)
    expected = Native()(*args, **keywords)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert output.is_contiguous() or skip_output_reshape
    assert all(torch.equal(one, other) for one, other in zip(args[:3], before, strict=True))


SCORES = QO_LEN * KV_LEN
"""Elements of a mask for one head."""


@pytest.mark.parametrize(
    ("shape", "limit", "kernel_calls"),
    [
        ((2, 4, QO_LEN, KV_LEN), 8 * SCORES - 1, 1),
        ((2, 4, QO_LEN, KV_LEN), 4 * SCORES - 1, 2),  # each batch entry within reach
        ((2, 4, QO_LEN, KV_LEN), 4 * SCORES - 2, 8),
        ((2, 4, QO_LEN, KV_LEN), 1 * SCORES - 1, 8),
        ((2, 4, QO_LEN, KV_LEN), 1 * SCORES - 2, None),  # not even one head
        ((2, 1, QO_LEN, KV_LEN), 1 * SCORES - 1, 2),
        ((1, 1, QO_LEN, KV_LEN), 1 * SCORES - 1, 1),
        ((QO_LEN, KV_LEN), 1 * SCORES - 2, None),
    ],
)
def test_a_call_whose_mask_alone_is_too_large_is_cut_as_far_as_that_helps(shape, limit, kernel_calls):
    mask = normal(*shape, seed=9)
    args, keywords = comfy_arguments(batch=2, heads=4, qo_len=QO_LEN, kv_len=KV_LEN, head_dim=4, mask=mask)
    assert max(map(largest_offset, args[:3])) <= SCORES - 2
    reached = []

    def note(*call):
        reached.append(last_offset(call[-1]))
        return attention(*call)

    backend = fake_backend(FakeKernel(note), max_offset=limit)
    comfy = FakeComfy(
        make_dispatcher(backend), lambda attend, options: attend(*args, **keywords, transformer_options=options)
    )
    comfy.sample()
    del reached[:]
    (output,) = comfy.sample()
    torch.testing.assert_close(output, Native()(*args, **keywords), rtol=1e-4, atol=1e-5)
    if kernel_calls is None:
        assert [refusal["code"] for refusal in comfy.run()["refusals"]] == ["offset"]
        assert reached == []
    else:
        assert len(reached) == kernel_calls
        assert max(reached) <= limit


@pytest.mark.parametrize("batch", [1, 2])
def test_views_into_a_fused_tensor_are_copied_piece_by_piece(batch):
    heads = 6
    fused = normal(batch, QO_LEN, 3 * heads * HEAD_DIM)
    q, k, v = (part.unflatten(-1, (heads, HEAD_DIM)).transpose(1, 2) for part in fused.chunk(3, -1))
    limit = COPIED_SHARE * 2 * HEAD - 1
    assert batch * heads * HEAD - 1 <= limit < largest_offset(q[:1])
    kernel = Reaching(fused)
    output = serve(kernel, (q, k, v, heads), {"skip_reshape": True}, limit)
    assert len(kernel.calls) == batch * 3
    assert max(kernel.reached) == 2 * HEAD - 1
    torch.testing.assert_close(output, Native()(q, k, v, heads, skip_reshape=True), rtol=1e-4, atol=1e-5)


def test_batch_entries_of_a_fused_tensor_are_handed_over_without_a_copy():
    heads = 6
    fused = normal(3, QO_LEN, 3 * heads * HEAD_DIM)
    q, k, v = fused.chunk(3, -1)
    kernel = Reaching(fused)
    output = serve(kernel, (q, k, v, heads), {}, largest_offset(q[:1]))
    assert (len(kernel.calls), kernel.views) == (3, 9)
    torch.testing.assert_close(output, Native()(q, k, v, heads), rtol=1e-4, atol=1e-5)


def test_a_call_is_cut_for_key_heads_that_are_repeated():
    """Only the copy with as many key heads as query heads is too large."""
    args, keywords = comfy_arguments(heads=4, kv_heads=2, qo_len=10, kv_len=QO_LEN, head_dim=HEAD_DIM)
    limit = 4 * HEAD - 2
    assert max(map(largest_offset, args[:3])) <= limit
    kernel = Reaching(*args[:3])
    output = serve(kernel, args, keywords, limit, options=())
    assert len(kernel.calls) == 2
    assert max(kernel.reached) <= limit
    torch.testing.assert_close(output, Native()(*args, **keywords), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("rows", "width", "kernel_calls"), [(99_866, 3, 3), (400_000, 1, 12)], ids=["fused", "long"])
def test_tensors_of_true_size_reach_the_kernel_within_32_bits(layout, rows, width, kernel_calls):
    """56 heads of 128 in tensors without memory: a third of a fused tensor, and more than 2**31 elements. At most 20
    heads of the one and 5 of the other are an eighth of 2**31 elements."""
    reached = []

    def kernel(query, key, value, **keywords):
        assert keywords == {"tensor_layout": layout, "sm_scale": 128**-0.5}
        reached.extend(map(largest_offset, (query, key, value)))
        return torch.empty_like(query, memory_format=torch.contiguous_format)

    fused = torch.empty(1, rows, width * 56 * 128, dtype=torch.bfloat16, device="meta")
    call = AttentionCall.from_comfy(*(fused[..., : 56 * 128] for _ in range(3)), 56)
    sizes = {"num_qo_heads": 56, "num_kv_heads": 56, "qo_len": rows, "kv_len": rows, "head_dim": 128}
    spec = make_spec(**sizes, dtype="bfloat16", max_offset=largest_offset(call.query))
    assert spec.max_offset > MAX_OFFSET_32_BIT
    backend = fake_backend(kernel)
    use = Use(backend, Kernel(kernel, frozenset()), layout, expand_kv=False, smooth_k=None)
    output = server(use, call, spec)(*call[:3], None)
    assert (output.shape, output.dtype) == (call.query.shape, torch.bfloat16)
    assert output.is_contiguous()
    assert len(reached) == 3 * kernel_calls
    assert max(reached) <= MAX_OFFSET_32_BIT // COPIED_SHARE  # half a GiB of each, in 16 bits


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("how", ["raises", "gives a part", "gives another dtype"])
def test_a_piece_that_fails_makes_the_call_native(failing, how):
    args, keywords = comfy_arguments(heads=6, qo_len=QO_LEN, head_dim=HEAD_DIM, skip_reshape=True)
    made = []

    def spoil(*call):
        made.append(1)
        output = attention(*call)
        if len(made) - 1 - TRIAL_CALLS != failing:  # after the small example
            return output
        if how == "raises":
            raise ValueError("bad")
        return output[..., :1] if how == "gives a part" else output.double()

    backend = fake_backend(FakeKernel(spoil), max_offset=2 * HEAD - 1)
    comfy = FakeComfy(
        make_dispatcher(backend), lambda attend, options: attend(*args, **keywords, transformer_options=options)
    )
    (output,) = comfy.sample()
    assert served(comfy.run()) == {"native": 1}
    assert torch.equal(output, Native()(*args, **keywords))
    assert [refusal["code"] for refusal in comfy.run()["refusals"]] == ["kernel_error"]
