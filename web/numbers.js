// Numbers as people read them. The report's Markdown rounds in the same way, so that both show one value.

export const UNKNOWN = "-";

export const ms = (value) => known(value, () => `${short(value)} ms`);
export const seconds = (value) => known(value, () => `${value.toFixed(2)} s`);
export const percent = (share) => known(share, () => `${(share * 100).toFixed(1)}%`);
export const ratio = (value) => known(value, () => `x${value.toFixed(3)}`);
export const error = (value) => known(value, () => value.toFixed(3));
export const small = (value) => known(value, () => value.toPrecision(2).replace("e-", "e\u2212"));
export const decibel = (value) => known(value, () => `${value.toFixed(1)} dB`);
export const gib = (mib) => known(mib, () => `${(mib / 1024).toFixed(2)} GiB`);
export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

/** Four digits that count. */
export function short(value) {
  return value >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
}

/** The time of day, in the language of the browser. */
export function timeOfDay(secondsSince1970) {
  return known(secondsSince1970, () => new Date(secondsSince1970 * 1000).toLocaleTimeString());
}

/** What changed from one number to another, with its sign and as a share of the first; "" when one is not known. */
export function change(from, to, show) {
  if (from === null || to === null) return "";
  const by = to - from;
  const shown = show(Math.abs(by));
  if (shown === show(0)) return "the same";
  const share = from > 0 ? ` (${signed(by, `${Math.abs((by / from) * 100).toFixed(0)}%`)})` : "";
  return signed(by, shown) + share;
}

function signed(by, text) {
  return (by < 0 ? "\u2212" : "+") + text;
}

function known(value, show) {
  return value === null || value === undefined ? UNKNOWN : show();
}
