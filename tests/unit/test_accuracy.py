"""compare() on numbers worked out by hand, exact_attention() against PyTorch's own in fp64, sample_rows()."""

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
from sage_core.accuracy import Accuracy, compare, exact_attention, sample_rows
from tests.unit.fp64 import exact, example, normal

FP32 = {"rtol": 1e-5, "atol": 1e-5}
FP64 = {"rtol": 1e-12, "atol": 1e-13}


def test_every_number_of_a_comparison():
    reference = torch.tensor([[3.0, 4.0], [0.0, 12.0]])
    output = torch.tensor([[3.0, 5.0], [0.0, 10.0]])
    result = compare(output, reference, head_axis=0)
    assert result.relative_l2 == pytest.approx(math.sqrt(5) / 13)
    assert result.relative_l1 == pytest.approx(3 / 19)
    assert result.cosine == pytest.approx((9 + 20 + 120) / (13 * math.sqrt(134)))
    assert result.rmse == pytest.approx(math.sqrt(5) / 2)
    assert result.max_abs == pytest.approx(2.0)
    assert result.worst_head_relative_l2 == pytest.approx(1 / 5)
    assert result.finite
    assert compare(output, reference, head_axis=1).worst_head_relative_l2 == pytest.approx(
        math.sqrt(5) / math.sqrt(160)
    )
    assert compare(output, reference) == result._replace(worst_head_relative_l2=None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 6e4, 1e-7])
def test_a_tensor_is_identical_to_itself_whatever_its_size(dtype, size):
    tensor = (size * torch.linspace(-1, 1, 100)).to(dtype)
    assert compare(tensor, tensor.clone(), 0) == Accuracy(0.0, pytest.approx(1.0), 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("size", [1e-300, 1e300, 1e-30])
def test_numbers_whose_squares_leave_fp64_are_compared_all_the_same(size):
    reference = size * torch.tensor([3.0, 4.0], dtype=torch.float64)
    result = compare(reference * 1.5, reference)
    assert result.relative_l2 == pytest.approx(0.5)
    assert result.max_abs == pytest.approx(2.0 * size, rel=1e-12, abs=0)
    assert result.cosine == pytest.approx(1.0)
    assert result.finite


def test_zeros():
    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    assert compare(zeros, zeros, 0) == Accuracy(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    assert compare(ones, zeros, 0) == Accuracy(math.inf, 0.0, math.inf, 1.0, 1.0, math.inf)
    assert compare(zeros, ones, 0) == Accuracy(1.0, 0.0, 1.0, 1.0, 1.0, 1.0)


def test_a_head_of_zeros_must_be_zeros():
    reference = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert compare(reference, reference, 0).worst_head_relative_l2 == 0
    assert compare(reference + 1e-3, reference, 0).worst_head_relative_l2 == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["output", "reference", "both"])
def test_what_is_not_finite_is_as_bad_as_can_be(bad, where):
    output, reference = torch.ones(2, 3), torch.ones(2, 3)
    for tensor, name in ((output, "output"), (reference, "reference")):
        if where in (name, "both"):
            tensor[1, 2] = bad
    assert compare(output, reference, 0) == Accuracy(*[math.inf, -1.0] + [math.inf] * 4, finite=False)
    assert compare(output, reference).worst_head_relative_l2 is None


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1), (0,)])
def test_only_equal_shapes_are_compared(shape):
    with pytest.raises(ValueError, match="cannot compare"):
        compare(torch.ones(shape), torch.ones((2, 3) if shape != (0,) else (0,)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    qo_len=st.sampled_from([1, 2, 31, 127, 128, 129, 257]),
    kv_len=st.sampled_from([1, 2, 63, 64, 65, 77, 127, 129, 521]),
    head_dim=st.sampled_from([1, 3, 40, 64, 128, 512]),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 1), (8, 2), (7, 1), (14, 2)]),
    batch=st.integers(1, 3),
    tensor_layout=st.sampled_from(["HND", "NHD"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    limit=st.sampled_from([2**16, 2**17, 2**20]),
)
def test_exact_attention_is_exact(qo_len, kv_len, head_dim, heads, batch, tensor_layout, dtype, limit):
    tensors = example(qo_len, kv_len, head_dim, heads, batch, dtype)
    given_tensors = [blockwise.heads_first(tensor, tensor_layout) for tensor in tensors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_ELEMENTS_ON_CPU", limit)
        output = exact_attention(*given_tensors, tensor_layout, dtype=torch.float64)
    assert output.dtype == torch.float64
    assert output.is_contiguous()
    torch.testing.assert_close(blockwise.heads_first(output, tensor_layout), exact(*tensors), **FP64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fp32_is_enough_for_half_precision(dtype):
    tensors = example(300, 1000, 128, dtype=dtype)
    output = exact_attention(*tensors, "HND")
    assert output.dtype == torch.float32
    assert compare(output, exact(*tensors)).relative_l2 < 1e-6


@pytest.mark.parametrize("tensor_layout", ["HND", "NHD"])
@pytest.mark.parametrize("shape", list(itertools.product((1, 2), (1, 4), (1, 70), (1, 130))))
@pytest.mark.parametrize("kind", ["bool", "float32", "bfloat16", "float64"])
def test_sampled_rows_are_those_rows_under_any_mask_and_scale(kind, shape, tensor_layout):
    tensors = example(70, 130, heads=(4, 2), batch=2)
    mask = normal(*shape, seed=5)
    mask = mask > -1 if kind == "bool" else (3 * mask).to(getattr(torch, kind))
    rows = torch.tensor([69, 0, 33, 33, 5])
    given_tensors = [blockwise.heads_first(tensor, tensor_layout) for tensor in tensors]
    output = exact_attention(*given_tensors, tensor_layout, 0.3, mask, rows, torch.float64)
    expected = exact(*tensors, 0.3, mask)[:, :, rows]
    torch.testing.assert_close(blockwise.heads_first(output, tensor_layout), expected, **FP64)


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min])
def test_rows_masked_everywhere_are_what_pytorch_makes_of_them(lowest):
    query, key, value = example(3, 700)
    mask = torch.zeros(1, 1, 3, 700)
    mask[:, :, 1] = lowest
    output = exact_attention(query, key, value, "HND", attn_mask=mask)
    torch.testing.assert_close(output, scaled_dot_product_attention(query, key, value, attn_mask=mask), **FP32)


def test_nan_and_shapes_that_do_not_fit():
    query, key, value = example(10, 10)
    value[0, 1, 3, 5] = torch.nan
    assert exact_attention(query, key, value, "HND")[0, 1].isnan().any()
    with pytest.raises(ValueError, match="shapes do not fit"):
        exact_attention(query, key[:, :3], value[:, :3], "HND")
    with pytest.raises(ValueError, match="tensor_layout"):
        exact_attention(query, key, value, "BHSD")


class Largest(TorchDispatchMode):
    """The largest storage in bytes that any operation makes, other than the output's."""

    def __init__(self, output_shape):
        super().__init__()
        self.output_shape, self.nbytes = output_shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_output = func is torch.ops.aten.empty.memory_format and result.shape == self.output_shape
        if isinstance(result, Tensor) and func._schema.returns[0].alias_info is None and not is_output:
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(("tokens", "sampled"), [(1024, False), (4096, False), (4096, True), (100_000, True)])
def test_temporaries_stay_below_one_bound_for_any_number_of_tokens(monkeypatch, tokens, sampled):
    monkeypatch.setattr(blockwise, "_ELEMENTS_ON_CPU", 2**16)
    query, key, value = (normal(1, tokens, heads, 64, dtype=torch.bfloat16) for heads in (2, 1, 1))
    mask = torch.ones(1, 1, 1, tokens, dtype=torch.bool)
    rows = sample_rows(tokens) if sampled else None
    shape = (1, len(rows) if sampled else tokens, 2, 64)
    with Largest(shape) as largest:
        output = exact_attention(query, key, value, "NHD", attn_mask=mask, rows=rows)
    assert output.shape == shape
    assert 0 < largest.nbytes <= 4 * 2**16


@settings(deadline=None, derandomize=True)
@given(qo_len=st.integers(1, 300_000), count=st.integers(4, 256), tile=st.sampled_from([64, 128]))
def test_sampled_rows_are_spread_with_both_ends_and_the_last_tile(qo_len, count, tile):
    rows = sample_rows(qo_len, count, tile).tolist()
    assert min(count - 3, qo_len) <= len(rows) <= count
    assert rows == sorted(set(rows))
    assert (rows[0], rows[-1]) == (0, qo_len - 1)
    assert (qo_len - 1) // tile * tile in rows
    assert max((high - low for low, high in itertools.pairwise(rows)), default=0) <= 2 * math.ceil(qo_len / (count - 3))


@pytest.mark.parametrize("qo_len", [4608, 8000, 32_000])
def test_sampled_rows_do_not_keep_meeting_the_same_place(qo_len):
    rows = sample_rows(qo_len)
    for period in (16, 32, 64):  # rows of a tile, columns of an image
        assert len(set((rows % period).tolist())) > 0.75 * period


@pytest.mark.parametrize(("qo_len", "count"), [(0, 128), (10, 3)])
def test_sampling_needs_rows(qo_len, count):
    with pytest.raises(ValueError, match="at least 1 and 4"):
        sample_rows(qo_len, count)
