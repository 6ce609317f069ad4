import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./loading.mjs";
import { report, run } from "./samples.mjs";

const { readOutput } = await load("report_data.js");
const { drawRun } = await load("report_view.js");
const { kernelKeys } = await load("run_summary.js");

/** The parts of the last run as one element. */
function drawn(...runs) {
  const read = readOutput({ sagescope_report: [JSON.parse(JSON.stringify(report(runs)))] });
  assert.equal(read.problem, null);
  const page = document.createElement("main");
  page.append(...drawRun(read.report.runs.at(-1), kernelKeys(read.report.runs), read.report.gpu));
  return page;
}

const texts = (elements) => elements.map(({ textContent }) => textContent);
const rows = (table) =>
  table
    .all("tr")
    .slice(1)
    .map((row) => texts(row.children));
const section = (page, title) => page.all("section").find((part) => part.children[0].textContent === title);
const tiles = (page) =>
  Object.fromEntries(
    page.classed("tile").map((tile) => [tile.children[0].textContent, texts(tile.children.slice(1)).join("|")]),
  );

test("the tiles have what was found", () => {
  assert.deepEqual(tiles(drawn(run())), {
    GPU: "NVIDIA H200|sm90",
    "Gain against native": "x1.402|730.6 ms per model call, 1024 natively",
    "Error of the output": "0.021|relative L2|41.2 dB",
    "Worst head's error": "0.134|beyond 0.10, at site 38 in step 11",
    "Per step": "1.07 s|with what was compared",
    "Peak of VRAM": "33.70 GiB",
  });
});

test("what is not known has no tile", () => {
  const page = drawn(run({ comparisons: [], vram_peak_mib: null, seconds: null, siteCount: 0 }));
  assert.deepEqual(Object.keys(tiles(page)), ["GPU"]);
});

test("a plan that brought nothing, and a comparison of an earlier run, are said", () => {
  const [comparison] = run().comparisons;
  const changes = { plan_ms: 1023, faster: false, remembered: true, host_bound: true, relative_l2: null, psnr: null };
  const shown = tiles(drawn(run({ comparisons: [{ ...comparison, ...changes }] })));
  assert.match(
    shown["Gain against native"],
    /x1.001.*Not faster by more than noise \(.0.4%\).*host limits.*earlier run/,
  );
  assert.equal(shown["Error of the output"], undefined);
  const slower = tiles(drawn(run({ comparisons: [{ ...comparison, plan_ms: 1200, faster: false }] })));
  assert.match(slower["Gain against native"], /x0.854.*Slower/);
});

test("several comparisons get a table, and the longest model call the tile", () => {
  const [comparison] = run().comparisons;
  const short = { ...comparison, native_ms: 100, plan_ms: 200, faster: false };
  const page = drawn(run({ comparisons: [short, comparison, short] }));
  assert.match(tiles(page)["Gain against native"], /x1.402/);
  assert.deepEqual(rows(section(page, "Whole model calls"))[0].slice(0, 3), ["x0.500", "200 ms", "100 ms"]);
});

test("calls by kernel, with a letter for each", () => {
  const table = rows(section(drawn(run()), "Calls by kernel"));
  assert.deepEqual(table, [
    ["Asageattn_qk_int8_pv_fp8_cuda_sm90", "971", "63.9%", ""],
    ["Nnative", "480", "31.6%", ""],
    ["Bsdpa: cudnn", "69", "4.5%", ""],
  ]);
});

test("a kernel keeps its letter from run to run", () => {
  const before = run({ id: 1, calls_by_kernel: [{ kernel: "sdpa: cudnn", calls: 1, share: 1 }] });
  assert.match(rows(section(drawn(before, run({ id: 2 })), "Calls by kernel"))[2][0], /^Asdpa: cudnn/);
});

test("each refusal says what to do; what is beyond six is folded", () => {
  const refusals = Array.from({ length: 8 }, (_, index) => ({
    kernel: `k${index}`,
    detail: "why",
    advice: "do",
    calls: 9 - index,
  }));
  const part = section(drawn(run({ refusals })), "Why not");
  const items = texts(part.classed("reasons")[0].children);
  assert.equal(items.length, 6);
  assert.equal(items[0], "9 calls not served by k0whydo");
  const folded = part.all("details")[0];
  assert.equal(folded.textContent, "2 more reasons");
  Object.assign(folded, { open: true });
  folded.listeners.toggle();
  folded.listeners.toggle();
  assert.equal(folded.all("li").length, 2);
});

test("every timed kernel of a shape, fastest first, with the calls that it serves", () => {
  const part = section(drawn(run()), "Shapes");
  const table = rows(part.all("table")[0]).map((row) => row.slice(0, 4));
  assert.deepEqual(table.slice(0, 4), [
    ["Asageattn_qk_int8_pv_fp8_cuda_sm90", "\u2713 500", "4.731", "0.171"],
    ["Asageattn_qk_int8_pv_fp8_cuda_sm90 with smooth_k", "\u2713 471", "4.902", "0.192"],
    ["Bsdpa: cudnn", "\u2713 69", "5.716", "0.033"],
    ["sageattn_qk_int8_pv_fp16_cuda", "", "6.210", "0.164"],
  ]);
  const widths = part.classed("bar").map((bar) => Number.parseFloat(bar.attributes.style.slice("width: ".length)));
  assert.deepEqual(widths.map(Math.round), [25, 26, 30, 33, 54, 54, 100]);
  assert.equal(part.classed("bar").at(-1).textContent, "\u00bb", "a bar that is cut off says so");
  assert.match(texts(part.all("li")).join(" "), /1 x 24 x 16896->512 x 128 bfloat16 HND 480 callsNnative 480/);
});

test("events stand at their steps", () => {
  const part = section(drawn(run()), "What happened");
  assert.deepEqual(
    part.classed("mark").map((mark) => [mark.textContent, mark.attributes.style]),
    [
      ["", "left: 2.5%"],
      ["2", "left: 52.5%"],
      ["", "left: 77.5%"],
    ],
  );
  assert.deepEqual(texts(part.classed("tick")), ["1", "5", "10", "15", "20"]);
  assert.equal(part.all("li").length, 4);
});

test("events without a step or in a run of unknown length are a list alone", () => {
  const part = section(drawn(run({ events: [{ step: null, text: "why" }], total_steps: null })), "What happened");
  assert.deepEqual(texts(part.all("li")), ["-why"]);
  assert.equal(part.classed("axis").length, 0);
  for (const total of [1, 2, 7, 50, 999, 1e6]) {
    const axis = section(drawn(run({ total_steps: total })), "What happened");
    const ticks = texts(axis.classed("tick")).map(Number);
    assert.ok(
      ticks[0] === 1 && ticks.at(-1) === total && new Set(ticks).size === ticks.length && ticks.length <= 8,
      ticks,
    );
  }
});

test("parts without content are left out", () => {
  const empty = { calls: 0, calls_by_kernel: [], refusals: [], shapes: [], sites: [], events: [], comparisons: [] };
  const page = drawn(run({ ...empty, forwards: 3 }));
  assert.equal(page.all("section").length, 0);
  assert.match(page.textContent, /made 3 forwards and offered none of its attention calls/);
});

test("a run of nothing but absent, null and wrong fields is drawn", () => {
  for (const wrong of [
    undefined,
    null,
    "x",
    -1,
    [null],
    [[]],
    [{}],
    { a: 1 },
    [{ kernel: {}, calls: "3", spec: 7, accuracy: [] }],
  ]) {
    const broken = Object.fromEntries(Object.keys(run()).map((name) => [name, wrong]));
    assert.ok(drawn(run(broken)).textContent.length > 10);
    for (const name of Object.keys(broken)) assert.ok(drawn(run({ [name]: wrong })).textContent.length > 10, name);
  }
});

test("no name is read as markup", () => {
  const evil = "<img src=x onerror=alert(1)>&lt;b";
  const copy = JSON.parse(JSON.stringify(run({ model: evil })), (key, value) =>
    ["kernel", "detail", "advice", "text", "block", "spec"].includes(key) && typeof value === "string" ? evil : value,
  );
  const page = drawn(copy);
  const tags = new Set(page.all().map(({ tag }) => tag));
  assert.ok(!tags.has("img") && !tags.has("b"));
  assert.equal(page.all("h2")[0].textContent, evil);
  assert.match(rows(section(page, "Calls by kernel"))[0][0], /<img src=x onerror=alert\(1\)>&lt;b$/);
});

test("the table of sites has a row for each, made when it is opened", () => {
  const folded = section(drawn(run()), "Sites").all("details")[0];
  assert.equal(folded.textContent, "All 77 sites as a table");
  assert.equal(folded.all("table").length, 0);
  Object.assign(folded, { open: true });
  folded.listeners.toggle();
  const table = rows(folded);
  assert.equal(table.length, 77);
  assert.deepEqual(table[38], [
    ...["38", "12: double 12", "Asageattn_qk_int8_pv_fp8_cuda_sm90", "0.134 at step 11", "on"],
    ...["1 x 24 x 16896 x 128 bfloat16 HND", "11", ""],
  ]);
});
