"""What each kernel declares to take, the order in which the node offers them, and what is tried first per GPU."""

from __future__ import annotations

import pytest

from sage_core.backends import BACKENDS, STARTING_ORDER
from sage_core.refusal import RefusalCode
from sage_core.spec import AttentionSpec, MaskKind

BY_NAME = {backend.name: backend for backend in BACKENDS}
SM90, FP8, FP16, TRITON = (
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
)
SM90_FUSED, FP8_FUSED = f"{SM90} (fused quantization)", f"{FP8} (fused quantization)"
SAGE1 = "sageattn 1.x (triton)"
HUB_SAGE, HUB_FP4, HUB_AMD = "hub: sage-attention", "hub: sage-blackwell", "hub: aiter-sage-attention (gfx1201)"


def make_spec(arch: str, head_dim: int = 128, **changes) -> AttentionSpec:
    fields = {
        "dtype": "bfloat16",
        "batch_size": 1,
        "num_qo_heads": 24,
        "num_kv_heads": 24,
        "qo_len": 4608,
        "kv_len": 4608,
        **changes,
    }
    return AttentionSpec(arch=arch, head_dim=head_dim, **fields)


def test_the_names_and_their_order_are_those_that_saved_workflows_hold():
    assert [backend.name for backend in BACKENDS] == [
        SM90,
        SM90_FUSED,
        FP8,
        FP8_FUSED,
        FP16,
        TRITON,
        SAGE1,
        "sageattn3_blackwell",
        "comfy_kitchen_int8",
        HUB_SAGE,
        HUB_FP4,
        HUB_AMD,
        "sdpa: cudnn",
        "sdpa: flash",
        "sdpa: efficient",
        "flash_attn 2",
        "flash_attn 3",
        "flash_attn 4",
        "hub: flash-attn2",
        "hub: flash-attn3",
        "int8_reference",
    ]


ACCEPTED = [
    (SM90, make_spec("sm90")),
    (SM90, make_spec("sm90", 40, qo_len=1, kv_len=77, num_kv_heads=8, sm_scale=1.0, dtype="float16")),
    (SM90_FUSED, make_spec("sm90")),
    # a third of a fused tensor whose last elements are beyond 32 bits, and the most elements that a call may have
    *[
        (name, make_spec(arch, num_qo_heads=56, num_kv_heads=56, qo_len=99_866, kv_len=99_866, max_offset=2**31))
        for name, arch in ((SM90_FUSED, "sm90"), (FP8_FUSED, "sm89"))
    ],
    (SM90_FUSED, make_spec("sm90", num_qo_heads=1, num_kv_heads=1, qo_len=2**24 - 1)),
    (FP16, make_spec("sm80", kv_len=64)),
    *[(FP8_FUSED, make_spec(arch)) for arch in ("sm89", "sm100", "sm120", "sm121")],
    *[(FP8, make_spec(arch)) for arch in ("sm89", "sm100", "sm120", "sm121")],
    *[(FP16, make_spec(arch)) for arch in ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "sm121")],
    *[(TRITON, make_spec(arch)) for arch in ("sm80", "sm86", "sm89", "sm90")],
    (TRITON, make_spec("sm86", mask_kind=MaskKind.BOOL, mask_dtype="bool")),
    *[(SAGE1, make_spec("sm86", head_dim)) for head_dim in (64, 96, 128)],
    (SAGE1, make_spec("sm89", qo_len=77, kv_len=64, num_kv_heads=6, sm_scale=0.2)),
    *[("sageattn3_blackwell", make_spec(arch, head_dim)) for arch in ("sm120", "sm121") for head_dim in (64, 128)],
    ("sageattn3_blackwell", make_spec("sm120", sm_scale=128**-0.5)),
    *[("comfy_kitchen_int8", make_spec(arch)) for arch in ("sm75", "sm80", "sm86", "sm89", "sm90", "sm120", "gfx1151")],
    ("comfy_kitchen_int8", make_spec("sm90", 256, mask_kind=MaskKind.ADDITIVE, mask_dtype="bfloat16", sm_scale=2.0)),
    *[(HUB_SAGE, make_spec(arch)) for arch in ("sm80", "sm89", "sm90")],
    (HUB_FP4, make_spec("sm120")),
    (HUB_AMD, make_spec("gfx1201")),
    (HUB_AMD, make_spec("gfx1201", num_kv_heads=8)),
    *[("sdpa: cudnn", make_spec("sm90", head_dim)) for head_dim in (8, 40, 64, 128, 160, 256)],
    ("sdpa: cudnn", make_spec("sm89", 128, kv_len=77, sm_scale=1.0)),
    *[("sdpa: flash", make_spec("sm86", head_dim)) for head_dim in (8, 64, 160, 256)],
    ("sdpa: flash", make_spec("cpu", 36, dtype="float32")),
    ("sdpa: flash", make_spec("cpu", 320)),
    *[("sdpa: efficient", make_spec(arch, 512)) for arch in ("sm80", "sm86", "sm89", "sm90", "sm120")],
    ("sdpa: efficient", make_spec("sm90", 36, dtype="float32")),
    ("sdpa: efficient", make_spec("sm86", num_kv_heads=8, mask_kind=MaskKind.BOOL, mask_dtype="bool")),
    ("sdpa: efficient", make_spec("sm86", mask_kind=MaskKind.ADDITIVE, mask_dtype="bfloat16")),
    ("sdpa: flash", make_spec("sm90", batch_size=65535)),
    *[("flash_attn 2", make_spec(arch, 256)) for arch in ("sm80", "sm86", "sm89", "sm90", "sm120", "gfx1201")],
    ("flash_attn 2", make_spec("sm86", 36, num_kv_heads=8, sm_scale=1.0, dtype="float16")),
    *[("flash_attn 3", make_spec("sm90", head_dim, num_kv_heads=8)) for head_dim in (40, 64, 128, 256)],
    ("flash_attn 3", make_spec("sm90", 64, batch_size=70000)),
    *[("flash_attn 4", make_spec(arch)) for arch in ("sm90", "sm100", "sm120", "sm121")],
    ("flash_attn 4", make_spec("sm90", 256, sm_scale=1.0)),
    ("hub: flash-attn2", make_spec("sm89", 256)),
    ("hub: flash-attn3", make_spec("sm90", 256)),
    ("int8_reference", make_spec("cpu", 80, dtype="float32", mask_kind=MaskKind.ADDITIVE)),
]

SMALL = {"num_qo_heads": 1, "num_kv_heads": 1, "qo_len": 64, "kv_len": 64}
REFUSED = [
    *[(FP16, make_spec("sm80", kv_len=length), {RefusalCode.KV_LEN: (str(length), "64")}) for length in (1, 63)],
    *[
        (name, make_spec(arch, batch_size=65_536, **SMALL), {RefusalCode.SHAPE: ("65536", "65535")})
        for name, arch in (
            *((SM90, "sm90"), (SM90_FUSED, "sm90"), (FP8, "sm89"), (FP8_FUSED, "sm89")),
            *((FP16, "sm80"), (TRITON, "sm86"), (SAGE1, "sm86")),
        )
    ],
    *[
        (
            SM90_FUSED,
            make_spec("sm90", head_dim, num_qo_heads=1, num_kv_heads=1, **long),
            {RefusalCode.OFFSET: ("2147",)},
        )
        for head_dim, long in ((128, {"qo_len": 2**24}), (40, {"qo_len": 2**25}), (72, {"kv_len": 2**24 - 128}))
    ],
    (FP8_FUSED, make_spec("sm89", num_qo_heads=1, qo_len=2**24), {RefusalCode.OFFSET: ("2147483648", "2147483647")}),
    (SM90_FUSED, make_spec("sm89"), {RefusalCode.ARCH: ("sm89", "sm90")}),
    (FP8_FUSED, make_spec("sm90"), {RefusalCode.ARCH: ("sm90",)}),
    (SM90_FUSED, make_spec("sm90", 160), {RefusalCode.HEAD_DIM: ("160", "128")}),
    (SM90_FUSED, make_spec("sm90", mask_kind=MaskKind.BOOL), {RefusalCode.ATTN_MASK: ("bool", "none")}),
    (SM90, make_spec("sm89"), {RefusalCode.ARCH: ("sm89", "sm90")}),
    (SM90, make_spec("sm90", 160), {RefusalCode.HEAD_DIM: ("160", "128")}),
    (SM90, make_spec("sm90", dtype="float32"), {RefusalCode.DTYPE: ("float32", "bfloat16")}),
    (SM90, make_spec("sm90", mask_kind=MaskKind.BOOL), {RefusalCode.ATTN_MASK: ("bool", "none")}),
    *[(FP8, make_spec(arch), {RefusalCode.ARCH: (arch,)}) for arch in ("sm80", "sm86", "sm87", "sm90", "sm103")],
    *[(FP16, make_spec(arch), {RefusalCode.ARCH: (arch,)}) for arch in ("sm61", "sm75", "sm87", "sm103", "gfx1201")],
    *[(TRITON, make_spec(arch), {RefusalCode.ARCH: (arch,)}) for arch in ("sm87", "sm100", "sm120", "sm121")],
    (TRITON, make_spec("sm86", mask_kind=MaskKind.ADDITIVE), {RefusalCode.ATTN_MASK: ("additive", "bool")}),
    *[(SAGE1, make_spec("sm86", head_dim), {RefusalCode.HEAD_DIM: (str(head_dim), "96")}) for head_dim in (40, 72, 80)],
    *[(SAGE1, make_spec("sm86", kv_len=n), {RefusalCode.KV_LEN: (str(n), "64")}) for n in (1, 63, 77, 200, 4173)],
    (SAGE1, make_spec("sm120"), {RefusalCode.ARCH: ("sm120",)}),
    ("sageattn3_blackwell", make_spec("sm100"), {RefusalCode.ARCH: ("sm100", "sm120")}),
    ("sageattn3_blackwell", make_spec("sm120", 256), {RefusalCode.HEAD_DIM: ("256", "64 or 128")}),
    ("sageattn3_blackwell", make_spec("sm120", sm_scale=0.125), {RefusalCode.SM_SCALE: ("0.125",)}),
    ("comfy_kitchen_int8", make_spec("sm90", 384), {RefusalCode.HEAD_DIM: ("384", "256")}),
    ("comfy_kitchen_int8", make_spec("gfx1030"), {RefusalCode.ARCH: ("gfx1030",)}),
    (HUB_SAGE, make_spec("sm86"), {RefusalCode.ARCH: ("sm86",)}),
    (HUB_FP4, make_spec("sm121"), {RefusalCode.ARCH: ("sm121", "sm120")}),
    (HUB_AMD, make_spec("gfx1200"), {RefusalCode.ARCH: ("gfx1200", "gfx1201")}),
    (HUB_AMD, make_spec("gfx1201", 64), {RefusalCode.HEAD_DIM: ("64", "128")}),
    (HUB_AMD, make_spec("gfx1201", dtype="float16"), {RefusalCode.DTYPE: ("float16", "bfloat16")}),
    (HUB_AMD, make_spec("gfx1201", kv_len=512), {RefusalCode.SHAPE: ("4608", "512")}),
    (HUB_AMD, make_spec("gfx1201", mask_kind=MaskKind.BOOL), {RefusalCode.ATTN_MASK: ("bool",)}),
    (HUB_AMD, make_spec("gfx1201", sm_scale=1.0), {RefusalCode.SM_SCALE: ("1",)}),
    ("sdpa: cudnn", make_spec("sm89", 160), {RefusalCode.HEAD_DIM: ("160", "128")}),
    ("sdpa: cudnn", make_spec("sm90", 36), {RefusalCode.HEAD_DIM: ("36", "multiples of 8")}),
    ("sdpa: cudnn", make_spec("cpu"), {RefusalCode.ARCH: ("cpu",)}),
    ("sdpa: flash", make_spec("sm90", 264), {RefusalCode.HEAD_DIM: ("264", "256")}),
    ("sdpa: flash", make_spec("sm90", dtype="float32"), {RefusalCode.DTYPE: ("float32",)}),
    ("sdpa: flash", make_spec("cpu", mask_kind=MaskKind.BOOL), {RefusalCode.ATTN_MASK: ("bool",)}),
    ("sdpa: flash", make_spec("sm90", batch_size=65536), {RefusalCode.SHAPE: ("65536", "65535")}),
    ("sdpa: efficient", make_spec("cpu"), {RefusalCode.ARCH: ("cpu", "sm80")}),
    ("sdpa: efficient", make_spec("sm75"), {RefusalCode.ARCH: ("sm75", "sm80")}),
    ("sdpa: efficient", make_spec("sm90", 36), {RefusalCode.HEAD_DIM: ("36", "multiples of 8")}),
    ("sdpa: efficient", make_spec("sm90", 6, dtype="float32"), {RefusalCode.HEAD_DIM: ("6", "multiples of 4")}),
    (
        "sdpa: efficient",
        make_spec("sm90", mask_kind=MaskKind.ADDITIVE, mask_dtype="float32"),
        {RefusalCode.ATTN_MASK: ("float32", "bfloat16")},
    ),
    ("flash_attn 2", make_spec("sm75"), {RefusalCode.ARCH: ("sm75", "sm80")}),
    ("flash_attn 2", make_spec("sm90", 264), {RefusalCode.HEAD_DIM: ("264", "256")}),
    ("flash_attn 2", make_spec("sm90", dtype="float32"), {RefusalCode.DTYPE: ("float32", "bfloat16")}),
    ("flash_attn 2", make_spec("sm90", batch_size=65536), {RefusalCode.SHAPE: ("65536", "65535")}),
    *[("flash_attn 3", make_spec(arch), {RefusalCode.ARCH: (arch, "sm90")}) for arch in ("sm80", "sm89", "sm100")],
    ("flash_attn 3", make_spec("sm90", 36), {RefusalCode.HEAD_DIM: ("36", "multiples of 8 up to 256")}),
    ("flash_attn 3", make_spec("sm90", mask_kind=MaskKind.BOOL), {RefusalCode.ATTN_MASK: ("bool", "none")}),
    ("flash_attn 4", make_spec("sm86"), {RefusalCode.ARCH: ("sm86", "sm120")}),
    ("flash_attn 4", make_spec("sm100", 160), {RefusalCode.HEAD_DIM: ("160", "multiples of 8 up to 128")}),
    ("flash_attn 4", make_spec("sm90", 264), {RefusalCode.HEAD_DIM: ("264", "multiples of 8 up to 256")}),
    ("flash_attn 4", make_spec("sm90", batch_size=65536), {RefusalCode.SHAPE: ("65536", "65535")}),
    ("hub: flash-attn2", make_spec("sm75"), {RefusalCode.ARCH: ("sm75", "sm80")}),
    ("hub: flash-attn3", make_spec("sm80"), {RefusalCode.ARCH: ("sm80", "sm90")}),
    ("hub: flash-attn3", make_spec("sm90", 36), {RefusalCode.HEAD_DIM: ("36", "multiples of 8 up to 256")}),
    (
        SM90,
        make_spec("gfx1201", 256, dtype="float32", mask_kind=MaskKind.ADDITIVE),
        {RefusalCode.ARCH: (), RefusalCode.HEAD_DIM: (), RefusalCode.DTYPE: (), RefusalCode.ATTN_MASK: ()},
    ),
]


@pytest.mark.parametrize(("name", "spec"), ACCEPTED, ids=lambda value: str(value)[:60])
def test_accepts(name, spec):
    assert BY_NAME[name].support.refusals(spec, name) == ()


@pytest.mark.parametrize(("name", "spec", "expected"), REFUSED, ids=lambda value: str(value)[:60])
def test_refuses_with_every_reason_and_both_sides(name, spec, expected):
    refusals = {refusal.code: refusal.detail for refusal in BY_NAME[name].support.refusals(spec, name)}
    assert refusals.keys() == expected.keys()
    for code, words in expected.items():
        assert all(word in refusals[code] for word in (*words, name)), refusals[code]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_no_kernel_is_for_a_gpu_that_nobody_tried(backend):
    for arch in ("sm61", "sm70", "sm87", "sm103", "gfx906", "gfx9999", "unknown", "mps"):
        if backend.name != "int8_reference":
            assert backend.support.refusals(make_spec(arch), backend.name), arch


def test_fp4_and_the_reference_are_never_chosen_automatically():
    assert {b.name for b in BACKENDS if not b.auto} == {"sageattn3_blackwell", HUB_FP4, "int8_reference"}
    exact = {b.name for b in BACKENDS if b.exact}
    assert exact == {b.name for b in BACKENDS if b.name.startswith(("sdpa: ", "flash_attn ", "hub: flash-attn"))}


def first_choice(spec: AttentionSpec) -> str | None:
    for preference in STARTING_ORDER.get(spec.arch, ()):
        backend = BY_NAME[preference.kernel]
        pays_off = spec.qo_len >= preference.min_qo_len and spec.head_dim in (preference.head_dims or (spec.head_dim,))
        if pays_off and not backend.support.refusals(spec, backend.name):
            return backend.name
    return None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (make_spec("sm90", qo_len=32760, kv_len=32760), SM90_FUSED),
        (make_spec("sm90", qo_len=4608), SM90_FUSED),
        (make_spec("sm90", qo_len=512, kv_len=512), None),
        (make_spec("sm90", 64, qo_len=16384), None),
        (make_spec("sm80", qo_len=16896), FP16),
        (make_spec("sm86"), TRITON),
        (make_spec("sm89"), FP8_FUSED),
        (make_spec("sm120"), FP8_FUSED),
        (make_spec("gfx1201", qo_len=32760, kv_len=32760), HUB_AMD),
        (make_spec("sm87"), None),
        (make_spec("gfx1200"), None),
        (make_spec("cpu"), None),
    ],
    ids=lambda value: value.describe() if isinstance(value, AttentionSpec) else str(value),
)
def test_starting_order(spec, expected):
    assert first_choice(spec) == expected


def test_what_a_kernel_is_slower_than_is_there_for_every_arch_of_which_it_is_said():
    assert [name for name, backend in BY_NAME.items() if backend.slower_than] == [SM90, FP8]
    for backend in BACKENDS:
        for name in backend.slower_than:
            assert BY_NAME[name].auto
            assert set(BY_NAME[name].support.archs) & set(backend.support.archs)


def test_the_starting_order_holds_only_kernels_that_may_be_chosen_automatically():
    for arch, preferences in STARTING_ORDER.items():
        for preference in preferences:
            backend = BY_NAME[preference.kernel]
            assert backend.auto
            assert arch in backend.support.archs
