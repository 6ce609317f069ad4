"""int8_reference against PyTorch's own attention in fp64, and against numbers worked out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from sage_core import blockwise
from sage_core.accuracy import compare
from sage_core.backends.base import Kernel
from sage_core.backends.reference import INT8_REFERENCE, int8_attention
from sage_core.environment import Environment
from sage_core.spec import AttentionSpec, MaskKind
from tests.unit.fp64 import exact, example, normal

LN2 = math.log(2)
FP16_BOUND = 0.02
FP8_BOUND = 0.045
"""Relative L2 on normal data; measured 0.012 to 0.014 with fp16 value and 0.035 to 0.040 with fp8 value."""


def error(query, key, value, sm_scale=None, attn_mask=None, **options) -> float:
    output = int8_attention(query, key, value, tensor_layout="HND", sm_scale=sm_scale, attn_mask=attn_mask, **options)
    return compare(output, exact(query, key, value, sm_scale, attn_mask)).relative_l2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1024, 1024, 64), (300, 77, 128), (129, 4173, 64), (1040, 1040, 128)])
def test_normal_data_stays_within_the_documented_error(shape, dtype):
    tensors = example(*shape, dtype=dtype)
    assert 0.005 < error(*tensors) < FP16_BOUND  # below 0.005 nothing was quantized
    assert FP16_BOUND < error(*tensors, pv_dtype="float8_e4m3") < FP8_BOUND


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    qo_len=st.sampled_from([1, 2, 31, 127, 128, 129, 257]),
    kv_len=st.sampled_from([1, 2, 63, 64, 65, 77, 127, 128, 129, 191, 193, 257]),
    head_dim=st.sampled_from([1, 2, 3, 17, 40, 64, 80, 128, 160, 256, 512]),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 1), (8, 2), (7, 1), (14, 2)]),
    batch=st.integers(1, 3),
    tensor_layout=st.sampled_from(["HND", "NHD"]),
    smooth_k=st.booleans(),
)
def test_every_shape_layout_and_head_ratio(qo_len, kv_len, head_dim, heads, batch, tensor_layout, smooth_k):
    tensors = example(qo_len, kv_len, head_dim, heads, batch)
    given_tensors = [blockwise.heads_first(tensor, tensor_layout).contiguous() for tensor in tensors]
    output = int8_attention(*given_tensors, tensor_layout=tensor_layout, smooth_k=smooth_k)
    assert output.shape == given_tensors[0].shape
    assert output.is_contiguous()
    result = compare(blockwise.heads_first(output, tensor_layout), exact(*tensors), head_axis=1)
    assert result.relative_l2 < (FP16_BOUND if output.numel() > 2000 else 0.2)  # few numbers average little


@pytest.mark.parametrize(("keys", "sign"), [((127.0, 62.5), 1), ((-127.0, -62.5), -1)])
def test_golden_value(keys, sign):
    # Steps: key 127 / 127 = 1, so 62.5 is a tie and becomes 63. Scores in log2: 127 / 16 and 63 / 16, 4 apart, so the
    # weights are 1 and 1 / 16. Output: 17 * (1 / 16) / (17 / 16) = 1. Exact attention gives 0.980, rounding halves to
    # even 0.960.
    query = torch.full((1, 1, 1, 1), sign / 16)
    key, value = torch.tensor(keys).view(1, 1, 2, 1), torch.tensor([0.0, 17.0]).view(1, 1, 2, 1)
    output = int8_attention(query, key, value, tensor_layout="HND", sm_scale=LN2, smooth_k=False)
    assert output.item() == pytest.approx(1.0, abs=2e-4)


def test_golden_value_fp8():
    # Channel 0 has step 1: 17 is a tie between the e4m3 neighbours 16 and 18 and goes to 16. Channel 1 has a step of
    # its own, 1e-4 / 448: its 1e-4 is kept, where a step of 1 makes it 0. The weight 2 ** 8.807 = 447.9 becomes 448.
    value = torch.tensor([[448.0, 5e-5], [17.0, 1e-4]]).view(1, 1, 2, 2)
    mask = torch.tensor([False, True]).view(1, 1, 1, 2)
    query = key = torch.zeros(1, 1, 2, 2)
    output = int8_attention(query, key, value, tensor_layout="HND", attn_mask=mask, pv_dtype="float8_e4m3")
    expected = torch.tensor([16.0, 1e-4]) * 448 / 2**8.807
    torch.testing.assert_close(output[0, 0, 0], expected, rtol=1e-5, atol=0)


def test_128_query_rows_share_one_scale():
    query, key, value = example(256, 128, heads=(1, 1))
    loud = query.clone()
    loud[:, :, 127] *= 100
    before, after = (int8_attention(rows, key, value, tensor_layout="HND") for rows in (query, loud))
    assert compare(after[:, :, :1], before[:, :, :1]).relative_l2 > 0.1
    assert torch.equal(after[:, :, 128:], before[:, :, 128:])


@pytest.mark.parametrize(("row", "first_tile_suffers"), [(63, True), (64, False)])
def test_64_key_rows_share_one_scale(row, first_tile_suffers):
    query, key, value = example(256, 128, heads=(1, 1))
    attended = torch.arange(128).view(1, 1, 1, 128) < 63
    loud = key.clone()
    loud[:, :, row] *= 100
    assert (error(query, loud, value, attn_mask=attended, smooth_k=False) > 0.1) == first_tile_suffers


@pytest.mark.parametrize("kv_len", [1040, 1037])
def test_smoothing_recovers_keys_that_share_an_offset(kv_len):
    query, key, value = example(kv_len, kv_len, dtype=torch.bfloat16)
    key = key + 8 * normal(1, 4, 1, 64, dtype=torch.bfloat16, seed=4)
    assert error(query, key, value, smooth_k=True) < FP16_BOUND
    assert error(query, key, value, smooth_k=False) > 2 * FP16_BOUND


def test_the_mean_is_taken_in_fp32_over_the_whole_sequence():
    query, key, value = example(200, 200)
    key = (key * 64).round() / 64  # so that the shifted keys are exact
    shifted = key + 1024
    expected = int8_attention(query, key, value, tensor_layout="HND")
    assert compare(int8_attention(query, shifted, value, tensor_layout="HND"), expected).relative_l2 < 4e-3


@pytest.mark.parametrize(("sm_scale", "size"), [(64**-0.5, 1), (1.0, 0.1), (0.0, 1), (-0.1, 1)])
def test_sm_scale_is_honoured(sm_scale, size):
    query, key, value = example(130, 200, 128)
    assert error(size * query, key, value, sm_scale) < FP16_BOUND


MASK_SHAPES = list(itertools.product((1, 2), (1, 4), (1, 70), (1, 130)))


@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("kind", ["bool", "float32", "bfloat16"])
def test_masks_of_every_broadcast_form(shape, kind):
    query, key, value = example(70, 130, heads=(4, 2), batch=2)
    mask = normal(*shape, seed=5)
    mask = mask > -1 if kind == "bool" else (3 * mask).to(getattr(torch, kind))
    if shape[3] > 1:
        mask[..., 0] = True if kind == "bool" else 0.0
        mask[..., 64:128] = False if kind == "bool" else -torch.inf  # a whole key tile
    assert error(query, key, value, attn_mask=mask) < FP16_BOUND


@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest"])
def test_rows_masked_everywhere_are_what_pytorch_makes_of_them(kind):
    query, key, value = example(3, 130)
    mask = torch.ones(1, 1, 3, 130, dtype=torch.bool)
    mask[:, :, 1] = False
    if kind != "bool":
        lowest = -torch.inf if kind == "-inf" else torch.finfo(torch.float32).min
        mask = torch.zeros(mask.shape).masked_fill(~mask, lowest)
    output = int8_attention(query, key, value, tensor_layout="HND", attn_mask=mask)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask)[:, :, 1]
    torch.testing.assert_close(output[:, :, 1], expected, rtol=1e-3, atol=1e-4)
    assert compare(output, exact(query, key, value, attn_mask=mask)).relative_l2 < FP16_BOUND


@pytest.mark.parametrize("pv_dtype", ["float16", "float8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_never_changed(dtype, pv_dtype):
    tensors = [tensor.requires_grad_() for tensor in example(130, 130, dtype=dtype)]
    mask = normal(1, 1, 130, 130, dtype=dtype)
    given_tensors = [*tensors, mask]
    before = [tensor.detach().clone() for tensor in given_tensors]
    output = int8_attention(*tensors, tensor_layout="HND", attn_mask=mask, pv_dtype=pv_dtype)
    assert not output.requires_grad
    assert all(torch.equal(now, then) for now, then in zip(given_tensors, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_output_keeps_dtype_and_folds_into_a_view(dtype):
    fused = normal(2, 70, 3, 4, 64, dtype=dtype)  # query, key and value as views into one projection
    query, key, value = fused.unbind(2)
    output = int8_attention(query, key, value, tensor_layout="NHD")
    assert output.dtype == dtype
    heads_first = output.transpose(1, 2)
    assert heads_first.transpose(1, 2).reshape(2, 70, 256).data_ptr() == output.data_ptr()
    expected = int8_attention(*(tensor.transpose(1, 2) for tensor in (query, key, value)), tensor_layout="HND")
    torch.testing.assert_close(heads_first, expected, rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """The largest storage in bytes that any operation makes, other than the output's."""

    def __init__(self, output_shape):
        super().__init__()
        self.output_shape, self.nbytes = output_shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_output = func is torch.ops.aten.empty.memory_format and result.shape == self.output_shape
        for made in (result,) if isinstance(result, Tensor) else result:
            if isinstance(made, Tensor) and func._schema.returns[0].alias_info is None and not is_output:
                self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("pv_dtype", ["float16", "float8_e4m3"])
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_temporaries_stay_below_one_bound_for_any_number_of_tokens(monkeypatch, tokens, pv_dtype):
    monkeypatch.setattr(blockwise, "_ELEMENTS_ON_CPU", 2**16)
    query, key, value = (normal(1, tokens, heads, 64, dtype=torch.bfloat16) for heads in (2, 1, 1))
    mask = torch.ones(1, 1, 1, tokens, dtype=torch.bool)
    with Largest(query.shape) as largest:
        int8_attention(query, key, value, tensor_layout="NHD", attn_mask=mask, pv_dtype=pv_dtype)
    assert 0 < largest.nbytes <= 4 * 2**16


@pytest.mark.parametrize("limit", [2**13, 2**14, 2**17])
def test_the_cut_into_blocks_does_not_matter(monkeypatch, limit):
    tensors = example(300, 200, heads=(8, 2), batch=3)
    mask = normal(3, 8, 300, 200)
    expected = int8_attention(*tensors, tensor_layout="HND", attn_mask=mask)
    monkeypatch.setattr(blockwise, "_ELEMENTS_ON_CPU", limit)
    output = int8_attention(*tensors, tensor_layout="HND", attn_mask=mask)
    assert compare(output, expected).relative_l2 < 1e-4  # the last bit of fp16 weights may differ, a step would be 1e-2


@pytest.mark.parametrize("pv_dtype", ["float16", "float8_e4m3"])
@pytest.mark.parametrize("zero", ["query", "key", "value", "keys alike"])
def test_constant_and_zero_inputs(zero, pv_dtype):
    tensors = dict(zip(("query", "key", "value"), example(130, 130), strict=True))
    tensors["key" if zero == "keys alike" else zero].fill_(2.5 if zero == "keys alike" else 0)
    output = int8_attention(**tensors, tensor_layout="HND", pv_dtype=pv_dtype)
    if zero == "value":
        assert not output.any()
    else:  # every weight alike: the mean of value
        expected = tensors["value"].mean(2, keepdim=True).expand_as(output)
        assert compare(output, expected).relative_l2 < (1e-3 if pv_dtype == "float16" else FP8_BOUND)


def test_one_huge_channel_costs_accuracy_and_stays_finite():
    query, key, value = example(256, 256)
    key[..., 5] += 600 * (torch.arange(256) % 2)  # on some tokens only, so no mean removes it
    result = compare(int8_attention(query, key, value, tensor_layout="HND"), exact(query, key, value))
    assert result.finite
    assert result.relative_l2 > FP16_BOUND


def test_value_above_65504_is_inf_in_fp16_and_kept_in_fp8():
    query, key, value = example(130, 130, dtype=torch.bfloat16)
    value[0, 0, 7, 3] = 1e5
    output = int8_attention(query, key, value, tensor_layout="HND")
    assert output[0, 0, :, 3].isinf().all()
    assert output[0, 0, :, :3].isfinite().all()
    assert int8_attention(query, key, value, tensor_layout="HND", pv_dtype="float8_e4m3").isfinite().all()


@pytest.mark.parametrize("pv_dtype", ["float16", "float8_e4m3"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_reaches_the_output(which, pv_dtype):
    tensors = example(130, 130)
    tensors[which][0, 1, 100, 5] = torch.nan
    output = int8_attention(*tensors, tensor_layout="HND", pv_dtype=pv_dtype)
    assert output[0, 1, 100].isnan().any()
    assert output[0, 0].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_layout": "BSHD"}, "tensor_layout is 'BSHD'"),
        ({"pv_dtype": "int4"}, "pv_dtype is 'int4'"),
        ({"key": torch.ones(1, 3, 5, 64), "value": torch.ones(1, 3, 5, 64)}, "shapes do not fit"),
        ({"key": torch.ones(1, 4, 6, 64)}, "shapes do not fit"),
        ({"attn_mask": torch.ones(7, 5)}, "must be 4-D"),
        ({"attn_mask": torch.ones(1, 1, 7, 6)}, "broadcast to"),
        ({"attn_mask": torch.ones(1, 1, 7, 5, dtype=torch.int32)}, "bool or floating"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    query, key, value = example(7, 5)
    with pytest.raises(ValueError, match=message):
        int8_attention(**{"query": query, "key": key, "value": value, "tensor_layout": "HND", **change})


def test_the_backend_takes_every_call_and_is_never_chosen_automatically():
    spec = AttentionSpec("gfx1201", "float32", 1, 48, 12, 1, 77, 500, "HND", MaskKind.ADDITIVE, "float32", False, 0.3)
    assert INT8_REFERENCE.support.refusals(spec, INT8_REFERENCE.name) == ()
    assert (INT8_REFERENCE.name, INT8_REFERENCE.auto, INT8_REFERENCE.exact) == ("int8_reference", False, False)
    kernel = INT8_REFERENCE.load(Environment(), "cpu", False)
    assert isinstance(kernel, Kernel)
    assert kernel.options == {"smooth_k", "attn_mask", "enable_gqa"}
    query, key, value = example(10, 10, heads=(4, 2))
    output = kernel.function(query, key, value, tensor_layout="HND", sm_scale=0.3, smooth_k=False)
    assert compare(output, exact(query, key, value, 0.3)).relative_l2 < 2 * FP16_BOUND
