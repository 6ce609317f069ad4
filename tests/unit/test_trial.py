"""The small known example: a kernel that is right passes, and each way of being wrong is found and named."""

from __future__ import annotations

import pytest
import torch

from sage_core.backends.base import Kernel
from sage_core.backends.reference import INT8_REFERENCE
from sage_core.failure import DeviceLost
from sage_core.selection import Use
from sage_core.spec import MaskKind
from sage_core.trial import TRIAL_LENGTH, trial_spec, try_kernel
from tests.unit.conftest import (
    CPU,
    KERNEL,
    TRIAL_CALLS,
    FakeKernel,
    attention,
    fake_backend,
    fake_environment,
    make_spec,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = ("NHD", "HND")
SPEC = make_spec(qo_len=200, kv_len=333, sm_scale=0.3)
"""A partial last tile and a scale of its own."""


def trial(spoil=None, spec=SPEC, layout="NHD", expand_kv=False, smooth_k=None):
    """The refusal of a kernel that does ``spoil``, and the kernel."""
    kernel = FakeKernel(spoil)
    use = Use(fake_backend(kernel), Kernel(kernel), layout, expand_kv, smooth_k)
    return try_kernel(use, spec, CPU), kernel


def fails_with(refusal, *words):
    assert refusal is not None
    assert refusal.code.value == "trial"
    assert KERNEL in refusal.detail
    for word in words:
        assert word in refusal.detail


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "float32"},
        {"head_dim": 40},
        {"num_qo_heads": 48, "num_kv_heads": 12},
        {"mask_kind": MaskKind.BOOL, "mask_dtype": "bool"},
        {"mask_kind": MaskKind.ADDITIVE, "mask_dtype": "bfloat16"},
        {"mask_kind": MaskKind.ADDITIVE, "mask_dtype": "bfloat16", "num_qo_heads": 8, "num_kv_heads": 2},
        {"sm_scale": 1.0},
        {"qo_len": 1, "kv_len": 1},
        {"batch_size": 9, "qo_len": 100_000, "kv_len": 77},
    ],
)
def test_a_correct_kernel_passes(fields, layout):
    assert trial(spec=make_spec(**{"dtype": "bfloat16", **fields}), layout=layout)[0] is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("position", [(0, 0), (-1, -1)])
def test_one_nan_is_found(layout, position):
    def spoil(query, key, value, tensor_layout, scale, mask):
        output = attention(query, key, value, tensor_layout, scale, mask)
        output[position] = float("nan")
        return output

    fails_with(trial(spoil, layout=layout)[0], "NaN or Inf")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda o: o.transpose(1, 2).contiguous(), ["returned [1, 2, 200, 64]"], id="other layout"),
        pytest.param(lambda o: o.flatten(2), ["expected [1, 200, 2, 64]"], id="flat"),
        pytest.param(lambda o: o[:, :-1], ["[1, 199, 2, 64]"], id="a row less"),
        pytest.param(lambda o: o.half(), ["torch.float16"], id="other dtype"),
        pytest.param(lambda o: o.to("meta"), ["on meta"], id="other device"),
        pytest.param(lambda o: (o, None), ["returned a tuple"], id="tuple"),
        pytest.param(lambda o: None, ["returned a NoneType"], id="nothing"),
    ],
)
def test_an_output_of_another_kind_is_named(spoil, words):
    fails_with(trial(lambda *call: spoil(attention(*call)))[0], *words)


@pytest.mark.parametrize("role", ["query", "key", "value"])
def test_a_kernel_that_changes_its_input_is_named_with_it(role):
    def spoil(query, key, value, layout, scale, mask):
        output = attention(query, key, value, layout, scale, mask)
        {"query": query, "key": key, "value": value}[role][0, 0, 0, 0] += 1
        return output

    fails_with(trial(spoil)[0], f"changed the caller's {role} in place")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kernel_that_writes_its_next_output_over_the_one_before_is_found(layout):
    buffers = {}

    def spoil(*call):
        output = attention(*call)
        return buffers.setdefault(output.shape, output).copy_(output)

    fails_with(trial(spoil, layout=layout)[0], "over the one before")
    assert trial(lambda *call: spoil(*call).clone(), layout=layout)[0] is None


def test_what_another_call_of_the_example_raises_counts():
    calls = []

    def spoil(*call):
        calls.append(1)
        if len(calls) == TRIAL_CALLS:
            raise RuntimeError("twice")
        return attention(*call)

    assert "twice" in trial(spoil)[0].detail


@pytest.mark.parametrize("kind", [MaskKind.BOOL, MaskKind.ADDITIVE])
def test_a_kernel_that_changes_the_mask_is_named_with_it(kind):
    def spoil(query, key, value, layout, scale, mask):
        output = attention(query, key, value, layout, scale, mask)
        mask.copy_(mask.logical_not() if mask.dtype is torch.bool else mask * 1.4426950408889634 - 1)
        return output

    spec = SPEC._replace(mask_kind=kind, mask_dtype="float32")
    fails_with(trial(spoil, spec=spec)[0], "changed the caller's attn_mask in place")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [MaskKind.BOOL, MaskKind.ADDITIVE])
def test_a_kernel_that_swallows_the_mask_is_found(kind, layout):
    spec = SPEC._replace(mask_kind=kind, mask_dtype="float32")
    refusal, _ = trial(lambda *call: attention(*call[:5], None), spec=spec, layout=layout)
    fails_with(refusal, f"a {kind.value} attn_mask")


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.2, 1.0, 8.0, -0.1])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_healthy_quantized_kernel_passes_at_any_scale(scale, head_dim):
    kernel = INT8_REFERENCE.load(fake_environment(), "cpu", False)
    use = Use(INT8_REFERENCE, kernel, "NHD", False, False)
    assert try_kernel(use, make_spec(head_dim=head_dim, sm_scale=scale, dtype="bfloat16"), CPU) is None


@pytest.mark.parametrize("scale", [64**-0.5, 1.0, 1e-3, -0.1])
def test_a_kernel_with_a_scale_of_its_own_is_found(scale):
    spec = make_spec(head_dim=128, sm_scale=scale)
    refusal, _ = trial(lambda q, k, v, layout, _, mask: attention(q, k, v, layout, 128**-0.5, mask), spec=spec)
    fails_with(refusal, f"sm_scale {scale:g}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(48, 12), (32, 8), (28, 4)])
def test_a_kernel_that_folds_grouped_heads_into_a_shorter_sequence_is_found(heads, kv_heads, layout):
    def spoil(query, key, value, tensor_layout, scale, mask):
        if tensor_layout == "NHD":
            shape = (key.shape[0], -1, query.shape[2], key.shape[3])
        else:
            shape = (key.shape[0], query.shape[1], -1, key.shape[3])
        return attention(query, key.reshape(shape), value.reshape(shape), tensor_layout, scale, mask)

    spec = make_spec(num_qo_heads=heads, num_kv_heads=kv_heads, qo_len=224, kv_len=224)
    fails_with(trial(spoil, spec=spec, layout=layout)[0], "key heads")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kernel_that_gives_grouped_heads_the_wrong_key_head_is_found(layout):
    axis = 2 if layout == "NHD" else 1

    def spoil(query, key, value, tensor_layout, scale, mask):
        times = query.shape[axis] // key.shape[axis]
        key, value = (torch.cat([tensor] * times, axis) for tensor in (key, value))
        return attention(query, key, value, tensor_layout, scale, mask)

    spec = make_spec(num_qo_heads=8, num_kv_heads=2)
    fails_with(trial(spoil, spec=spec, layout=layout)[0], "8 query heads on 2 key heads")


@pytest.mark.parametrize("kv_len", [77, 200, 4_173, 32_770])
def test_a_kernel_that_takes_the_rest_of_its_last_tile_for_keys_is_found(kv_len):
    def spoil(query, key, value, layout, scale, mask):
        extra = -key.shape[1] % 64
        key, value = (torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, extra)) for tensor in (key, value))
        return attention(query, key, value, layout, scale, mask)

    fails_with(trial(spoil, spec=make_spec(kv_len=kv_len))[0], "kv_len")
    assert trial(spoil, spec=make_spec(kv_len=4_096))[0] is None


def test_a_kernel_that_forgets_the_last_rows_is_found():
    def spoil(query, key, value, layout, scale, mask):
        output = attention(query, key, value, layout, scale, mask)
        output[:, output.shape[1] // 128 * 128 :] = 0
        return output

    fails_with(trial(spoil, spec=make_spec(qo_len=4_500))[0], "relative L2")


def test_the_tolerance_is_the_backends_own():
    def spoil(query, key, value, layout, scale, mask):
        return attention(query, key, value, layout, scale, mask) * 1.03

    assert trial(spoil)[0] is not None
    backend = fake_backend(tolerance=fake_backend().tolerance._replace(relative_l2=0.04))
    assert try_kernel(Use(backend, Kernel(FakeKernel(spoil)), "NHD", False, None), SPEC, CPU) is None


def raising(error):
    def spoil(*call):
        raise error

    return spoil


def test_a_kernel_that_raises_is_quoted():
    refusal, _ = trial(raising(RuntimeError("no compiler")))
    assert (refusal.code.value, refusal.detail) == ("kernel_error", f"{KERNEL} raised RuntimeError: no compiler")


def test_running_out_of_memory_is_told_apart():
    assert trial(raising(torch.OutOfMemoryError("2 GiB")))[0].code.value == "out_of_memory"


def test_a_lost_device_is_no_refusal():
    with pytest.raises(DeviceLost):
        trial(raising(RuntimeError("CUDA error: an illegal memory access was encountered")))


def test_the_trial_hands_over_what_a_call_would():
    spec = make_spec(num_qo_heads=8, num_kv_heads=2, sm_scale=0.7)
    _, kernel = trial(spec=spec, layout="HND", expand_kv=True, smooth_k=True)
    assert len(kernel.calls) == TRIAL_CALLS
    for call in kernel.calls:
        assert {name: call[name] for name in ("tensor_layout", "sm_scale", "smooth_k")} == {
            "tensor_layout": "HND",
            "sm_scale": 0.7,
            "smooth_k": True,
        }
        assert call["shapes"] == [(1, 8, 128, 64)] * 3


def test_the_example_is_the_same_each_time_and_leaves_the_global_random_numbers_alone():
    sums = []

    def spoil(query, key, value, layout, scale, mask):
        sums.append([float(tensor.double().sum()) for tensor in (query, key, value, mask)])
        return attention(query, key, value, layout, scale, mask)

    state = torch.get_rng_state()
    for _ in range(2):
        assert trial(spoil, spec=SPEC._replace(mask_kind=MaskKind.BOOL))[0] is None
    assert sums[:TRIAL_CALLS] == sums[TRIAL_CALLS:]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("fields", "small"),
    [
        ({}, {}),
        ({"batch_size": 8}, {"batch_size": 2}),
        ({"num_qo_heads": 24, "num_kv_heads": 24}, {"num_qo_heads": 2, "num_kv_heads": 2}),
        ({"num_qo_heads": 48, "num_kv_heads": 12}, {"num_qo_heads": 8, "num_kv_heads": 2}),
        ({"num_qo_heads": 7, "num_kv_heads": 1}, {"num_qo_heads": 7, "num_kv_heads": 1}),
        ({"qo_len": 4_608, "kv_len": 77}, {"qo_len": TRIAL_LENGTH, "kv_len": 77}),
        ({"qo_len": 4_173, "kv_len": 4_173}, {"qo_len": TRIAL_LENGTH + 77, "kv_len": TRIAL_LENGTH + 77}),
        ({"max_offset": 2**40, "mask_offset": 2**40}, {"max_offset": 0, "mask_offset": 0}),
        ({"head_dim": 160, "dtype": "bfloat16"}, {"head_dim": 160, "dtype": "bfloat16"}),
    ],
)
def test_the_example_is_small_and_has_the_features_of_the_call(fields, small):
    assert trial_spec(make_spec(**fields)) == make_spec(**{**fields, **small})
