"""The spec of a call, and the declared limits of a kernel against it: every reason, with both sides in it."""

from __future__ import annotations

import pytest

from sage_core.refusal import ADVICE, Refusal, RefusalCode
from sage_core.spec import MaskKind
from sage_core.support import Support
from tests.unit.conftest import codes, make_spec


def test_a_spec_tells_grouped_heads_and_the_scale_it_means():
    assert not make_spec().enable_gqa
    assert make_spec(num_qo_heads=8, num_kv_heads=2).enable_gqa
    assert make_spec(head_dim=64).softmax_scale == 0.125
    assert make_spec(head_dim=64, sm_scale=1.0).softmax_scale == 1.0
    assert make_spec(head_dim=64, sm_scale=0.0).softmax_scale == 0.0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "1 x 2 x 128 x 64 float32 NHD"),
        ({"num_qo_heads": 48, "num_kv_heads": 12}, "1 x 48/12 x 128 x 64 float32 NHD"),
        ({"kv_len": 77, "tensor_layout": "HND"}, "1 x 2 x 128->77 x 64 float32 HND"),
        ({"mask_kind": MaskKind.BOOL}, "1 x 2 x 128 x 64 float32 NHD bool mask"),
    ],
)
def test_a_spec_describes_itself_in_one_line(fields, text):
    assert make_spec(**fields).describe() == text


def test_specs_of_equal_calls_are_equal_and_hash_alike():
    assert hash(make_spec()) == hash(make_spec())
    assert make_spec() != make_spec(max_offset=1)


def never(spec):
    return Refusal(RefusalCode.KV_LEN, f"kv_len is {spec.kv_len}; never enough")


@pytest.mark.parametrize(
    ("support", "fields", "code", "detail"),
    [
        ({"archs": ("sm89", "sm90")}, {}, "arch", "this device is cpu; k is for sm89 or sm90"),
        ({"archs": ("sm90",)}, {"arch": "sm90a"}, "arch", "sm90a"),
        ({}, {"dtype": "float32"}, "dtype", "dtype is float32; k takes float16 or bfloat16"),
        ({"head_dims": (64, 96, 128)}, {"head_dim": 160}, "head_dim", "head_dim is 160; k takes 64, 96 or 128"),
        ({"max_head_dim": 128}, {"head_dim": 129}, "head_dim", "head_dim is 129; k takes at most 128"),
        ({}, {"mask_kind": MaskKind.BOOL}, "attn_mask", "attn_mask is bool; k takes none"),
        (
            {"mask_kinds": (MaskKind.NONE, MaskKind.ADDITIVE)},
            {"mask_kind": MaskKind.BOOL},
            "attn_mask",
            "attn_mask is bool; k takes none or additive",
        ),
        ({"sm_scale": False}, {"sm_scale": 1.0}, "sm_scale", "sm_scale is 1; k takes only head_dim ** -0.5"),
        ({"rules": (never,)}, {}, "kv_len", "kv_len is 128; never enough"),
    ],
)
def test_each_limit_refuses_what_is_beyond_it(support, fields, code, detail):
    spec = make_spec(**{"dtype": "bfloat16", **fields})
    (refusal,) = Support(**{"archs": None, **support}).refusals(spec, "k")
    assert refusal.code.value == code
    assert detail in refusal.detail


@pytest.mark.parametrize(
    ("support", "fields"),
    [
        ({}, {}),
        ({"archs": ("cpu",)}, {}),
        ({"max_head_dim": 64}, {}),
        ({"head_dims": (32, 64)}, {}),
        ({"sm_scale": False}, {}),
        ({"sm_scale": False}, {"sm_scale": 0.125}),
        ({"sm_scale": False}, {"sm_scale": 0.125 + 1e-9}),
        ({"rules": (lambda spec: None,)}, {}),
        ({"mask_kinds": (MaskKind.BOOL,)}, {"mask_kind": MaskKind.BOOL}),
    ],
)
def test_what_is_within_the_limits_is_not_refused(support, fields):
    spec = make_spec(**{"dtype": "float16", **fields})
    assert Support(**{"archs": None, **support}).refusals(spec, "k") == ()


def test_every_reason_is_collected_not_only_the_first():
    support = Support(archs=("sm90",), head_dims=(128,), max_head_dim=32, sm_scale=False, rules=(never, never))
    spec = make_spec(mask_kind=MaskKind.ADDITIVE, sm_scale=2.0)
    found = codes(support.refusals(spec, "k"))
    assert found == ["arch", "dtype", "head_dim", "head_dim", "attn_mask", "sm_scale", "kv_len", "kv_len"]


@pytest.mark.parametrize("code", RefusalCode)
def test_every_code_says_what_a_person_can_do(code):
    assert ADVICE[code].endswith(".")
    assert Refusal(code, "why").advice == ADVICE[code]
