"""The report as JSON and as Markdown: complete, strict, and with a plain word for each empty state."""

from __future__ import annotations

import json

import pytest

from sage_core.comparing import Comparison
from sage_core.policy import NATIVE_ONLY
from sage_core.refusal import Refusal, RefusalCode
from sage_core.report import MAX_SITE_ROWS, build_report, run_headline, to_markdown
from sage_core.selection import Plan, Verdict
from sage_core.session import Session
from tests.unit.conftest import (
    CPU,
    KERNEL,
    FakeComfy,
    comfy_arguments,
    fake_backend,
    fake_environment,
    make_dispatcher,
    make_session,
    make_spec,
    plain_model,
)

NEVER_SAMPLED = "Nothing was sampled with this model yet."


def report_of(comfy, prompt_id="prompt", after=True):
    """The report after it went through JSON, as ComfyUI sends it."""
    report = build_report(comfy.dispatcher.snapshot(), "0.1.0", prompt_id, after)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    return report


def comfy_with(model=None, backend=None, **policy):
    session = make_session(backend or fake_backend())
    return FakeComfy(make_dispatcher(session=session, host_context=lambda: ("prompt", "3"), **policy), model)


def three_blocks(attention, transformer_options):
    """One forward of a model with an attention call in each of three blocks."""
    for number in range(3):
        block = {"block_type": "double", "block_index": number}
        attention(*comfy_arguments()[0], transformer_options={**transformer_options, **block})


def headline(comfy):
    report = report_of(comfy)
    return run_headline(report["runs"][-1], report["policy"])


# -- the document


def test_a_report_has_every_part():
    comfy = comfy_with()
    comfy.sample()
    report = report_of(comfy)
    assert set(report) == {
        *("schema", "version", "notes", "shown", "runs", "environment", "policy", "previous_override")
    }
    assert (report["schema"], report["version"], report["notes"], report["shown"]) == (1, "0.1.0", [], [1])
    assert report["policy"]["kernel"] == KERNEL


def test_the_runs_of_the_prompt_are_shown_and_the_last_one_when_it_has_none():
    contexts = iter([("old", "3"), ("new", "3"), ("new", "8")])
    comfy = FakeComfy(make_dispatcher(host_context=lambda: next(contexts)))
    for _ in range(3):
        comfy.sample()
    assert report_of(comfy, "new")["shown"] == [2, 3]
    assert report_of(comfy, "old")["shown"] == [1]
    assert report_of(comfy, "newer")["shown"] == [3]
    assert report_of(comfy, None)["shown"] == [3]
    markdown = to_markdown(report_of(comfy, "new"))
    assert "### Run 2: FakeComfy, sampler node 3" in markdown
    assert "### Run 3: FakeComfy, sampler node 8" in markdown
    assert "### Run 1" not in markdown


# -- notes


def test_a_model_without_our_node_is_told_so():
    report = build_report(None, "0.1.0", "prompt", True)
    assert report["notes"] == ["This model has no Apply SageAttention node before it: nothing was recorded."]
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["notes"][0] in to_markdown(report)


def test_a_model_that_was_not_sampled_is_told_so():
    report = report_of(comfy_with())
    assert report["notes"] == [NEVER_SAMPLED]
    assert (report["shown"], report["runs"]) == ([], [])
    assert NEVER_SAMPLED in to_markdown(report)


def test_a_report_that_does_not_wait_for_the_sampler_says_so():
    comfy = comfy_with()
    assert len(report_of(comfy, after=False)["notes"]) == 2
    comfy.sample()
    (note,) = report_of(comfy, after=False)["notes"]
    assert "'after' is not connected" in note


def test_a_sampler_that_was_cached_is_told_so():
    comfy = comfy_with()
    comfy.sample()
    (note,) = report_of(comfy, "a later prompt")["notes"]
    assert "was cached" in note


def test_an_override_that_was_there_before_is_named():
    comfy = comfy_with(previous=plain_model)
    comfy.sample()
    (note,) = report_of(comfy)["notes"]
    assert f"{plain_model.__module__}.plain_model" in note


def test_kernels_that_are_out_are_named_with_their_error():
    comfy = comfy_with()
    comfy.dispatcher.session.retire(KERNEL, CPU, Refusal(RefusalCode.KERNEL_ERROR, "it broke"))
    comfy.sample()
    (note,) = report_of(comfy)["notes"]
    assert note == f"{KERNEL} is out on cpu until ComfyUI restarts: it broke"


# -- the first line about a run


def test_the_first_line_says_who_served_how_much():
    comfy = comfy_with(plain_model(calls=3))
    comfy.sample((1.0, 0.5, 0.0))
    assert headline(comfy) == [f"{KERNEL} served 6 of 6 attention calls (100.0%) in 2 forwards."]
    comfy.attention(*comfy_arguments()[0], window=1, transformer_options=comfy.options)
    comfy.forward_once = plain_model(calls=1)
    comfy.forward()
    assert headline(comfy) == [f"{KERNEL} served 1 of 2 attention calls (50.0%) in 1 forward."]


def test_a_run_that_native_served_says_why():
    comfy = comfy_with(kernel=NATIVE_ONLY)
    comfy.sample()
    assert headline(comfy) == [
        f"Native attention served all 2 attention calls in 1 forward: kernel is '{NATIVE_ONLY}'."
    ]


def test_a_model_that_never_offers_its_calls_is_told_so():
    comfy = comfy_with(lambda attention, transformer_options: attention(*comfy_arguments()[0]))
    comfy.sample()
    (line,) = headline(comfy)
    assert "This model made 1 forward and offered none of its attention calls" in line
    assert comfy.native.calls == 1


def test_a_node_that_took_our_place_is_named():
    comfy = comfy_with()
    comfy.options["optimized_attention_override"] = lambda func, *args, **kwargs: func(*args, **kwargs)
    comfy.sample()
    (line,) = headline(comfy)
    assert line.startswith("No call came here: ")
    assert f"{__name__}.test_a_node_that_took_our_place_is_named" in line
    assert "after the node that changed it" in line


def test_an_override_that_was_taken_off_is_no_node_called_nothing():
    comfy = comfy_with()
    del comfy.options["optimized_attention_override"]
    comfy.sample()
    (line,) = headline(comfy)
    assert line.startswith("No call came here: nothing stands where Apply SageAttention put its override.")


def test_an_override_before_ours_that_hands_calls_over_is_named_beside_the_result():
    comfy = comfy_with()

    def sparse(func, *args, **kwargs):
        return comfy.dispatcher.attend(func, *args, **kwargs)

    comfy.options["optimized_attention_override"] = sparse
    comfy.sample()
    first, second = headline(comfy)
    assert first.startswith(f"{KERNEL} served 2 of 2")
    assert "sparse" in second


def test_skip_blocks_on_a_model_without_blocks_is_told_to_have_no_effect():
    args, _ = comfy_arguments()
    nameless = comfy_with(
        lambda attention, transformer_options: attention(*args, transformer_options=transformer_options),
        skip_blocks=frozenset({0}),
    )
    nameless.sample()
    assert headline(nameless)[1:] == ["skip_blocks has no effect: this model does not report its blocks."]


@pytest.mark.parametrize(
    ("skipped", "line"),
    [
        ({0}, None),
        ({0, 2}, None),
        ({1, 3}, "skip_blocks names 3, which this model does not have: its last block is number 2."),
        (
            {2, 3, 4, 9, 11, 12},
            "skip_blocks names 3-4, 9, 11-12, which this model does not have: its last block is number 2.",
        ),
    ],
)
def test_blocks_that_the_model_does_not_have_are_told(skipped, line):
    comfy = comfy_with(three_blocks, skip_blocks=frozenset(skipped))
    comfy.sample()
    assert headline(comfy)[1:] == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("plan_ms", "noise", "end"),
    [
        (9.9, 0.0, "(x1.010)."),
        (9.97, 0.0, "Not faster by more than noise."),
        (10.04, 0.0, "Not faster by more than noise."),
        (10.06, 0.0, "Slower than native."),
        (14.0, 0.02, "Slower than native."),
        (10.06, 0.02, "Not faster by more than noise."),
        (9.9, 0.02, "Not faster by more than noise."),
    ],
)
def test_a_comparison_says_whether_the_plan_is_faster_the_same_or_slower(plan_ms, noise, end):
    comfy = comfy_with()
    comfy.sample()
    comparison = Comparison(native_ms=10.0, plan_ms=plan_ms, noise=noise, relative_l2=None, cosine=None, psnr=None)
    comfy.dispatcher.stats._runs[-1].compared("key", comparison, remembered=False)
    assert headline(comfy)[1].endswith(end)


# -- Markdown


def table_rows(markdown, title):
    """The rows of a table, as lists of cells split where Markdown splits them."""
    lines = markdown.split(f"**{title}**\n\n")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.replace("\\|", "&").strip("|").split("|")] for line in lines]


def test_a_pipe_or_a_line_break_in_a_text_stays_in_its_cell():
    comfy = comfy_with()
    run = comfy.dispatcher.stats.open("prompt", "3", "Model")
    run.note("a | b\nc")
    run.record([Plan("native", make_spec(), "odd | block")])
    markdown = to_markdown(report_of(comfy))
    assert table_rows(markdown, "What happened") == [["-", "a & b c"]]
    assert table_rows(markdown, "Sites")[0][1] == "0: odd & block"


def test_every_table_row_has_as_many_cells_as_its_heading():
    comfy = comfy_with(end_percent=0.5)
    comfy.sample((1.0, 0.5, 0.25, 0.0))
    markdown = to_markdown(report_of(comfy))
    width = None
    for line in markdown.splitlines():
        cells = line.count("|") if line.startswith("|") else None
        assert None in (cells, width) or cells == width
        width = cells
    assert table_rows(markdown, "Why not")[0][:2] == ["2", "any kernel"]
    assert table_rows(markdown, "Shapes") == [
        ["1 x 2 x 24 x 16 float32 NHD", KERNEL, "4"],
        ["1 x 2 x 24 x 16 float32 NHD", "native", "2"],
    ]


def test_a_table_without_rows_is_left_out():
    comfy = comfy_with()
    comfy.sample()
    markdown = to_markdown(report_of(comfy))
    assert "Why not" not in markdown
    assert "What happened" not in markdown


def test_two_thousand_sites_are_all_in_the_json_and_cut_in_the_markdown():
    comfy = comfy_with()
    run = comfy.dispatcher.stats.open("prompt", "3", "Model")
    run.record([Plan("native", make_spec(), f"block {site}") for site in range(2_000)])
    report = report_of(comfy)
    assert len(report["runs"][0]["sites"]) == 2_000
    markdown = to_markdown(report)
    assert len(table_rows(markdown, f"Sites (first {MAX_SITE_ROWS} of 2000)")) == MAX_SITE_ROWS
    assert len(markdown) < 100_000


@pytest.mark.parametrize(
    ("machine", "texts"),
    [
        (fake_environment(), ["no GPU", "2.9.0, built for CPU only"]),
        (
            fake_environment("sm90", cuda="12.8", driver="570.1"),
            ["Fake sm90 (sm90)", "570.1", "2.9.0, built for CUDA 12.8"],
        ),
        (fake_environment("gfx1201", hip="6.4"), ["Fake gfx1201 (gfx1201)", "2.9.0, built for ROCm 6.4"]),
    ],
)
def test_the_machine_is_described(machine, texts):
    backends = [fake_backend(package="no-such-distribution"), fake_backend(name="b", package="pytest")]
    session = Session(backends, machine, host="0.33.0")
    comfy = FakeComfy(make_dispatcher(session=session, skip_blocks=frozenset({1, 2})))
    markdown = to_markdown(report_of(comfy))
    for text in (*texts, "| no-such-distribution | not installed |", "| ComfyUI | 0.33.0 |", "skip_blocks 1,2"):
        assert text in markdown


def test_the_settings_are_given_as_the_node_names_them():
    comfy = comfy_with(smooth_k="off", start_percent=0.25, allow_hub_download=True)
    assert (
        f"Settings: kernel {KERNEL}, smooth_k off, start_percent 0.25, end_percent 1.0, skip_blocks none, "
        "if_unavailable use native, allow_hub_download true, tolerance off, compare_with_native never\n"
    ) in to_markdown(report_of(comfy))


@pytest.mark.parametrize(("tolerance", "words"), [(0.10, "normal (0.10)"), (0.05, "strict (0.05)"), (None, "off")])
def test_the_tolerance_is_in_the_words_of_the_widget(tolerance, words):
    comfy = comfy_with(tolerance=tolerance)
    assert f"tolerance {words}," in to_markdown(report_of(comfy))
    assert report_of(comfy)["policy"]["tolerance"] == tolerance


def test_names_are_no_markup_when_the_report_is_pasted():
    """What a browser or an issue shows of it is the text itself; kernels keep their plain names."""
    odd = "<img src=x> [a](b) `c` *d* _e_ f__g ~~h~~ &lt; i\\j k|l smooth_k"
    escaped = r"\<img src=x> \[a](b) \`c\` \*d\* \_e\_ f\_\_g \~\~h\~\~ \&lt; i\\j k\|l smooth_k"
    comfy = comfy_with()
    run = comfy.dispatcher.stats.open("prompt", odd, odd)
    run.note(odd)
    run.replaced_by = odd
    run.record([Plan("native", make_spec(), odd)])
    comfy.dispatcher.session.retire(KERNEL, CPU, Refusal(RefusalCode.KERNEL_ERROR, odd))
    markdown = to_markdown(report_of(comfy))
    assert odd not in markdown
    # the note; model and node in the heading; the bold line; the event and the site
    assert markdown.count(escaped) == 6


def test_no_folder_of_the_machine_is_in_a_report():
    comfy = comfy_with()
    run = comfy.dispatcher.stats.open("prompt", "3", "Model")
    path = "/home/ann/ComfyUI/lib/kernel.so"
    run.note(f"cannot open {path}")
    run.replaced_by = "/home/ann/ComfyUI/custom_nodes/Pack.nodes.patch"
    refusal = Refusal(RefusalCode.BUILD, f"{path}: undefined symbol")
    run.record([Plan("native", make_spec(), None, (Verdict("a", (refusal,)),))])
    comfy.dispatcher.session.retire(KERNEL, CPU, Refusal(RefusalCode.KERNEL_ERROR, f"{path} broke"))
    report = report_of(comfy)
    text = json.dumps(report) + to_markdown(report)
    assert "/home" not in text
    for shortened in ("cannot open kernel.so", "kernel.so: undefined symbol", "kernel.so broke", "Pack.nodes.patch"):
        assert shortened in text
