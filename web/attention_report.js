// Shows the report on every Attention Backend Report node, in both ways in which ComfyUI draws nodes.

import { app } from "../../scripts/app.js";
import { create, renderMarkdown } from "./markdown.js";

const NODE = "AttentionBackendReport";
// Not one of ComfyUI's own widget types: those are drawn by its own components.
const WIDGET_TYPE = "sagescope_report";
const EMPTY = "Queue the workflow: which kernel served which attention calls, and why, appears here.";
const SIZE = [560, 480];
const MIN_HEIGHT = 300; // the same as in the style sheet, which the Vue nodes go by
const SAID_MS = 2000;

/** The Markdown in a node's output; "" when there is none, as for a node whose output ComfyUI did not keep. */
export function reportText(output) {
  const texts = Array.isArray(output?.text) ? output.text : [];
  return texts.filter((text) => typeof text === "string").join("\n");
}

/** The panel in a node: a button and, below it, the report, which can be scrolled and selected. */
export class ReportPanel {
  #text = "";

  constructor() {
    this.button = create("button", "Copy report");
    this.button.type = "button";
    this.button.disabled = true;
    this.button.addEventListener("click", () => this.#copy());
    this.body = create("div", create("p", EMPTY));
    this.body.className = "sagescope-report-body";
    this.body.tabIndex = 0; // scrolls with the keyboard, and the Vue nodes leave the wheel to what has the focus
    this.body.dataset.captureWheel = "true";
    // ComfyUI would copy the selected nodes in place of the selected text
    this.body.addEventListener("copy", (event) => event.stopPropagation());
    this.element = create("div", this.button, this.body);
    this.element.className = "sagescope-report";
  }

  /** Draws a node's output; one without a report leaves what is there. */
  show(output) {
    const text = reportText(output);
    if (!text || text === this.#text) return;
    this.#text = text;
    this.body.replaceChildren(renderMarkdown(text));
    this.button.disabled = false;
  }

  async #copy() {
    const copied = await copyText(this.#text);
    this.button.textContent = copied ? "Copied" : "Copying was refused";
    setTimeout(() => (this.button.textContent = "Copy report"), SAID_MS);
  }
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyThroughSelection(text);
  }
}

/** For pages that are neither https nor localhost, such as ComfyUI on another machine: they have no clipboard. */
function copyThroughSelection(text) {
  const area = create("textarea", text);
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

/** The node of this output; its locator is "id", or "subgraph:id" inside a subgraph. */
function nodeAt(locator) {
  const root = app.rootGraph ?? app.graph;
  const [id, subgraph] = locator.split(":").reverse();
  return (subgraph ? root?.subgraphs?.get(subgraph) : root)?.getNodeById(id);
}

const panels = new WeakMap();

app.registerExtension({
  name: "SageScope.AttentionReport",

  setup() {
    const link = create("link");
    link.rel = "stylesheet";
    link.href = new URL("./attention_report.css", import.meta.url).href;
    document.head.append(link);
  },

  nodeCreated(node) {
    if (node.constructor.comfyClass !== NODE) return;
    const panel = new ReportPanel();
    panels.set(node, panel);
    // serialize is asked in two places: the first keeps the widget out of the prompt, the second out of the workflow
    const options = { serialize: false, hideInPanel: true, hideOnZoom: false, getMinHeight: () => MIN_HEIGHT };
    node.addDOMWidget("sagescope_report", WIDGET_TYPE, panel.element, options).serialize = false;
    node.setSize([Math.max(node.size[0], SIZE[0]), Math.max(node.size[1], SIZE[1])]);
    const onExecuted = node.onExecuted;
    node.onExecuted = function (output) {
      onExecuted?.call(this, output);
      panel.show(output);
    };
  },

  /** Outputs came from elsewhere than a run in this tab: the history, or a switch of tabs. */
  onNodeOutputsUpdated(outputs) {
    for (const [locator, output] of Object.entries(outputs ?? {})) {
      if (output?.sagescope_report) panels.get(nodeAt(locator))?.show(output);
    }
  },
});
