import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { load } from "./loading.mjs";

const extensions = [];
globalThis.app = { registerExtension: (extension) => extensions.push(extension) };
await load("attention_report.js");
const [extension] = extensions;
const report = (name) => ({ text: [`## ${name}`], sagescope_report: [{ schema: 1 }] });

class Node {
  static comfyClass = "AttentionBackendReport";
  size = [200, 100];
  executed = [];

  addDOMWidget(name, type, element, options) {
    this.widget = { name, type, element, options };
    return this.widget;
  }

  setSize(size) {
    this.size = size;
  }

  onExecuted(output) {
    this.executed.push(output);
  }

  get shown() {
    return this.widget.element.children[1].textContent;
  }

  get button() {
    return this.widget.element.children[0];
  }
}

function created(node = new Node()) {
  extension.nodeCreated(node);
  return node;
}

beforeEach(() => {
  app.rootGraph = undefined;
});

test("one extension, with a style sheet beside it", () => {
  assert.equal(extensions.length, 1);
  extension.setup();
  assert.match(document.head.children[0].href, /^file:.*\/web\/attention_report\.css$/);
});

test("other nodes are left alone", () => {
  class Other extends Node {
    static comfyClass = "KSampler";
  }
  assert.equal(created(new Other()).widget, undefined);
});

test("the widget is in neither the prompt nor the workflow", () => {
  const { widget } = created();
  assert.equal(widget.serialize, false);
  assert.equal(widget.options.serialize, false);
});

test("a new node says what to do and has nothing to copy", () => {
  const node = created();
  assert.match(node.shown, /^Queue the workflow/);
  assert.equal(node.button.disabled, true);
});

test("an execution shows its report and what stood there before still runs", () => {
  const node = created();
  node.onExecuted(report("first"));
  assert.equal(node.shown, "first");
  node.onExecuted(report("second"));
  assert.equal(node.shown, "second");
  assert.equal(node.executed.length, 2);
  assert.equal(node.button.disabled, false);
});

test("outputs without a report leave what is there", () => {
  const node = created();
  node.onExecuted(report("kept"));
  for (const output of [null, undefined, {}, { text: null }, { text: [] }, { text: [null] }, { text: "letters" }]) {
    node.onExecuted(output);
    assert.equal(node.shown, "kept");
  }
});

test("reports of other schemas are shown by their text", () => {
  const node = created();
  node.onExecuted({ text: ["## old"] });
  assert.equal(node.shown, "old");
  node.onExecuted({ text: ["## new"], sagescope_report: [{ schema: 99, runs: "elsewhere" }], more: [1] });
  assert.equal(node.shown, "new");
});

test("restored outputs reach their nodes, also inside a subgraph", () => {
  const [outer, inner, untouched] = [created(), created(), created()];
  const graph = (nodes) => ({ getNodeById: (id) => nodes[id] });
  app.rootGraph = { ...graph({ 7: outer, 8: untouched }), subgraphs: new Map([["uuid", graph({ 7: inner })]]) };
  extension.onNodeOutputsUpdated({ 7: report("outer"), "uuid:7": report("inner"), 8: null, 9: report("gone") });
  assert.deepEqual([outer.shown, inner.shown], ["outer", "inner"]);
  assert.match(untouched.shown, /^Queue/);
});

test("restored outputs of other packs, of no graph and of nothing do no harm", () => {
  extension.onNodeOutputsUpdated(null);
  extension.onNodeOutputsUpdated({ 7: report("before the graph") });
  app.rootGraph = { getNodeById: () => ({ type: "KSampler" }) };
  extension.onNodeOutputsUpdated({ 7: report("another node"), "gone:7": report("no such subgraph") });
});

test("the button copies the Markdown and says so", async (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const copied = [];
  Object.defineProperty(globalThis, "navigator", {
    value: { clipboard: { writeText: async (text) => copied.push(text) } },
    configurable: true,
  });
  const node = created();
  node.onExecuted(report("copied"));
  await node.button.listeners.click();
  assert.deepEqual(copied, ["## copied"]);
  await new Promise(setImmediate);
  assert.equal(node.button.textContent, "Copied");
  context.mock.timers.tick(2000);
  assert.equal(node.button.textContent, "Copy report");
});
