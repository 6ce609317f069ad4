"""select(): which kernel serves a spec, and a verdict with every reason on each that does not."""

from __future__ import annotations

import pytest

from sage_core.backends.base import Kernel
from sage_core.backends.reference import INT8_REFERENCE
from sage_core.policy import Policy
from sage_core.refusal import Refusal, RefusalCode
from sage_core.selection import Plan, Use, Verdict, select
from sage_core.spec import MaskKind
from sage_core.support import MAX_OFFSET_32_BIT
from tests.unit.conftest import attention, codes, fake_backend, make_spec

BROKEN = Refusal(RefusalCode.BUILD, "broken")
WRONG = Refusal(RefusalCode.TRIAL, "wrong")


class Asked:
    """load and trial of a session, with a list of who was asked for what."""

    def __init__(self, loads=None, trials=None, options=("attn_mask", "enable_gqa", "smooth_k")):
        self.loads, self.trials, self.options = loads or {}, trials or {}, options
        self.seen = []

    def load(self, backend):
        self.seen.append(("load", backend.name))
        return self.loads.get(backend.name, Kernel(attention, frozenset(self.options)))

    def trial(self, use):
        self.seen.append(("trial", use.backend.name))
        return self.trials.get(use.backend.name, use)


def choose(spec, *candidates, asked=None, **policy):
    """(use, codes by kernel)."""
    asked = asked or Asked()
    use, verdicts = select(spec, candidates, Policy(**policy), asked.load, asked.trial)
    return use, {verdict.kernel: codes(verdict.refusals) for verdict in verdicts}


def named(name, **support):
    return fake_backend(name=name, **{"smooth_k": True, **support})


def test_the_first_candidate_that_nothing_speaks_against_is_used():
    use, verdicts = choose(make_spec(), named("small", max_head_dim=32), named("first"), named("second"))
    assert use.backend.name == "first"
    assert verdicts == {"small": ["head_dim"], "first": []}


def test_without_a_candidate_nothing_is_used_and_nothing_is_said():
    assert choose(make_spec()) == (None, {})


def test_each_candidate_keeps_all_its_reasons():
    spec = make_spec(head_dim=256, qo_len=64, mask_kind=MaskKind.BOOL)
    limits = {"archs": ("sm90",), "head_dims": (64,), "mask_kinds": (MaskKind.NONE,)}
    use, verdicts = choose(spec, named("a", **limits), named("b", mask_kinds=(MaskKind.ADDITIVE,)))
    assert use is None
    assert verdicts == {"a": ["arch", "head_dim", "attn_mask"], "b": ["attn_mask"]}
    blocked = named("b", mask_kinds=(MaskKind.NONE,), max_offset=10, smooth_k=False)
    assert choose(spec, blocked, smooth_k="on")[1] == {"b": ["attn_mask", "smooth_k", "offset"]}


def test_a_kernel_is_loaded_only_when_its_declared_limits_take_the_call_and_tried_only_when_it_loads():
    asked = Asked(loads={"absent": (BROKEN, BROKEN)}, trials={"wrong": WRONG})
    names = ("small", "absent", "wrong", "good", "never reached")
    candidates = [named(name, max_head_dim=32 if name == "small" else None) for name in names]
    use, verdicts = choose(make_spec(), *candidates, asked=asked)
    assert use.backend.name == "good"
    assert asked.seen == [("load", "absent"), *((kind, name) for name in names[2:4] for kind in ("load", "trial"))]
    assert verdicts == {"small": ["head_dim"], "absent": ["build", "build"], "wrong": ["trial"], "good": []}


@pytest.mark.parametrize(
    ("asked_for", "declares", "has", "smoothed", "reasons"),
    [
        ("auto", True, True, False, []),
        ("auto", True, False, None, []),
        ("auto", False, False, None, []),
        ("on", True, True, True, []),
        ("off", True, True, False, []),
        ("on", True, False, None, ["smooth_k"]),
        ("off", True, False, None, ["smooth_k"]),
        ("on", False, False, None, ["smooth_k"]),
        ("off", False, False, None, ["smooth_k"]),
    ],
)
def test_smoothing_is_what_was_asked_for_or_a_refusal(asked_for, declares, has, smoothed, reasons):
    asked = Asked(options=("smooth_k",) if has else ())
    use, verdicts = choose(make_spec(), named("k", smooth_k=declares), asked=asked, smooth_k=asked_for)
    assert verdicts == {"k": reasons}
    assert (use is None) is bool(reasons)
    if use is not None:
        assert use.smooth_k is smoothed
        assert ("smooth_k" in use.keywords(make_spec())) is (smoothed is not None)


def test_an_exact_kernel_has_nothing_to_smooth_and_is_not_refused_for_it():
    use, _ = choose(make_spec(), fake_backend(exact=True), asked=Asked(options=()), smooth_k="on")
    assert use.smooth_k is None


@pytest.mark.parametrize(("options", "reasons"), [(("attn_mask",), []), ((), ["attn_mask"])])
@pytest.mark.parametrize("kind", [MaskKind.BOOL, MaskKind.ADDITIVE])
def test_a_masked_call_needs_an_installed_function_that_declares_the_mask(kind, options, reasons):
    use, verdicts = choose(make_spec(mask_kind=kind), named("k"), asked=Asked(options=options))
    assert verdicts == {"k": reasons}
    assert (use is None) is bool(reasons)


@pytest.mark.parametrize(
    ("heads", "options", "expanded"),
    [((8, 2), ("enable_gqa",), False), ((8, 2), (), True), ((8, 8), (), False), ((8, 8), ("enable_gqa",), False)],
)
def test_grouped_heads_are_expanded_for_a_kernel_that_does_not_take_them(heads, options, expanded):
    spec = make_spec(num_qo_heads=heads[0], num_kv_heads=heads[1])
    assert choose(spec, named("k"), asked=Asked(options=options))[0].expand_kv is expanded


@pytest.mark.parametrize(
    ("fields", "too_large"),
    [
        ({"qo_len": 128, "kv_len": 128}, False),
        ({"qo_len": 129, "kv_len": 128}, True),
        ({"qo_len": 128, "kv_len": 129}, True),
        ({"batch_size": 2, "num_qo_heads": 8, "num_kv_heads": 8}, False),  # served piece by piece
        ({"num_qo_heads": 4, "num_kv_heads": 2}, True),  # the query heads of a key head belong together
        ({"head_dim": 65}, True),
        ({"qo_len": 64, "max_offset": 2**40}, False),
    ],
)
def test_heads_whose_copies_are_beyond_the_reach_of_a_kernel_are_refused(fields, too_large):
    limit = 128 * 64 - 1
    assert choose(make_spec(**fields), named("k", max_offset=limit))[1] == {"k": ["offset"] * too_large}
    assert choose(make_spec(**fields), named("k", max_offset=None))[1] == {"k": []}


@pytest.mark.parametrize(("offset", "reasons"), [(MAX_OFFSET_32_BIT, []), (MAX_OFFSET_32_BIT + 1, ["offset"])])
def test_a_mask_beyond_the_reach_of_a_kernel_is_refused_for_that_kernel_alone(offset, reasons):
    spec = make_spec(mask_kind=MaskKind.BOOL, mask_dtype="bool", mask_offset=offset)
    assert choose(spec, named("k"))[1] == {"k": reasons}
    assert choose(spec, named("k", max_offset=None))[1] == {"k": []}
    assert choose(spec, INT8_REFERENCE)[1] == {"int8_reference": []}


@pytest.mark.parametrize("layouts", [("NHD", "HND"), ("HND",), ("HND", "NHD")])
@pytest.mark.parametrize("memory", ["NHD", "HND"])
def test_a_kernel_is_called_in_the_layout_it_likes_best(layouts, memory):
    use, _ = choose(make_spec(tensor_layout=memory), named("k", tensor_layouts=layouts))
    assert use.layout == layouts[0]


@pytest.mark.parametrize(("scale", "handed"), [(None, 0.125), (1.0, 1.0), (0.5, 0.5)])
def test_the_keywords_of_a_kernel_always_hold_layout_and_scale(scale, handed):
    use = Use(named("k"), Kernel(attention), "NHD", False, None)
    assert use.keywords(make_spec(sm_scale=scale)) == {"tensor_layout": "NHD", "sm_scale": handed}
    assert use._replace(smooth_k=False).keywords(make_spec())["smooth_k"] is False


def test_a_plan_gives_all_its_reasons_and_is_compared_by_identity():
    verdicts = (Verdict("a", (BROKEN, WRONG)), Verdict("b", (WRONG,)), Verdict("c", ()))
    plan = Plan("c", make_spec(), None, verdicts)
    assert list(plan.reasons()) == [("a", BROKEN), ("a", WRONG), ("b", WRONG)]
    assert plan != Plan("c", make_spec(), None, verdicts)
    assert len({plan, Plan("c", make_spec(), None, verdicts)}) == 2
