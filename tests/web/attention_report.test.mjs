import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { load } from "./loading.mjs";
import { output, report, run, twoRuns } from "./samples.mjs";

const extensions = [];
globalThis.app = { registerExtension: (extension) => extensions.push(extension) };
globalThis.api = {};
await load("attention_report.js");
const [extension] = extensions;
/** The server answers with what is in app.answers, by the uid of the run. */
const fetchesRuns = (asked) => {
  api.fetchApi = async (path) => {
    asked.push(path);
    const answer = app.answers[path.split("/").at(-1)];
    return { ok: Boolean(answer), status: answer ? 200 : 404, json: async () => answer };
  };
};
const named = (name) => output(report([], { notes: [name] }), `## ${name}`);

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
    return this.body.textContent;
  }

  get body() {
    return this.widget.element.classed("sagescope-report-body")[0];
  }

  get runs() {
    return this.widget.element.all("select")[0];
  }

  button(text) {
    return this.widget.element.all("button").find((button) => button.textContent === text);
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
  assert.deepEqual(
    node.widget.element.all("button").map(({ disabled }) => disabled),
    [true, true],
  );
  assert.equal(node.runs.hidden, true);
});

test("an execution shows its report and what stood there before still runs", () => {
  const node = created();
  node.onExecuted(named("first"));
  assert.equal(node.shown, "first");
  node.onExecuted(named("second"));
  assert.equal(node.shown, "second");
  assert.equal(node.executed.length, 2);
  assert.deepEqual(
    node.widget.element.all("button").map(({ disabled }) => disabled),
    [false, false],
  );
});

test("outputs without a report leave what is there", () => {
  const node = created();
  node.onExecuted(named("kept"));
  for (const output of [null, undefined, {}, { text: null }, { text: [] }, { text: [null] }, { text: "letters" }]) {
    node.onExecuted(output);
    assert.equal(node.shown, "kept");
  }
});

test("a report that cannot be drawn is shown by its text, and says what to do", () => {
  const node = created();
  for (const [data, advice] of [
    [[{ schema: 99, runs: "elsewhere" }], /format 99.*reload the page/],
    [[{ schema: 0, runs: [] }], /another version.*Queue the workflow again/],
    [[{ runs: [] }], /another version.*Queue the workflow again/],
    [[{ schema: 1, runs: { 0: "not a list" } }], /not complete. Queue the workflow again/],
    [["{ broken"], /cannot be read. Queue the workflow again/],
    [[[]], /cannot be read/],
    [[null], /cannot be read/],
    [undefined, /cannot be read/],
  ]) {
    node.onExecuted({ text: ["## Title\n**as text**"], sagescope_report: data, more: [1] });
    const [problem] = node.body.classed("problem");
    assert.match(problem.textContent, advice);
    assert.equal(node.shown, `${problem.textContent}Titleas text`);
  }
});

test("after a report that cannot be drawn the next one is", () => {
  const node = created();
  node.onExecuted({ text: ["old"], sagescope_report: [{ schema: 99 }] });
  node.onExecuted(twoRuns());
  assert.equal(node.body.classed("problem").length, 0);
  assert.equal(node.body.all("h2")[0].textContent, "Flux");
});

test("a report without data of its text is drawn from its data alone", () => {
  const node = created();
  node.onExecuted({ sagescope_report: twoRuns().sagescope_report });
  assert.equal(node.body.all("h2")[0].textContent, "Flux");
  assert.equal(node.button("Copy report").disabled, true);
  assert.equal(node.button("Save JSON").disabled, false);
});

test("the last run of the workflow is drawn, and another can be chosen", () => {
  const node = created();
  node.onExecuted(output(report([run({ id: 1, model: "First" }), run({ id: 2, model: "Second" })], { shown: [1, 2] })));
  assert.match(node.body.all("blockquote")[0].textContent, /The workflow made 2 runs/);
  assert.equal(node.body.all("h2")[0].textContent, "Second");
  assert.deepEqual(
    node.runs.all("option").map(({ selected, value }) => [value, selected]),
    [
      ["run-2", true],
      ["run-1", false],
    ],
  );
  node.runs.value = "run-1";
  node.runs.listeners.change();
  assert.equal(node.body.all("h2")[0].textContent, "First");
});

test("runs of earlier reports are remembered, as other settings start the report anew", () => {
  const node = created();
  const [before, after] = [
    run({ id: 1, uid: "a", seconds: 30 }),
    run({ id: 1, uid: "b", started: 1796089999, seconds: 20 }),
  ];
  node.onExecuted(output(report([before])));
  assert.equal(node.body.classed("differences").length, 0);
  node.onExecuted(output(report([after], { policy: { kernel: "sdpa: cudnn", tolerance: null } })));
  const [numbers, settings] = node.body.classed("differences");
  assert.match(numbers.textContent, /seconds per step1.00 s1.50 s\u22120.50 s \(\u221233%\)/);
  assert.match(settings.textContent, /kernelsdpa: cudnnauto/);
  for (let id = 2; id < 60; id++) node.onExecuted(output(report([run({ id })])));
  assert.equal(node.runs.all("option").length, 32);
});

test("a run is compared with the finished one of its model before it, or with a chosen one", () => {
  const node = created();
  const runs = [
    run({ id: 1, seconds: 10 }),
    run({ id: 2, seconds: 20 }),
    run({ id: 3, status: "interrupted" }),
    run({ id: 4, model: "Other" }),
    run({ id: 5, seconds: 40 }),
  ];
  node.onExecuted(output(report(runs)));
  const choice = node.body.all("select")[0];
  assert.deepEqual(
    choice.all("option").map(({ value, selected }) => [value, selected]),
    [
      ["run-2", true],
      ["run-1", false],
    ],
  );
  const perStep = () =>
    node.body
      .classed("differences")[0]
      .all("tr")[1]
      .children.map(({ textContent }) => textContent);
  assert.deepEqual(perStep(), ["seconds per step", "2.00 s", "1.00 s", "+1.00 s (+100%)"]);
  choice.value = "run-1";
  choice.listeners.change();
  assert.deepEqual(perStep(), ["seconds per step", "2.00 s", "0.50 s", "+1.50 s (+300%)"]);
});

test("the JSON is saved as it came", async (context) => {
  const node = created();
  node.onExecuted(twoRuns());
  const saved = [];
  context.mock.method(URL, "createObjectURL", (blob) => saved.push(blob) && "blob:report");
  const clicked = [];
  context.mock.method(document, "createElement", (tag) => ({
    tag,
    append() {},
    click() {
      clicked.push(this);
    },
  }));
  node.button("Save JSON").listeners.click();
  assert.deepEqual([clicked[0].href, clicked[0].download], ["blob:report", "attention-report.json"]);
  assert.deepEqual(JSON.parse(await saved[0].text()), twoRuns().sagescope_report[0]);
});

test("restored outputs reach their nodes, also inside a subgraph", () => {
  const [outer, inner, untouched] = [created(), created(), created()];
  const graph = (nodes) => ({ getNodeById: (id) => nodes[id] });
  app.rootGraph = { ...graph({ 7: outer, 8: untouched }), subgraphs: new Map([["uuid", graph({ 7: inner })]]) };
  extension.onNodeOutputsUpdated({ 7: named("outer"), "uuid:7": named("inner"), 8: null, 9: named("gone") });
  assert.deepEqual([outer.shown, inner.shown], ["outer", "inner"]);
  assert.match(untouched.shown, /^Queue/);
});

test("restored outputs of other packs, of no graph and of nothing do no harm", () => {
  extension.onNodeOutputsUpdated(null);
  extension.onNodeOutputsUpdated({ 7: named("before the graph") });
  app.rootGraph = { getNodeById: () => ({ type: "KSampler" }) };
  extension.onNodeOutputsUpdated({ 7: named("another node"), "gone:7": named("no such subgraph") });
});

/** What goes into the clipboard. */
function clipboard() {
  const copied = [];
  Object.defineProperty(globalThis, "navigator", {
    value: { clipboard: { writeText: async (text) => copied.push(text) } },
    configurable: true,
  });
  return copied;
}

/** Opens the report as text, below what is drawn. */
async function asText(node) {
  const details = node.body.children.at(-1);
  details.open = true;
  details.listeners.toggle();
  await new Promise(setImmediate);
  return details.children[1].textContent;
}

test("what is copied, and shown as text, is the run that is drawn", async (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const copied = clipboard();
  const asked = [];
  app.answers = { "run-1": { text: "## Run 1, from the server" } };
  fetchesRuns(asked);
  const node = created();
  const copy = async (key, said) => {
    node.runs.value = key;
    node.runs.listeners.change();
    const button = node.widget.element.all("button")[0];
    await button.listeners.click();
    assert.equal(button.textContent, said);
    context.mock.timers.tick(2000);
    return copied.at(-1);
  };
  const runs = [1, 2, 3].map((id) => run({ id }));
  // the node saw run 2 and run 3 in an output, and run 0 and run 1 only in the list of runs
  node.onExecuted(output(report([run({ id: 0 }), ...runs.slice(0, 2)]), "## Run 2"));
  node.onExecuted(output(report(runs), "## Run 3"));
  assert.equal(await copy("run-3", "Copied"), "## Run 3");
  assert.equal(await asText(node), "Run 3");
  assert.equal(await copy("run-2", "Copied"), "## Run 2");
  assert.equal(await asText(node), "Run 2");
  assert.deepEqual(asked, []);
  assert.equal(await copy("run-1", "Copied"), "## Run 1, from the server");
  assert.equal(await asText(node), "Run 1, from the server");
  assert.equal(await copy("run-1", "Copied"), "## Run 1, from the server");
  assert.deepEqual(asked, ["/sagescope/runs/run-1"]);
  const before = copied.length;
  await copy("run-0", "The server has no report of this run any more");
  assert.match(await asText(node), /^The server has no report/);
  assert.equal(copied.length, before);
});

test("the text of a run that was still going is not that of the finished one", async (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const copied = clipboard();
  app.answers = { "run-1": { text: "## finished" } };
  fetchesRuns([]);
  const node = created();
  node.onExecuted(output(report([run({ id: 1, status: "running" })]), "## running"));
  node.onExecuted(output(report([run({ id: 1 }), run({ id: 2 })]), "## Run 2"));
  node.runs.value = "run-1";
  node.runs.listeners.change();
  await node.button("Copy report").listeners.click();
  assert.deepEqual(copied, ["## finished"]);
});

test("the button copies the Markdown and says so", async (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const copied = clipboard();
  const node = created();
  node.onExecuted(named("copied"));
  const button = node.button("Copy report");
  await button.listeners.click();
  assert.deepEqual(copied, ["## copied"]);
  await new Promise(setImmediate);
  assert.equal(button.textContent, "Copied");
  context.mock.timers.tick(2000);
  assert.equal(button.textContent, "Copy report");
});
