// The pack in ComfyUI's settings, commands and about page.

import { app } from "../../scripts/app.js";
import { copyText } from "./clipboard.js";
import { fetchRun, fetchRuns, post } from "./server.js";

const NODE = "ApplySageAttention";
const COPY = "SageScope.CopyReport";
const FORGET = "SageScope.ForgetMeasurements";
const TOLERANCE = "SageScope.DefaultTolerance";
const TOLERANCES = ["normal (0.10)", "strict (0.05)", "off"]; // the options of the node
const AS_COMFYUI = "as ComfyUI";
const LEVELS = [AS_COMFYUI, "info", "warning", "error"];
const SAID_MS = 5000;

// completed once the server has said which version it runs
const page = new URL("./docs/ApplySageAttention.md", import.meta.url).href;
const badge = { label: "SageScope", url: page, icon: "pi pi-bolt" };

function say(severity, detail) {
  app.extensionManager?.toast?.add({ severity, summary: "SageScope", detail, life: SAID_MS });
}

/** Does something that asks the server, and says so when that fails. */
function attempt(action) {
  return async (...given) => {
    try {
      await action(...given);
    } catch (error) {
      say("error", error.message);
    }
  };
}

const copyReport = attempt(async () => {
  const [last] = (await fetchRuns()).runs;
  if (!last) return say("warn", "Nothing was sampled with Apply SageAttention since ComfyUI started.");
  const copied = await copyText((await fetchRun(last.uid)).text);
  if (copied) say("success", "The report of the last run is in the clipboard.");
  else say("error", "The browser refused to copy.");
});

const forgetMeasurements = attempt(async () => {
  const message = "Forget everything that was measured on this machine? The next runs measure again.";
  const dialog = app.extensionManager?.dialog;
  const sure = dialog?.confirm ? await dialog.confirm({ title: "SageScope", message }) : window.confirm(message);
  if (!sure) return;
  const { on_disk } = await post("/sagescope/measurements/forget");
  if (on_disk) say("success", "What was measured is forgotten.");
  else say("warn", "What was measured is forgotten until ComfyUI ends: the file could not be written.");
});

/** On load, the level that the server has by itself is no change. */
const setLogLevel = attempt(async (level, before) => {
  if (before === undefined && level === AS_COMFYUI) return;
  await post("/sagescope/log_level", { level: level === AS_COMFYUI ? null : level });
});

function forgetButton() {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "sagescope-button";
  button.textContent = "Forget measurements";
  button.addEventListener("click", forgetMeasurements);
  return button;
}

app.registerExtension({
  name: "SageScope.Settings",

  settings: [
    {
      id: TOLERANCE,
      name: "Tolerance of new Apply SageAttention nodes",
      category: ["SageScope", "Nodes", "Tolerance"],
      tooltip: "Nodes that are in a workflow already keep theirs.",
      type: "combo",
      options: TOLERANCES,
      defaultValue: TOLERANCES[0],
    },
    {
      id: "SageScope.LogLevel",
      name: "What SageScope writes into ComfyUI's log",
      category: ["SageScope", "Server", "Log level"],
      tooltip: "info has a line for each run and each new kind of call. Holds for the whole server.",
      type: "combo",
      options: LEVELS,
      defaultValue: AS_COMFYUI,
      onChange: setLogLevel,
    },
    {
      id: "SageScope.Forget",
      name: "What was measured on this machine",
      category: ["SageScope", "Server", "Measurements"],
      tooltip: "Times of kernels and comparisons with native attention. They are measured again when they are needed.",
      type: forgetButton,
      defaultValue: null,
    },
  ],

  commands: [
    { id: COPY, label: "Copy attention report", icon: "pi pi-copy", function: copyReport },
    { id: FORGET, label: "Forget attention measurements", icon: "pi pi-trash", function: forgetMeasurements },
  ],
  menuCommands: [{ path: ["Extensions", "SageScope"], commands: [COPY, FORGET] }],
  aboutPageBadges: [badge],

  async setup() {
    try {
      const { version, homepage } = await fetchRuns();
      Object.assign(badge, { label: `SageScope v${version}`, url: homepage });
    } catch (error) {
      console.warn("SageScope: the version is not known:", error);
    }
  },

  /** A node that someone adds, and not one that comes with a workflow, starts with the tolerance of the settings. */
  nodeCreated(node) {
    if (node.constructor.comfyClass !== NODE || app.configuringGraph) return;
    const widget = node.widgets?.find(({ name }) => name === "tolerance");
    const chosen = app.extensionManager?.setting?.get(TOLERANCE);
    if (widget && TOLERANCES.includes(chosen)) widget.value = chosen;
  },
});
