"""The check of a kernel on a site's own tensors: what it finds, what follows from it, and what it costs in memory."""

from __future__ import annotations

import gc
import math
from collections import defaultdict

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from sage_core import checking, operators, planning, serving
from sage_core.accuracy import compare, exact_attention, sample_rows
from sage_core.blockwise import element_limit
from sage_core.call import AttentionCall
from sage_core.checking import KEYS_IN_A_PART, SiteAccuracy, site_check, site_norms
from sage_core.refusal import RefusalCode
from sage_core.spec import AttentionSpec, MaskKind
from tests.unit.conftest import (
    CPU,
    TRIAL_CALLS,
    Machine,
    Native,
    Sites,
    attention,
    comfy_arguments,
    fake_backend,
    make_call,
    normal,
    off_by,
    served,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NATIVE = "native"
LOOSE = fake_backend().tolerance._replace(relative_l2=math.inf, cosine=-1.0)
"""For kernels that pass their small example and are wrong on the model's tensors."""
STEPS_20 = [1.0 - step / 20 for step in range(21)]


def by_site(run):
    """Kernels of each site in the order of their calls."""
    found = defaultdict(set)
    for site in run["sites"]:
        found[site["site"]].add(site["kernel"])
    return dict(found)


def where(condition, error):
    """A kernel that is off by ``error`` where ``condition()`` holds."""
    return lambda *call: off_by(error if condition() else 0.0)(*call)


# -- the numbers


def accuracy_of(call, spec, output, exact=True):
    return SiteAccuracy.from_norms(site_norms(call, spec, output, exact).tolist())


@pytest.mark.parametrize(
    ("output", "reference", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], (0.0, 0.0, 1.0)),
        ([-3.0, -4.0], [3.0, 4.0], (2.0, 2.0, -1.0)),
        ([4.0, -3.0], [3.0, 4.0], (2**0.5, 2**0.5, 0.0)),
        ([0.0, 0.0], [0.0, 0.0], (0.0, 0.0, 1.0)),
        ([1.0, 0.0], [0.0, 0.0], (math.inf, math.inf, 0.0)),
        ([0.0, 0.0], [3.0, 4.0], (1.0, 1.0, 0.0)),
        ([1e200, 0.0], [1e200, 1e200], (0.5**0.5, 0.5**0.5, 0.5**0.5)),
        ([math.inf, 0.0], [1.0, 1.0], (math.nan,) * 3),
        ([math.nan, 0.0], [1.0, 1.0], (math.nan,) * 3),
        ([math.inf, 0.0], [math.inf, 0.0], (math.nan,) * 3),
    ],
)
def test_accuracy_from_the_norms_of_one_head(output, reference, expected):
    error = [got - exact for got, exact in zip(output, reference, strict=True)]
    norms = [math.hypot(*part) for part in (error, reference, output)]
    assert SiteAccuracy.from_norms(norms) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_a_broken_head_shows_whichever_it_is():
    sound = [0.1, 0.2, 1.0, 1.0, 1.0, 1.0]
    assert SiteAccuracy.from_norms(sound).worst_head_relative_l2 == pytest.approx(0.2)
    for at in range(len(sound)):
        broken = [math.nan if place == at else norm for place, norm in enumerate(sound)]
        assert not SiteAccuracy.from_norms(broken).within(math.inf)


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"qo_len": 300},
        {"qo_len": 300, "kv_len": 77, "batch": 2},
        {"heads": 4, "kv_heads": 2, "scale": 0.5, "qo_len": 150},
        {"qo_len": 300, "mask": normal(300, 300, seed=9)},
        {"qo_len": 300, "batch": 2, "mask": normal(2, 300, 300, seed=9) > 0},
        {"qo_len": 300, "mask": normal(1, 300, seed=9) > 0},
        {"qo_len": 300, "batch": 2, "mask": normal(1, 1, 300, 300, seed=9).expand(2, 2, 300, 300)},
        {"qo_len": 300, "batch": 2, "mask": (normal(2, 1, 1, 300, seed=9) > 0).expand(2, 2, 300, 300)},
    ],
    ids=str,
)
def test_errors_are_those_of_the_sampled_rows(skip_reshape, skip_output_reshape, exact, options):
    call = make_call(skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **options)
    spec, refusals = call.read("cpu")
    assert refusals == ()
    split = {"skip_reshape": True, "skip_output_reshape": True}
    heads_first = [t if skip_reshape else t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in call[:3]]
    mask = call.mask if call.mask is None or call.mask.ndim != 3 else call.mask.unsqueeze(1)
    right = Native()(*heads_first, spec.num_qo_heads, mask, scale=spec.sm_scale, enable_gqa=True, **split)
    wrong = right.clone()
    wrong[:, 1] *= 1.25
    output = wrong if skip_output_reshape else wrong.transpose(1, 2).flatten(2)
    found = accuracy_of(call, spec, output, exact)
    rows = sample_rows(spec.qo_len)
    expected = compare(wrong[:, :, rows], right[:, :, rows], head_axis=1)
    assert found.worst_head_relative_l2 == pytest.approx(0.25, rel=1e-4)
    assert found.relative_l2 == pytest.approx(expected.relative_l2, rel=1e-4)
    assert found.cosine == pytest.approx(expected.cosine, rel=1e-5)


LONG_KEYS = 2 * KEYS_IN_A_PART + 37
"""Two parts, and a rest."""


@pytest.mark.parametrize(
    "options", [{}, {"skip_reshape": True}, {"batch": 2}, {"scale": 0.05}, {"dtype": torch.bfloat16}]
)
def test_sampled_rows_attend_to_long_keys_in_parts_as_to_the_whole(options, monkeypatch):
    (*tensors, heads), keywords = comfy_arguments(qo_len=40, kv_len=LONG_KEYS, head_dim=32, **options)
    call = AttentionCall.from_comfy(*tensors, heads, **keywords)
    spec, _ = call.read("cpu")
    in_parts = []
    flash = checking._flash
    monkeypatch.setattr(checking, "_flash", lambda *given: in_parts.append(given[1].shape[-2]) or flash(*given))
    rows = torch.arange(40)
    found = checking._reference(call, spec, rows, exact=False)
    assert in_parts == [KEYS_IN_A_PART + 18, 1] * spec.batch_size
    expected = checking._reference(call, spec, rows, exact=True)
    bound = 5e-3 if spec.dtype == "bfloat16" else 1e-5
    assert ((found - expected).norm() / expected.norm()).item() < bound


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, 11),
        ({"num_qo_heads": 10, "num_kv_heads": 10, "batch_size": 2}, 13),
        ({"num_qo_heads": 300, "num_kv_heads": 300}, 1),
        ({"kv_len": 4_608}, 4),
        ({"kv_len": 2_047}, 1),
        ({"num_kv_heads": 8}, 1),
        ({"mask_kind": MaskKind.BOOL}, 1),
        ({"head_dim": 36}, 1),
        ({"head_dim": 264}, 1),
        ({"dtype": "float32"}, 1),
        ({"arch": "sm75"}, 1),
        ({"arch": "gfx1201"}, 1),
        ({"arch": "cpu", "dtype": "float32"}, 11),
    ],
)
def test_keys_are_parted_to_fill_the_device_and_where_flash_attention_takes_them(changes, parts, monkeypatch):
    monkeypatch.setattr(checking, "flash_operator", lambda on_cpu: "there")
    spec = AttentionSpec("sm90", "bfloat16", 1, 24, 24, 16_896, 16_896, 128)
    assert checking._parts(spec._replace(**changes)) == parts


def test_keys_are_not_parted_where_torch_has_no_flash_attention(monkeypatch):
    spec = AttentionSpec("sm90", "bfloat16", 1, 24, 24, 16_896, 16_896, 128)
    operators.flash_operator.cache_clear()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)  # as it is on Windows
    assert checking._parts(spec) == 1
    assert checking._parts(spec._replace(arch="cpu")) == 11
    operators.flash_operator.cache_clear()
    monkeypatch.setattr(operators, "FLASH_CPU_SCHEMA", "query key value and more")
    assert checking._parts(spec._replace(arch="cpu")) == 1
    operators.flash_operator.cache_clear()


def test_a_strided_head_dim_is_left_to_pytorch_as_a_whole(monkeypatch):
    monkeypatch.setattr(checking, "_flash", None)
    tensors = [torch.randn(1, 2, 16, LONG_KEYS).mT for _ in range(3)]
    call = AttentionCall.from_comfy(*tensors, 2, skip_reshape=True)
    spec, _ = call.read("cpu")
    rows = torch.arange(8)
    found, expected = (checking._reference(call, spec, rows, exact) for exact in (False, True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exact", [True, False])
def test_a_check_leaves_nothing_on_the_device(exact):
    before = {id(thing) for thing in gc.get_objects() if type(thing) is torch.Tensor}
    call = make_call(qo_len=300)
    spec, _ = call.read("cpu")
    away = call._replace(**{role: getattr(call, role).to("meta") for role in ("query", "key", "value")})
    assert site_norms(away, spec, away.query, exact).is_meta
    del away
    left = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and id(thing) not in before]
    assert [tensor.shape for tensor in left if tensor.is_meta] == []


ROWS = len(sample_rows(300))


@pytest.fixture
def quick(monkeypatch):
    """The attn_mask of each call of PyTorch's attention in a check."""
    masks = []

    def noting(*tensors, attn_mask, **keywords):
        masks.append(attn_mask)
        return scaled_dot_product_attention(*tensors, attn_mask=attn_mask, **keywords)

    monkeypatch.setattr(checking, "scaled_dot_product_attention", noting)
    return masks


@pytest.mark.parametrize(
    ("shape", "handed"),
    [
        ((3, 4, 300, 300), (3, 4, ROWS, 300)),
        ((3, 1, 300, 300), (3, 1, ROWS, 300)),
        ((1, 4, 1, 300), (1, 4, 1, 300)),
        ((1, 1, 1, 300), (1, 1, 1, 300)),
    ],
)
def test_the_rows_of_a_mask_are_no_larger_than_the_mask_in_memory(shape, handed, quick):
    call = make_call(batch=3, heads=4, qo_len=300, mask=normal(*shape, seed=9).expand(3, 4, 300, 300))
    spec, _ = call.read("cpu")
    right = Native()(*call[:3], 4, call.mask)
    assert accuracy_of(call, spec, right, exact=False).worst_head_relative_l2 < 1e-4
    assert [tuple(mask.shape) for mask in quick] == [handed]


@pytest.mark.parametrize(
    ("limit", "mask", "asked"),
    [
        (300 * 32 - 1, None, True),
        (300 * 32 - 2, None, False),
        (ROWS * 300 - 1, normal(300, 300, seed=9), True),
        (ROWS * 300 - 2, normal(300, 300, seed=9), False),
    ],
)
def test_beyond_32_bits_a_check_does_without_attention_that_may_not_count_so_far(
    limit, mask, asked, quick, monkeypatch
):
    monkeypatch.setattr(checking, "MAX_OFFSET_32_BIT", limit)
    call = make_call(qo_len=300, mask=mask)
    spec, _ = call.read("cpu")
    right = Native()(*call[:3], 2, mask)
    assert accuracy_of(call, spec, right, exact=False).worst_head_relative_l2 < 1e-4
    assert bool(quick) is asked


def test_the_worst_head_is_found_among_many_and_in_any_batch():
    call = make_call(heads=8, qo_len=200, batch=3, skip_reshape=True, skip_output_reshape=True)
    spec, _ = call.read("cpu")
    output = Native()(*call[:3], 8, skip_reshape=True, skip_output_reshape=True)
    output[2, 5] *= 1.5
    found = accuracy_of(call, spec, output)
    assert found.worst_head_relative_l2 == pytest.approx(0.5, rel=1e-4)
    assert found.relative_l2 < 0.2


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_errors_of_tiny_and_huge_values_are_right(size):
    call = make_call(heads=2, qo_len=200, skip_reshape=True, skip_output_reshape=True)
    call = call._replace(value=call.value * size)
    spec, _ = call.read("cpu")
    output = Native()(*call[:3], 2, skip_reshape=True, skip_output_reshape=True) * 1.25
    assert accuracy_of(call, spec, output) == pytest.approx((0.25, 0.25, 1.0), rel=1e-4)


@pytest.mark.parametrize("row", [0, 1_300, 1_279 + 1, 1_289])
def test_an_error_in_the_first_or_last_row_or_the_last_tile_is_seen(row):
    call = make_call(heads=1, qo_len=1_290, skip_reshape=True, skip_output_reshape=True)
    spec, _ = call.read("cpu")
    output = Native()(*call[:3], 1, skip_reshape=True, skip_output_reshape=True)
    output[:, :, min(row, 1_289)] += 100
    assert not accuracy_of(call, spec, output).within(0.1)


@pytest.mark.parametrize("exact", [True, False])
def test_a_check_has_the_same_bits_each_time_and_leaves_the_global_generator_alone(exact):
    call = make_call(heads=3, qo_len=700, dtype=torch.bfloat16)
    spec, _ = call.read("cpu")
    output = off_by(0.03)(*(t.view(1, 700, 3, 16) for t in call[:3]), "NHD", 0.25).flatten(2)
    before = torch.get_rng_state()
    first = site_norms(call, spec, output, exact)
    for _ in range(3):
        assert torch.equal(site_norms(call, spec, output, exact), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert SiteAccuracy.from_norms(first.tolist()).worst_head_relative_l2 > 0.02


def test_a_site_is_within_the_tolerance_up_to_it_and_nan_never_is():
    found = SiteAccuracy(0.05, 0.1, 0.99)
    assert (found.within(0.1), found.within(0.0999)) == (True, False)
    refusal = found.refusal("a", 0.05)
    assert refusal.code is RefusalCode.ACCURACY
    assert refusal.detail == "a is off by relative L2 0.100 in its worst head at this site; tolerance is 0.05"
    broken = SiteAccuracy(math.nan, math.nan, math.nan)
    assert not broken.within(math.inf)
    assert broken.refusal("a", 0.1).code is RefusalCode.NOT_FINITE


class LargestTemporary(TorchDispatchMode):
    """The most elements of one tensor that an operation made, views apart."""

    def __init__(self, given):
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                self.elements = max(self.elements, tensor.numel())
        return output


def test_memory_does_not_grow_with_the_length():
    def largest(length):
        call = make_call(heads=2, qo_len=length, head_dim=8, skip_reshape=True, skip_output_reshape=True)
        spec, _ = call.read("cpu")
        output = call.value.clone()
        with LargestTemporary((*call[:3], output)) as recorded:
            site_norms(call, spec, output)
        return recorded.elements

    assert largest(2_000) > 0
    assert largest(200_000) <= element_limit(CPU)
    assert element_limit(CPU) < 2 * 128 * 200_000, "the length is too small to tell"


# -- the first check of a site


def test_a_kernel_wrong_at_one_site_keeps_the_others_and_the_next_fastest_takes_over_there():
    model = Sites(calls=4)
    machine = Machine()
    machine.add("fastest", 1.0, spoil=where(lambda: model.site == 2, 0.3))
    machine.add("fast", 2.0)
    comfy = machine.comfy(model, tolerance=0.1)
    comfy.sample((1.0, 0.5, 0.0))
    run = comfy.run()
    assert by_site(run) == {0: {"fastest"}, 1: {"fastest"}, 2: {"fast"}, 3: {"fastest"}}
    (reason,) = [entry for entry in run["refusals"] if entry["code"] == "accuracy"]
    assert (reason["kernel"], reason["calls"]) == ("fastest", 2)
    assert "relative L2 0.300" in reason["detail"]
    assert "tolerance is 0.1" in reason["detail"]
    assert run["sites"][0]["accuracy"]["worst_head_relative_l2"] < 1e-4


def test_a_site_where_every_kernel_is_wrong_is_native():
    model = Sites()
    machine = Machine()
    for number, name in enumerate(("fastest", "fast"), 1):
        machine.add(name, number, spoil=where(lambda: model.site == 1, 0.2 * number))
    comfy = machine.comfy(model, tolerance=0.1)
    (outputs,) = comfy.sample()
    assert by_site(comfy.run()) == {0: {"fastest"}, 1: {NATIVE}, 2: {"fastest"}}
    reasons = [(entry["kernel"], entry["code"]) for entry in comfy.run()["refusals"]]
    assert reasons == [("fastest", "accuracy"), ("fast", "accuracy")]
    assert torch.equal(outputs[1], model.natively()[1])


def test_an_exact_kernel_is_not_checked_and_takes_over_before_native():
    machine = Machine()
    machine.add("rough", 1.0, spoil=off_by(0.3), tolerance=LOOSE)
    machine.add("exact", 5.0, spoil=off_by(0.2), tolerance=LOOSE, exact=True)
    comfy = machine.comfy(tolerance=0.1)
    comfy.sample()
    assert served(comfy.run()) == {"exact": 3}
    assert [site["accuracy"] for site in comfy.run()["sites"]] == [None] * 3


@pytest.mark.parametrize(
    ("error", "tolerance", "kernel"),
    [(0.04, 0.05, "a"), (0.07, 0.05, NATIVE), (0.07, 0.10, "a"), (0.13, 0.10, NATIVE), (9.0, None, "a")],
)
def test_the_tolerance_is_the_persons(error, tolerance, kernel):
    machine = Machine()
    machine.add("a", 1.0, spoil=off_by(error), tolerance=LOOSE)
    comfy = machine.comfy(kernel="a", tolerance=tolerance)
    comfy.sample((1.0, 0.5, 0.0))
    assert served(comfy.run()) == {kernel: 6}
    accuracy = comfy.run()["sites"][0]["accuracy"]
    if kernel == NATIVE or tolerance is None:
        assert accuracy is None
    else:
        assert accuracy["worst_head_relative_l2"] == pytest.approx(error, rel=1e-3)


def smoothing_kernel(plain, smoothed, calls=None):
    """A kernel with the switch, off by ``plain`` without smoothing and by ``smoothed`` with it."""

    def function(query, key, value, tensor_layout, sm_scale, smooth_k):
        if calls is not None:
            calls.append(smooth_k)
        return off_by(smoothed if smooth_k else plain)(query, key, value, tensor_layout, sm_scale)

    return fake_backend(function, name="a", options=("smooth_k",), smooth_k=True, tolerance=LOOSE)


@pytest.mark.parametrize(
    ("plain", "smoothed", "kept"),
    [
        (0.05, 0.03, True),
        (0.05, 0.047, False),  # smoothing costs time: a little better is not enough
        (0.03, 0.05, False),
        (0.2, 0.05, True),
        (0.05, 0.2, False),
        (0.05, math.nan, False),
        (math.nan, 0.05, True),
        (0.2, 0.15, None),
    ],
)
def test_smoothing_is_kept_where_it_gains(plain, smoothed, kept):
    machine = Machine()
    machine.backends.append(smoothing_kernel(plain, smoothed))
    comfy = machine.comfy(kernel="a", tolerance=0.1)
    (outputs,) = comfy.sample()
    sites = comfy.run()["sites"]
    assert [site["smooth_k"] for site in sites] == [kept] * 3
    assert {site["kernel"] for site in sites} == {NATIVE if kept is None else "a"}
    if kept is not None:
        factor = 1 + (smoothed if kept else plain)
        torch.testing.assert_close(outputs[0], comfy.forward_once.natively()[0] * factor, rtol=1e-4, atol=1e-5)
        error = sites[0]["accuracy"]["worst_head_relative_l2"]
        assert error == pytest.approx(smoothed if kept else plain, rel=1e-3)


def test_smoothing_is_decided_for_each_site_of_its_own():
    model = Sites()
    machine = Machine()

    def function(query, key, value, tensor_layout, sm_scale, smooth_k):
        gains = model.site == 1
        return off_by(0.02 if smooth_k is gains else 0.05)(query, key, value, tensor_layout, sm_scale)

    machine.backends.append(fake_backend(function, name="a", options=("smooth_k",), smooth_k=True, tolerance=LOOSE))
    comfy = machine.comfy(model, kernel="a", tolerance=0.1)
    comfy.sample()
    assert [site["smooth_k"] for site in comfy.run()["sites"]] == [False, True, False]


@pytest.mark.parametrize("smooth_k", ["on", "off"])
def test_smoothing_that_the_person_chose_is_not_tried_otherwise(smooth_k):
    calls = []
    machine = Machine()
    machine.backends.append(smoothing_kernel(0.05, 0.05, calls))
    comfy = machine.comfy(kernel="a", tolerance=0.1, smooth_k=smooth_k)
    comfy.sample()
    assert served(comfy.run()) == {"a": 3}
    assert set(calls) == {smooth_k == "on"}


# -- degenerate data


def int8_like(query, key, value, layout, scale, mask=None):
    """Attention with query and key rounded to 255 steps per row, and value to fp16, as quantized kernels do."""

    def rounded(tensor):
        step = tensor.float().abs().amax(-1, keepdim=True) / 127
        return (tensor.float() / step.clamp_min(1e-30)).round().mul(step)

    output = attention(rounded(query), rounded(key), value.half().float(), layout, scale, mask)
    return output.to(query.dtype)


def changed(**tensors):
    """The change of a Sites model that replaces or maps tensors by name."""

    def change(query, key, value):
        given = {"query": query, "key": key, "value": value}
        return [tensors[name](tensor) if name in tensors else tensor for name, tensor in given.items()]

    return change


def one_channel(index, factor, offset=0.0):
    """The map that changes one channel of every head."""
    return lambda tensor: torch.where(torch.arange(tensor.shape[-1]) % 16 == index, factor * tensor + offset, tensor)


def nan_at_one_place(tensor):
    tensor = tensor.clone()
    tensor[0, 7, 3] = math.nan  # row 7 of 512 is not among the sampled ones
    return tensor


DEGENERATE = {
    "all keys equal": (changed(key=lambda key: key[:, :1].expand_as(key).contiguous()), {}, "a"),
    "value zero": (changed(value=torch.zeros_like), {}, "a"),
    "one value channel zero": (changed(value=one_channel(5, 0.0)), {}, "a"),
    "query zero": (changed(query=torch.zeros_like), {}, "a"),
    "everything zero": (changed(query=torch.zeros_like, key=torch.zeros_like, value=torch.zeros_like), {}, "a"),
    "one huge channel": (changed(key=one_channel(3, 0.0, 600.0)), {}, NATIVE),
    "huge value in bf16": (changed(value=lambda value: value * 1e6), {"dtype": torch.bfloat16}, NATIVE),
    "huge value in fp32": (changed(value=lambda value: value * 1e25), {}, NATIVE),
    "NaN in a row of query that is not sampled": (changed(query=nan_at_one_place), {}, "a, then native"),
    "NaN in key": (changed(key=nan_at_one_place), {}, NATIVE),
    "NaN in value": (changed(value=nan_at_one_place), {}, NATIVE),
    "Inf in value": (changed(value=lambda value: value.index_fill(1, torch.tensor([3]), math.inf)), {}, NATIVE),
    "one key less than a tile": (None, {"kv_len": 127}, "a"),
    "one key more than a tile": (None, {"kv_len": 129}, "a"),
    "one key": (None, {"kv_len": 1}, "a"),
    "one query": (None, {"qo_len": 1, "kv_len": 77}, "a"),
}


@pytest.mark.parametrize(("change", "options", "kernel"), DEGENERATE.values(), ids=DEGENERATE.keys())
def test_degenerate_data_is_served_rightly_or_natively(change, options, kernel):
    model = Sites(calls=2, change=change, **options)
    machine = Machine()
    machine.add("a", 1.0, spoil=int8_like)
    comfy = machine.comfy(model, kernel="a", tolerance=0.1)
    (outputs,) = comfy.sample()
    assert served(comfy.run()) == ({"a": 2, NATIVE: 2} if kernel == "a, then native" else {kernel: 2})
    for output, native in zip(outputs, model.natively(), strict=True):
        if NATIVE in kernel:
            assert torch.equal(output.nan_to_num(), native.nan_to_num())
            assert torch.equal(output.isnan(), native.isnan())
        else:
            assert (output - native).norm() <= 0.1 * native.norm()
    assert {entry["code"] for entry in comfy.run()["refusals"]} <= {"accuracy", "not_finite"}


# -- later checks


@pytest.mark.parametrize(("wrong_from", "checked_at"), [(1, 5), (4, 5), (5, 5), (7, 10), (11, 15), (16, None)])
def test_a_site_that_drifts_leaves_its_kernel_after_the_next_check(wrong_from, checked_at):
    model = Sites()
    machine = Machine()
    kernel = machine.add("a", 1.0, spoil=where(lambda: model.forward >= wrong_from and model.site == 1, 0.4))
    comfy = machine.comfy(model, kernel="a", tolerance=0.1)
    outputs = comfy.sample(STEPS_20)
    run = comfy.run()
    served_by_kernel = 20 if checked_at is None else checked_at + 1
    calls = {(site["site"], site["kernel"]): site["calls"] for site in run["sites"]}
    expected = {(0, "a"): 20, (1, "a"): served_by_kernel, (1, NATIVE): 20 - served_by_kernel, (2, "a"): 20}
    assert calls == {place: number for place, number in expected.items() if number}
    if checked_at is None:
        assert run["events"] == []
    else:
        (event,) = run["events"]
        assert event["step"] == checked_at + 1
        assert "site 1" in event["text"]
        assert "0.400" in event["text"]
        (site,) = [site for site in run["sites"] if (site["site"], site["kernel"]) == (1, "a")]
        assert site["accuracy"]["step"] == checked_at + 1
        assert site["accuracy"]["worst_head_relative_l2"] == pytest.approx(0.4, rel=1e-3)
        native = model.natively()[1]
        assert all(torch.equal(output[1], native) for output in outputs[checked_at + 1 :])
        assert not torch.equal(outputs[checked_at][1], native)
    assert run["calls"] == 60
    checks = 3
    assert len(kernel.calls) == TRIAL_CALLS + checks + sum(n for (_, name), n in calls.items() if name == "a")
    comfy.sample()
    # a drift after the last check is found by the first one of the next run
    assert by_site(comfy.run())[1] == ({NATIVE} if checked_at is not None else {"a", NATIVE})


def test_a_site_that_is_wrong_in_the_first_forward_of_a_later_run_never_reaches_the_picture():
    model = Sites()
    wrong = []
    machine = Machine()
    machine.add("a", 1.0, spoil=where(lambda: bool(wrong) and model.site == 1, 0.4))
    comfy = machine.comfy(model, kernel="a", tolerance=0.1)
    good = comfy.sample((1.0, 0.5, 0.0))
    wrong.append(1)
    outputs = comfy.sample((1.0, 0.5, 0.0))
    native = model.natively()
    for before, now in zip(good, outputs, strict=True):
        assert torch.equal(now[1], native[1])
        assert torch.equal(now[0], before[0])
        assert torch.equal(now[2], before[2])
    run = comfy.run()
    assert run["events"][0]["step"] == 1
    # the first forward was run twice, and every call of both is counted
    assert (run["forwards"], run["calls"]) == (3, 9)


def test_the_next_kernel_takes_the_site_that_another_left():
    model = Sites()
    machine = Machine()
    machine.add("fastest", 1.0, spoil=where(lambda: model.forward >= 3 and model.site == 1, 0.4))
    machine.add("fast", 2.0)
    comfy = machine.comfy(model, tolerance=0.1)
    comfy.sample(STEPS_20)
    assert by_site(comfy.run()) == {0: {"fastest"}, 1: {"fastest", "fast"}, 2: {"fastest"}}
    assert served(comfy.run()) == {"fastest": 40 + 6, "fast": 14}


def test_a_run_is_checked_four_times_and_no_more(monkeypatch):
    checks = []

    def counting(function, exact):
        def counted(*args, **kwargs):
            checks.append((comfy.run()["steps"], exact))
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(planning, "site_norms", counting(site_norms, exact=True))
    monkeypatch.setattr(serving, "site_check", counting(site_check, exact=False))
    machine = Machine()
    machine.add("a", 1.0)
    machine.add("exact", 1.0, exact=True)
    comfy = machine.comfy(Sites(calls=2), kernel="a", tolerance=0.1)
    comfy.sample(STEPS_20)
    assert checks == [(0, True)] * 2 + [(step, False) for step in (5, 10, 15) for _ in range(2)]
    del checks[:]
    comfy.sample(STEPS_20)
    assert checks == [(step, False) for step in (0, 5, 10, 15) for _ in range(2)]
    del checks[:]
    for policy in ({"kernel": "a", "tolerance": None}, {"kernel": "exact", "tolerance": 0.1}):
        machine.comfy(**policy).sample(STEPS_20)
    assert checks == []


def test_checks_change_no_bit():
    outputs = {}
    for tolerance in (0.1, None):
        machine = Machine()
        machine.add("a", 1.0, spoil=off_by(0.03), tolerance=LOOSE)
        comfy = machine.comfy(kernel="a", tolerance=tolerance)
        outputs[tolerance] = [output for forward in comfy.sample(STEPS_20) for output in forward]
    for checked, unchecked in zip(*outputs.values(), strict=True):
        assert torch.equal(checked, unchecked)


def test_the_reference_of_the_tests_is_exact():
    query, key, value = (normal(1, 2, 40, 16, seed=seed) for seed in range(3))
    exact = exact_attention(query, key, value, "HND")
    torch.testing.assert_close(attention(query, key, value, "HND", 0.25), exact, rtol=1e-4, atol=1e-5)
    assert comfy_arguments()[0][3] == 2
