"""The line on Apply SageAttention, the settings and the commands, as a person meets them in ComfyUI's own page."""

from __future__ import annotations

import itertools
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import demo
import dev
from comfyui_server import Server

playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")
OFFLINE = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
PACK = "/extensions/ComfyUI-SageScope/"
# The page opens a workflow by itself when it starts, and would put it in place of one opened before
READY = "window.app?.extensionManager?.workflow?.activeWorkflow && window.app.rootGraph.nodes.length"
LINE = ".sagescope-status"
APPLY = "window.app.rootGraph.nodes.find(node => node.type === 'ApplySageAttention')"
STEPS = 150
SEEDS = itertools.count(1_000)
"""A seed of its own makes a sampler run whatever earlier tests left in the cache."""
RECORD = """async line => {
    window.linesSeen = [];
    const { api } = await import("/scripts/api.js");
    // told after the pack, which was there first
    api.addEventListener("sagescope.status", () => window.linesSeen.push(document.querySelector(line).textContent));
}"""
INSIDE = f"""() => {{
    const [canvas, node] = [window.app.canvas, {APPLY}];
    const {{ left, top }} = canvas.canvas.getBoundingClientRect();
    const [dx, dy] = canvas.ds.offset;
    const corner = (x, y) => [(x + dx) * canvas.ds.scale + left, (y + dy) * canvas.ds.scale + top];
    const [[x, y], [width, height]] = [node.pos, node.size];
    return [...corner(x, y), ...corner(x + width, y + height)];
}}"""
"""The corners of the node on the page: left, top, right, bottom."""
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    comfyui = dev.comfyui_roots()[0]
    if not comfyui.exists():
        pytest.skip(f"no ComfyUI in {comfyui}; `python dev.py test` fetches it")
    with Server(comfyui) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OFFLINE)
        yield browser
        browser.close()


@pytest.fixture(params=[False, True], ids=["canvas", "vue"])
def page(request: pytest.FixtureRequest, browser: Any, server: Server, tmp_path: Path) -> Iterator[Any]:
    """ComfyUI's page in one of the two ways in which it draws nodes; no error of the pack may be left in it."""
    errors: list[str] = []
    context = browser.new_context(
        viewport={"width": 1280, "height": 800}, permissions=["clipboard-read", "clipboard-write"]
    )
    context.set_default_timeout(WAIT_MS)
    settings = {"Comfy.TutorialCompleted": True, "Comfy.VueNodes.Enabled": request.param}
    settings |= {"SageScope.DefaultTolerance": "normal (0.10)", "SageScope.LogLevel": "as ComfyUI"}
    context.request.post(f"{server.address}/settings", data=settings)
    page = context.new_page()
    page.on("console", lambda message: errors.append(f"{message.type} {message.text} {message.location.get('url')}"))
    page.on("pageerror", lambda error: errors.append(f"error {error}\n{error.stack}"))
    page.goto(server.address)
    page.wait_for_function(READY)
    yield page
    page.screenshot(path=tmp_path / "page.png")
    context.close()
    # ComfyUI's page has errors of its own
    assert [error for error in errors if PACK in error and error.startswith(("error", "warning"))] == []


def workflow(page: Any, kernel: str, **sampler: Any) -> dict[str, Any]:
    """The demo as a workflow file, with an id of its own."""
    graph = demo.graph(kernel)
    graph[demo.SAMPLER]["inputs"].update(seed=next(SEEDS), **sampler)
    page.evaluate("graph => window.app.loadApiJson(graph, 'sagescope')", graph)
    page.wait_for_selector(LINE, state="attached")
    saved: dict[str, Any] = page.evaluate("() => window.app.rootGraph.serialize()")
    return {**saved, "id": str(uuid.uuid4())}


def open_workflow(page: Any, saved: dict[str, Any]) -> None:
    page.evaluate("saved => window.app.loadGraphData(saved)", saved)
    page.wait_for_function("id => window.app.rootGraph.id === id", arg=saved["id"])
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.wait_for_selector(LINE)


def queue(page: Any) -> None:
    page.evaluate("() => void window.app.queuePrompt(0)")


def wait_for(page: Any, pattern: str) -> str:
    """The line, once it says this."""
    page.wait_for_function(
        "([line, pattern]) => new RegExp(pattern).test(document.querySelector(line)?.innerText)", arg=[LINE, pattern]
    )
    return str(page.inner_text(LINE))


def execute(page: Any, command: str) -> None:
    page.evaluate("command => void window.app.extensionManager.command.execute(command)", command)


def test_the_line_follows_a_run_and_stays_after_it_and_is_not_saved(page: Any, server: Server) -> None:
    saved = workflow(page, "int8_reference", steps=STEPS)
    open_workflow(page, saved)
    assert page.inner_text(LINE) == "Not sampled yet."
    page.evaluate(RECORD, LINE)
    queue(page)
    summary = wait_for(page, "^int8_reference served 100.0% of")
    *running, last = page.evaluate("() => window.linesSeen")
    assert last == summary
    steps = [int(re.findall(rf"^Step (\d+) of {STEPS}: int8_reference serves", line)[0]) for line in running[1:]]
    assert len(steps) >= 2
    assert steps == sorted(steps)
    newest = server.get("/sagescope/runs")["runs"][0]
    assert (newest["summary"], newest["workflow_id"]) == (summary, saved["id"])
    assert page.get_attribute(LINE, "title") == summary

    kept = page.evaluate("() => window.app.rootGraph.serialize()")
    node, before = (next(n for n in w["nodes"] if n["type"] == "ApplySageAttention") for w in (kept, saved))
    assert node["widgets_values"] == before["widgets_values"]
    assert len(node["widgets_values"]) == 9
    prompt = page.evaluate("async () => (await window.app.graphToPrompt()).output")
    (inputs,) = [entry["inputs"] for entry in prompt.values() if entry["class_type"] == "ApplySageAttention"]
    assert len(inputs) == 10

    # another workflow with the same ids of nodes has not run
    open_workflow(page, {**saved, "id": str(uuid.uuid4())})
    assert page.inner_text(LINE) == "Not sampled yet."
    # the line is there again in a page that saw nothing of the run
    page.reload()
    page.wait_for_function(READY)
    open_workflow(page, saved)
    assert wait_for(page, "served") == summary


def test_the_line_stays_inside_the_node(page: Any) -> None:
    saved = workflow(page, "sageattn3_blackwell", steps=3)
    open_workflow(page, saved)
    queue(page)
    wait_for(page, "native attention served")
    long = "sageattn_qk_int8_pv_fp8_cuda_sm90 served 97.5% of 2,800 calls; x1.31 against native; worst error 0.038; 2 "
    page.evaluate("([line, text]) => document.querySelector(line).textContent = text", [LINE, long * 3])
    page.wait_for_timeout(500)
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.wait_for_selector(LINE)
    line = page.locator(LINE).bounding_box()
    left, top, right, bottom = page.evaluate(INSIDE)
    assert left <= line["x"] < line["x"] + line["width"] <= right + 1
    assert top <= line["y"] < line["y"] + line["height"] <= bottom + 1


def test_a_new_node_has_the_tolerance_of_the_settings_and_a_loaded_one_its_own(page: Any) -> None:
    saved = workflow(page, "auto")
    page.evaluate("() => window.app.extensionManager.setting.set('SageScope.DefaultTolerance', 'strict (0.05)')")
    open_workflow(page, saved)
    tolerance = f"{APPLY}.widgets.find(widget => widget.name === 'tolerance').value"
    assert page.evaluate(f"() => {tolerance}") == "normal (0.10)"
    page.evaluate(f"() => window.app.rootGraph.remove({APPLY})")
    page.evaluate("() => window.app.rootGraph.add(window.LiteGraph.createNode('ApplySageAttention'))")
    assert page.evaluate(f"() => {tolerance}") == "strict (0.05)"


def test_settings_commands_and_badge(page: Any, server: Server) -> None:
    open_workflow(page, workflow(page, "int8_reference", steps=3))
    queue(page)
    wait_for(page, "served")
    execute(page, "SageScope.CopyReport")
    page.wait_for_selector("text=The report of the last run is in the clipboard")
    newest = server.get("/sagescope/runs")["runs"][0]
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied == server.get(f"/sagescope/runs/{newest['uid']}")["text"]

    file = server.base_directory / "user" / "sagescope" / "measurements.json"
    assert '"forwards"' in file.read_text()
    execute(page, "Comfy.ShowSettingsDialog")
    page.locator("[role=dialog], .settings-container").get_by_text("SageScope", exact=True).first.click()
    page.click("button:text-is('Forget measurements')")
    page.wait_for_selector("text=Forget everything that was measured")
    assert '"forwards"' in file.read_text()
    page.get_by_role("button", name=re.compile("confirm", re.I)).last.click()
    page.wait_for_selector("text=What was measured is forgotten")
    assert '"forwards"' not in file.read_text()

    page.locator("[role=dialog], .settings-container").get_by_text("About", exact=True).first.click()
    page.wait_for_selector("text=SageScope v0.1.0")


def test_the_choices_of_the_settings_are_those_of_the_node_and_the_route(page: Any, server: Server) -> None:
    widgets = server.get("/object_info/ApplySageAttention")["ApplySageAttention"]["input"]["required"]
    settings = page.evaluate("() => window.app.ui.settings.settingsLookup ?? {}")
    options = settings["SageScope.DefaultTolerance"]["options"]
    assert options == (widgets["tolerance"][1].get("options") or widgets["tolerance"][0])
    for level in settings["SageScope.LogLevel"]["options"]:
        page.evaluate("level => window.app.extensionManager.setting.set('SageScope.LogLevel', level)", level)
    page.wait_for_timeout(1000)
    assert page.locator("text=the server answered").count() == 0
