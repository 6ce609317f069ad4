import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { load } from "./loading.mjs";

const WORKFLOW = "the-workflow";
const listeners = {};
let answers;
const extensions = [];
globalThis.app = { registerExtension: (extension) => extensions.push(extension) };
globalThis.api = {
  addEventListener: (name, listener) => (listeners[name] = listener),
  fetchApi: async (path) => {
    if (!(path in answers)) throw new Error("no server");
    return { ok: true, json: async () => answers[path] };
  },
};
await load("apply_status.js");
const [extension] = extensions;

class Node {
  static comfyClass = "ApplySageAttention";

  addDOMWidget(name, type, element, options) {
    this.widget = { name, type, element, options };
    return this.widget;
  }

  get line() {
    return this.widget.element.textContent;
  }
}

function created(node = new Node()) {
  extension.nodeCreated(node);
  return node;
}

const graph = (nodes, id = WORKFLOW) => ({ id, getNodeById: (key) => nodes[key] });
const status = (apply_node_id, summary, more = {}) => ({
  ...{ schema: 1, uid: summary, workflow_id: WORKFLOW, apply_node_id, summary, status: "running" },
  ...more,
});
const tell = (...given) => listeners["sagescope.status"]({ detail: status(...given) });

beforeEach(async () => {
  answers = { "/sagescope/runs": { runs: [] } };
  app.rootGraph = undefined;
  document.head.children = [];
  await extension.setup();
});

test("a style sheet beside it", () => {
  assert.match(document.head.children[0].href, /\/apply_status\.css$/);
});

test("other nodes are left alone", () => {
  class Other extends Node {
    static comfyClass = "KSampler";
  }
  assert.equal(created(new Other()).widget, undefined);
});

test("the line is in neither the prompt nor the workflow, and says that nothing ran", () => {
  const node = created();
  assert.equal(node.widget.serialize, false);
  assert.equal(node.widget.options.serialize, false);
  assert.equal(node.line, "Not sampled yet.");
});

test("what the server tells reaches its node, also inside subgraphs", () => {
  const [outer, inner, untouched] = [created(), created(), created()];
  app.rootGraph = graph({ 5: outer, 6: untouched, 12: { subgraph: graph({ 5: inner }, "another") } });
  tell("5", "Step 1 of 4: a serves");
  tell("12:5", "Step 2 of 4: b serves");
  assert.deepEqual([outer.line, inner.line], ["Step 1 of 4: a serves", "Step 2 of 4: b serves"]);
  assert.equal(untouched.line, "Not sampled yet.");
  tell("5", "a served", { status: "finished" });
  assert.deepEqual([outer.line, outer.widget.element.title], ["a served", "a served"]);
  assert.equal(outer.widget.element.dataset.status, "finished");
});

test("markup in it stays text", () => {
  const node = created();
  app.rootGraph = graph({ 5: node });
  tell("5", "<img src=x onerror=alert(1)>");
  assert.deepEqual(node.widget.element.children, ["<img src=x onerror=alert(1)>"]);
});

test("runs of another workflow, and of none, are not shown on a node that has the same id", () => {
  const node = created();
  app.rootGraph = graph({ 5: node });
  tell("5", "elsewhere", { workflow_id: "another" });
  tell("5", "from a script", { workflow_id: null });
  assert.equal(node.line, "Not sampled yet.");
  // and when its tab is opened, it is there
  const there = created();
  app.rootGraph = graph({ 5: there }, "another");
  extension.afterConfigureGraph();
  assert.equal(there.line, "elsewhere");
});

test("what is told of nodes that are not there, or in another way, does no harm", () => {
  const node = created();
  app.rootGraph = graph({ 5: node, 7: { type: "KSampler" } });
  for (const id of ["9", "5:1", "", null, "7"]) tell(id, "gone");
  tell("5", undefined);
  tell("5", 7);
  listeners["sagescope.status"]({ detail: null });
  app.rootGraph = undefined;
  tell("5", "no graph yet", { workflow_id: "loading" });
  extension.afterConfigureGraph();
  assert.equal(node.line, "Not sampled yet.");
});

test("after a reload the last runs come from the server, the newest for each node", async () => {
  const [five, six] = [created(), created()];
  app.rootGraph = graph({ 5: five, 6: six }, "reloaded");
  const told = (...given) => ({ ...status(...given), workflow_id: "reloaded" });
  answers["/sagescope/runs"] = { runs: [told("5", "newest"), told("6", "other"), told("5", "oldest")] };
  await extension.setup();
  assert.deepEqual([five.line, six.line], ["newest", "other"]);
});

test("what was told while the server was asked is newer than its answer", async () => {
  const node = created();
  app.rootGraph = graph({ 5: node }, "busy");
  answers["/sagescope/runs"] = { runs: [status("5", "old", { workflow_id: "busy" })] };
  const ready = extension.setup();
  tell("5", "new", { workflow_id: "busy" });
  await ready;
  assert.equal(node.line, "new");
});

test("a server that does not answer leaves the page working", async (context) => {
  const warned = context.mock.method(console, "warn", () => {});
  answers = {};
  await extension.setup();
  assert.equal(warned.mock.callCount(), 1);
});

test("a report from the history puts the line of its shown runs back", () => {
  const node = created();
  app.rootGraph = graph({ 5: node });
  const run = (id, summary) => ({ id, summary, apply_node_id: "5", status: "finished" });
  const report = { shown: [2], runs: [run(1, "first"), run(2, "second")] };
  extension.onNodeOutputsUpdated({ 8: { sagescope_report: [report] }, 9: null });
  assert.equal(node.line, "second");
  for (const broken of [null, {}, { runs: 3, shown: [2] }, { runs: [run(2, "x")] }, { runs: [null, {}], shown: [2] }]) {
    extension.onNodeOutputsUpdated({ 8: { sagescope_report: [broken] } });
  }
  extension.onNodeOutputsUpdated(null);
  assert.equal(node.line, "second");
});
