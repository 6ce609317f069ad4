// The parts of a drawn report, from top to bottom. What can be said in a table is one, with bars in its cells.

import { breakable, classed, create, folded, set, table } from "./dom.js";
import { stepAxis } from "./step_axis.js";
import * as show from "./numbers.js";
import { mainComparison, secondsPerStep, sentences, worstSite } from "./run_summary.js";
import { kernelLabel, siteStrip } from "./site_strip.js";

const MANY = 6;

/** All parts of one run but its comparison with another. */
export function drawRun(run, keys, gpu) {
  return [
    headline(run),
    tiles(run, gpu),
    section("Calls by kernel", callsByKernel(run, keys)),
    section("Sites", ...sites(run, keys)),
    section("Why not", ...refusals(run, keys)),
    section("Shapes", ...shapes(run, keys)),
    section("Whole model calls", ...wholeCalls(run)),
    section("What happened", ...stepAxis(run)),
  ].filter(Boolean);
}

/** A part with its title; nothing without content. */
export function section(title, ...content) {
  const parts = content.filter(Boolean);
  return parts.length ? create("section", create("h3", title), ...parts) : null;
}

function headline(run) {
  const steps = run.totalSteps === null ? `${run.steps ?? "?"}` : `${run.steps ?? "?"} of ${run.totalSteps}`;
  const more = run.comparisonCalls ? `, and ${show.count(run.comparisonCalls, "call")} more to compare and plan` : "";
  const facts = `${run.status || "status not known"}, ${steps} steps, ${show.seconds(run.seconds)}${more}`;
  const where = run.node ? `, sampler node ${run.node}` : "";
  return classed(
    "headline",
    "header",
    create("h2", run.model || "Model without a name"),
    classed("aside", "p", `Run ${run.id ?? "?"}${where}: ${facts}`),
    ...sentences(run).map((line) => classed("sentence", "p", ...breakable(line))),
  );
}

function tiles(run, gpu) {
  const comparison = mainComparison(run);
  const worst = worstSite(run);
  const shown = [
    tile("GPU", gpu.replace(/ \([^()]*\)$/, ""), gpu.match(/\(([^()]*)\)$/)?.[1] ?? ""),
    tile("Gain against native", ...gain(comparison)),
    tile("Error of the output", ...outputError(comparison)),
    tile("Worst head's error", ...worstError(worst, run)),
    tile("Per step", show.seconds(secondsPerStep(run)), run.comparisonCalls ? "with what was compared" : ""),
    tile("Peak of VRAM", show.gib(run.vramMib), ""),
  ];
  return classed("tiles", "dl", ...shown.filter(Boolean));
}

function tile(title, value, ...notes) {
  if (!value || value === show.UNKNOWN) return null;
  const lines = notes.filter(Boolean).map((note) => classed("aside", "dd", note));
  return classed("tile", "div", create("dt", title), classed("value", "dd", value), ...lines);
}

function gain(comparison) {
  if (!comparison) return [null];
  const noise = comparison.noise === null ? "" : ` (\u00b1${show.percent(comparison.noise)})`;
  return [
    show.ratio(comparison.ratio),
    `${show.ms(comparison.plan)} per model call, ${show.short(comparison.native)} natively`,
    comparison.faster ? "" : `${comparison.ratio < 1 ? "Slower" : "Not faster by more than noise"}${noise}`,
    comparison.hostBound ? "The host limits this model" : "",
    comparison.remembered ? "Measured in an earlier run" : "",
  ];
}

function outputError(comparison) {
  if (!comparison) return [null];
  return [
    show.small(comparison.relativeL2),
    "relative L2",
    comparison.psnr === null ? "" : show.decibel(comparison.psnr),
  ];
}

function worstError(worst, run) {
  if (!worst) return run.tolerance === "off" && run.calls ? ["off", "Sites are not compared"] : [null];
  const isBeyond = worst.error === null || worst.error > run.tolerance;
  const limit = run.tolerance > 0 ? `${isBeyond ? "beyond" : "within"} ${run.tolerance.toFixed(2)}, ` : "";
  const place = worst.site === null ? "outside the sites" : `at site ${worst.site}`;
  const step = worst.errorStep === null ? "" : ` in step ${worst.errorStep}`;
  return [worst.error === null ? "not finite" : show.error(worst.error), limit + place + step];
}

function sites(run, keys) {
  const strip = siteStrip(run, keys);
  if (!run.sites.length) return [];
  const help =
    "One bar for each attention call of the model, in their order; its height is the error of the worst head. " +
    "Lines: native. Hollow: nothing to check. The letters are those of the kernels above.";
  return [
    strip,
    classed("aside", "p", help),
    folded(`All ${run.sites.length} sites as a table`, () => siteTable(run, keys)),
  ];
}

function siteTable(run, keys) {
  const titles = ["site", "block", "kernel", "error", "smooth_k", "shape", "calls", "reasons"];
  const error = ({ checked, error, errorStep }) =>
    checked
      ? `${error === null ? "not finite" : show.error(error)}${errorStep === null ? "" : ` at step ${errorStep}`}`
      : "-";
  const rows = run.sites.map((row) => [
    String(row.site ?? "-"),
    row.block || "-",
    kernelLabel(row.kernel, keys),
    error(row),
    { null: "-", true: "on", false: "off" }[row.smoothed],
    row.shape,
    String(row.calls),
    row.reasons.join(", "),
  ]);
  return classed("scroller", "div", table("sites", titles, rows));
}

function callsByKernel(run, keys) {
  if (!run.kernels.length) return null;
  const rows = run.kernels.map(({ name, calls, share }) => [
    kernelLabel(name, keys),
    String(calls),
    show.percent(share),
    bar(share ?? 0, keys.get(name)),
  ]);
  return table("bars", ["kernel", "calls", "share", ""], rows);
}

/** A bar as long as the share of the cell that it is in. */
function bar(share, key, isCut = false) {
  const length = set(create("span", isCut ? "\u00bb" : ""), { style: `width: ${Math.min(share, 1) * 100}%` });
  length.className = `bar kernel-${key?.colour ?? "other"}`;
  return set(classed("track", "div", length), { "aria-hidden": true });
}

function refusals(run, keys) {
  const items = run.refusals.map(({ kernel, detail, advice, calls }) =>
    create(
      "li",
      classed("title", "p", create("strong", show.count(calls, "call")), " not served by ", kernelLabel(kernel, keys)),
      create("p", ...breakable(detail)),
      ...(advice ? [classed("advice", "p", advice)] : []),
    ),
  );
  return firstOnes(items, "reasons", (some) => classed("reasons", "ul", ...some));
}

function firstOnes(items, noun, wrap) {
  if (!items.length) return [];
  const rest = items.slice(MANY);
  return [wrap(items.slice(0, MANY)), rest.length ? folded(`${rest.length} more ${noun}`, () => wrap(rest)) : null];
}

function shapes(run, keys) {
  const parts = run.shapes.map((shape) => {
    const served = [...shape.served].map(([name, calls]) => create("li", kernelLabel(name, keys), ` ${calls}`));
    const title = classed("title", "p", create("strong", shape.text), ` ${show.count(shape.calls, "call")}`);
    return create("li", title, shape.times.length ? timings(run, shape, keys) : classed("served", "ul", ...served));
  });
  const help = "Each is batch x heads x tokens x head_dim. Times are milliseconds of one call, the fastest first.";
  return parts.length
    ? [classed("aside", "p", help), ...firstOnes(parts, "shapes", (some) => classed("shapes", "ul", ...some))]
    : [];
}

function timings(run, shape, keys) {
  const served = servedBy(run, shape);
  // a kernel that is far slower would leave no length to the others
  const fastest = Math.min(...shape.times.map(({ device }) => device ?? Infinity));
  const slowest = Math.max(...shape.times.map(({ device }) => device ?? 0));
  const longest = Math.min(slowest, fastest * 4) || 1;
  const rows = shape.times.map(({ kernel, device, host }) => {
    const key = keys.get(kernel) ?? keys.get(withoutSmoothing(kernel));
    const name = kernelLabel(kernel, key ? new Map([[kernel, key]]) : keys);
    const calls = served.get(kernel);
    return [
      name,
      calls ? classed("serves", "strong", `\u2713 ${calls}`) : "",
      device === null ? show.UNKNOWN : device.toFixed(3),
      host === null ? show.UNKNOWN : host.toFixed(3),
      bar((device ?? 0) / longest, key, device > longest),
    ];
  });
  return table("bars", ["kernel", "serves", "device ms", "host ms", ""], rows);
}

const SMOOTHED = " with smooth_k";
const withoutSmoothing = (name) => (name.endsWith(SMOOTHED) ? name.slice(0, -SMOOTHED.length) : name);

/** The calls of a shape by the name under which their kernel was timed: smoothing is decided site by site. */
function servedBy(run, shape) {
  const timed = new Set(shape.times.map(({ kernel }) => kernel));
  const calls = new Map();
  for (const row of run.sites.filter((site) => site.shape === shape.text)) {
    const smoothed = row.kernel + SMOOTHED;
    const name = row.smoothed && timed.has(smoothed) ? smoothed : row.kernel;
    calls.set(name, (calls.get(name) ?? 0) + row.calls);
  }
  return calls;
}

/** Only where there are several: a single one is in the tiles. */
function wholeCalls(run) {
  if (run.comparisons.length < 2) return [];
  const rows = run.comparisons.map(({ plan, native, ratio, relativeL2, faster }) => [
    show.ratio(ratio),
    show.ms(plan),
    show.ms(native),
    show.small(relativeL2),
    faster ? "" : ratio < 1 ? "slower" : "not faster by more than noise",
  ]);
  return [table("", ["gain", "with kernels", "natively", "error", ""], rows)];
}
