// Shows the report on every Attention Backend Report node, in both ways in which ComfyUI draws nodes.

import { app } from "../../scripts/app.js";
import { create } from "./dom.js";
import { ReportPanel } from "./report_panel.js";

const NODE = "AttentionBackendReport";
// Not one of ComfyUI's own widget types: those are drawn by its own components.
const WIDGET_TYPE = "sagescope_report";
const SIZE = [600, 680];
const MIN_HEIGHT = 300; // the same as in the style sheet, which the Vue nodes go by

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
