"""Ratios, noise and bars from given seconds, on both sides of every bar."""

from __future__ import annotations

import pytest

from benchmarks.ratios import Ratio, Verdict, graph_verdicts, memory_verdict, noise, ratio, verdicts


def test_a_ratio_is_native_over_the_entry_of_the_same_round():
    native, entry = [1.0, 2.0, 4.0], [0.5, 2.0, 8.0]
    assert ratio(native, entry) == Ratio(median=1.0, low=0.5, high=2.0)
    # a round that is slow for both changes nothing
    assert ratio([1.0, 30.0, 1.0], [0.5, 15.0, 0.5]) == Ratio(2.0, 2.0, 2.0)


def test_rounds_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="zip"):
        noise([1.0, 1.0], [1.0])


def test_noise_is_the_usual_distance_of_two_native_runs():
    assert noise([1.0, 1.0, 1.0], [1.0, 1.0, 2.0]) == 0.0
    assert noise([1.0, 1.0], [1.25, 0.8]) == pytest.approx((0.2 + 0.25) / 2)
    assert noise([1.02, 1.0, 0.98], [1.0, 1.0, 1.0]) == pytest.approx(0.02)


def held(ratios, noise=0.0, target=None):
    return [verdict.held for verdict in verdicts(ratios, noise, target)]


@pytest.mark.parametrize(
    ("auto", "other", "expected"),
    [
        (1.40, 1.40, [True, True]),
        (0.991 * 1.5, 1.5, [True, True]),
        (0.989 * 1.5, 1.5, [False, True]),
        (0.995, 0.5, [True, True]),
        (0.994, 0.5, [True, False]),
        (0.989, 0.5, [False, False]),  # native is an entry too
    ],
)
def test_auto_is_judged_by_the_best_entry_and_by_native(auto, other, expected):
    assert held({"other": other, "auto": auto, "slow": 0.1}) == expected


def test_the_noise_widens_each_bar_by_itself_and_no_more():
    assert held({"other": 1.0, "auto": 0.970}, noise=0.02) == [True, False]
    assert held({"other": 1.0, "auto": 0.975}, noise=0.02) == [True, True]
    assert held({"other": 1.0, "auto": 0.969}, noise=0.02) == [False, False]


def test_the_best_entry_is_named():
    best = verdicts({"slow": 0.8, "fast": 1.3, "auto": 1.25}, 0.0)[0]
    assert best.name == "auto over the best entry (fast)"
    assert best.value == pytest.approx(1.25 / 1.3)
    assert "native" in verdicts({"slow": 0.8, "auto": 1.25}, 0.0)[0].name


@pytest.mark.parametrize(("auto", "met"), [(1.12, True), (1.119, False)])
def test_a_target_is_stated_beside_the_bars(auto, met):
    *bars, target = verdicts({"auto": auto}, 0.0, target=1.12)
    assert [bar.target for bar in bars] == [False, False]
    assert (target.bar, target.target, target.held) == (1.12, True, met)


def test_the_text_says_whether_only_the_noise_helped():
    assert Verdict("a", 1.0, 0.99, 0.02).text() == "a: 1.000, bar 0.99, noise 0.020: met"
    assert Verdict("a", 0.98, 0.99, 0.02).text().endswith("met within the noise")
    assert Verdict("a", 0.96, 0.99, 0.02, target=True).text() == "a: 0.960, target 0.99, noise 0.020: MISSED"
    assert Verdict("a", 0.96, 0.99, 0.02).to_json()["held"] is False


@pytest.mark.parametrize(
    ("breaks", "recompiles", "expected"), [(3, 0, [True, True]), (4, 0, [False, True]), (0, 1, [True, False])]
)
def test_the_pack_may_not_add_to_what_torch_compile_does_for_native(breaks, recompiles, expected):
    native = {"compile_s": 1.0, "graph_breaks": 3, "recompiles": 0}
    found = graph_verdicts({"compile_s": 9.0, "graph_breaks": breaks, "recompiles": recompiles}, native)
    assert [verdict.held for verdict in found] == [verdict.to_json()["held"] for verdict in found] == expected
    assert [verdict.text().endswith("met") for verdict in found] == expected


@pytest.mark.parametrize("compiled", [False, True])
def test_auto_may_need_no_more_memory_than_native(compiled):
    assert memory_verdict(1_000, 900, compiled).held
    assert memory_verdict(100_000, 100_100, compiled).held
    assert not memory_verdict(100_000, 100_200, compiled).held
    assert memory_verdict(1, 1, compiled).target is compiled
