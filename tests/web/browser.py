"""ComfyUI's own page in a browser, as a person uses it: nodes, links, the queue, and what the report node shows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import demo
from comfyui_server import Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OFFLINE = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
PACK = "/extensions/ComfyUI-SageScope/"
# The page opens a workflow by itself when it starts, and would put it in place of one opened before
READY = "window.app?.extensionManager?.workflow?.activeWorkflow && window.app.rootGraph.nodes.length"
NAME = "sagescope-test"
PANEL = ".sagescope-report"
BODY = f"{PANEL}-body"
REPORT = "AttentionBackendReport"
WAIT_MS = 10_000
SAMPLES = Path(__file__).with_name("samples.mjs").read_text(encoding="utf-8")


class Tab:
    """One browser tab with ComfyUI open, and what the pack complained about in it."""

    def __init__(self, browser: Any, server: Server, settings: dict[str, Any], pictures: Path) -> None:
        self.server = server
        self.errors: list[str] = []
        self._pictures = pictures
        self.context = browser.new_context(
            viewport={"width": 1280, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
        )
        self.context.set_default_timeout(WAIT_MS)
        self.context.request.post(f"{server.address}/settings", data={"Comfy.TutorialCompleted": True, **settings})
        self.page = self.context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self._keep(f"{error}\n{error.stack}"))
        self.load()

    def load(self) -> None:
        self.page.goto(self.server.address)
        self.page.wait_for_function(READY)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self._keep(f"{message.text} {message.location.get('url')}")

    def _keep(self, error: str) -> None:
        # ComfyUI's page has errors of its own, such as user files that are not there
        if PACK in error:
            self.errors.append(error)

    def call(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def picture(self, name: str) -> None:
        self.page.screenshot(path=self._pictures / f"{name}.png")

    def open(self, graph: dict[str, Any]) -> None:
        self.call("([graph, name]) => window.app.loadApiJson(graph, name)", [graph, NAME])
        self.fit()

    def fit(self) -> None:
        """Brings all nodes into view, and waits until the view is at rest."""
        self.call("() => window.app.canvas.deselectAll()")
        self.call("() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        self.page.wait_for_function(
            """() => {
                const { scale, offset } = window.app.canvas.ds;
                const view = [scale, ...offset].join();
                const [isSame, since] = [view === window.lastView, window.viewSince ?? 0];
                if (!isSame) [window.lastView, window.viewSince] = [view, performance.now()];
                return isSame && performance.now() - since > 300;
            }"""
        )

    def add_by_search(self, words: str, x: int, y: int) -> None:
        """Adds the first node that ComfyUI's search finds, with its upper left corner at a place of the page."""
        before = self.call("() => window.app.graph.nodes.length")
        self.page.mouse.dblclick(x, y)
        search = self.page.locator("input:focus")
        search.wait_for()
        search.fill(words)
        self.page.get_by_text("Attention Backend Report").first.wait_for()
        self.page.keyboard.press("Enter")
        self.page.wait_for_function("before => window.app.graph.nodes.length > before", arg=before)
        # in some versions a node hangs at the pointer until the next click
        self.page.mouse.move(x + 10, y + 10, steps=4)
        self.page.wait_for_timeout(100)
        self.page.mouse.click(x, y)

    def connect(self, source: str, output: int, target: str, slot: int) -> None:
        """Draws a link, as a drag from slot to slot does in the end."""
        self.call(
            """([source, output, target, slot]) => {
                const find = (type) => window.app.graph.nodes.find(n => n.type === type);
                find(source).connect(output, find(target), slot);
            }""",
            [source, output, target, slot],
        )

    def queue(self) -> dict[str, Any]:
        """Queues the workflow, waits until it is done, and returns the outputs of its nodes."""
        done = len(self.server.get("/history"))
        self.call("() => window.app.queuePrompt(0)")
        deadline = self.page.evaluate("() => performance.now()") + WAIT_MS
        while len(history := self.server.get("/history")) == done:
            assert self.page.evaluate("() => performance.now()") < deadline, "the prompt is not done"
            self.page.wait_for_timeout(50)
        last = max(history.values(), key=lambda entry: entry["prompt"][0])
        assert last["status"]["status_str"] == "success", last["status"]
        return last["outputs"]

    def show(self, sample: str) -> None:
        """Gives the report node an output made by an expression over tests/web/samples.mjs."""
        self.call(
            """async ([source, sample]) => {
                const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
                const output = new Function("samples", `return ${sample}`)(await import(url));
                window.app.graph.nodes.find(n => n.type === "AttentionBackendReport").onExecuted(output);
            }""",
            [SAMPLES, sample],
        )

    def set(self, setting: str, value: Any) -> None:
        self.call("([id, value]) => window.app.extensionManager.setting.set(id, value)", [setting, value])

    def widget(self, node: str, name: str, value: Any) -> None:
        """Sets an input of a node, as its own widget does."""
        self.call(
            """([type, name, value]) => {
                const widget = window.app.graph.nodes.find(n => n.type === type).widgets.find(w => w.name === name);
                widget.value = value;
                widget.callback?.(value);
            }""",
            [node, name, value],
        )

    def section(self, title: str) -> Any:
        return self.page.locator(f"{BODY} section", has=self.page.locator(f"h3:text-is('{title}')"))

    def rows(self, title: str, table: int = 0) -> list[list[str]]:
        """The texts of the cells of a table in the part of the report with this title, as a screen reader has them:
        without the row of titles, and without the letters beside the names of kernels."""
        found = self.section(title).locator("table").nth(table)
        rows: list[list[str]] = found.evaluate(
            """table => [...table.tBodies[0].rows].map(row => [...row.cells].map(cell => {
                const read = cell.cloneNode(true);
                for (const hidden of read.querySelectorAll("[aria-hidden]")) hidden.remove();
                return read.textContent.trim();
            }))"""
        )
        return rows


def without_report(kernel: str) -> dict[str, Any]:
    """The demo's workflow as it is before someone adds the report node."""
    graph = demo.graph(kernel)
    del graph[demo.REPORT]
    graph[demo.SAVE]["inputs"]["samples"] = [demo.SAMPLER, 0]
    return graph
