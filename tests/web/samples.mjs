// Outputs of the report node as the server sends them, made by code: names and numbers are like those of real runs.

const SAGE = "sageattn_qk_int8_pv_fp8_cuda_sm90";
const CUDNN = "sdpa: cudnn";
const NATIVE = "native";
const WHY = {
  [CUDNN]: ["not_worthwhile", "sageattn_qk_int8_pv_fp16_cuda takes 6.21 ms here, sdpa: cudnn 5.72 ms"],
  [NATIVE]: ["kv_len", "kv_len is 512 and fewer than 512 x 512 query times key tokens are not measured"],
};

const DRIFTED = `${SAGE} is off by relative L2 0.134 for the worst head, and 0.1 is allowed`;
const ADVICE = {
  kv_len: "Nothing to do: other attention serves these calls. If only this kernel has the limit, choose another.",
  not_worthwhile: "Nothing to do: other attention serves. A kernel that is chosen by name is not timed.",
  accuracy: "Nothing to do: other attention serves this site, where the kernel is not accurate enough.",
  not_installed: "Install the package that the detail names, then restart ComfyUI.",
};
const COMPARISON = {
  ...{ native_ms: 1024.3, plan_ms: 730.6, relative_l2: 0.0213, cosine: 0.9998, psnr: 41.2 },
  ...{ faster: true, remembered: false, noise: 0.004, host_bound: false },
};

const refusal = (kernel, code, detail, calls) => ({ kernel, code, detail, advice: ADVICE[code], calls });
const accuracy = (error, step) => ({ step, relative_l2: error / 2, worst_head_relative_l2: error, cosine: 0.999 });

/** A run over many sites: most with SAGE, short ones native, a few with CUDNN, and one that drifted. */
export function run({ id = 1, siteCount = 76, steps = 20, ...changes } = {}) {
  const shapes = ["1 x 24 x 16896 x 128 bfloat16 HND", "1 x 24 x 16896->512 x 128 bfloat16 HND"];
  const rows = Array.from({ length: siteCount }, (_, site) => {
    const isCross = site % 3 === 2;
    const kernel = isCross ? NATIVE : site % 19 === 4 ? CUDNN : SAGE;
    const checked = kernel === SAGE;
    const error = 0.012 + 0.03 * Math.abs(Math.sin(site * 1.7)) + (site % 23 === 1 ? 0.045 : 0);
    return {
      site,
      block: `${site < 40 ? "double" : "single"} ${Math.floor(site / 3)}`,
      block_number: Math.floor(site / 3),
      kernel,
      smooth_k: checked ? site % 2 === 0 : null,
      accuracy: checked ? accuracy(error, site % 5 ? null : 11) : null,
      spec: shapes[isCross ? 1 : 0],
      calls: steps,
      reasons: kernel === SAGE ? [] : [WHY[kernel][0]],
    };
  });
  const drifted = rows[Math.floor(siteCount / 2)];
  if (drifted) {
    Object.assign(drifted, { kernel: SAGE, smooth_k: true, calls: 11, spec: shapes[0], reasons: [] });
    drifted.accuracy = accuracy(0.134, 11);
    const after = { kernel: CUDNN, smooth_k: null, accuracy: null, calls: 9, reasons: ["accuracy"] };
    rows.splice(drifted.site + 1, 0, { ...drifted, ...after });
  }
  const calls = (kernel) => rows.filter((row) => row.kernel === kernel).reduce((sum, row) => sum + row.calls, 0);
  const total = rows.reduce((sum, row) => sum + row.calls, 0);
  const shape = (text, kernel, times) => ({ spec: { text, arch: "sm90" }, kernel, calls: calls(kernel), times });
  const times = {
    native: { device_ms: 10.214, host_ms: 0.031 },
    "sdpa: flash": { device_ms: 10.198, host_ms: 0.03 },
    [CUDNN]: { device_ms: 5.716, host_ms: 0.033 },
    [SAGE]: { device_ms: 4.731, host_ms: 0.171 },
    [`${SAGE} with smooth_k`]: { device_ms: 4.902, host_ms: 0.192 },
    sageattn_qk_int8_pv_fp16_cuda: { device_ms: 6.21, host_ms: 0.164 },
    comfy_kitchen_int8: { device_ms: 58.43, host_ms: 0.12 },
  };
  return {
    id,
    uid: `run-${id}`,
    prompt_id: `prompt-${id}`,
    node_id: "31",
    apply_node_id: "12",
    model: "Flux",
    started: 1796085478 + 60 * id,
    seconds: 21.4,
    status: "finished",
    steps,
    total_steps: steps,
    forwards: steps,
    calls: total,
    calls_by_kernel: [SAGE, NATIVE, CUDNN]
      .map((kernel) => ({ kernel, calls: calls(kernel), share: total && calls(kernel) / total }))
      .filter((entry) => entry.calls),
    refusals: [
      refusal("any kernel", "kv_len", WHY[NATIVE][1], calls(NATIVE)),
      refusal("sageattn_qk_int8_pv_fp16_cuda", "not_worthwhile", WHY[CUDNN][1], calls(CUDNN)),
      refusal(SAGE, "accuracy", DRIFTED, 9),
      refusal("sageattn3_blackwell", "not_installed", "the package sageattn3 is not installed", total),
    ].filter((refusal) => refusal.calls),
    shapes: siteCount
      ? [shape(shapes[0], SAGE, times), shape(shapes[0], CUDNN, times), shape(shapes[1], NATIVE, {})]
      : [],
    sites: rows,
    rescued_forwards: 0,
    comparison_calls: siteCount * 3,
    comparisons: [COMPARISON],
    events: [
      { step: 1, text: "measured 6 kernels for 1 x 24 x 16896 x 128 bfloat16 HND" },
      { step: 11, text: `site 38: ${DRIFTED}` },
      { step: 11, text: "site 38: sdpa: cudnn serves from the next forward on" },
      { step: 16, text: "a check was left out: out of memory" },
    ],
    override_replaced_by: null,
    vram_peak_mib: 34512.5,
    ...changes,
  };
}

/** The report of these runs, the last of them shown. */
export function report(runs, changes = {}) {
  return {
    schema: 1,
    version: "0.1.0",
    notes: [],
    shown: runs.slice(-1).map(({ id }) => id),
    runs,
    environment: { devices: [{ index: 0, arch: "sm90", name: "NVIDIA H200", total_memory: 1 }], retired: [] },
    policy: { kernel: "auto", smooth_k: "auto", tolerance: 0.1, skip_blocks: [], compare_with_native: "first time" },
    previous_override: null,
    ...changes,
  };
}

/** A node's output with a report in it. */
export function output(value, text = "## Attention Backend Report\n\n### Run\n\n**As text.**\n") {
  return { text: [text], sagescope_report: [value] };
}

/** Two runs of one model: the first with everything native. */
export function twoRuns() {
  const before = run({ id: 1, seconds: 29.8, siteCount: 0, calls: 1520, comparisons: [], vram_peak_mib: 35001 });
  before.calls_by_kernel = [{ kernel: NATIVE, calls: 1520, share: 1 }];
  return output(report([before, run({ id: 2 })]));
}
