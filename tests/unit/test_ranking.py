"""Ranking: which kernel serves a call when the device limits the forward, and which when the host does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_core.ranking import CHECKED_SHARE, DISPATCH_MS, MARGIN, NOISE, rank
from sage_core.refusal import Refusal, RefusalCode
from sage_core.timing import Timing

EXACT = {"native", "sdpa: cudnn", "sdpa: flash", "flash-attn 4"}
BROKE = Refusal(RefusalCode.KERNEL_ERROR, "it broke")

SDXL = {
    "native": Timing(0.31, 0.031),
    "sdpa: cudnn": Timing(0.19, 0.031),
    "flash-attn 4": Timing(0.20, 0.105),
    "sage": Timing(0.28, 0.250),
}
"""2 x 10 x 4,096 x 64 on an H200, as the following: measured there, device and host milliseconds."""
FLUX = {
    "native": Timing(0.83, 0.031),
    "sdpa: cudnn": Timing(0.41, 0.031),
    "flash-attn 4": Timing(0.39, 0.098),
    "sage": Timing(0.48, 0.170),
}
FLUX_2048 = {
    "native": Timing(10.2, 0.031),
    "sdpa: cudnn": Timing(5.7, 0.031),
    "flash-attn 4": Timing(5.0, 0.098),
    "sage": Timing(4.6, 0.170),
}
WAN = {
    "native": Timing(62.0, 0.031),
    "sdpa: cudnn": Timing(38.8, 0.031),
    "flash-attn 4": Timing(34.2, 0.098),
    "sage": Timing(28.5, 0.170),
}


def ranked(found, host_bound=False, **options):
    return rank(found, EXACT, "native", host_bound, **options)


@pytest.mark.parametrize(
    ("found", "host_bound", "order"),
    [
        (SDXL, True, ("native",)),
        (SDXL, False, ("sdpa: cudnn", "flash-attn 4", "native")),
        (FLUX, False, ("flash-attn 4", "sdpa: cudnn", "native")),
        (FLUX, True, ("native",)),
        (FLUX_2048, False, ("sage", "flash-attn 4", "sdpa: cudnn", "native")),
        (WAN, False, ("sage", "flash-attn 4", "sdpa: cudnn", "native")),
    ],
)
def test_the_order_for_calls_that_were_measured_on_an_h200(found, host_bound, order):
    assert ranked(found, host_bound).order == order


def test_a_quantized_kernel_has_to_earn_its_checks():
    found = {**FLUX, "sage": Timing(0.37, 0.170)}
    assert ranked(found).order == ("sage", "flash-attn 4", "sdpa: cudnn", "native")
    order, refusals = ranked(found, check=Timing(0.12, 0.1))
    assert order == ("flash-attn 4", "sdpa: cudnn", "native")
    detail = "sage takes 0.394 ms with its checks; flash-attn 4 takes 0.39 ms"
    assert refusals == {"sage": Refusal(RefusalCode.NOT_WORTHWHILE, detail)}
    assert pytest.approx(0.394) == 0.37 + CHECKED_SHARE * 0.12
    # long calls hardly notice
    assert ranked(WAN, check=Timing(0.5, 0.1)).order == ("sage", "flash-attn 4", "sdpa: cudnn", "native")


def test_where_the_host_limits_the_launches_of_the_checks_count():
    found = {"native": Timing(0.31, 0.100), "sage": Timing(0.28, 0.080)}
    assert ranked(found, host_bound=True).order == ("sage", "native")
    order, refusals = ranked(found, host_bound=True, check=Timing(0.0, 0.1))
    assert order == ("native",)
    assert "sage takes 0.105 ms with its checks of host time, which limits this forward" in refusals["sage"].detail


def test_a_kernel_that_saves_device_time_and_costs_more_to_launch_loses_where_the_host_limits():
    found = {"native": Timing(0.31, 0.031), "sdpa: cudnn": Timing(0.21, 0.061)}
    order, refusals = ranked(found, host_bound=True)
    assert order == ("native",)
    assert refusals["sdpa: cudnn"] == Refusal(
        RefusalCode.NOT_WORTHWHILE,
        "sdpa: cudnn takes 0.066 ms of host time, which limits this forward; native takes 0.031 ms",
    )
    assert ranked(found, host_bound=False).order == ("sdpa: cudnn", "native")


def test_where_the_host_limits_a_kernel_wins_by_host_time_unless_it_takes_longer_on_the_device():
    native = Timing(0.30, 0.060)
    for device_ms, wins in ((0.20, True), (0.30, True), (0.30 * (1 + NOISE) - 1e-6, True), (0.31, False)):
        found = {"native": native, "sdpa: cudnn": Timing(device_ms, 0.030), "sage": Timing(device_ms, 0.031)}
        order, refusals = ranked({name: found[name] for name in ("native", "sdpa: cudnn")}, host_bound=True)
        assert (order == ("sdpa: cudnn", "native")) is wins
        assert (ranked({name: found[name] for name in ("native", "sage")}, host_bound=True).order[0] == "sage") is wins
        if not wins:
            assert refusals["sdpa: cudnn"].detail == "sdpa: cudnn takes 0.31 ms on the device; native takes 0.3 ms"


def test_where_the_device_limits_host_time_counts_once_it_exceeds_device_time():
    found = {"native": Timing(0.100, 0.030), "sdpa: cudnn": Timing(0.020, 0.120), "sdpa: flash": Timing(0.02, 0.08)}
    order, refusals = ranked(found)
    assert order == ("sdpa: flash", "native")
    assert refusals["sdpa: cudnn"].detail == "sdpa: cudnn takes 0.125 ms; native takes 0.1 ms"


def test_where_the_device_limits_more_device_time_is_no_loss_when_the_host_takes_longer():
    found = {"native": Timing(0.02, 0.12), "sdpa: cudnn": Timing(0.06, 0.05)}
    assert ranked(found).order == ("sdpa: cudnn", "native")
    assert ranked(found, host_bound=True).order == ("native",)


def test_a_quantized_kernel_must_beat_the_best_exact_one_by_the_margin():
    exact = {"native": Timing(0.83, 0.03), "sdpa: cudnn": Timing(0.41, 0.03)}
    order, refusals = ranked({**exact, "sage": Timing(0.48, 0.03)})
    assert order == ("sdpa: cudnn", "native")
    assert refusals == {"sage": Refusal(RefusalCode.NOT_WORTHWHILE, "sage takes 0.48 ms; sdpa: cudnn takes 0.41 ms")}
    order, refusals = ranked({**exact, "sage": Timing(0.40, 0.03)})
    assert order == ("sdpa: cudnn", "native")
    assert refusals["sage"].detail == "sage takes 0.4 ms; sdpa: cudnn takes 0.41 ms, and 3% less is asked for"
    assert ranked({**exact, "sage": Timing(0.41 * (1 - MARGIN) - 1e-6, 0.03)}).order[0] == "sage"
    assert ranked({**exact, "sage": Timing(0.40, 0.03)}, margin=0.02).order[0] == "sage"
    assert ranked({**exact, "sage": Timing(0.38, 0.03)}, margin=0.1).order[0] == "sdpa: cudnn"


def test_native_wins_ties_against_exact_kernels():
    for device_ms, wins in ((1.0, False), (0.995, False), (0.9899, True)):
        order = ranked({"sdpa: cudnn": Timing(device_ms, 0.03), "native": Timing(1.0, 0.03)}).order
        assert (order[0] == "sdpa: cudnn") is wins
        assert order[-1] == "native"


def test_reaching_a_kernel_counts_as_host_time():
    for saved, wins in ((0.8 * DISPATCH_MS, False), (1.2 * DISPATCH_MS, True)):
        found = {"native": Timing(0.1, 0.0300), "sdpa: cudnn": Timing(0.1, 0.0300 - saved)}
        assert (ranked(found, host_bound=True).order[0] == "sdpa: cudnn") is wins


def test_several_quantized_kernels_are_tried_the_fastest_first_and_equal_ones_by_name():
    found = {
        "native": Timing(10.0, 0.03),
        **{name: Timing(time, 0.03) for name, time in (("d", 5.0), ("b", 6.0), ("a", 6.0), ("c", 9.9))},
    }
    order, refusals = ranked(found)
    assert order == ("d", "a", "b", "native")
    assert list(refusals) == ["c"]


def test_refusals_of_timing_are_handed_on_and_native_stays_the_last_resort():
    order, refusals = ranked({"native": Timing(1.0, 0.03), "sdpa: cudnn": BROKE, "sage": BROKE})
    assert order == ("native",)
    assert refusals == {"sdpa: cudnn": BROKE, "sage": BROKE}
    order, refusals = ranked({"native": BROKE, "sdpa: cudnn": Timing(1.0, 0.03), "sage": Timing(0.5, 0.03)})
    assert order == ("sage", "sdpa: cudnn", "native")
    assert refusals == {}
    assert ranked({}).order == ("native",)


@given(
    st.dictionaries(
        st.sampled_from(["native", "sdpa: cudnn", "sdpa: flash", "a", "b", "c"]),
        st.one_of(st.just(BROKE), st.builds(Timing, st.floats(0.001, 100), st.floats(0.001, 1))),
    ),
    st.booleans(),
)
def test_every_kernel_is_in_the_order_or_refused_and_what_wins_is_worth_it(found, host_bound):
    order, refusals = ranked(found, host_bound)
    assert order[-1] == "native"
    assert {*order, *refusals} == {*found, "native"}
    assert len(order) + len(refusals) == len({*found, "native"})
    assert order == ranked(dict(reversed(found.items())), host_bound).order
    native, winner = found.get("native", BROKE), found.get(order[0], BROKE)
    if order[0] == "native" or native == BROKE:
        return
    if host_bound:
        assert winner.host_ms < native.host_ms
        assert winner.device_ms <= native.device_ms * 1.021  # of cudnn's, and that of native's
    else:
        assert max(winner) < max(native)
