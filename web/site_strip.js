// The strip over the sites of a run: a bar for each, as high as its error, and below it a lane for each kernel, so that
// the place of a mark says the same as its colour. Hover it, or focus it and use the arrow keys, to read one site.

import { breakable, classed, create, set, svg } from "./dom.js";
import * as show from "./numbers.js";
import { bySite, NATIVE, worstSite } from "./run_summary.js";

// One unit upwards is one pixel; sideways the drawing is stretched to the width that is there.
const SLOT = 10;
const BAR = 8;
const BARS = 84;
const LANE = 11;
const LANES_AT = BARS + 6;
const UNCHECKED = 9;
const PAGE = 10;
const ROWS = 3;

/** The strip with its texts; null for a run without sites. */
export function siteStrip(run, keys) {
  const sites = bySite(run);
  if (!sites.length) return null;
  const isServing = (name) => sites.some((rows) => rows.some(({ kernel }) => kernel === name));
  const [native, ...others] = keys; // native attention is the lowest lane, as it is the ground for the others
  const lanes = [...others, native].filter(([name]) => isServing(name));
  const top = highest(run);
  const drawing = draw(sites, lanes, top);
  const cursor = svg("rect", { class: "cursor", y: 0, width: SLOT, height: LANES_AT + lanes.length * LANE });
  drawing.append(cursor);
  const readout = classed("readout", "div");
  const scroller = classed("scroller", "div", drawing);
  const read = (index) => {
    set(cursor, { x: index * SLOT });
    readout.replaceChildren(...sites[index].slice(0, ROWS).flatMap((row, nth) => rowLines(row, nth, run, keys)));
    set(drawing, { "aria-valuenow": sites[index][0].site, "aria-valuetext": readout.textContent });
  };
  const worst = sites.findIndex((rows) => rows.includes(worstSite(run)));
  selectable(drawing, scroller, sites.length, worst, read);
  const letters = lanes.map(([, key], lane) =>
    set(classed("lane", "span", key.letter), { style: `top: ${LANES_AT + lane * LANE}px` }),
  );
  const plot = classed("plot", "div", classed("letters", "div", ...letters), scroller, ...toleranceLabel(top));
  return classed("strip", "div", plot, readout);
}

function draw(sites, lanes, top) {
  const [width, height] = [sites.length * SLOT, LANES_AT + lanes.length * LANE];
  const line = svg("path", { class: "tolerance", d: `M0 ${y(top.tolerance, top)}H${width}` });
  return svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      // as wide as the node at most, but where sites would be too thin to point at
      style: `height: ${height}px; width: ${sites.length * 28}px; min-width: ${sites.length * 3}px`,
      tabindex: 0,
      role: "slider",
      "aria-label": "Site of the model",
      "aria-valuemin": sites[0][0].site,
      "aria-valuemax": sites.at(-1)[0].site,
    },
    ...lanes.map(([name, key], lane) => kernelPaths(sites, name, key, lane, top)),
    svg("path", { class: "over", d: overPath(sites, top) }),
    ...(top.tolerance ? [line] : []),
  );
}

/** What the full height stands for: the tolerance has its place in it, far larger errors are cut off. */
function highest(run) {
  const errors = run.sites.map(({ error }) => error ?? 0);
  const largest = errors.reduce((one, other) => Math.max(one, other), 0);
  const tolerance = run.tolerance > 0 ? run.tolerance : null;
  const value = tolerance ? Math.min(Math.max(tolerance * 1.3, largest * 1.05), tolerance * 2) : largest * 1.1;
  return { value: value || 1, tolerance };
}

const y = (error, top) => BARS - Math.max(1.5, (Math.min(error, top.value) / top.value) * BARS);

function toleranceLabel(top) {
  if (!top.tolerance) return [];
  const label = classed("tolerance-label", "span", `tolerance ${top.tolerance.toFixed(2)}`);
  return [set(label, { style: `top: ${y(top.tolerance, top) - 15}px` })];
}

/** The bars and the marks of one kernel: filled where checked, hollow where not, lines for native attention. */
function kernelPaths(sites, name, key, lane, top) {
  const filled = [];
  const hollow = [];
  const at = LANES_AT + lane * LANE + 1;
  sites.forEach((rows, index) => {
    const mine = rows.filter(({ kernel }) => kernel === name);
    if (!mine.length) return;
    const x = index * SLOT + (SLOT - BAR) / 2;
    const draw = name === NATIVE ? lines : box;
    filled.push(draw(x, at, LANE - 3));
    const checked = mine.filter((row) => row.checked);
    if (checked.some(({ error }) => error === null)) filled.push(lines(x, 0, BARS, 4, 7));
    else if (checked.length) {
      const highest = y(Math.max(...checked.map(({ error }) => error)), top);
      filled.push(box(x, highest, BARS - highest));
    } else if (mine[0] === (rows.find((row) => row.checked) ?? rows[0])) {
      (name === NATIVE ? filled : hollow).push(draw(x, BARS - UNCHECKED, UNCHECKED));
    }
  });
  const colour = `kernel-${key.colour}`;
  return svg(
    "g",
    { class: colour },
    svg("path", { class: "filled", d: filled.join("") }),
    svg("path", { class: "hollow", d: hollow.join("") }),
  );
}

const box = (x, top, height) => `M${x} ${top}h${BAR}v${height}h-${BAR}z`;

/** A box of horizontal lines, which stay even when the drawing is stretched. */
function lines(x, top, height, thick = 1.5, step = 3.5) {
  const count = Math.ceil(height / step);
  return Array.from({ length: count }, (_, line) => box(x, top + line * step, thick)).join("");
}

/** Marks above bars that are cut off, and above those that are not finite. */
function overPath(sites, top) {
  const isOver = (row) => row.checked && (row.error === null || row.error > top.value);
  return sites.map((rows, index) => (rows.some(isOver) ? `M${index * SLOT + 1} 7l4 -7l4 7z` : "")).join("");
}

/** Lets the pointer and the keys choose one of the sites, which `read` is told of; `first` is chosen until then. */
function selectable(drawing, scroller, count, first, read) {
  let selected = 0;
  const select = (index) => {
    selected = Math.min(Math.max(index, 0), count - 1);
    read(selected);
  };
  const point = (event) => {
    const { left, width } = drawing.getBoundingClientRect();
    select(Math.floor(((event.clientX - left) / width) * count));
  };
  const steps = {
    ArrowRight: () => selected + 1,
    ArrowUp: () => selected + 1,
    ArrowLeft: () => selected - 1,
    ArrowDown: () => selected - 1,
    PageUp: () => selected + PAGE,
    PageDown: () => selected - PAGE,
    Home: () => 0,
    End: () => count - 1,
  };
  drawing.addEventListener("pointermove", point);
  drawing.addEventListener("pointerdown", point);
  drawing.addEventListener("keydown", (event) => {
    if (!Object.hasOwn(steps, event.key)) return;
    // neither the page nor ComfyUI has anything to do with these keys now
    event.preventDefault();
    event.stopPropagation();
    select(steps[event.key]());
    const slot = scroller.scrollWidth / count;
    const middle = (selected + 0.5) * slot;
    const { scrollLeft, clientWidth } = scroller;
    if (middle < scrollLeft || middle > scrollLeft + clientWidth) scroller.scrollLeft = middle - clientWidth / 2;
  });
  select(first);
}

function rowLines(row, nth, run, keys) {
  const where = nth ? "and" : [`Site ${row.site}`, row.block && `block ${row.block}`].filter(Boolean).join(", ");
  const title = create("p", create("strong", where), " ", kernelLabel(row.kernel, keys));
  const facts = [row.shape, show.count(row.calls, "call"), errorText(row, run), smoothingText(row)].filter(Boolean);
  const lines = [title, create("p", facts.join(", "))];
  const why = [...new Set(row.reasons)].map(
    (code) => run.refusals.find((refusal) => refusal.code === code)?.detail || code,
  );
  if (why.length) lines.push(create("p", ...breakable(`Why: ${why.slice(0, 3).join("; ")}`)));
  return lines;
}

function errorText(row, run) {
  if (!row.checked) return run.tolerance === "off" ? "not checked: tolerance is off" : "nothing to check";
  const found = row.error === null ? "not finite" : show.error(row.error);
  return `worst head's error ${found}${row.errorStep === null ? "" : ` at step ${row.errorStep}`}`;
}

function smoothingText({ smoothed }) {
  return smoothed === null ? "" : `smooth_k ${smoothed ? "on" : "off"}`;
}

/** The name of a kernel with its letter and colour, where it has them. */
export function kernelLabel(name, keys) {
  const key = keys.get(name);
  const badge = key ? [set(classed(`badge kernel-${key.colour}`, "span", key.letter), { "aria-hidden": true })] : [];
  return classed("kernel", "span", ...badge, create("span", ...breakable(name)));
}
