// Draws the Markdown that the report is written in: headings, quotes, tables, bold lines and plain lines.
// Nothing else is Markdown here, and no text is ever read as HTML: names come from models and other packs.

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
  if (heading) return create(`h${hashes.length}`, heading);
  if (line.startsWith("> ")) return create("blockquote", line.slice(2));
  const [, bold] = line.match(/^\*\*(.+)\*\*$/) ?? [];
  return bold ? create("p", create("strong", bold)) : create("p", line);
}

function table([header, , ...rows]) {
  const head = create("tr", ...cells(header).map((text) => create("th", text)));
  const body = rows.map((row) => create("tr", ...cells(row).map(dataCell)));
  return create("table", create("thead", head), create("tbody", ...body));
}

/** A cell of the body. Long words, such as names of kernels, would push the last columns out of sight. */
function dataCell(text) {
  const parts = text.split(/(\S{20,})/);
  const cell = create("td", ...parts.flatMap((part, index) => (index % 2 ? breakable(part) : part)));
  if (/^\d+(\.\d+)?%?$/.test(text)) cell.className = "number";
  return cell;
}

/** The word in parts between which a line may break: after each underscore. */
function breakable(word) {
  const parts = word.match(/[^_]*_|[^_]+/g);
  return parts.flatMap((part, index) => (index ? [create("wbr"), part] : part));
}

/** The texts between the bars of a row; a bar after a backslash is part of the text. */
function cells(row) {
  const texts = row.trim().slice(1).match(/(\\\||[^|])*\|/g) ?? [];
  return texts.map((text) => text.slice(0, -1).trim().replaceAll("\\|", "|"));
}

/** A new element; strings among its children become text. */
export function create(tag, ...children) {
  const element = document.createElement(tag);
  element.append(...children);
  return element;
}
