"""Widget values in, a checked Policy out; every bad value is named together with what is allowed."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_core.policy import MAX_BLOCK, Policy, PolicyError, parse_blocks

KERNELS = ("auto", "native (observe only)", "a kernel")
DEFAULTS = {
    "kernel": "auto",
    "smooth_k": "auto",
    "start_percent": 0.0,
    "end_percent": 1.0,
    "skip_blocks": "",
    "if_unavailable": "use native",
    "allow_hub_download": False,
    "tolerance": "normal (0.10)",
    "compare_with_native": "first time",
}


def from_widgets(**widgets) -> Policy:
    return Policy.from_widgets(KERNELS, **{**DEFAULTS, **widgets})


def test_the_defaults_of_the_node_are_the_defaults_of_the_policy():
    assert from_widgets() == Policy()


def test_every_widget_reaches_the_policy():
    widgets = {
        "kernel": "a kernel",
        "smooth_k": "on",
        "start_percent": 0.25,
        "end_percent": 0.75,
        "skip_blocks": "0, 2-3",
        "if_unavailable": "stop with an error",
        "allow_hub_download": True,
        "tolerance": "strict (0.05)",
        "compare_with_native": "every run",
    }
    assert widgets.keys() == DEFAULTS.keys()
    assert from_widgets(**widgets) == Policy(**{**widgets, "skip_blocks": frozenset({0, 2, 3}), "tolerance": 0.05})
    assert from_widgets(tolerance="off").tolerance is None


@pytest.mark.parametrize(
    ("widget", "value", "allowed"),
    [
        ("kernel", "sage", "auto, native (observe only), a kernel"),
        ("kernel", None, "a kernel"),
        ("smooth_k", True, "auto, off, on"),
        ("if_unavailable", "", "use native, stop with an error"),
        ("allow_hub_download", "yes", "true or false"),
        ("allow_hub_download", 1, "true or false"),
        ("tolerance", 0.1, "normal (0.10), strict (0.05), off"),
        ("tolerance", [], "normal (0.10), strict (0.05), off"),
        ("tolerance", {}, "normal (0.10), strict (0.05), off"),
        ("tolerance", ["off"], "normal (0.10), strict (0.05), off"),
        ("compare_with_native", "always", "first time, every run, never"),
        ("start_percent", -0.001, "0.0 to 1.0"),
        ("start_percent", math.nan, "0.0 to 1.0"),
        ("start_percent", True, "0.0 to 1.0"),
        ("end_percent", 1.001, "0.0 to 1.0"),
        ("end_percent", math.inf, "0.0 to 1.0"),
        ("end_percent", "1", "0.0 to 1.0"),
        ("end_percent", None, "0.0 to 1.0"),
        ("skip_blocks", 3, "text such as"),
        ("skip_blocks", "0, one", "numbers and ranges"),
        ("skip_blocks", "-1", "numbers and ranges"),
        ("skip_blocks", "1.5", "numbers and ranges"),
        ("skip_blocks", "1-2-3", "numbers and ranges"),
        ("skip_blocks", "1 2", "numbers and ranges"),
        ("skip_blocks", "9-3", "rising ranges"),
        ("skip_blocks", "0-10000", "rising ranges up to 9999"),
        ("skip_blocks", "0-999999999", "rising ranges"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_input_and_what_is_allowed(widget, value, allowed):
    with pytest.raises(PolicyError, match=f"^{widget} ") as error:
        from_widgets(**{widget: value})
    assert allowed in str(error.value)


def test_a_window_that_ends_before_it_starts_is_an_error():
    with pytest.raises(PolicyError, match=r"start_percent is 0\.6, after end_percent 0\.5"):
        from_widgets(start_percent=0.6, end_percent=0.5)
    assert from_widgets(start_percent=0.5, end_percent=0.5).start_percent == 0.5


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("", set()),
        (" , ;", set()),
        ("0", {0}),
        ("0, 1, 47-49", {0, 1, 47, 48, 49}),
        ("3;3,3-3", {3}),
        (" 7 - 9 ", {7, 8, 9}),
        ("007", {7}),
        (f"{MAX_BLOCK}", {MAX_BLOCK}),
    ],
)
def test_blocks_are_numbers_and_ranges(text, blocks):
    assert parse_blocks(text) == blocks


@given(st.text(alphabet="0123456789-,; x٣\n", max_size=30))
@settings(deadline=None)
def test_any_text_is_either_blocks_or_a_policy_error(text):
    try:
        blocks = parse_blocks(text)
    except PolicyError:
        return
    assert all(0 <= block <= MAX_BLOCK for block in blocks)


@given(st.sets(st.integers(0, 200), max_size=20))
@settings(deadline=None)
def test_blocks_written_out_are_read_back(blocks):
    assert parse_blocks(", ".join(map(str, blocks))) == blocks


@pytest.mark.parametrize(
    ("start", "end", "whole"), [(0.0, 1.0, True), (0.001, 1.0, False), (0.0, 0.999, False), (0.5, 0.5, False)]
)
def test_the_whole_schedule_is_the_one_without_a_window(start, end, whole):
    assert Policy(start_percent=start, end_percent=end).whole_schedule is whole


def test_a_policy_as_json_holds_every_widget_in_plain_types():
    written = json.loads(json.dumps(Policy(skip_blocks=frozenset({3, 1})).to_json(), allow_nan=False))
    assert written == {**DEFAULTS, "skip_blocks": [1, 3], "tolerance": 0.1}


def test_plans_depend_on_all_but_what_is_done_around_them():
    changed = {
        "kernel": "a kernel",
        "smooth_k": "on",
        "start_percent": 0.5,
        "end_percent": 0.5,
        "skip_blocks": frozenset({1}),
        "allow_hub_download": True,
        "tolerance": None,
        "if_unavailable": "stop with an error",
        "compare_with_native": "never",
    }
    keys = {name: Policy(**{name: value}).plan_key() for name, value in changed.items()}
    assert keys.keys() == DEFAULTS.keys()
    around = {keys.pop("if_unavailable"), keys.pop("compare_with_native")}
    assert around == {Policy().plan_key()}
    assert len({*keys.values(), *around}) == len(keys) + 1
