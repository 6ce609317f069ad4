"""ComfyUI's page, opened in a browser that reaches nothing but the server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Page, sync_playwright

from comfyui_server import Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OFFLINE = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
# The page opens a workflow by itself when it starts, and would put it in place of one opened before
READY = "window.app?.extensionManager?.workflow?.activeWorkflow && (app.rootGraph ?? app.graph).nodes.length"
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasInfo": False}


@contextmanager
def opened(server: Server, *, width: int = 1600, height: int = 1200, **settings: Any) -> Iterator[Page]:
    """The page once it has started; settings by their id, with __ for a dot."""
    chosen = {name.replace("__", "."): value for name, value in settings.items()}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OFFLINE)
        context = browser.new_context(viewport={"width": width, "height": height})
        context.set_default_timeout(60_000)
        context.request.post(f"{server.address}/settings", data={**SETTINGS, **chosen})
        page = context.new_page()
        page.goto(server.address)
        page.wait_for_function(READY)
        yield page
        browser.close()


def command(page: Page, name: str) -> None:
    page.evaluate("name => app.extensionManager.command.execute(name)", name)
