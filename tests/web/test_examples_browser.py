"""An example workflow as a person finds it: in the list of templates of ComfyUI's page."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import dev
from comfyui_server import ROOT, Server

pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")

import comfyui_page

pytestmark = pytest.mark.skipif(comfyui_page.CHROMIUM is None, reason="needs chromium on the PATH")
PACK = "ComfyUI-SageScope"
NAME = "sageattention_wan2_2_t2v"
ACTIVE = "() => app.extensionManager.workflow.activeWorkflow.filename"
THUMBNAIL = f"[data-testid=template-workflow-{NAME}] img"
SAVED = """
() => app.graph.serialize().nodes.map(node => [
  node.id, node.type, node.widgets_values ?? [], (node.inputs ?? []).filter(i => i.link !== null).map(i => i.name),
])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    comfyui = dev.comfyui_roots()[0]
    if not comfyui.exists():
        pytest.skip(f"no ComfyUI in {comfyui}; `python dev.py test` fetches it")
    with Server(comfyui) as server:
        yield server


@pytest.mark.parametrize("vue", [False, True], ids=["canvas", "vue"])
def test_example_opens_from_the_list_of_templates_as_it_was_saved(server: Server, vue: bool) -> None:
    with comfyui_page.opened(server, Comfy__VueNodes__Enabled=vue) as page:
        comfyui_page.command(page, "Comfy.BrowseTemplates")
        page.get_by_text(PACK).first.click()
        picture = page.locator(THUMBNAIL).first
        picture.wait_for()
        assert picture.evaluate("async image => { await image.decode(); return image.naturalWidth }") == 400
        picture.click()
        page.wait_for_function(f"({ACTIVE})() === {json.dumps(NAME)}")
        shown = page.evaluate(SAVED)
    workflow = json.loads((ROOT / "example_workflows" / f"{NAME}.json").read_text(encoding="utf-8"))
    saved = [
        [node["id"], node["type"], node.get("widgets_values", []), [i["name"] for i in node["inputs"] if i["link"]]]
        for node in workflow["nodes"]
    ]
    assert sorted(shown) == sorted(saved)
