import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./loading.mjs";

const { renderMarkdown } = await load("markdown.js");
const shown = (text) => renderMarkdown(text).children.map((element) => [element.tag, element.textContent]);
const rows = (element) => element.all("tr").map((row) => row.children.map((cell) => cell.textContent));

test("headings, quotes, bold lines and plain lines", () => {
  const text = "## Report\n\n> A note.\n\n### Run 1\n\n**Served 3 of 3.**\n**Second line.**\n\nfinished, 3 steps\n";
  assert.deepEqual(shown(text), [
    ["h2", "Report"],
    ["blockquote", "A note."],
    ["h3", "Run 1"],
    ["p", "Served 3 of 3."],
    ["p", "Second line."],
    ["p", "finished, 3 steps"],
  ]);
  assert.equal(renderMarkdown(text).all("strong").length, 2);
});

test("a table, with numbers told apart", () => {
  const [table, after] = renderMarkdown(
    "| kernel | calls |\n| --- | --- |\n| native | 12 |\n|  | 4.5% |\nafter",
  ).children;
  assert.deepEqual(rows(table), [
    ["kernel", "calls"],
    ["native", "12"],
    ["", "4.5%"],
  ]);
  assert.deepEqual(
    table.all("td").map((cell) => cell.className),
    ["", "number", "", "number"],
  );
  assert.deepEqual(after.textContent, "after");
});

test("a bar after a backslash is text of the cell", () => {
  const [table] = renderMarkdown("| why |\n| --- |\n| a \\| b |").children;
  assert.deepEqual(rows(table), [["why"], ["a | b"]]);
});

test("a backslash before markup is taken off, everywhere, and any other stays", () => {
  const escaped = "\\<locals> C:\\dir a\\_b \\*x\\* \\`y\\` \\[z] \\~ \\& \\\\n";
  const text = "<locals> C:\\dir a_b *x* `y` [z] ~ & \\n";
  const drawn = renderMarkdown(`## ${escaped}\n> ${escaped}\n**${escaped}**\n${escaped}\n| why |\n| --- |\n| ${escaped} |`);
  assert.deepEqual(
    drawn.children.slice(0, 4).map((element) => element.textContent),
    [text, text, text, text],
  );
  assert.equal(drawn.all("td")[0].textContent, text);
});

test("a long name in a cell may break after an underscore and stays one text", () => {
  const text = "smooth_k and _sageattn_qk__int8_pv_fp8 too";
  const [cell] = renderMarkdown(`| why |\n| --- |\n| ${text} |`).all("td");
  const parts = ["_", "sageattn_", "qk_", "_", "int8_", "pv_", "fp8"];
  assert.deepEqual(
    cell.children.map((child) => child.tag ?? child),
    ["smooth_k and ", ...parts.flatMap((part) => ["wbr", part]).slice(1), " too"],
  );
  assert.equal(cell.textContent, text);
});

test("markup in names stays text", () => {
  const evil = "<img src=x onerror=alert(1)> [a](javascript:alert(1)) `b` &lt;";
  const drawn = renderMarkdown(`## ${evil}\n> ${evil}\n**${evil}**\n${evil}\n| ${evil} |\n| --- |\n| ${evil} |`);
  const tags = new Set(drawn.all().map((element) => element.tag));
  assert.deepEqual(tags, new Set(["h2", "blockquote", "p", "strong", "table", "thead", "tbody", "tr", "th", "td"]));
  for (const element of [...drawn.all("td"), ...drawn.all("th"), ...drawn.all("h2"), ...drawn.all("strong")]) {
    assert.equal(element.textContent, evil);
  }
});

test("what is not understood is shown as it is", () => {
  assert.deepEqual(shown("| no table\n**\n#### deeper\n- item"), [
    ["p", "| no table"],
    ["p", "**"],
    ["p", "#### deeper"],
    ["p", "- item"],
  ]);
  assert.deepEqual(shown(""), []);
});

test("a report without runs", () => {
  const note = "This model has no Apply SageAttention node before it: nothing was recorded.";
  assert.deepEqual(shown(`## Attention Backend Report\n\n> ${note}\n`), [
    ["h2", "Attention Backend Report"],
    ["blockquote", note],
  ]);
});

test("2,000 sites are drawn at once", () => {
  const lines = Array.from({ length: 2000 }, (_, site) => `| ${site} | double ${site} | native | - | 3 | arch |`);
  const started = performance.now();
  const drawn = renderMarkdown(["| a | b | c | d | e | f |", `|${" --- |".repeat(6)}`, ...lines].join("\n"));
  assert.ok(performance.now() - started < 500);
  assert.equal(drawn.all("td").length, 12_000);
});
