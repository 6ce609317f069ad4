// What changed during a run: a mark on the axis of its steps for each step with an event, and the events as a list.

import { breakable, classed, create, set } from "./dom.js";

/** The axis and the list; nothing without events. */
export function stepAxis(run) {
  if (!run.events.length) return [];
  const items = run.events.map(({ step, text }) =>
    create("li", classed("step", "span", step === null ? "-" : `step ${step}`), create("span", ...breakable(text))),
  );
  const list = classed("events", "ol", ...items);
  return run.totalSteps > 0 ? [axis(run), list] : [list];
}

function axis({ events, totalSteps }) {
  const at = (step) => `${((Math.min(Math.max(step, 1), totalSteps) - 0.5) / totalSteps) * 100}%`;
  const steps = [...new Set(events.map(({ step }) => step).filter((step) => step !== null))];
  const marks = steps.map((step) => {
    const number = events.filter((event) => event.step === step).length;
    return set(classed("mark", "span", number > 1 ? String(number) : ""), { style: `left: ${at(step)}` });
  });
  const labels = labelled(totalSteps).map((step) =>
    set(classed("tick", "span", String(step)), { style: `left: ${at(step)}` }),
  );
  // the list says the same in words
  return set(classed("axis", "div", classed("line", "div"), ...labels, ...marks), { "aria-hidden": true });
}

/** The few steps that get a number, the first and the last among them. */
function labelled(total) {
  const sizes = [1, 2, 5]
    .flatMap((size) => [size, size * 10, size * 100, size * 1000])
    .sort((one, other) => one - other);
  const size = sizes.find((size) => total / size <= 6) ?? total;
  const between = Array.from({ length: Math.floor(total / size) }, (_, index) => (index + 1) * size);
  return [...new Set([1, ...between.filter((step) => step > 1 + size / 2 && step < total - size / 2), total])];
}
