import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { load } from "./loading.mjs";

let answers, asked, said, copied, sure, chosen;
const extensions = [];
globalThis.app = { registerExtension: (extension) => extensions.push(extension) };
globalThis.api = {
  fetchApi: async (path, options) => {
    asked.push([path, options]);
    const answer = answers[path];
    return { ok: answer !== undefined, status: 404, json: async () => answer };
  },
};
Object.defineProperty(globalThis, "navigator", {
  value: { clipboard: { writeText: async (text) => copied.push(text) } },
  configurable: true,
});
globalThis.window = { confirm: () => sure };
await load("settings.js");
const [extension] = extensions;
const command = (id) => extension.commands.find((command) => command.id === id).function;
const setting = (id) => extension.settings.find((setting) => setting.id === id);
const COPY = "SageScope.CopyReport";
const FORGET = "SageScope.ForgetMeasurements";

beforeEach(() => {
  [asked, said, copied] = [[], [], []];
  [sure, chosen] = [true, "strict (0.05)"];
  answers = {
    "/sagescope/runs": { version: "1.2.3", homepage: "home", runs: [{ uid: "newest" }, { uid: "older" }] },
    "/sagescope/runs/newest": { text: "## Report" },
    "/sagescope/measurements/forget": { on_disk: true },
    "/sagescope/log_level": {},
  };
  app.configuringGraph = false;
  app.extensionManager = {
    toast: { add: ({ severity, detail }) => said.push([severity, detail]) },
    dialog: { confirm: async () => sure },
    setting: { get: () => chosen },
  };
});

const posted = () => asked.filter(([, options]) => options?.method === "POST");

test("the command copies the report of the last run", async () => {
  await command(COPY)();
  assert.deepEqual(copied, ["## Report"]);
  assert.equal(said[0][0], "success");
});

test("without a run there is nothing to copy, and a server that does not answer is told", async () => {
  answers["/sagescope/runs"].runs = [];
  await command(COPY)();
  delete answers["/sagescope/runs"];
  await command(COPY)();
  assert.deepEqual(copied, []);
  assert.deepEqual(said.map(([severity]) => severity), ["warn", "error"]);
});

test("forgetting asks first, and asks the server in the way that it takes from a page", async () => {
  for (const answer of [false, null, undefined]) {
    sure = answer;
    await command(FORGET)();
  }
  assert.deepEqual(asked, []);
  sure = true;
  await command(FORGET)();
  const [[path, options]] = posted();
  assert.equal(path, "/sagescope/measurements/forget");
  assert.deepEqual(options, { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" });
  assert.equal(said[0][0], "success");
  answers["/sagescope/measurements/forget"].on_disk = false;
  await command(FORGET)();
  assert.equal(said[1][0], "warn");
});

test("the button in the settings does the same", async () => {
  const button = setting("SageScope.Forget").type();
  assert.equal(button.textContent, "Forget measurements");
  await button.listeners.click();
  assert.equal(posted().length, 1);
});

test("the level of the log is sent when it is changed, and on load when it was", async () => {
  const { onChange, options, defaultValue } = setting("SageScope.LogLevel");
  assert.ok(options.includes(defaultValue));
  await onChange(defaultValue, undefined);
  assert.deepEqual(posted(), []);
  await onChange("warning", undefined);
  await onChange(defaultValue, "warning");
  assert.deepEqual(posted().map(([, { body }]) => body), ['{"level":"warning"}', '{"level":null}']);
});

test("a page without the newer parts of ComfyUI still works", async () => {
  app.extensionManager = undefined;
  await command(FORGET)();
  assert.equal(posted().length, 1);
  await command(COPY)();
  assert.deepEqual(copied, ["## Report"]);
  const node = created();
  assert.equal(node.widgets[1].value, "normal (0.10)");
});

function created(comfyClass = "ApplySageAttention") {
  class Node {
    static comfyClass = comfyClass;
    widgets = [{ name: "kernel", value: "auto" }, { name: "tolerance", value: "normal (0.10)" }];
  }
  const node = new Node();
  extension.nodeCreated(node);
  return node;
}

test("a new node has the tolerance of the settings, one that is loaded keeps its own", () => {
  assert.deepEqual(created().widgets.map(({ value }) => value), ["auto", "strict (0.05)"]);
  assert.equal(created("KSampler").widgets[1].value, "normal (0.10)");
  chosen = "0.3";
  assert.equal(created().widgets[1].value, "normal (0.10)");
  chosen = "off";
  app.configuringGraph = true;
  assert.equal(created().widgets[1].value, "normal (0.10)");
});

test("the badge has the version that the server runs", async (context) => {
  const [badge] = extension.aboutPageBadges;
  assert.equal(badge.label, "SageScope");
  await extension.setup();
  assert.deepEqual([badge.label, badge.url], ["SageScope v1.2.3", "home"]);
  const warned = context.mock.method(console, "warn", () => {});
  answers = {};
  await extension.setup();
  assert.equal(warned.mock.callCount(), 1);
});

test("ids are in one category and used once", () => {
  assert.deepEqual(new Set(extension.settings.map(({ category }) => category[0])), new Set(["SageScope"]));
  assert.deepEqual(extension.menuCommands[0].commands, extension.commands.map(({ id }) => id));
});
