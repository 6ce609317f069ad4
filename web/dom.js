// Makes elements. Strings become text and nothing is ever read as HTML: names come from models and other packs.

const SVG = "http://www.w3.org/2000/svg";

const IS_NUMBER = /^(x?\d[\d.]*(e\u2212\d+)?%?( (s|ms|GiB))?|-|)$/;

/** A new element; strings among its children become text. */
export function create(tag, ...children) {
  const element = document.createElement(tag);
  element.append(...children);
  return element;
}

/** A new element with a class. */
export function classed(className, tag, ...children) {
  const element = create(tag, ...children);
  element.className = className;
  return element;
}

/** A new SVG element with its attributes. */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  set(element, attributes);
  element.append(...children);
  return element;
}

/** The element with these attributes set. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}

/** A table; a cell is a text or an element, and the first one of a row is its title. */
export function table(className, titles, rows) {
  const isNumbers = titles.map((_, column) => column > 0 && rows.every((row) => IS_NUMBER.test(row[column])));
  const cell = (tag, content, column) => classed(isNumbers[column] ? "number" : "", tag, content);
  const head = create("tr", ...titles.map((title, column) => set(cell("th", title, column), { scope: "col" })));
  const body = rows.map(([first, ...rest]) =>
    create(
      "tr",
      set(create("th", first), { scope: "row" }),
      ...rest.map((content, index) => cell("td", content, index + 1)),
    ),
  );
  return classed(className, "table", create("thead", head), create("tbody", ...body));
}

/** A part of the page that is folded until someone opens it, and made only then. */
export function folded(title, make) {
  const details = create("details", create("summary", title));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(make());
  });
  return details;
}

/** The text in parts between which a line may break: long names of kernels break after underscores. */
export function breakable(text) {
  return text
    .split(/(\S{20,})/)
    .flatMap((part, index) => (index % 2 ? wordParts(part) : part))
    .filter((part) => part !== "");
}

function wordParts(word) {
  const parts = word.match(/[^_]*_|[^_]+/g);
  return parts.flatMap((part, index) => (index ? [create("wbr"), part] : part));
}
