"""From ComfyUI's arguments to query, key and value and back, and the key that a decision about a call is kept under."""

from __future__ import annotations

import contextlib
from itertools import product

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nested
from torch.nn import Parameter

from sage_core.call import AttentionCall, decision_key, four_axes, shaping
from sage_core.spec import MaskKind
from sage_core.support import MAX_OFFSET_32_BIT
from tests.unit.conftest import Native, attention, codes, comfy_arguments, make_call, normal, virtual_memory

pytestmark = pytest.mark.usefixtures("one_thread")

RESHAPES = [
    pytest.param(*flags, id=f"skip_reshape={flags[0]:d}-output={flags[1]:d}") for flags in product((0, 1), (0, 1))
]


def read(**options):
    return make_call(**options).read("cpu")


def key_of(*args, **kwargs):
    return decision_key(*args, **kwargs)


# -- what a call says


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (12, 3), (8, 2), (7, 1)])
def test_the_spec_names_every_size(skip_reshape, heads, kv_heads):
    spec, refusals = read(
        batch=3, heads=heads, kv_heads=kv_heads, qo_len=5, kv_len=7, head_dim=16, skip_reshape=skip_reshape
    )
    assert refusals == ()
    assert spec[:8] == ("cpu", "float32", 3, heads, kv_heads, 5, 7, 16)
    assert (spec.mask_kind, spec.mask_dtype, spec.sm_scale, spec.is_causal) == (MaskKind.NONE, None, None, False)


def test_the_layout_is_the_one_that_memory_has():
    assert read(skip_reshape=False)[0].tensor_layout == "NHD"
    assert read(skip_reshape=True)[0].tensor_layout == "HND"
    tensors = [normal(1, 24, 2, 16).transpose(1, 2) for _ in range(3)]
    assert AttentionCall.from_comfy(*tensors, 2, skip_reshape=True).read("cpu")[0].tensor_layout == "NHD"


@pytest.mark.parametrize(("scale", "expected"), [(None, None), (0.125, 0.125), (1, 1.0), (numpy.float64(0.5), 0.5)])
def test_a_scale_is_obeyed(scale, expected):
    spec, refusals = read(scale=scale)
    assert (spec.sm_scale, refusals) == (expected, ())


@pytest.mark.parametrize("scale", [torch.tensor(0.1), "0.1", numpy.float32(0.1), float("nan"), float("inf"), [1.0]])
def test_a_scale_that_is_no_finite_number_is_refused(scale):
    spec, refusals = read(scale=scale)
    assert (spec.sm_scale, codes(refusals)) == (None, ["sm_scale"])


@pytest.mark.parametrize(
    ("keywords", "code"),
    [
        ({"window_size": 4}, "unknown_argument"),
        ({"causal": None}, "unknown_argument"),
        ({"low_precision_attention": False}, "low_precision_forbidden"),
        ({"attn_precision": torch.float32}, "attn_precision"),
    ],
)
def test_an_argument_that_no_kernel_can_honour_is_refused(keywords, code):
    assert codes(read(**keywords)[1]) == [code]


@pytest.mark.parametrize(
    "keywords",
    [
        {"low_precision_attention": True},
        {"low_precision_attention": None},
        {"attn_precision": None},
        {"attn_precision": torch.float16},
        {"transformer_options": {"anything": object()}, "_inside_attn_wrapper": True},
        {"enable_gqa": False},
        {"enable_gqa": True},
        {"scale": None},
    ],
)
def test_an_argument_that_changes_nothing_is_not_refused(keywords):
    assert read(**keywords)[1] == ()


def test_every_reason_is_collected():
    refusals = read(scale="x", unknown=1, low_precision_attention=False, attn_precision=torch.float32)[1]
    assert codes(refusals) == ["unknown_argument", "sm_scale", "low_precision_forbidden", "attn_precision"]


def test_an_unknown_argument_is_named():
    assert "passed causal, window, which" in read(window=1, causal=2)[1][0].detail


def test_gradients_are_refused_only_where_they_are_needed():
    (q, k, v, heads), _ = comfy_arguments()
    call = AttentionCall.from_comfy(q, k, v.requires_grad_(), heads)
    assert codes(call.read("cpu")[1]) == ["gradient"]
    with torch.no_grad():
        assert call.read("cpu")[1] == ()


def test_gradients_for_the_mask_are_refused_too():
    mask = torch.zeros(24, 24).requires_grad_()
    assert codes(read(mask=mask)[1]) == ["gradient"]
    with torch.no_grad():
        assert read(mask=mask)[1] == ()


def test_autocast_around_the_call_is_refused():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert codes(read()[1]) == ["autocast"]
    assert read()[1] == ()


def test_a_device_that_has_no_autocast_is_refused_and_has_a_key():
    args = [tensor.to("meta") for tensor in comfy_arguments()[0][:3]]
    spec, refusals = AttentionCall.from_comfy(*args, 2).read("cpu")
    assert spec is not None
    assert codes(refusals) == ["tensor_type"]
    assert "meta" in refusals[0].detail
    assert key_of(*args, 2) is not None


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_tensors_of_different_dtypes_are_refused(wrong):
    (*tensors, heads), _ = comfy_arguments(dtype=torch.float16)
    tensors[wrong] = tensors[wrong].bfloat16()
    refusals = AttentionCall.from_comfy(*tensors, heads).read("cpu")[1]
    assert codes(refusals) == ["dtype"]
    assert "bfloat16" in refusals[0].detail


@pytest.mark.parametrize("elsewhere", [1, 2])
def test_tensors_on_different_devices_are_refused(elsewhere):
    (*tensors, heads), _ = comfy_arguments()
    tensors[elsewhere] = tensors[elsewhere].to("meta")
    assert codes(AttentionCall.from_comfy(*tensors, heads).read("cpu")[1]) == ["malformed_call"]


@pytest.mark.parametrize(
    ("shapes", "heads", "keywords", "code"),
    [
        # without skip_reshape: (batch, seq, heads * head_dim)
        (((1, 8, 30), (1, 8, 30), (1, 8, 30)), 4, {}, "malformed_call"),
        (((1, 8, 32), (1, 8, 32), (1, 8, 64)), 2, {}, "malformed_call"),
        (((1, 8, 32), (1, 8, 32), (1, 9, 32)), 2, {}, "malformed_call"),
        (((2, 8, 32), (1, 8, 32), (1, 8, 32)), 2, {}, "malformed_call"),
        (((1, 8, 32), (1, 8, 16), (1, 8, 16)), 2, {}, "malformed_call"),
        (((1, 8, 96), (1, 8, 64), (1, 8, 64)), 3, {"enable_gqa": True}, "malformed_call"),
        (((1, 8, 32), (1, 8, 64), (1, 8, 64)), 2, {"enable_gqa": True}, "malformed_call"),
        (((1, 8, 32), (1, 8, 24), (1, 8, 24)), 2, {"enable_gqa": True}, "malformed_call"),
        (((1, 2, 8, 16),) * 3, 2, {}, "malformed_call"),
        (((1, 8, 32),) * 3, 0, {}, "malformed_call"),
        (((1, 8, 32),) * 3, -2, {}, "malformed_call"),
        (((1, 0, 32), (1, 8, 32), (1, 8, 32)), 2, {}, "shape"),
        (((1, 8, 32), (1, 0, 32), (1, 0, 32)), 2, {}, "shape"),
        (((0, 8, 32),) * 3, 2, {}, "shape"),
        (((1, 8, 0),) * 3, 2, {}, "shape"),
        # with skip_reshape: (batch, heads, seq, head_dim)
        (((1, 8, 32),) * 3, 2, {"skip_reshape": True}, "malformed_call"),
        (((1, 4, 8, 16),) * 3, 2, {"skip_reshape": True}, "malformed_call"),
        (((1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 8, 32)), 2, {"skip_reshape": True}, "malformed_call"),
        (((1, 2, 8, 16), (1, 2, 8, 32), (1, 2, 8, 32)), 2, {"skip_reshape": True}, "malformed_call"),
        (((1, 2, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)), 2, {"skip_reshape": True}, "malformed_call"),
        (((1, 4, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16)), 4, {"skip_reshape": True}, "malformed_call"),
        (
            ((1, 4, 8, 16), (1, 3, 8, 16), (1, 3, 8, 16)),
            4,
            {"skip_reshape": True, "enable_gqa": True},
            "malformed_call",
        ),
        (((1, 2, 0, 16),) * 3, 2, {"skip_reshape": True}, "shape"),
        (((1, 4, 8, 16), (1, 0, 8, 16), (1, 0, 8, 16)), 4, {"skip_reshape": True, "enable_gqa": True}, "shape"),
    ],
)
def test_shapes_that_do_not_fit_or_are_empty_have_no_spec(shapes, heads, keywords, code):
    spec, refusals = AttentionCall.from_comfy(*map(torch.zeros, shapes), heads, **keywords).read("cpu")
    assert (spec, codes(refusals)) == (None, [code])


# -- masks


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 7), (5, 1), (2, 5, 7), (1, 5, 7), (2, 1, 7), (2, 3, 5, 7), (2, 1, 1, 7), (1, 3, 5, 1)]
)
def test_a_mask_that_broadcasts_is_taken(shape, dtype):
    spec, refusals = read(batch=2, heads=3, qo_len=5, kv_len=7, mask=torch.ones(shape).to(dtype))
    assert refusals == ()
    assert spec.mask_kind is (MaskKind.BOOL if dtype is torch.bool else MaskKind.ADDITIVE)
    assert spec.mask_dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(torch.ones(7), id="one axis"),
        pytest.param(torch.ones(1, 2, 3, 5, 7), id="five axes"),
        pytest.param(torch.ones(7, 5), id="transposed"),
        pytest.param(torch.ones(3, 5, 7), id="heads where samples are"),
        pytest.param(torch.ones(2, 2, 5, 7), id="other heads"),
        pytest.param(torch.ones(4, 3, 5, 7), id="other batch"),
        pytest.param(torch.ones(5, 0), id="empty"),
        pytest.param(torch.ones(2, 7, dtype=torch.bool), id="a row per sample or per query"),
        pytest.param(torch.ones(5, 7, dtype=torch.int64), id="integers"),
        pytest.param(torch.ones(5, 7, dtype=torch.complex64), id="complex"),
        pytest.param(torch.ones(5, 7, device="meta"), id="elsewhere"),
    ],
)
def test_a_mask_that_cannot_be_handed_on_is_refused_once(mask):
    spec, refusals = read(batch=2, heads=3, qo_len=5, kv_len=7, mask=mask)
    assert spec is not None
    assert codes(refusals) == ["attn_mask"]


def test_a_boolean_mask_with_as_many_rows_as_samples_and_queries_has_two_meanings():
    assert codes(read(batch=5, qo_len=5, mask=torch.ones(5, 5, dtype=torch.bool))[1]) == ["attn_mask"]
    assert read(batch=5, qo_len=5, mask=torch.zeros(5, 5))[1] == ()


@pytest.mark.parametrize("rows", [2**15, 2**16])
def test_a_mask_counts_as_it_lies_in_memory(rows):
    """One row for all is small. How far a mask may reach is each kernel's own limit."""
    dense = virtual_memory(rows * rows).view(torch.bool).view(rows, rows)
    call = {"qo_len": rows, "head_dim": 1}
    one_row = dense[:1].expand(rows, rows)
    for mask, reached in ((dense, rows * rows - 1), (one_row, rows - 1)):
        spec, refusals = read(**call, mask=mask)
        assert (spec.mask_offset, refusals) == (reached, ())
    by_head = virtual_memory(2 * 12 * 64).view(torch.bool).view(2, 12, 8, 8)
    for kv_heads, reached in ((12, 63), (4, 3 * 64 - 1), (1, 12 * 64 - 1)):
        spec, _ = read(batch=2, heads=12, kv_heads=kv_heads, qo_len=8, mask=by_head, skip_reshape=True)
        assert spec.mask_offset == reached
    (*tensors, heads), _ = comfy_arguments(**call)
    assert key_of(*tensors, heads, mask=dense) != key_of(*tensors, heads, mask=one_row)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
@settings(deadline=None)
def test_a_mask_is_taken_exactly_when_pytorch_would_broadcast_it(shape):
    target = (2, 3, 4, 4)
    _, refusals = read(batch=2, heads=3, qo_len=4, mask=torch.zeros(shape))
    try:
        taken = torch.broadcast_shapes(four_axes(torch.zeros(shape)).shape, target) == target
    except RuntimeError:
        taken = False
    assert (refusals == ()) is taken


def test_a_mask_is_given_its_missing_axes_where_comfyui_puts_them():
    assert four_axes(torch.zeros(5, 7)).shape == (1, 1, 5, 7)
    assert four_axes(torch.zeros(2, 5, 7)).shape == (2, 1, 5, 7)
    assert four_axes(torch.zeros(2, 3, 5, 7)).shape == (2, 3, 5, 7)


# -- element offsets


def test_the_largest_offset_is_that_of_the_last_element():
    (q, k, v, heads), _ = comfy_arguments(heads=2, qo_len=10, kv_len=12, head_dim=16)
    assert AttentionCall.from_comfy(q, k, v, heads).read("cpu")[0].max_offset == 12 * 32 - 1
    fused = normal(1, 10, 96)
    spec, _ = AttentionCall.from_comfy(*fused.chunk(3, dim=-1), 2).read("cpu")
    assert spec.max_offset == 9 * 96 + 31


def test_a_row_stride_can_carry_a_small_tensor_past_32_bits():
    rows, width, heads = 99_866, 21_504, 56
    fused = virtual_memory(rows * width).view(1, rows, width)
    spec, _ = AttentionCall.from_comfy(*fused.chunk(3, dim=-1), heads).read("cpu")
    assert spec.head_dim == 128
    assert spec.max_offset == (rows - 1) * width + heads * 128 - 1 > MAX_OFFSET_32_BIT


def test_a_tensor_without_strides_counts_as_its_contiguous_copy():
    wide = torch.zeros(1, 1, 1).expand(1, 2**20, 2**12)
    spec, _ = AttentionCall.from_comfy(wide, wide, wide, 32).read("cpu")
    assert spec.max_offset == 2**32 - 1


# -- to a kernel and back


def through(call, layout, *, expand_kv=False, max_offset=None, kernel=None):
    """(output as ComfyUI gets it, output of the kernel, what the kernel was handed)."""
    spec, refusals = call.read("cpu")
    assert refusals == ()
    to_kernel, from_kernel = shaping(call, spec, layout, expand_kv, max_offset)
    handed = to_kernel(call.query, call.key, call.value)
    mask = None if call.mask is None else four_axes(call.mask)
    output = (kernel or attention)(*handed, layout, spec.softmax_scale, mask)
    return from_kernel(output), output, handed


def native(call):
    function = Native()
    function.factor = 1
    return function(*call[:8], **call.extra)


@pytest.mark.parametrize(("skip_reshape", "skip_output_reshape"), RESHAPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "expand_kv"), [(2, 2, False), (12, 3, False), (12, 3, True), (7, 1, True)]
)
@pytest.mark.parametrize("extra", [{}, {"scale": 1.0}, {"mask": normal(24, 30, seed=9)}])
def test_a_call_gives_what_comfyui_would_have_got(
    skip_reshape, skip_output_reshape, layout, heads, kv_heads, expand_kv, extra
):
    call = make_call(
        batch=2,
        heads=heads,
        kv_heads=kv_heads,
        kv_len=30,
        skip_reshape=bool(skip_reshape),
        skip_output_reshape=bool(skip_output_reshape),
        **extra,
    )
    output, _, handed = through(call, layout, expand_kv=expand_kv)
    expected = native(call)
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected)
    head_axis = 2 if layout == "NHD" else 1
    assert [t.shape[head_axis] for t in handed] == [heads] + [heads if expand_kv else kv_heads] * 2


@pytest.mark.parametrize(("skip_reshape", "skip_output_reshape"), RESHAPES)
def test_the_output_of_a_kernel_in_nhd_is_never_copied(skip_reshape, skip_output_reshape):
    call = make_call(batch=2, skip_reshape=bool(skip_reshape), skip_output_reshape=bool(skip_output_reshape))
    output, of_kernel, _ = through(call, "NHD")
    if skip_output_reshape:
        output = output.transpose(1, 2).reshape(2, 24, 32)
    assert output.shape == (2, 24, 32)
    assert output.data_ptr() == of_kernel.data_ptr()


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_tensors_reach_the_kernel_as_views(skip_reshape, layout):
    call = make_call(batch=2, skip_reshape=skip_reshape)
    _, _, handed = through(call, layout, max_offset=10**6)
    assert [t.data_ptr() for t in handed] == [t.data_ptr() for t in call[:3]]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_parts_of_a_fused_projection_reach_the_kernel_as_views(layout):
    fused = normal(2, 24, 96)
    call = AttentionCall.from_comfy(*fused.chunk(3, dim=-1), 2)
    output, _, handed = through(call, layout)
    assert [t.data_ptr() for t in handed] == [t.data_ptr() for t in call[:3]]
    torch.testing.assert_close(output, native(call))


@pytest.mark.parametrize("strided", [0, 1, 2])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_strided_head_dim_is_copied_and_nothing_else(strided, layout):
    (*tensors, heads), kwargs = comfy_arguments(skip_reshape=True)
    tensors[strided] = tensors[strided].mT.contiguous().mT
    call = AttentionCall.from_comfy(*tensors, heads, **kwargs)
    output, _, handed = through(call, layout)
    assert [t.data_ptr() == given.data_ptr() for t, given in zip(handed, tensors, strict=True)] == [
        number != strided for number in range(3)
    ]
    assert all(t.stride(-1) == 1 for t in handed)
    torch.testing.assert_close(output, native(call))


@pytest.mark.parametrize("expand_kv", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_offsets_beyond_the_limit_are_copied_within_it(layout, expand_kv):
    q, k, v = normal(1, 24, 10, 16), normal(1, 24, 100, 16), normal(1, 24, 100, 16)
    tensors = q[:, :, :4].transpose(1, 2), k[:, :, :2].transpose(1, 2), v[:, :, :2].transpose(1, 2)
    call = AttentionCall.from_comfy(*tensors, 4, skip_reshape=True, enable_gqa=True)
    limit = 10_000
    output, _, handed = through(call, layout, max_offset=limit, expand_kv=expand_kv)
    assert handed[0].data_ptr() == q.data_ptr()
    assert handed[1].data_ptr() != k.data_ptr()
    assert handed[2].data_ptr() != v.data_ptr()
    for tensor in handed:
        assert sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) <= limit
    torch.testing.assert_close(output, native(call))


# -- the key


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda t: Parameter(t), id="parameter"),
        pytest.param(lambda t: t.as_subclass(type("Marked", (torch.Tensor,), {})), id="subclass"),
        pytest.param(lambda t: nested.nested_tensor([t[0], t[0]], layout=torch.strided), id="nested"),
        pytest.param(lambda t: nested.nested_tensor([t[0], t[0]], layout=torch.jagged), id="jagged"),
        pytest.param(lambda t: t.to_sparse(), id="coo"),
        pytest.param(lambda t: t[0].to_sparse_csr(), id="csr"),
        pytest.param(lambda t: t.to_mkldnn(), id="mkldnn"),
        pytest.param(lambda t: t.numpy(), id="array"),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_are_not_plain_have_no_key(spoil, position):
    (*tensors, heads), _ = comfy_arguments()
    assert key_of(*tensors, heads) is not None
    tensors[position] = spoil(tensors[position])
    assert key_of(*tensors, heads) is None


@pytest.mark.parametrize(
    "mask",
    [
        [[True]],
        object(),
        numpy.ones((24, 24)),
        torch.ones(24, 24).to_sparse(),
        torch.ones(24, 24).as_subclass(type("CausalBias", (torch.Tensor,), {})),
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_a_mask_that_is_no_plain_tensor_has_no_key(mask):
    args, _ = comfy_arguments()
    assert key_of(*args, mask=mask) is None
    assert key_of(*args, mask) is None


def test_arguments_that_comfyui_does_not_have_are_a_type_error():
    (q, k, v, heads), _ = comfy_arguments()
    with pytest.raises(TypeError):
        key_of(q, k, v, heads, None, None, False, False, "one too many")
    with pytest.raises(TypeError):
        key_of(q=q, k=k, v=v, heads=heads)
    with pytest.raises(TypeError):
        key_of(q, k, v)


def test_positional_and_keyword_arguments_of_one_call_have_one_key():
    (q, k, v, heads), _ = comfy_arguments()
    mask = torch.zeros(24, 24)
    assert key_of(q, k, v, heads, mask, None, False, True) == key_of(
        q, k, v, heads=heads, mask=mask, skip_output_reshape=True
    )


def test_keys_hold_no_tensor():
    args, _ = comfy_arguments()
    key = key_of(*args, mask=torch.zeros(24, 24), scale=torch.tensor(0.5), low_precision_attention=torch.tensor(1))

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value]
        return [t for part in value for t in tensors(part)] if isinstance(value, tuple) else []

    assert tensors(key) == []


def test_calls_with_new_numbers_have_the_key_of_the_first():
    (q, k, v, heads), _ = comfy_arguments()
    assert key_of(q, k, v, heads) == key_of(q + 1, k + 1, v + 1, heads)


FLAT = ((1, 8, 32), (1, 8, 32), (1, 8, 32))
SPLIT = ((1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16))
GROUPED = ((1, 2, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16))
FLAGS = (None, True, False, 0, 1)
VALUES = {
    "shapes": [
        *(FLAT, SPLIT, GROUPED),
        ((1, 8, 32), (1, 4, 32), (1, 4, 32)),
        ((1, 8, 32), (1, 8, 16), (1, 8, 16)),
        ((1, 8, 32), (1, 8, 32), (1, 8, 16)),
        ((2, 8, 32), (2, 8, 32), (2, 8, 32)),
        ((1, 8, 2, 16), (1, 8, 2, 16), (1, 8, 2, 16)),
        ((1, 2, 0, 16), (1, 2, 8, 16), (1, 2, 8, 16)),
    ],
    "memory": list(product(["contiguous", "transposed", "wide rows"], repeat=3)),
    "dtypes": list(product([torch.float16, torch.bfloat16], repeat=3)),
    "devices": list(product(["cpu", "meta"], repeat=3)),
    "needs_grad": list(product([False, True], repeat=4)),
    "heads": [1, 2, 4],
    "mask": [
        None,
        *product(
            [(8, 8), (2, 8), (1, 8, 8), (8,)],
            [torch.bool, torch.float16, torch.float32, torch.int32],
            ["cpu", "meta"],
        ),
    ],
    "attn_precision": [None, torch.float16, torch.float32],
    "skip_reshape": [False, True],
    "skip_output_reshape": [False, True],
    "extra": [
        {},
        *({"scale": 0.5, "enable_gqa": flag} for flag in FLAGS),
        *({name: flag} for name in ("enable_gqa", "low_precision_attention", "unheard_of") for flag in FLAGS),
        *({"scale": scale} for scale in (None, 0.5, 1, 1.0, True, 0, numpy.float32(0.5), numpy.float64(0.5))),
        *({"scale": scale} for scale in (float("inf"), float("nan"), "0.5", torch.tensor(0.5))),
    ],
    "grad": [False, True],
    "autocast": [False, True],
}
PLAIN = {name: values[0] for name, values in VALUES.items()} | {"heads": 2}
BASES = {
    "flat": PLAIN,
    "split": {**PLAIN, "shapes": SPLIT, "skip_reshape": True},
    "grouped": {**PLAIN, "shapes": GROUPED, "skip_reshape": True, "extra": {"enable_gqa": True}},
    "masked": {**PLAIN, "shapes": VALUES["shapes"][6], "mask": ((8, 8), torch.float16, "cpu")},
    "training": {**PLAIN, "grad": True, "mask": ((8, 8), torch.float16, "cpu")},
    "refused": {**PLAIN, "attn_precision": torch.float32, "extra": {"low_precision_attention": False}},
}


def as_in_memory(shape, memory, dtype, device, needs_grad):
    if memory == "transposed":
        tensor = torch.zeros((*shape[:-2], shape[-1], shape[-2]), dtype=dtype, device=device).mT
    elif memory == "wide rows":
        tensor = torch.zeros((*shape[:-1], shape[-1] * 3), dtype=dtype, device=device)[..., : shape[-1]]
    else:
        tensor = torch.zeros(shape, dtype=dtype, device=device)
    return tensor.detach().requires_grad_(needs_grad)


def key_and_reading(call):
    """The key of a call, what it says, and what else decides how it is served."""
    tensors = list(
        map(as_in_memory, call["shapes"], call["memory"], call["dtypes"], call["devices"], call["needs_grad"][:3])
    )
    mask = None
    if call["mask"] is not None:
        shape, dtype, device = call["mask"]
        mask = torch.zeros(shape, dtype=dtype, device=device)
        mask.requires_grad_(call["needs_grad"][3] and dtype.is_floating_point)
    names = ("attn_precision", "skip_reshape", "skip_output_reshape")
    arguments = (*tensors, call["heads"], mask, *(call[name] for name in names))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(call["grad"]))
        stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=call["autocast"]))
        key = key_of(*arguments, **call["extra"])
        said = AttentionCall.from_comfy(*arguments, **call["extra"]).read("cpu")
    return key, (said, [t.stride() for t in tensors], call["skip_reshape"], call["skip_output_reshape"])


@pytest.mark.parametrize("field", VALUES)
@pytest.mark.parametrize("base", BASES.values(), ids=BASES.keys())
def test_calls_that_are_decided_differently_never_have_one_key(base, field):
    met = {}
    for value in VALUES[field]:
        key, said = key_and_reading({**base, field: value})
        assert key is not None
        first, said_first = met.setdefault(key, (value, said))
        assert said == said_first, f"{field} {first} and {value} have one key"


CALLS = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in VALUES.items()})


@given(CALLS, st.sampled_from(sorted(VALUES)), st.sampled_from(sorted(VALUES)), CALLS)
@settings(max_examples=100, deadline=None)
def test_no_two_changes_to_a_call_make_up_for_each_other_in_its_key(call, one, other, new):
    key, said = key_and_reading(call)
    changed_key, changed_said = key_and_reading({**call, one: new[one], other: new[other]})
    if key == changed_key:
        assert said == changed_said
