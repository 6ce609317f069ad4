"""Writes example_workflows/ from example_graphs.py, drawn and saved by ComfyUI's own page in a browser.

Run it with ``PYTHONPATH=.:tests/comfyui``, playwright and chromium. The thumbnails are pictures of the graphs.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

import dev
from comfyui_page import command, opened
from comfyui_server import Server
from example_graphs import EXAMPLES, GAP, Example

FOLDER = Path(__file__).resolve().parents[2] / "example_workflows"
THUMBNAIL = (400, 300)
SHOWN = ("Attention", "Sampling")
"""How the titles of the columns in the thumbnail start."""

BUILD = """
([columns, gap, id]) => {
  const graph = app.rootGraph
  graph.clear()
  graph.id = id
  const made = {}
  let x = 0
  for (const column of columns) {
    const top = 0
    let y = top
    for (const [key, spec] of Object.entries(column.nodes)) {
      const node = LiteGraph.createNode(spec.type)
      if (!node) throw Error(`no node type ${spec.type}`)
      graph.add(node)
      made[key] = node
      if (spec.title) node.title = spec.title
      for (const [name, value] of Object.entries(spec.widgets)) {
        const widget = name ? node.widgets.find(w => w.name === name) : node.widgets[0]
        if (!widget) throw Error(`${spec.type} has no widget ${name}`)
        widget.value = value
      }
      node.pos = [x, y]
      node.setSize([column.width, spec.size[1] || node.computeSize()[1]])
      y += node.size[1] + gap
    }
    if (column.title) {
      const group = new LiteGraph.LGraphGroup(column.title)
      group.pos = [x - 20, top - 90]
      group.size = [column.width + 40, y - top + 70]
      group.color = column.color
      group.font_size = 40
      graph.add(group)
    }
    x += column.width + gap
  }
  for (const column of columns) for (const [key, spec] of Object.entries(column.nodes))
    for (const [name, [source, slot]] of Object.entries(spec.links)) {
      const input = made[key].findInputSlot(name)
      if (input < 0 || !made[source].connect(slot, made[key], input))
        throw Error(`cannot connect ${source} ${slot} to ${key} ${name}`)
    }
  return Object.fromEntries(Object.entries(made).map(([key, node]) => [key, [...node.pos, ...node.size]]))
}
"""
FRAME = """
([left, top, right, bottom]) => {
  const ds = app.canvas.ds
  const { width, height } = app.canvas.canvas.getBoundingClientRect()
  ds.scale = Math.min(width / (right - left), height / (bottom - top))
  ds.offset = [width / ds.scale / 2 - (left + right) / 2, height / ds.scale / 2 - (top + bottom) / 2]
  app.canvas.setDirty(true, true)
}
"""
SAVE = "async () => JSON.stringify((await app.graphToPrompt()).workflow)"
ONLY_THE_GRAPH = "#graph-canvas-container > .z-999 *, .no-drag, .p-toast { visibility: hidden !important }"


def make(page: Page, example: Example) -> None:
    columns = [dataclasses.asdict(column) for column in example.columns]
    boxes = page.evaluate(BUILD, [columns, GAP, str(uuid.uuid5(uuid.NAMESPACE_URL, example.name))])
    shown = [column for column in example.columns if column.title.startswith(SHOWN)]
    _frame(page, [boxes[key] for column in shown for key in column.nodes])
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    thumbnail = picture.resize(THUMBNAIL, Image.Resampling.LANCZOS)
    thumbnail.save(FOLDER / f"{example.name}.jpg", quality=85, optimize=True)
    _frame(page, list(boxes.values()))
    workflow = json.loads(page.evaluate(SAVE))
    text = json.dumps(workflow, ensure_ascii=False, indent=1)
    (FOLDER / f"{example.name}.json").write_text(text + "\n", encoding="utf-8")


def _frame(page: Page, boxes: Sequence[Sequence[float]]) -> None:
    left, top = min(box[0] for box in boxes), min(box[1] for box in boxes)
    right, bottom = max(box[0] + box[2] for box in boxes), max(box[1] + box[3] for box in boxes)
    page.evaluate(FRAME, [left - 30, top - 100, right + 30, bottom + 60])
    page.wait_for_timeout(1500)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with Server(dev.comfyui_roots()[0]) as server, opened(server, Comfy__VueNodes__Enabled=False) as page:
        command(page, "Workspace.ToggleFocusMode")
        page.add_style_tag(content=ONLY_THE_GRAPH)
        for example in EXAMPLES:
            make(page, example())


if __name__ == "__main__":
    main()
