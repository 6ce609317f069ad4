// Shows a line on every Apply SageAttention node: how its run goes, and afterwards what came of it.
// The text is made by the server; here it only finds its node.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { fetchRuns } from "./server.js";

const NODE = "ApplySageAttention";
// Not one of ComfyUI's own widget types: those are drawn by its own components.
const WIDGET_TYPE = "sagescope_status";
const EMPTY = "Not sampled yet.";
const MARGIN = 4; // between the line and the edge of the node, where the canvas draws nodes
const HEIGHT = 46 + 2 * MARGIN; // three lines, as in the style sheet, which the Vue nodes go by
const MAX_KNOWN = 200;

const lines = new WeakMap();
/** The last status of each node that was told of, by workflow and node: nodes are made anew when tabs are switched. */
const known = new Map();

const root = () => app.rootGraph ?? app.graph;
const keyOf = (status) => `${status.workflow_id} ${status.apply_node_id}`;

/** The node with the id that the server knows it by: "12:5" is node 5 inside the subgraph that node 12 stands for. */
function nodeOf(executionId) {
  let graph = root();
  let node;
  for (const id of String(executionId).split(":")) {
    node = graph?.getNodeById?.(id);
    graph = node?.subgraph;
  }
  return node;
}

function show({ apply_node_id, summary, status }) {
  const line = typeof summary === "string" && lines.get(nodeOf(apply_node_id));
  if (!line) return;
  line.textContent = summary;
  line.title = summary; // a node can be too narrow for all of it
  line.dataset.status = String(status);
}

/** Keeps the status, and shows it when its workflow is the one that is open: ids of nodes mean nothing in another. */
function take(status) {
  if (!status?.workflow_id) return;
  known.delete(keyOf(status)); // so that the one told of longest ago is the first
  known.set(keyOf(status), status);
  if (known.size > MAX_KNOWN) known.delete(known.keys().next().value);
  if (status.workflow_id === root()?.id) show(status);
}

function showKnown() {
  for (const status of known.values()) if (status.workflow_id === root()?.id) show(status);
}

app.registerExtension({
  name: "SageScope.ApplyStatus",

  async setup() {
    const link = document.createElement("link");
    link.rel = "stylesheet";
    link.href = new URL("./apply_status.css", import.meta.url).href;
    document.head.append(link);
    api.addEventListener("sagescope.status", ({ detail }) => take(detail));
    try {
      const { runs } = await fetchRuns();
      // newest first, and what was told meanwhile is newer still
      for (const status of runs) if (!known.has(keyOf(status))) take(status);
    } catch (error) {
      console.warn("SageScope: the runs so far are not known:", error);
    }
  },

  nodeCreated(node) {
    if (node.constructor.comfyClass !== NODE) return;
    const line = document.createElement("div");
    line.className = "sagescope-status";
    line.textContent = EMPTY;
    lines.set(node, line);
    // serialize is asked in two places: the first keeps the widget out of the prompt, the second out of the workflow
    const height = { margin: MARGIN, getMinHeight: () => HEIGHT, getMaxHeight: () => HEIGHT };
    const options = { serialize: false, hideInPanel: true, hideOnZoom: false, ...height };
    node.addDOMWidget("sagescope_status", WIDGET_TYPE, line, options).serialize = false;
  },

  /** A workflow was opened, or its tab again. */
  afterConfigureGraph() {
    showKnown();
  },

  /** Outputs came from elsewhere than a run in this tab, such as the history: the report holds the runs. */
  onNodeOutputsUpdated(outputs) {
    for (const output of Object.values(outputs ?? {})) {
      const report = output?.sagescope_report?.[0];
      if (!Array.isArray(report?.runs) || !Array.isArray(report.shown)) continue;
      for (const run of report.runs) if (report.shown.includes(run?.id) && run.apply_node_id) show(run);
    }
  },
});
