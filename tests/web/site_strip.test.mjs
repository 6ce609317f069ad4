import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./loading.mjs";
import { report, run } from "./samples.mjs";

const { readOutput } = await load("report_data.js");
const { siteStrip } = await load("site_strip.js");
const { kernelKeys } = await load("run_summary.js");

function strip(changes, { tolerance = 0.1 } = {}) {
  const data = report([run(changes)]);
  data.policy.tolerance = tolerance;
  const { runs } = readOutput({ sagescope_report: [data] }).report;
  const element = siteStrip(runs[0], kernelKeys(runs));
  if (!element) return null;
  const [drawing] = element.all("svg");
  return {
    element,
    drawing,
    paths: (kernel) =>
      Object.fromEntries(
        element.classed(`kernel-${kernel}`)[0].children.map((p) => [p.attributes.class, p.attributes.d]),
      ),
    readout: () => element.classed("readout")[0].textContent,
    press: (key) => {
      const event = {
        key,
        preventDefault: () => (event.prevented = true),
        stopPropagation: () => (event.stopped = true),
      };
      drawing.listeners.keydown(event);
      return event;
    },
  };
}

const site = (site, kernel, error, changes = {}) => ({
  site,
  ...{ block: "double 0", block_number: 0, kernel, smooth_k: null, spec: "shape", calls: 3, reasons: [] },
  accuracy: error === undefined ? null : { step: null, worst_head_relative_l2: error },
  ...changes,
});
const served = (...names) => names.map((kernel) => ({ kernel, calls: 3, share: 0.5 }));
/** The tops of the bars, without the marks in the lanes below them. */
const tops = (path) => [...path.matchAll(/M\S+ (\S+?)h/g)].map(([, y]) => Number(y)).filter((y) => y < 84);
const two = (...errors) => ({
  calls_by_kernel: served("k", "native"),
  sites: errors.map((error, index) => site(index, "k", error)),
});

test("a bar is as high as its error against the tolerance, which has a line", () => {
  const { element, paths } = strip(two(0.05, 0.1, 0.13));
  const [half, full, highest] = tops(paths(0).filled);
  const line = Number(element.classed("tolerance")[0].attributes.d.match(/^M0 (\S+)H30$/)[1]);
  assert.equal(element.classed("tolerance-label")[0].textContent, "tolerance 0.10");
  assert.equal(full, line);
  assert.ok(Math.abs((84 - half) * 2 - (84 - line)) < 1e-9);
  assert.ok(highest > 0 && highest < 10, "the largest error fits with some room");
  assert.equal(element.classed("over")[0].attributes.d, "");
});

test("an error far beyond the tolerance is cut off, one that is not finite is lines, and both are marked", () => {
  const { element, paths } = strip(two(0.05, 5, null));
  const found = tops(paths(0).filled);
  assert.equal(found[1], 0);
  assert.deepEqual(found.slice(2, 5), [0, 7, 14]);
  assert.equal(element.classed("over")[0].attributes.d.match(/M/g).length, 2);
});

test("without a tolerance there is no line and the largest error sets the height", () => {
  const { element, paths } = strip(two(0.01, 0.02), { tolerance: null });
  assert.equal(element.classed("tolerance").length + element.classed("tolerance-label").length, 0);
  const [small, large] = tops(paths(0).filled).map((y) => 84 - y);
  assert.ok(large > 70 && Math.abs(small * 2 - large) < 1e-9);
});

test("what was not checked is hollow, native is lines, and each kernel has a lane with its letter", () => {
  const sites = [site(0, "native"), site(1, "k"), site(2, "other", 0.01)];
  const { element, paths } = strip({ calls_by_kernel: served("k", "other", "native"), sites });
  assert.deepEqual(
    element.classed("lane").map(({ textContent }) => textContent),
    ["A", "B", "N"],
  );
  assert.equal(paths(0).filled.match(/M/g).length, 1, "only the mark in the lane");
  assert.deepEqual(tops(paths(0).hollow), [75]);
  assert.equal(tops(paths("native").filled).length, 3);
  assert.equal(paths("native").hollow, "");
  assert.equal(tops(paths(1).filled).length, 1);
});

test("a site that changed its kernel is one place with two marks and the error that was found", () => {
  const reasons = ["accuracy"];
  const sites = [site(0, "k", 0.134, { calls: 11 }), site(0, "native", undefined, { calls: 9, reasons })];
  const refusals = [{ kernel: "k", code: "accuracy", detail: "k is off by 0.134", calls: 9 }];
  const { drawing, paths, readout } = strip({ calls_by_kernel: served("k", "native"), sites, refusals });
  assert.match(drawing.attributes.viewBox, /^0 0 10 /);
  assert.equal(tops(paths("native").filled).length, 0);
  assert.match(readout(), /^Site 0, block 0: double 0 Akshape, 11 calls, worst head's error 0.134/);
  assert.match(readout(), /and Nnativeshape, 9 calls, nothing to checkWhy: k is off by 0.134$/);
});

test("the site with the largest error is read first, and keys and the pointer read others", () => {
  const { drawing, press, readout } = strip(two(0.01, 0.05, 0.02, 0.03));
  const now = () => drawing.attributes["aria-valuenow"];
  assert.equal(now(), "1");
  for (const [key, expected] of [
    ["ArrowRight", "2"],
    ["ArrowLeft", "1"],
    ["End", "3"],
    ["ArrowUp", "3"],
    ["Home", "0"],
    ["ArrowDown", "0"],
    ["PageUp", "3"],
    ["PageDown", "0"],
  ]) {
    const event = press(key);
    assert.ok(event.prevented && event.stopped);
    assert.equal(now(), expected, key);
    assert.equal(drawing.attributes["aria-valuetext"], readout());
  }
  for (const key of ["Tab", "Escape", "toString", "r"]) assert.equal(press(key).stopped, undefined, key);
  drawing.getBoundingClientRect = () => ({ left: 100, width: 200 });
  drawing.listeners.pointermove({ clientX: 260 });
  assert.match(readout(), /^Site 3/);
  drawing.listeners.pointerdown({ clientX: 149 });
  assert.match(readout(), /^Site 0/);
});

test("a site that is not finite is the worst", () => {
  const { readout } = strip(two(0.09, null, 0.02));
  assert.match(readout(), /^Site 1, .* not finite$/);
});

test("with tolerance off the readout says why nothing is checked", () => {
  assert.match(strip(two(undefined), { tolerance: null }).readout(), /not checked: tolerance is off$/);
});

test("calls outside the sites are on no place of the strip", () => {
  const { drawing } = strip({ sites: [site(null, "native"), site(0, "native")] });
  assert.match(drawing.attributes.viewBox, /^0 0 10 /);
  assert.equal(strip({ sites: [site(null, "native")] }), null);
});

test("2,000 sites are drawn at once, as one path for each kernel", () => {
  const started = performance.now();
  const { element, drawing, press } = strip({ siteCount: 2000 });
  press("End");
  assert.ok(performance.now() - started < 1000);
  assert.equal(drawing.attributes["aria-valuenow"], "1999");
  assert.ok(element.all("path").length < 12);
});

test("a run without sites has no strip", () => {
  assert.equal(strip({ sites: [] }), null);
});
