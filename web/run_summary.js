// What a run comes to: sentences and numbers, made from the data and drawn elsewhere.

import * as show from "./numbers.js";

export const NATIVE = "native";
const LETTERS = "ABCDEFGHIJKLMOPQRSTUVWXYZ"; // without N, which stands for native

/** A letter and the number of a colour for each kernel that served; a name without either gets a new one. */
export function kernelKeys(runs) {
  const keys = new Map([[NATIVE, { letter: "N", colour: NATIVE }]]);
  for (const { kernels } of runs) {
    for (const { name } of kernels) {
      const place = keys.size - 1;
      if (!keys.has(name)) keys.set(name, { letter: LETTERS[place % LETTERS.length], colour: place % 5 });
    }
  }
  return keys;
}

/** Who served, in a sentence, and what else a person must know first. */
export function sentences(run) {
  const forwards = show.count(run.forwards, "forward");
  const calls = show.count(run.calls, "attention call");
  if (run.calls === 0 && run.replacedBy) {
    return [
      `No call came here: ${run.replacedBy} stands where Apply SageAttention put its override. ` +
        "Put Apply SageAttention after the node that changed it, or remove one of the two.",
    ];
  }
  if (run.calls === 0) {
    return [
      `This model made ${forwards} and offered none of its attention calls to an override: its attention ran as ` +
        "without the pack, and no kernel choice can change that.",
    ];
  }
  const reason = run.refusals[0]?.detail || "no kernel was chosen";
  const served = run.kernels.some(({ name }) => name !== NATIVE);
  const lines = [
    served ? whoServed(run, calls, forwards) : `Native attention served all ${calls} in ${forwards}: ${reason}.`,
  ];
  if (run.rescued) {
    const rescued = show.count(run.rescued, "forward");
    lines.push(`The output of ${rescued} was not finite: run again with exact attention before anything saw it.`);
  }
  if (run.replacedBy) lines.push(`${run.replacedBy} stands before this node and hands over what it does not serve.`);
  return [...lines, ...skippedInVain(run)];
}

/** Says which numbers in skip_blocks are no block of the model. */
function skippedInVain({ policy, sites }) {
  const skipped = Array.isArray(policy.skip_blocks) ? policy.skip_blocks : [];
  const blocks = sites.map(({ blockNumber }) => blockNumber).filter((number) => number !== null);
  if (!skipped.length || !sites.length) return [];
  if (!blocks.length) return ["skip_blocks has no effect: this model does not report its blocks."];
  const last = Math.max(...blocks);
  const beyond = skipped.filter((number) => number > last);
  if (!beyond.length) return [];
  return [`skip_blocks names ${ranges(beyond)}, which this model does not have: its last block is number ${last}.`];
}

/** Rising numbers as skip_blocks takes them: 3, 7-9. */
function ranges(numbers) {
  const found = [];
  for (const number of numbers) {
    if (found.at(-1)?.[1] === number - 1) found.at(-1)[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => (first === last ? first : `${first}-${last}`)).join(", ");
}

function whoServed({ kernels }, calls, forwards) {
  const [first, ...others] = [...kernels].sort((one, other) => (one.name === NATIVE) - (other.name === NATIVE));
  const share = (entry) => `(${show.percent(entry.share)})`;
  const rest = others.map((entry) => `, ${entry.name} ${entry.calls} ${share(entry)}`).join("");
  return `${first.name} served ${first.calls} of ${calls} ${share(first)}${rest}, in ${forwards}.`;
}

/** The comparison of the longest model call: where kernels can bring most. */
export function mainComparison(run) {
  return run.comparisons.reduce((best, next) => (best && best.native >= next.native ? best : next), null);
}

/** The site with the largest error; one that is not finite is larger than any number. Null when none was checked. */
export function worstSite(run) {
  const size = ({ error }) => error ?? Infinity;
  const checked = run.sites.filter((site) => site.checked);
  return checked.reduce((worst, next) => (worst && size(worst) >= size(next) ? worst : next), null);
}

/** The rows of each site of a forward, in order: a site has several when it changed its kernel or its shape. */
export function bySite(run) {
  const places = new Map();
  for (const row of run.sites) {
    if (row.site === null) continue;
    const rows = places.get(row.site) ?? [];
    places.set(row.site, rows);
    rows.push(row);
  }
  return [...places.values()];
}

export function secondsPerStep(run) {
  return run.seconds !== null && run.steps > 0 ? run.seconds / run.steps : null;
}

export function runName(run) {
  return [`Run ${run.id ?? "?"}`, show.timeOfDay(run.started), show.seconds(run.seconds), setting(run.policy.kernel)]
    .filter((part) => part && part !== show.UNKNOWN)
    .join(", ");
}

/** The rows of the table that compares a run with another: what, here, there, and what changed. */
export function differences(run, other) {
  const row = (what, value, text) => [
    what,
    text(value(run)),
    text(value(other)),
    show.change(value(other), value(run), text),
  ];
  const error = (one) => worstSite(one)?.error ?? null;
  const rows = [
    row("seconds per step", secondsPerStep, show.seconds),
    row("gain against native", (one) => mainComparison(one)?.ratio ?? null, show.ratio),
    row("error of the output", (one) => mainComparison(one)?.relativeL2 ?? null, show.small),
    row("worst head's error", error, show.error),
    row("peak of VRAM", (one) => one.vramMib, show.gib),
    ...callsOfBoth(run, other).map((name) => row(`calls of ${name}`, callsOf(name), (calls) => String(calls))),
  ];
  return rows.filter(([, here, there]) => here !== show.UNKNOWN || there !== show.UNKNOWN);
}

function callsOfBoth(run, other) {
  return [...new Set([...run.kernels, ...other.kernels].map(({ name }) => name))];
}

function callsOf(name) {
  return (run) => run.kernels.find((entry) => entry.name === name)?.calls ?? 0;
}

/** The inputs of the node that were not the same: [input, here, there]. */
export function changedSettings(run, other) {
  const names = new Set([...Object.keys(run.policy), ...Object.keys(other.policy)]);
  return [...names]
    .map((name) => [name, setting(run.policy[name]), setting(other.policy[name])])
    .filter(([, here, there]) => here !== there);
}

function setting(value) {
  if (value === undefined) return "";
  if (value === null) return "off";
  return Array.isArray(value) ? value.join(",") || "none" : String(value);
}
