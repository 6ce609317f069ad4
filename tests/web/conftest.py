"""What the browser tests stand on: one ComfyUI server, one Chromium, and a tab in each of the ways to draw nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dev
from comfyui_server import Server
from tests.web.browser import CHROMIUM, OFFLINE, Tab

PICTURES = Path(__file__).with_name("pictures")
"""Of every browser test, to look at; not in the repository."""


@pytest.fixture(scope="module")  # no other Playwright can be begun while this one is
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
    if CHROMIUM is None:
        pytest.skip("needs chromium on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OFFLINE)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_server(browser: Any) -> Iterator[Server]:
    """The server whose page is opened; asked for after the browser, so that none starts where there is no browser."""
    comfyui = dev.comfyui_roots()[0]
    if not comfyui.exists():
        pytest.skip(f"no ComfyUI in {comfyui}; `python dev.py test` fetches it")
    with Server(comfyui) as server:
        yield server


@pytest.fixture(params=[False, True], ids=["canvas", "vue"])
def tab(request: pytest.FixtureRequest, browser: Any, page_server: Server) -> Iterator[Tab]:
    pictures = PICTURES / request.node.name
    pictures.mkdir(parents=True, exist_ok=True)
    settings = {"Comfy.VueNodes.Enabled": request.param, "Comfy.ColorPalette": "dark"}
    tab = Tab(browser, page_server, settings, pictures)
    yield tab
    tab.picture("at the end")
    tab.context.close()
    assert not tab.errors
