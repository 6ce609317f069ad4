import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./loading.mjs";
import { report, run } from "./samples.mjs";

const { readOutput } = await load("report_data.js");
const summary = await load("run_summary.js");
const numbers = await load("numbers.js");

function read(changes, policy) {
  const data = report([run(changes)]);
  Object.assign(data.policy, policy);
  return readOutput({ sagescope_report: [data] }).report.runs[0];
}

const served = (...names) => names.map((kernel) => ({ kernel, calls: 4, share: 0.5 }));

test("who served is said in one sentence, native last", () => {
  const kernels = { calls: 8, calls_by_kernel: served("native", "k"), forwards: 1 };
  assert.deepEqual(summary.sentences(read(kernels)), [
    "k served 4 of 8 attention calls (50.0%), native 4 (50.0%), in 1 forward.",
  ]);
});

test("native alone is said with the reason", () => {
  const kernels = { calls: 4, calls_by_kernel: served("native"), forwards: 2 };
  const reason = { refusals: [{ kernel: "k", code: "arch", detail: "no GPU", calls: 4 }] };
  const said = (changes) => summary.sentences(read({ ...kernels, ...changes }))[0];
  assert.equal(said(reason), "Native attention served all 4 attention calls in 2 forwards: no GPU.");
  assert.match(said({ refusals: [] }), /: no kernel was chosen\.$/);
});

test("rescues, another override and blocks that are not known are said", () => {
  const changes = { rescued_forwards: 2, override_replaced_by: "other.patch", sites: run().sites };
  for (const site of changes.sites) site.block = null;
  const [, rescued, replaced, blocks] = summary.sentences(read(changes, { skip_blocks: [1] }));
  assert.match(rescued, /^The output of 2 forwards was not finite/);
  assert.match(replaced, /^other.patch stands before this node/);
  assert.match(blocks, /^skip_blocks has no effect/);
});

test("numbers in skip_blocks that are no block of the model are said as in the text of the report", () => {
  const last = Math.max(...run().sites.map((site) => site.block_number));
  const said = (...skip_blocks) => summary.sentences(read({}, { skip_blocks })).slice(1);
  assert.deepEqual(said(), []);
  assert.deepEqual(said(0, last), []);
  const end = `which this model does not have: its last block is number ${last}.`;
  assert.deepEqual(said(1, last + 3), [`skip_blocks names ${last + 3}, ${end}`]);
  const [three, four, nine] = [3, 4, 9].map((more) => last + more);
  assert.deepEqual(said(last, three, four, nine), [`skip_blocks names ${three}-${four}, ${nine}, ${end}`]);
});

test("no calls: another override took them, or the model offers none", () => {
  assert.match(
    summary.sentences(read({ calls: 0, override_replaced_by: "other" }))[0],
    /^No call came here: other stands/,
  );
  assert.match(summary.sentences(read({ calls: 0 }))[0], /offered none of its attention calls/);
});

test("what differs from another run, with its sign", () => {
  const rows = summary.differences(read(), read({ seconds: 42.8, vram_peak_mib: 30000, calls_by_kernel: served("k") }));
  assert.deepEqual(rows.slice(0, 5), [
    ["seconds per step", "1.07 s", "2.14 s", "\u22121.07 s (\u221250%)"],
    ["gain against native", "x1.402", "x1.402", "the same"],
    ["error of the output", "0.021", "0.021", "the same"],
    ["worst head's error", "0.134", "0.134", "the same"],
    ["peak of VRAM", "33.70 GiB", "29.30 GiB", "+4.41 GiB (+15%)"],
  ]);
  assert.deepEqual(rows.slice(5).at(-1), ["calls of k", "0", "4", "\u22124 (\u2212100%)"]);
});

test("what neither run knows is left out, and what one does not know has no change", () => {
  const unknown = { vram_peak_mib: null, comparisons: [], sites: [] };
  const rows = summary.differences(read({ ...unknown, seconds: null }), read(unknown));
  assert.deepEqual(rows[0], ["seconds per step", "-", "1.07 s", ""]);
  assert.match(rows[1][0], /^calls of/);
});

test("settings that differ are named", () => {
  const [one, other] = [read({}, { tolerance: null, skip_blocks: [1, 2] }), read({}, { kernel: "k" })];
  assert.deepEqual(summary.changedSettings(one, other), [
    ["kernel", "auto", "k"],
    ["tolerance", "off", "0.1"],
    ["skip_blocks", "1,2", "none"],
  ]);
});

test("letters go on when colours are used up, and N stays native's", () => {
  const names = Array.from({ length: 30 }, (_, index) => ({ kernel: `k${index}`, calls: 1, share: 0 }));
  const keys = [...summary.kernelKeys([read({ calls_by_kernel: names })])];
  assert.deepEqual(keys[0], ["native", { letter: "N", colour: "native" }]);
  const letters = keys.slice(1, 26).map(([, { letter }]) => letter);
  assert.equal(new Set(letters).size, 25);
  assert.ok(!letters.includes("N"));
  assert.equal(keys[6][1].colour, 0);
});

test("numbers are rounded as in the Markdown, and what is not known is a dash", () => {
  assert.equal(numbers.ms(20.228277), "20.23 ms");
  assert.equal(numbers.ms(12345.6), "12346 ms");
  assert.equal(numbers.small(0.0000123), "0.000012");
  assert.equal(numbers.small(1.23e-9), "1.2e\u22129");
  for (const name of ["ms", "seconds", "percent", "ratio", "error", "small", "decibel", "gib", "timeOfDay"]) {
    assert.equal(numbers[name](null), "-", name);
    assert.equal(numbers[name](undefined), "-", name);
  }
});
