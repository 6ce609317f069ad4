"""The report: a dispatcher's snapshot as one JSON document, and that document as Markdown for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from .comparing import NOISE
from .paths import without_paths
from .policy import TOLERANCES
from .selection import NATIVE
from .stats import SCHEMA

MAX_SITE_ROWS = 200
"""Rows of the Markdown table of sites; the JSON has them all."""
MARKUP = re.compile(r"[\\|<&*`\[~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""What Markdown would read as markup in a name or a sentence; each gets a backslash, which web/markdown.js takes off.

An underscore between letters, as in the names of kernels, is none.
"""


def build_report(snapshot: dict[str, Any] | None, version: str, prompt_id: str | None, after: bool) -> dict[str, Any]:
    """The report of a model in plain JSON types.

    ``snapshot`` is the dispatcher's, None for a model without one. ``after`` says that the report node stands after
    the sampler. ``shown`` lists the ids of the runs that the report is about: those of the prompt being executed when
    there are any, the last one otherwise. Reports are shown to others, so no text in it names a folder of the machine.
    """
    report: dict[str, Any] = {"schema": SCHEMA, "version": version, "notes": [], "shown": [], "runs": []}
    if snapshot is None:
        report["notes"].append("This model has no Apply SageAttention node before it: nothing was recorded.")
        return report
    report.update(snapshot)
    runs = report["runs"]
    current = [run["id"] for run in runs if prompt_id is not None and run["prompt_id"] == prompt_id]
    report["shown"] = current or [run["id"] for run in runs[-1:]]
    # a script has no prompts, so nothing can be said about which of them a run was in
    report["notes"] = list(_notes(report, bool(current) or prompt_id is None, after))
    return {name: without_paths(part) for name, part in report.items()}


def _notes(report: dict[str, Any], current: bool, after: bool) -> Iterable[str]:
    if not report["runs"]:
        yield "Nothing was sampled with this model yet."
    if not after:
        yield (
            "The input 'after' is not connected, so this node may run before the sampler: the runs below are those "
            "known so far. Connect the sampler's output to 'after' to see the run that has just finished."
        )
    elif report["runs"] and not current:
        yield "The sampler's result was cached and nothing ran in this prompt: the run below is an earlier one."
    if report["previous_override"]:
        yield (
            f"Another attention override was on the model already, {report['previous_override']}: it stands for "
            f"'{NATIVE}' here."
        )
    for retired in report["environment"]["retired"]:
        yield f"{retired['kernel']} is out on {retired['device']} until ComfyUI restarts: {retired['detail']}"


def run_headline(run: dict[str, Any], policy: dict[str, Any]) -> list[str]:
    """What a person wants to know about a run first, in a sentence or two."""
    forwards = _count(run["forwards"], "forward")
    if run["calls"] == 0 and run["override_replaced_by"] is not None:
        return [
            f"No call came here: {run['override_replaced_by']} stands where Apply SageAttention put its override. "
            "Put Apply SageAttention after the node that changed it, or remove one of the two."
        ]
    if run["calls"] == 0:
        return [
            f"This model made {forwards} and offered none of its attention calls to an override: its attention ran as "
            "without the pack, and no kernel choice can change that."
        ]
    served = [entry for entry in run["calls_by_kernel"] if entry["kernel"] != NATIVE]
    calls = _count(run["calls"], "attention call")
    if served:
        parts = [f"{entry['kernel']} served {entry['calls']} of {calls} ({entry['share']:.1%})" for entry in served]
        lines = [f"{'; '.join(parts)} in {forwards}."]
    else:
        reason = run["refusals"][0]["detail"] if run["refusals"] else "no kernel was chosen"
        lines = [f"Native attention served all {calls} in {forwards}: {reason}."]
    lines += [_comparison_line(comparison) for comparison in run["comparisons"]]
    if run["rescued_forwards"]:
        rescued = _count(run["rescued_forwards"], "forward")
        lines.append(f"The output of {rescued} was not finite: run again with exact attention before anything saw it.")
    if run["override_replaced_by"] is not None:
        lines.append(f"{run['override_replaced_by']} stands before this node and hands over what it does not serve.")
    lines += _skipped_in_vain(run, policy["skip_blocks"])
    return lines


def _skipped_in_vain(run: dict[str, Any], skip_blocks: list[int]) -> Iterable[str]:
    """Says which numbers in ``skip_blocks`` are no block of the model."""
    blocks = [site["block_number"] for site in run["sites"] if site["block"] is not None]
    if skip_blocks and not blocks:
        yield "skip_blocks has no effect: this model does not report its blocks."
        return
    beyond = [number for number in skip_blocks if number > max(blocks)]
    if beyond:
        yield (
            f"skip_blocks names {_ranges(beyond)}, which this model does not have: its last block is number "
            f"{max(blocks)}."
        )


def _ranges(numbers: list[int]) -> str:
    """Rising numbers as ``skip_blocks`` takes them: 3, 7-9."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def _comparison_line(comparison: dict[str, Any]) -> str:
    """What the plan brought and changed, in a sentence."""
    ratio = comparison["native_ms"] / comparison["plan_ms"]
    line = (
        f"Whole model call: {comparison['plan_ms']:.4g} ms with kernels, {comparison['native_ms']:.4g} ms natively "
        f"(x{ratio:.3f})"
    )
    line += "" if comparison["relative_l2"] is None else f", output off by relative L2 {comparison['relative_l2']:.2g}"
    line += "" if comparison["psnr"] is None else f" ({comparison['psnr']:.1f} dB)"
    line += ", measured in an earlier run" if comparison["remembered"] else ""
    if comparison["faster"]:
        return f"{line}."
    slower = comparison["native_ms"] < comparison["plan_ms"] * (1 - max(NOISE, comparison["noise"]))
    return f"{line}. " + ("Slower than native." if slower else "Not faster by more than noise.")


def to_markdown(report: dict[str, Any]) -> str:
    """The report for people, ready to paste into an issue."""
    lines = ["## Attention Backend Report", ""]
    lines += [f"> {_escaped(note)}\n" for note in report["notes"]]
    shown = [run for run in report["runs"] if run["id"] in report["shown"]]
    for run in shown:
        lines += _run_lines(run, report["policy"])
    if "environment" in report:
        lines += _environment_lines(report)
    return "\n".join(lines).rstrip() + "\n"


def _run_lines(run: dict[str, Any], policy: dict[str, Any]) -> list[str]:
    where = f"sampler node {run['node_id']}" if run["node_id"] else "outside a sampler node"
    steps = f"{run['steps']}" if run["total_steps"] is None else f"{run['steps']} of {run['total_steps']}"
    seconds = "" if run["seconds"] is None else f", {run['seconds']:.2f} s"
    lines = [f"### Run {run['id']}: {_escaped(run['model'])}, {_escaped(where)}", ""]
    lines += [f"**{_escaped(line)}**" for line in run_headline(run, policy)]
    extra = (
        f", and {_count(run['comparison_calls'], 'call')} more to compare and plan" if run["comparison_calls"] else ""
    )
    lines += ["", f"{run['status']}, {steps} steps{seconds}{extra}", ""]
    lines += _table(
        ("kernel", "calls", "share"),
        ((entry["kernel"], entry["calls"], f"{entry['share']:.1%}") for entry in run["calls_by_kernel"]),
    )
    lines += _table(
        ("calls", "not served by", "why", "what to do"),
        ((entry["calls"], entry["kernel"], entry["detail"], entry["advice"]) for entry in run["refusals"]),
        title="Why not",
    )
    lines += _table(
        ("shape (batch x heads x tokens x head_dim)", "kernel", "calls"),
        ((shape["spec"]["text"] if shape["spec"] else "?", shape["kernel"], shape["calls"]) for shape in run["shapes"]),
        title="Shapes",
    )
    lines += _table(
        ("shape", "kernel", "ms on the device", "ms of the host"),
        (
            (shape["spec"]["text"], name, f"{times['device_ms']:.3f}", f"{times['host_ms']:.3f}")
            for shape in run["shapes"]
            for name, times in shape["times"].items()
        ),
        title="Measured for one call",
    )
    rows = [
        (
            "-" if site["site"] is None else site["site"],
            "-" if site["block"] is None else f"{site['block_number']}: {site['block']}",
            site["kernel"],
            {None: "-", True: "on", False: "off"}[site["smooth_k"]],
            _error(site["accuracy"]),
            site["calls"],
            ", ".join(site["reasons"]),
        )
        for site in run["sites"]
    ]
    lines += _table(
        ("site", "block", "kernel", "smooth_k", "worst head's error", "calls", "reasons"),
        rows[:MAX_SITE_ROWS],
        title=f"Sites{'' if len(rows) <= MAX_SITE_ROWS else f' (first {MAX_SITE_ROWS} of {len(rows)})'}",
    )
    lines += _table(
        ("step", "event"),
        (("-" if event["step"] is None else event["step"], event["text"]) for event in run["events"]),
        title="What happened",
    )
    return lines


def _environment_lines(report: dict[str, Any]) -> list[str]:
    environment = report["environment"]
    devices = [f"{device['name']} ({device['arch']})" for device in environment["devices"]] or ["no GPU"]
    toolkit = f"CUDA {environment['cuda']}" if environment["cuda"] else f"ROCm {environment['hip']}"
    built_for = toolkit if environment["cuda"] or environment["hip"] else "CPU only"
    rows = [
        ("device", ", ".join(devices)),
        ("driver", environment["driver"] or "-"),
        ("torch", f"{environment['torch']}, built for {built_for}"),
        ("ComfyUI", environment["comfyui"] or "unknown"),
        ("Python", f"{environment['python']} on {environment['platform']}"),
        ("ComfyUI-SageScope", report["version"]),
        *(
            (
                package["name"],
                f"{package['version']} (build {package['build']})" if package["version"] else "not installed",
            )
            for package in environment["packages"]
        ),
    ]
    policy = report["policy"]
    shown = {**policy, "tolerance": next((name for name, l2 in TOLERANCES.items() if l2 == policy["tolerance"]), "?")}
    settings = ", ".join(f"{name} {_shown(value)}" for name, value in shown.items())
    return ["### Machine", "", *_table(("what", "which"), rows), f"Settings: {_escaped(settings)}", ""]


def _error(accuracy: dict[str, Any] | None) -> str:
    if accuracy is None:
        return "-"
    worst = accuracy["worst_head_relative_l2"]
    found = "not finite" if worst is None else f"{worst:.3f}"
    return found if accuracy["step"] is None else f"{found} in step {accuracy['step']}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> list[str]:
    """A Markdown table with a title line; nothing at all without rows."""
    body = [f"| {' | '.join(_escaped(value) for value in row)} |" for row in rows]
    if not body:
        return []
    heading = [f"**{title}**", ""] if title else []
    return [*heading, f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}", *body, ""]


def _escaped(value: Any) -> str:
    """The value on one line, as text that Markdown shows as it is."""
    return MARKUP.sub(lambda markup: f"\\{markup[0]}", " ".join(str(value).split()))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
