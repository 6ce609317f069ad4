// Reads the output of a report node. Whatever comes in, what goes out has every field that is drawn, with its type:
// a number that is absent, null or not finite is null, a text that is absent is "", a list that is absent is empty.

/** The version of the report's JSON that this page can draw. */
const SCHEMA = 1;

/**
 * What a node's output says: its Markdown, and the report or why it cannot be drawn.
 * Null for an output without either, as for a node whose output ComfyUI did not keep.
 */
export function readOutput(output) {
  const text = list(output?.text).filter(isText).join("\n");
  const raw = list(output?.sagescope_report)[0];
  if (!text && raw === undefined) return null;
  const problem = problemOf(raw);
  return { text, raw, problem, report: problem ? null : readReport(raw) };
}

function problemOf(raw) {
  if (!isObject(raw)) return "The data of this report cannot be read. Queue the workflow again to make a new one.";
  if (raw.schema > SCHEMA) {
    return `This report has format ${raw.schema}, and this page draws format ${SCHEMA}: reload the page.`;
  }
  if (raw.schema !== SCHEMA) {
    return "This report was made by another version of the pack. Queue the workflow again to make a new one.";
  }
  if (!Array.isArray(raw.runs)) return "The data of this report is not complete. Queue the workflow again.";
  return null;
}

function readReport(raw) {
  const policy = isObject(raw.policy) ? raw.policy : {};
  // null is what "off" is in the JSON; a number that is absent is not known
  const tolerance = policy.tolerance === null ? "off" : number(policy.tolerance);
  const runs = objects(raw.runs).map((run) => ({ ...readRun(run), policy, tolerance }));
  const shown = list(raw.shown);
  return {
    notes: list(raw.notes).filter(isText),
    runs,
    shown: runs.filter((run) => shown.includes(run.id)),
    gpu: gpuOf(raw.environment),
  };
}

function gpuOf(environment) {
  const devices = objects(environment?.devices).map(({ name, arch }) => `${string(name) || "GPU"} (${string(arch)})`);
  return isObject(environment) ? [...new Set(devices)].join(", ") || "no GPU" : "";
}

function readRun(raw) {
  return {
    key: string(raw.uid) || [raw.prompt_id, raw.node_id, raw.id, raw.started].join(" "),
    id: number(raw.id),
    model: string(raw.model),
    node: string(raw.node_id),
    started: number(raw.started),
    seconds: number(raw.seconds),
    status: string(raw.status),
    steps: number(raw.steps),
    totalSteps: number(raw.total_steps),
    forwards: number(raw.forwards) ?? 0,
    calls: number(raw.calls) ?? 0,
    kernels: objects(raw.calls_by_kernel).map(readKernel),
    refusals: objects(raw.refusals).map(readRefusal),
    shapes: readShapes(raw.shapes),
    sites: objects(raw.sites).map(readSite),
    rescued: number(raw.rescued_forwards) ?? 0,
    comparisonCalls: number(raw.comparison_calls) ?? 0,
    comparisons: objects(raw.comparisons)
      .map(readComparison)
      .filter(({ ratio }) => ratio !== null),
    events: objects(raw.events).map(({ step, text }) => ({ step: number(step), text: string(text) })),
    replacedBy: string(raw.override_replaced_by),
    vramMib: number(raw.vram_peak_mib),
  };
}

function readKernel(raw) {
  return { name: string(raw.kernel) || "?", calls: number(raw.calls) ?? 0, share: number(raw.share) };
}

function readRefusal(raw) {
  return {
    kernel: string(raw.kernel) || "any kernel",
    code: string(raw.code),
    detail: string(raw.detail) || string(raw.code),
    advice: string(raw.advice),
    calls: number(raw.calls) ?? 0,
  };
}

/** One entry per shape, with all kernels that served it; the JSON has one per shape and kernel. */
function readShapes(raw) {
  const shapes = new Map();
  for (const entry of objects(raw)) {
    const text = string(entry.spec?.text) || "not known";
    const shape = shapes.get(text) ?? { text, calls: 0, served: new Map(), times: [] };
    shapes.set(text, shape);
    const { name, calls } = readKernel(entry);
    shape.calls += calls;
    shape.served.set(name, (shape.served.get(name) ?? 0) + calls);
    if (shape.times.length) continue;
    shape.times = Object.entries(isObject(entry.times) ? entry.times : {})
      .map(([kernel, time]) => ({ kernel, device: number(time?.device_ms), host: number(time?.host_ms) }))
      .sort((one, other) => (one.device ?? Infinity) - (other.device ?? Infinity));
  }
  return [...shapes.values()];
}

function readSite(raw) {
  const accuracy = isObject(raw.accuracy) ? raw.accuracy : null;
  const block = string(raw.block);
  const place = number(raw.block_number);
  return {
    site: number(raw.site),
    block: block && place !== null ? `${place}: ${block}` : block,
    blockNumber: block ? place : null,
    kernel: string(raw.kernel) || "?",
    smoothed: typeof raw.smooth_k === "boolean" ? raw.smooth_k : null,
    checked: accuracy !== null,
    /** Of the worst head; null where it was checked and found not finite. */
    error: number(accuracy?.worst_head_relative_l2),
    errorStep: number(accuracy?.step),
    shape: string(raw.spec),
    calls: number(raw.calls) ?? 0,
    reasons: list(raw.reasons).filter(isText),
  };
}

function readComparison(raw) {
  const native = number(raw.native_ms);
  const plan = number(raw.plan_ms);
  return {
    native,
    plan,
    ratio: native > 0 && plan > 0 ? native / plan : null,
    relativeL2: number(raw.relative_l2),
    psnr: number(raw.psnr),
    faster: raw.faster === true,
    remembered: raw.remembered === true,
    noise: number(raw.noise),
    hostBound: raw.host_bound === true,
  };
}

const isText = (value) => typeof value === "string";
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const list = (value) => (Array.isArray(value) ? value : []);
const objects = (value) => list(value).filter(isObject);
const number = (value) => (Number.isFinite(value) ? value : null);
const string = (value) => (isText(value) || Number.isFinite(value) ? String(value) : "");
