// Draws the Markdown that the report is written in: headings, quotes, tables, bold lines and plain lines.
// Nothing else is Markdown here.

import { breakable, create } from "./dom.js";

/** The report as DOM. Every line becomes an element of its own; what is not understood is shown as it is. */
export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  const lines = text.split("\n");
  for (let index = 0; index < lines.length; index++) {
    const line = lines[index].trim();
    if (line.startsWith("|") && /^\|( --- \|)+$/.test(lines[index + 1]?.trim() ?? "")) {
      const end = lines.findIndex((other, at) => at > index && !other.trimStart().startsWith("|"));
      const rows = lines.slice(index, end < 0 ? lines.length : end);
      fragment.append(table(rows));
      index += rows.length - 1;
    } else if (line) {
      fragment.append(lineElement(line));
    }
  }
  return fragment;
}

function lineElement(line) {
  const [, hashes, heading] = line.match(/^(#{2,3}) (.+)$/) ?? [];
  if (heading) return create(`h${hashes.length}`, plain(heading));
  if (line.startsWith("> ")) return create("blockquote", plain(line.slice(2)));
  const [, bold] = line.match(/^\*\*(.+)\*\*$/) ?? [];
  return bold ? create("p", create("strong", plain(bold))) : create("p", plain(line));
}

function table([header, , ...rows]) {
  const head = create("tr", ...cells(header).map((text) => create("th", text)));
  const body = rows.map((row) => create("tr", ...cells(row).map(dataCell)));
  return create("table", create("thead", head), create("tbody", ...body));
}

/** A cell of the body. Long words, such as names of kernels, would push the last columns out of sight. */
function dataCell(text) {
  const cell = create("td", ...breakable(text));
  if (/^\d+(\.\d+)?%?$/.test(text)) cell.className = "number";
  return cell;
}

/** The texts between the bars of a row; a bar after a backslash is part of the text. */
function cells(row) {
  const texts =
    row
      .trim()
      .slice(1)
      .match(/(\\.|[^|])*\|/g) ?? [];
  return texts.map((text) => plain(text.slice(0, -1).trim()));
}

/** The text without the backslashes that keep names from being read as markup: MARKUP in sage_core/report.py. */
const plain = (text) => text.replace(/\\([\\|<&*`[~_])/g, "$1");
