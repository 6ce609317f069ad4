"""What a person sees whose ComfyUI is not in English: names on the nodes, and the help page with its picture."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import dev
from comfyui_server import ROOT, Server

pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")

import comfyui_page

pytestmark = pytest.mark.skipif(comfyui_page.CHROMIUM is None, reason="needs chromium on the PATH")
PICTURES = {"ApplySageAttention": "apply_node.png", "AttentionBackendReport": "report_node.png"}
ADD = """
type => {
  const graph = app.rootGraph
  graph.clear()
  const node = LiteGraph.createNode(type)
  graph.add(node)
  node.pos = [200, 200]
  app.canvas.ds.scale = 1
  app.canvas.ds.offset = [0, 0]
  app.canvas.selectNode(node)
  return {
    title: node.title,
    inputs: node.inputs.map(input => [input.name, input.label ?? input.localized_name]),
    values: node.widgets.filter(widget => widget.serialize !== false).map(widget => widget.value),
  }
}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    comfyui = dev.comfyui_roots()[0]
    if not comfyui.exists():
        pytest.skip(f"no ComfyUI in {comfyui}; `python dev.py test` fetches it")
    with Server(comfyui) as server:
        yield server


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_nodes_and_their_help_are_in_the_language_of_the_page(server: Server, language: str) -> None:
    texts = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    with comfyui_page.opened(server, Comfy__VueNodes__Enabled=False, Comfy__Locale=language) as page:
        for type_, expected in texts.items():
            shown = page.evaluate(ADD, type_)
            assert shown["title"] == expected["display_name"]
            assert dict(shown["inputs"]) == {name: text["name"] for name, text in expected["inputs"].items()}
            page.get_by_test_id("info-button").click()
            picture = page.locator(".node-help-content img")
            picture.and_(page.locator(f'[src*="{PICTURES[type_]}"]')).wait_for()
            assert picture.evaluate("async image => { await image.decode(); return image.naturalWidth }") > 0
            help_page = (ROOT / "web" / "docs" / type_ / f"{language}.md").read_text(encoding="utf-8")
            assert page.locator(".node-help-content h1").inner_text() == help_page.splitlines()[0].removeprefix("# ")


def test_choices_are_the_same_in_every_language(server: Server) -> None:
    values = {}
    for language in ("en", "ja"):
        with comfyui_page.opened(server, Comfy__VueNodes__Enabled=False, Comfy__Locale=language) as page:
            values[language] = page.evaluate(ADD, "ApplySageAttention")["values"]
    assert values["en"] == values["ja"]
    assert "use native" in values["en"]
