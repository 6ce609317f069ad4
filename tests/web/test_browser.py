"""The report as a person sees it: ComfyUI's own page in a browser, in both ways in which it draws nodes."""

from __future__ import annotations

import re
import shutil
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
TAB = "sagescope-test"
BODY = ".sagescope-report-body"
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


class Tab:
    """One browser tab with ComfyUI open, and what the pack complained about in it."""

    def __init__(self, browser: Any, server: Server, settings: dict[str, Any]) -> None:
        self.server = server
        self.errors: list[str] = []
        self.context = browser.new_context(
            viewport={"width": 1280, "height": 800}, permissions=["clipboard-read", "clipboard-write"]
        )
        self.context.set_default_timeout(WAIT_MS)
        self.context.request.post(f"{server.address}/settings", data={"Comfy.TutorialCompleted": True, **settings})
        self.page = self.context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self._keep(f"{error}\n{error.stack}"))
        self.page.goto(server.address)
        self.page.wait_for_function(READY)

    def _on_console(self, message: Any) -> None:
        if message.type == "error":
            self._keep(f"{message.text} {message.location.get('url')}")

    def _keep(self, error: str) -> None:
        # ComfyUI's page has errors of its own, such as user files that are not there
        if PACK in error:
            self.errors.append(error)

    def open(self, graph: dict[str, Any]) -> None:
        self.page.evaluate("([graph, name]) => window.app.loadApiJson(graph, name)", [graph, TAB])
        self.page.wait_for_selector(BODY, state="attached")
        self.call("() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        self.page.wait_for_selector(BODY)

    def queue(self) -> None:
        self.page.evaluate("() => window.app.queuePrompt(0)")
        self.page.wait_for_selector(f"{BODY} h3")

    def last_output(self) -> dict[str, Any]:
        history = self.server.get("/history?max_items=1")
        return next(iter(history.values()))["outputs"][demo.REPORT]

    def tables(self) -> list[list[list[str]]]:
        """The texts of the cells of every table in the report, without the rows of titles."""
        return self.page.eval_on_selector_all(
            f"{BODY} table",
            "tables => tables.map(t => [...t.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.innerText)))",
        )

    def call(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.fixture(params=[False, True], ids=["canvas", "vue"])
def tab(request: pytest.FixtureRequest, browser: Any, server: Server, tmp_path: Path) -> Iterator[Tab]:
    tab = Tab(browser, server, {"Comfy.VueNodes.Enabled": request.param, "Comfy.ColorPalette": "dark"})
    yield tab
    tab.page.screenshot(path=tmp_path / "page.png")
    tab.context.close()
    assert not tab.errors


def test_report_is_shown_copied_and_restored(tab: Tab) -> None:
    tab.open(demo.graph("int8_reference"))
    assert "Queue the workflow" in tab.page.inner_text(BODY)
    tab.queue()
    _check_against_history(tab)

    tab.page.click(".sagescope-report button")
    tab.page.wait_for_selector("text=Copied")
    assert tab.call("() => navigator.clipboard.readText()") == tab.last_output()["text"][0]

    _check_that_it_is_not_saved(tab)

    # in a new tab of ComfyUI and back, its outputs are restored without an execution
    tab.call("() => window.app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    tab.page.wait_for_selector(BODY, state="detached")
    tab.page.get_by_text(TAB, exact=True).first.click()
    tab.page.wait_for_selector(f"{BODY} h3")
    _check_against_history(tab)

    # in a page that has seen nothing yet, ComfyUI sends what it has cached
    tab.page.reload()
    tab.page.wait_for_function(READY)
    tab.open(demo.graph("int8_reference"))
    assert "Queue the workflow" in tab.page.inner_text(BODY)
    tab.queue()
    _check_against_history(tab)


def test_two_nodes_show_a_report_each_and_keep_their_size(tab: Tab) -> None:
    graph = demo.graph("sageattn3_blackwell")
    graph["unpatched"] = demo.node("AttentionBackendReport", model=["1", 0])
    tab.open(graph)
    sizes = "() => window.app.graph.nodes.filter(n => /Report/.test(n.type)).map(n => n.size[1])"
    before = tab.call(sizes)
    tab.queue()
    tab.page.wait_for_selector(f"{BODY} blockquote")
    shown = tab.page.locator(BODY).all_inner_texts()
    assert len(shown) == 2
    assert sum("nothing was recorded" in text for text in shown) == 1
    assert sum("Native attention served all 12 attention calls" in text for text in shown) == 1
    assert tab.call(sizes) == before
    overflows = f"() => [...document.querySelectorAll('{BODY}')].some(e => e.scrollWidth > e.clientWidth)"
    assert not tab.call(overflows)


def _check_against_history(tab: Tab) -> None:
    output = tab.last_output()
    report = output["sagescope_report"][0]
    (run,) = [run for run in report["runs"] if run["id"] in report["shown"]]
    kernels, shapes, sites, machine = tab.tables()
    assert kernels == [[e["kernel"], str(e["calls"]), f"{e['share']:.1%}"] for e in run["calls_by_kernel"]]
    assert shapes == [[s["spec"]["text"], s["kernel"], str(s["calls"])] for s in run["shapes"]]
    assert [(row[0], row[2], row[5]) for row in sites] == [
        (str(site["site"]), site["kernel"], str(site["calls"])) for site in run["sites"]
    ]
    assert ["ComfyUI", report["environment"]["comfyui"]] in machine
    words = re.findall(r"\w+", output["text"][0])
    assert re.findall(r"\w+", tab.page.inner_text(BODY)) == words


def _check_that_it_is_not_saved(tab: Tab) -> None:
    saved = tab.call("() => window.app.graph.serialize().nodes.find(n => n.type === 'AttentionBackendReport')")
    assert not saved.get("widgets_values")
    prompt = tab.call("async () => (await window.app.graphToPrompt()).output")
    assert set(prompt[demo.REPORT]["inputs"]) == {"model", "after"}
