"""The report of real runs, on ComfyUI's own page, in both ways in which it draws nodes."""

from __future__ import annotations

import json
import re
from typing import Any

import demo
from tests.web.browser import BODY, NAME, PANEL, REPORT, Tab, without_report


def test_a_node_from_the_search_shows_the_run_of_the_workflow(tab: Tab) -> None:
    tab.open(without_report("int8_reference"))
    tab.add_by_search("attention backend report", 900, 800)
    tab.fit()
    tab.connect("ApplySageAttention", 0, REPORT, 0)
    tab.connect("KSampler", 0, REPORT, 1)
    assert "Queue the workflow" in tab.page.inner_text(BODY)
    output = the_report(tab.queue())
    tab.page.wait_for_selector(f"{BODY} h2")
    tab.fit()
    tab.picture("after the run")
    check_against(tab, output)
    check_text(tab, output)
    check_that_it_is_not_saved(tab)


def test_report_is_copied_saved_restored_and_compared(tab: Tab) -> None:
    tab.open(demo.graph("native (observe only)"))
    first = the_report(tab.queue())
    tab.page.wait_for_selector(f"{BODY} h2")
    check_against(tab, first)
    tab.picture("native")

    tab.page.click(f"{PANEL} button:text-is('Copy report')")
    tab.page.wait_for_selector("text=Copied")
    assert tab.call("() => navigator.clipboard.readText()") == first["text"][0]

    with tab.page.expect_download() as download:
        tab.page.click(f"{PANEL} button:text-is('Save JSON')")
    assert download.value.suggested_filename == "attention-report.json"
    assert json.loads(download.value.path().read_text(encoding="utf-8")) == first["sagescope_report"][0]

    # other settings: the report starts anew, and the node remembers the run from before
    tab.widget("ApplySageAttention", "kernel", "int8_reference")
    second = the_report(tab.queue())
    tab.page.wait_for_selector(f"{BODY} h3:text-is('Compared with another run')")
    check_against(tab, second)
    check_comparison(tab, run_of(second), run_of(first))
    tab.section("Compared with another run").scroll_into_view_if_needed()
    tab.picture("compared")
    tab.page.locator(f"{PANEL}-bar select").select_option(index=1)
    check_against(tab, first)
    check_text(tab, first)
    tab.page.click(f"{PANEL} button:text-is('Copy report')")
    tab.page.wait_for_selector("text=Copied")
    assert tab.call("() => navigator.clipboard.readText()") == first["text"][0]

    # in a new tab of ComfyUI and back, its outputs are restored without an execution
    tab.call("() => window.app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    tab.page.wait_for_selector(BODY, state="detached")
    tab.page.get_by_text(NAME, exact=True).first.click()
    tab.page.wait_for_selector(f"{BODY} h2")
    check_against(tab, second)

    # in a page that has seen nothing yet, ComfyUI sends what it has cached
    tab.load()
    graph = demo.graph("int8_reference")
    tab.open(graph)
    assert "Queue the workflow" in tab.page.inner_text(BODY)
    cached = the_report(tab.queue())
    tab.page.wait_for_selector(f"{BODY} h2")
    check_against(tab, cached)


def test_two_nodes_show_a_report_each_and_keep_their_size(tab: Tab) -> None:
    graph = demo.graph("sageattn3_blackwell")
    graph["unpatched"] = demo.node("AttentionBackendReport", model=["1", 0])
    tab.open(graph)
    sizes = "() => window.app.graph.nodes.filter(n => /Report/.test(n.type)).map(n => n.size[1])"
    before = tab.call(sizes)
    tab.queue()
    tab.page.wait_for_selector(f"{BODY} blockquote")
    tab.page.wait_for_selector(f"{BODY} .tiles")
    shown = tab.page.locator(BODY).all_inner_texts()
    assert len(shown) == 2
    assert sum("nothing was recorded" in text for text in shown) == 1
    assert sum("Native attention served all 12 attention calls" in text for text in shown) == 1
    assert tab.call(sizes) == before
    assert not tab.call(f"() => [...document.querySelectorAll('{BODY}')].some(e => e.scrollWidth > e.clientWidth)")


def the_report(outputs: dict[str, Any]) -> dict[str, Any]:
    (output,) = [output for output in outputs.values() if "sagescope_report" in output]
    return output


def run_of(output: dict[str, Any]) -> dict[str, Any]:
    report = output["sagescope_report"][0]
    (run,) = [run for run in report["runs"] if run["id"] in report["shown"]]
    return run


def check_against(tab: Tab, output: dict[str, Any]) -> None:
    """What is drawn is what the server keeps in its history."""
    run = run_of(output)
    assert tab.page.inner_text(f"{BODY} h2") == run["model"]
    assert f"{run['steps']} of {run['total_steps']} steps, {run['seconds']:.2f} s" in tab.page.inner_text(BODY)
    assert [row[:3] for row in tab.rows("Calls by kernel")] == [
        [entry["kernel"], str(entry["calls"]), f"{entry['share']:.1%}"] for entry in run["calls_by_kernel"]
    ]
    shapes = tab.section("Shapes").inner_text()
    for shape in run["shapes"]:
        assert shape["spec"]["text"] in shapes
    check_sites(tab, run)
    check_tiles(tab, run)


def check_sites(tab: Tab, run: dict[str, Any]) -> None:
    tab.section("Sites").locator("summary").click()
    shown = [(row[0], row[2], row[3], row[6]) for row in tab.rows("Sites")]
    assert shown == [
        (str(site["site"]), site["kernel"], error_of(site["accuracy"]), str(site["calls"])) for site in run["sites"]
    ]
    tab.section("Sites").locator("summary").click()


def error_of(accuracy: dict[str, Any] | None) -> str:
    if accuracy is None:
        return "-"
    step = "" if accuracy["step"] is None else f" at step {accuracy['step']}"
    return f"{accuracy['worst_head_relative_l2']:.3f}{step}"


def check_tiles(tab: Tab, run: dict[str, Any]) -> None:
    tiles = tab.page.inner_text(f"{BODY} .tiles")
    for comparison in run["comparisons"]:
        assert f"x{comparison['native_ms'] / comparison['plan_ms']:.3f}" in tiles
        assert f"{comparison['plan_ms']:.4g} ms per model call" in tiles
    errors = [site["accuracy"]["worst_head_relative_l2"] for site in run["sites"] if site["accuracy"]]
    if errors:
        assert f"{max(errors):.3f}\nwithin 0.10" in tiles


def check_text(tab: Tab, output: dict[str, Any]) -> None:
    """All words of the Markdown are in the folded text."""
    summary = tab.page.locator(f"{BODY} > details > summary")
    summary.click()
    text = tab.page.inner_text(f"{BODY} .text")
    summary.click()
    assert re.findall(r"\w+", text) == re.findall(r"\w+", output["text"][0])


def check_comparison(tab: Tab, run: dict[str, Any], other: dict[str, Any]) -> None:
    rows = {row[0]: row[1:3] for row in tab.rows("Compared with another run")}
    assert rows["seconds per step"] == [f"{one['seconds'] / one['steps']:.2f} s" for one in (run, other)]
    assert rows["calls of native"] == ["0", "12"]
    assert rows["calls of int8_reference"] == ["12", "0"]
    assert rows["worst head's error"][1] == "-"
    assert ["kernel", "int8_reference", "native (observe only)"] in tab.rows("Compared with another run", table=1)


def check_that_it_is_not_saved(tab: Tab) -> None:
    saved = tab.call("() => window.app.graph.serialize().nodes.find(n => n.type === 'AttentionBackendReport')")
    assert not saved.get("widgets_values")
    prompt = tab.call("async () => (await window.app.graphToPrompt()).output")
    (inputs,) = [node["inputs"] for node in prompt.values() if node["class_type"] == REPORT]
    assert set(inputs) == {"model", "after"}
