// Asks the pack's own routes on the ComfyUI server.

import { api } from "../../scripts/api.js";

/** The version of the pack and its last runs, newest first; each run in a few numbers and a line. */
export function fetchRuns() {
  return ask("/sagescope/runs");
}

/** One run as a report, with its text as Markdown. */
export function fetchRun(uid) {
  return ask(`/sagescope/runs/${uid}`);
}

/** Has the server do something; it takes this from its own page only, and only as JSON. */
export function post(path, body = {}) {
  const headers = { "Content-Type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body) });
}

async function ask(path, options) {
  const response = await api.fetchApi(path, options);
  if (!response.ok) throw new Error(`the server answered ${response.status} to ${path}`);
  return response.json();
}
