// The panel in a report node: choices and buttons above, the drawn report below, which can be scrolled and selected.

import { copyText } from "./clipboard.js";
import { classed, create, folded, set, table } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { readOutput } from "./report_data.js";
import { drawRun, section } from "./report_view.js";
import { changedSettings, differences, kernelKeys, runName } from "./run_summary.js";
import { fetchRun } from "./server.js";

const EMPTY = "Queue the workflow: which kernel served which attention calls, and why, appears here.";
const GONE = "The server has no report of this run any more";
const SAID_MS = 2000;
const REMEMBERED = 32;

export class ReportPanel {
  #output = null;
  #drawn = "";
  /** The run that is drawn; null where the output is shown by its text. */
  #run = null;
  /** Every run that this node has shown, by key: with other settings, the report starts again without the old ones. */
  #known = new Map();

  constructor() {
    this.choice = set(create("select"), { "aria-label": "Run" });
    this.choice.addEventListener("change", () => this.#draw(this.#known.get(this.choice.value)));
    this.copyButton = button("Copy report", () => this.#copy());
    this.saveButton = button("Save JSON", () => saveJson(this.#output.raw));
    this.body = classed("sagescope-report-body", "div", create("p", EMPTY));
    this.body.tabIndex = 0; // scrolls with the keyboard, and the Vue nodes leave the wheel to what has the focus
    this.body.dataset.captureWheel = "true";
    // ComfyUI would copy the selected nodes in place of the selected text
    this.body.addEventListener("copy", (event) => event.stopPropagation());
    const bar = classed("sagescope-report-bar", "div", this.choice, this.copyButton, this.saveButton);
    this.element = classed("sagescope-report", "div", bar, this.body);
    this.#choose(null);
  }

  /** Draws a node's output; one without a report leaves what is there. */
  show(output) {
    const read = readOutput(output);
    const drawn = JSON.stringify([read?.text, read?.raw]);
    if (!read || drawn === this.#drawn) return;
    this.#output = read;
    this.#drawn = drawn;
    for (const run of read.report?.runs ?? []) {
      const before = this.#known.get(run.key);
      if (read.report.shown.includes(run)) run.text = read.text;
      else if (before && before.status !== "running") run.text = before.text; // it has not changed since
      this.#known.delete(run.key);
      this.#known.set(run.key, run);
    }
    for (const key of [...this.#known.keys()].slice(0, -REMEMBERED)) this.#known.delete(key);
    this.copyButton.disabled = !read.text;
    this.saveButton.disabled = read.raw === undefined;
    this.#draw(read.report?.shown.at(-1) ?? null);
  }

  #draw(run) {
    const { text, report, problem } = this.#output;
    this.#run = run;
    this.#choose(run);
    if (!run) {
      const notes = problem && report === null ? [classed("problem", "p", problem)] : [];
      this.body.replaceChildren(...notes, renderMarkdown(text));
      return;
    }
    const runs = [...this.#known.values()];
    const keys = kernelKeys(runs);
    const notes = report.notes.map((note) => create("blockquote", note));
    if (report.shown.length > 1)
      notes.push(create("blockquote", `The workflow made ${report.shown.length} runs: choose above.`));
    this.body.replaceChildren(
      ...notes,
      ...drawRun(run, keys, report.gpu),
      ...[comparison(run, runs)].filter(Boolean),
      folded("The report as text, with the machine and the settings", () => this.#asText(run)),
    );
  }

  #choose(run) {
    const runs = run ? [...this.#known.values()].reverse() : [];
    this.choice.replaceChildren(...runs.map((one) => option(one, run)));
    this.choice.hidden = runs.length < 2;
  }

  #asText(run) {
    const place = classed("text", "div");
    const fill = (text) => place.replaceChildren(text === null ? create("p", GONE) : renderMarkdown(text));
    if (run.text) fill(run.text);
    else textOf(run).then(fill);
    return place;
  }

  async #copy() {
    const text = this.#run ? await textOf(this.#run) : this.#output.text;
    const said = text === null ? GONE : (await copyText(text)) ? "Copied" : "Copying was refused";
    this.copyButton.textContent = said;
    setTimeout(() => (this.copyButton.textContent = "Copy report"), SAID_MS);
  }
}

/** The report of a run as Markdown: from the output that showed it, else from the server; null where neither has it. */
async function textOf(run) {
  try {
    run.text ||= (await fetchRun(run.key)).text;
  } catch {
    return null;
  }
  return run.text;
}

/** What differs from another finished run of the same model: the one before, until someone chooses another. */
function comparison(run, runs) {
  const others = runs.filter((other) => other !== run && other.model === run.model && other.status === "finished");
  if (!others.length) return null;
  others.sort((one, other) => other.started - one.started);
  const before = others.find((other) => other.started < run.started) ?? others[0];
  const choice = set(create("select", ...others.map((other) => option(other, before))), {
    "aria-label": "Compare with",
  });
  const place = create("div");
  const draw = (other) => {
    const settings = changedSettings(run, other);
    place.replaceChildren(
      table("differences", ["", "this run", "other run", "change"], differences(run, other)),
      ...(settings.length ? [table("differences", ["setting", "this run", "other run"], settings)] : []),
    );
  };
  choice.addEventListener("change", () => draw(others.find(({ key }) => key === choice.value)));
  draw(before);
  return section("Compared with another run", choice, place);
}

function option(run, selected) {
  const element = create("option", runName(run));
  element.value = run.key;
  element.selected = run === selected;
  return element;
}

function button(text, onClick) {
  const element = create("button", text);
  element.type = "button";
  element.disabled = true;
  element.addEventListener("click", onClick);
  return element;
}

function saveJson(report) {
  const link = create("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(report, null, 1)], { type: "application/json" }));
  link.download = "attention-report.json";
  link.click();
  URL.revokeObjectURL(link.href);
}
