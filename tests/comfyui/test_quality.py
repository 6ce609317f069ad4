"""Never black, never slower, inside real ComfyUIs: kernels that go wrong or are slow, and what the latent is then."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hosts import Host

NATIVE = "native"


def kernels(run: dict[str, Any]) -> dict[str, int]:
    return {entry["kernel"]: entry["calls"] for entry in run["calls_by_kernel"]}


def at_site(run: dict[str, Any], site: int) -> dict[str, int]:
    """Calls by kernel of one site, whatever the plans."""
    found: Counter[str] = Counter()
    for row in run["sites"]:
        if row["site"] == site:
            found[row["kernel"]] += row["calls"]
    return dict(found)


def sites(run: dict[str, Any]) -> list[dict[str, int]]:
    """Calls by kernel of each of tiny Wan's four sites: self and cross attention of two blocks."""
    return [at_site(run, site) for site in range(4)]


def codes(run: dict[str, Any]) -> dict[str, str]:
    return {entry["code"]: entry["detail"] for entry in run["refusals"]}


# -- rescue


@pytest.mark.parametrize("tolerance", [0.1, None], ids=["checked", "unchecked"])
def test_a_forward_with_nan_at_one_site_is_natives_and_only_that_site_leaves(
    host: Host, tolerance: float | None
) -> None:
    facts = host.run("scenarios_quality:rescued", sites=[2], first_step=2, int8=True, tolerance=tolerance)
    assert facts["finite"] == [True, True]
    # four steps each; the third forward is the rescued one
    assert facts["native forwards"] == [False, False, True, False, False, False, False, False]
    first, second = facts["runs"]
    # the broken forward is counted, and so is the one in its place
    others = {"sick": 4, NATIVE: 1}
    assert sites(first) == [others, others, {"sick": 3, NATIVE: 2}, others]
    assert sites(second) == [{"sick": 4}, {"sick": 4}, {NATIVE: 4}, {"sick": 4}]
    assert (first["rescued_forwards"], first["forwards"], first["calls"]) == (1, 5, 20)
    assert (second["rescued_forwards"], second["events"]) == (0, [])
    (event,) = first["events"]
    assert event["step"] == 3
    assert "sick left 1 sites" in event["text"]
    assert "not_finite" in codes(second)


def test_nan_at_a_site_from_the_start_never_gets_into_a_forward(host: Host) -> None:
    """The check of the site sees it before the first forward, so that none needs to be rescued."""
    facts = host.run("scenarios_quality:rescued", sites=[2], first_step=0, int8=True)
    assert facts["finite"] == [True, True]
    assert facts["latents"][0] == facts["latents"][1] != facts["native"]
    for run in facts["runs"]:
        assert sites(run) == [{"sick": 4}, {"sick": 4}, {NATIVE: 4}, {"sick": 4}]
        assert run["rescued_forwards"] == 0
        assert "sick met or made NaN or Inf" in codes(run)["not_finite"]


def test_nan_at_a_site_from_the_start_is_rescued_where_nothing_is_checked(host: Host) -> None:
    facts = host.run("scenarios_quality:rescued", sites=[2], first_step=0, int8=True, tolerance=None)
    assert facts["native forwards"] == [True] + [False] * 7
    assert [run["rescued_forwards"] for run in facts["runs"]] == [1, 0]
    assert at_site(facts["runs"][0], 2) == {"sick": 1, NATIVE: 4}
    assert at_site(facts["runs"][1], 2) == {NATIVE: 4}


def test_where_every_site_breaks_the_whole_latent_is_natives(host: Host) -> None:
    """The kernel has the bits of native attention until it breaks."""
    facts = host.run("scenarios_quality:rescued", sites=[], first_step=1, int8=False)
    assert facts["latents"] == [facts["native"]] * 2
    first, second = facts["runs"]
    assert kernels(first) == {"sick": 8, NATIVE: 12}
    assert kernels(second) == {NATIVE: 16}
    assert (first["rescued_forwards"], second["rescued_forwards"]) == (1, 0)
    assert [(event["step"], "sick left 4 sites" in event["text"]) for event in first["events"]] == [(2, True)]


def test_report_says_for_people_that_a_forward_was_run_again(host: Host) -> None:
    facts = host.run("scenarios_quality:rescued", sites=[2], first_step=1, int8=True)
    first, second = facts["texts"]
    said = "The output of 1 forward was not finite: run again with exact attention"
    assert said in first
    assert said not in second
    assert all("sick made NaN or Inf out of this site" in text for text in facts["texts"])


def test_a_model_that_makes_nan_itself_gives_natives_latent_and_is_said_to(host: Host) -> None:
    facts = host.run("scenarios_quality:model_with_nan", weight="head.head.weight", steps=1)
    assert facts["same"]
    assert 0 < facts["nan"] < facts["of"]
    assert [event["text"] for event in facts["run"]["events"]] == [
        "the model itself produced NaN or Inf: native attention gives them too"
    ]
    assert facts["run"]["rescued_forwards"] == 1
    assert kernels(facts["run"]) == {"int8": 4, NATIVE: 4}


def test_a_model_that_makes_nan_itself_is_run_twice_once_only(host: Host) -> None:
    facts = host.run("scenarios_quality:model_with_nan", weight="head.head.weight", steps=4)
    assert facts["same"]
    assert (facts["run"]["rescued_forwards"], facts["run"]["forwards"], facts["run"]["calls"]) == (1, 5, 20)
    assert len(facts["run"]["events"]) == 1


def test_nan_that_reaches_attention_leaves_it_to_native(host: Host) -> None:
    facts = host.run("scenarios_quality:model_with_nan", weight="blocks.0.self_attn.q.weight", steps=2)
    assert facts["same"]
    assert facts["nan"] == facts["of"]
    assert kernels(facts["run"]) == {NATIVE: 8}
    assert set(codes(facts["run"])) == {"not_finite"}


# -- check


@pytest.mark.parametrize("site", [0, 2, 3])
def test_a_kernel_that_is_wrong_at_one_site_serves_the_others(host: Host, site: int) -> None:
    facts = host.run("scenarios_quality:wrong_at_a_site", site=site, first_step=0, first_run=0, runs=1, steps=3)
    (run,) = facts["runs"]
    assert sites(run) == [{NATIVE: 3} if number == site else {"late": 3} for number in range(4)]
    (row,) = [row for row in run["sites"] if row["site"] == site]
    assert row["reasons"] == ["accuracy"]
    assert "late is off by relative L2 0.5" in codes(run)["accuracy"]
    assert all(row["accuracy"]["worst_head_relative_l2"] < 0.1 for row in run["sites"] if row["site"] != site)


def test_a_site_that_drifts_in_a_run_moves_at_the_next_check(host: Host) -> None:
    """Checks of 20 steps are at 0, 5, 10 and 15."""
    facts = host.run("scenarios_quality:wrong_at_a_site", site=2, first_step=7, first_run=0, runs=2, steps=20)
    first, second = facts["runs"]
    assert sites(first) == [{"late": 20}, {"late": 20}, {"late": 11, NATIVE: 9}, {"late": 20}]
    (event,) = first["events"]
    assert event["step"] == 11
    assert event["text"].startswith("site 2: late is off by relative L2 0.5")
    assert (first["forwards"], first["rescued_forwards"]) == (20, 0)
    worst = [row["accuracy"] for row in first["sites"] if row["site"] == 2 and row["kernel"] == "late"]
    assert [accuracy["step"] for accuracy in worst] == [11]
    # and from the start the next time
    assert sites(second) == [{"late": 20}, {"late": 20}, {NATIVE: 20}, {"late": 20}]
    assert second["events"] == []
    assert facts["latents"][1] == facts["never there"]


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "native's bits"])
def test_a_run_whose_first_check_fails_is_repaired_before_anything_is_handed_on(host: Host, int8: bool) -> None:
    facts = host.run("scenarios_quality:wrong_at_a_site", site=2, first_step=0, first_run=1, runs=2, steps=3, int8=int8)
    first, second = facts["runs"]
    assert kernels(first) == {"late": 12}
    assert sites(second) == [{"late": 4}, {"late": 4}, {"late": 1, NATIVE: 3}, {"late": 4}]
    assert [event["step"] for event in second["events"]] == [1]
    assert facts["latents"][1] == facts["never there"]
    assert (facts["latents"][1] == facts["native"]) is not int8


# -- measured auto


@pytest.mark.parametrize("model", ["wan", "flux"])
def test_fastest_accurate_kernel_serves_and_cold_warm_and_restarted_runs_are_the_same(host: Host, model: str) -> None:
    facts = host.run("scenarios_quality:measured", model=model)
    assert len(set(facts["latents"])) == 1
    assert facts["latents"][0] != facts["native"]
    assert facts["kept"]
    # cold; warm; another patched model of the process; two later processes
    assert facts["timed"] == [["exact", "good", "slow", "wrong"], [], [], [], []]
    expected = {"good": 4, NATIVE: 4} if model == "wan" else {"good": 4}
    for run in facts["runs"]:
        assert kernels(run) == expected
        (shape,) = [shape for shape in run["shapes"] if shape["kernel"] == "good"]
        times = {name: timing["device_ms"] for name, timing in shape["times"].items()}
        assert times == {NATIVE: 1000.0, "exact": 600.0, "slow": 5000.0, "good": 200.0, "wrong": 100.0}
        assert "wrong is off by relative L2 0.5" in codes(run)["accuracy"]
        details = [entry["detail"] for entry in run["refusals"] if entry["code"] == "not_worthwhile"]
        # a fifth of the calls is checked, and the clock of the scenario gives a check the second that native takes
        assert any("slow takes 5.2e+03 ms with its checks; exact takes 600 ms" in detail for detail in details)
    if model == "flux":
        assert facts["chosen by name"] == facts["latents"][0]


# -- comparison


@pytest.mark.parametrize(
    ("when", "extra"), [("first time", [True, False, False]), ("every run", [True] * 3), ("never", [False] * 3)]
)
@pytest.mark.parametrize("kernel", ["auto", "good"])
def test_comparison_is_made_as_often_as_asked_and_changes_no_bit(
    host: Host, when: str, extra: list[bool], kernel: str
) -> None:
    facts = host.run("scenarios_quality:compared", when=when, kernel=kernel, forward_ms=200.0)
    assert set(facts["latents"]) == {facts["never compared"]}
    assert facts["latents"][0] != facts["native"]
    assert [run["comparison_calls"] > 0 for run in facts["runs"]] == extra
    expected = {"good": 4, NATIVE: 4} if kernel == "auto" else {"good": 8}
    for run, compared in zip(facts["runs"], extra, strict=True):
        assert (run["forwards"], kernels(run)) == (2, expected)
        assert len(run["comparisons"]) == (when != "never")
        for comparison in run["comparisons"]:
            assert comparison["native_ms"] == pytest.approx(4000)
            assert comparison["plan_ms"] == pytest.approx(2400 if kernel == "auto" else 800)
            assert 0 < comparison["relative_l2"] < 0.1
            assert comparison["faster"]
            assert comparison["remembered"] is not compared
    assert ("Whole model call" in facts["text"]) is (when != "never")


@pytest.mark.parametrize("when", ["first time", "every run"])
def test_plan_that_makes_the_forward_slower_leaves_auto_with_natives_bits(host: Host, when: str) -> None:
    facts = host.run("scenarios_quality:compared", when=when, kernel="auto", forward_ms=1500.0)
    assert facts["latents"] == [facts["native"]] * 3
    assert facts["never compared"] != facts["native"]
    first, *later = facts["runs"]
    (comparison,) = first["comparisons"]
    assert (comparison["plan_ms"], comparison["native_ms"]) == (pytest.approx(5000), pytest.approx(4000))
    assert not comparison["faster"]
    detail = "the whole model call took 5000 ms with kernels and 4000 ms natively"
    assert [event["text"] for event in first["events"]] == [f"native from here on: {detail}"]
    for run in facts["runs"]:
        assert codes(run)["not_worthwhile"]
        assert detail in [entry["detail"] for entry in run["refusals"]]
    if when == "first time":
        assert [kernels(run) for run in later] == [{NATIVE: 8}] * 2
        assert [run["comparison_calls"] for run in later] == [0, 0]


def test_kernel_chosen_by_name_stays_when_it_makes_the_forward_slower(host: Host) -> None:
    facts = host.run("scenarios_quality:compared", when="first time", kernel="good", forward_ms=1500.0)
    assert set(facts["latents"]) == {facts["never compared"]} != {facts["native"]}
    assert [kernels(run) for run in facts["runs"]] == [{"good": 8}] * 3
    assert "Slower than native" in facts["text"]


@pytest.mark.parametrize("before", [True, False], ids=["before ours", "after ours"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("apply", "another node wraps the model call (other)"),
        ("diffusion", "another node wraps the model call (other)"),
        ("replaced block", "another node replaces blocks of the model"),
    ],
)
def test_what_a_second_forward_would_disturb_keeps_it_from_being_made(
    host: Host, how: str, said: str, before: bool
) -> None:
    facts = host.run("scenarios_quality:disturbed", how=how, before=before)
    assert facts["latent"] == facts["alone"]
    assert facts["native"] == facts["native without"]
    # once per forward, whatever served it and however it went
    assert facts["seen"] == [3, 3]
    run = facts["run"]
    assert (run["forwards"], run["comparison_calls"], run["comparisons"]) == (3, 0, [])
    assert [event["text"] for event in run["events"]] == [f"not compared with native: {said}"]
    assert kernels(facts["native run"]) == {NATIVE: 12}


# -- the way past us


@pytest.mark.parametrize("previous", [False, True], ids=["native", "over another override"])
@pytest.mark.parametrize("model", ["wan", "flux", "sdxl"])
def test_after_one_native_forward_the_others_go_past_us_and_are_counted(host: Host, model: str, previous: bool) -> None:
    facts = host.run("scenarios_quality:past_us", model=model, previous=previous)
    rest = "previous" if previous else "none"
    assert facts["overrides"] == [["ours", rest, rest]] * 2
    assert facts["latents"] == [facts["native"]] * 2
    assert [run["calls"] for run in facts["runs"]] == facts["calls"]
    for run in facts["runs"]:
        assert kernels(run) == {NATIVE: run["calls"]}
        assert run["forwards"] == 3
        assert {row["calls"] for row in run["sites"]} == {3}
        assert run["override_replaced_by"] is None


@pytest.mark.parametrize("large_first", [False, True])
def test_another_size_brings_us_back(host: Host, large_first: bool) -> None:
    facts = host.run("scenarios_quality:past_us_and_back", large_first=large_first)
    is_large = [large_first, not large_first, large_first]
    assert facts["overrides"] == [["ours"] * 3 if large else ["ours", "none", "none"] for large in is_large]
    same = [one == other for one, other in zip(facts["latents"], facts["native"], strict=True)]
    assert same == [not large for large in is_large]
    assert facts["latents"][0] == facts["latents"][2]
    assert [run["calls"] for run in facts["runs"]] == facts["calls"] == [12] * 3
    assert [kernels(run) for run in facts["runs"]] == [
        {"good": 6, NATIVE: 6} if large else {NATIVE: 12} for large in is_large
    ]


def test_steps_outside_the_window_go_past_us_and_those_inside_do_not(host: Host) -> None:
    facts = host.run("scenarios_quality:past_us_outside_the_window")
    # the fifth of eight steps is in the middle; native ones are alike whether they come before or after
    assert facts["overrides"] == ["ours", "none", "none", "none", "ours", "none", "none", "none"]
    assert facts["latent"] == facts["never past us"]
    with_way_past, without = facts["runs"]
    assert kernels(with_way_past) == kernels(without) == {"int8": 4, NATIVE: 28}
    assert with_way_past["refusals"] == without["refusals"]
    assert with_way_past["sites"] == without["sites"]


def test_forwards_for_conditions_of_two_lengths_go_past_us_each_after_its_first(host: Host) -> None:
    facts = host.run("scenarios_quality:past_us_with_conditions_apart")
    assert facts["latents"][0] == facts["latents"][1]
    assert facts["overrides"] == ["ours"] * 2 + ["none"] * 10
    assert facts["run"]["forwards"] == 6
    assert facts["calls"] == [facts["run"]["calls"]] * 2


# -- out of memory


@pytest.mark.parametrize("site", [0, 2])
def test_out_of_memory_in_the_middle_of_a_run_is_native_from_there_until_the_next_run(host: Host, site: int) -> None:
    facts = host.run("scenarios_quality:out_of_memory", step=1, site=site)
    assert facts["raised"] == [site]
    assert facts["latents"][1] == facts["healthy"] != facts["latents"][0]
    # at site 0 nothing quantized is left in that forward either
    assert facts["native forwards"] == [False, site == 0, True, True, False, False, False, False]
    first, second = facts["runs"]
    assert kernels(first) == {"full": 4 + site, NATIVE: 12 - site}
    assert kernels(second) == {"full": 16}
    assert set(codes(first)) == {"out_of_memory"}
    assert [event["step"] for event in first["events"]] == [2]
    assert second["events"] == []
    assert facts["retired"] == []


# -- files that are missing


@pytest.mark.parametrize(
    ("failing", "served", "retired"),
    [
        ([[1, 1], [1, 2]], 14, False),
        ([[1, 1], [1, 2], [2, 0], [2, 1]], 12, False),
        ([[1, 1], [1, 2], [1, 3]], 5, True),
    ],
)
def test_a_file_error_costs_its_call_and_three_in_a_row_the_kernel(
    host: Host, failing: list[list[int]], served: int, retired: bool
) -> None:
    facts = host.run("scenarios_quality:flaky", failing=failing)
    assert facts["latents"] == [facts["native"]] * 2
    first, second = facts["runs"]
    assert kernels(first) == {"flaky": served, NATIVE: 16 - served}
    assert kernels(second) == ({NATIVE: 16} if retired else {"flaky": 16})
    assert set(codes(first)) == {"file_error"}
    assert facts["retired"] == ["flaky"] * retired
