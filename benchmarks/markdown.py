"""The result of a run as text: a table for the terminal, and a block to paste into an issue."""

from __future__ import annotations

from statistics import median
from typing import Any

GIB = 2**30


def table(line: dict[str, Any]) -> str:
    """One line of the run: an entry per row."""
    note = f" ({line['note']})" if line["note"] else ""
    if line["status"] != "ok":
        return f"\n{line['title']}{note}: {line['error']}"
    head = f"{line['steps']} steps, {line['rounds']} rounds, noise {line['noise']:.1%}"
    rows = [f"\n{line['title']}{note}: {head}", f"largest call: {line.get('longest_call', 'unknown')}"]
    rows.append(f"  {'':<36}{'s per run':>10}{'ratio':>9}{'low to high':>17}{'peak GiB':>10}{'error':>9}")
    for name, entry in line["entries"].items():
        if entry["status"] != "ok":
            rows.append(f"  {name:<36}{entry['status']}: {entry['error']}")
            continue
        ratio = entry["ratio"]
        spread = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
        rows.append(
            f"  {name:<36}{median(entry['seconds']):>10.3f}{'x' + format(ratio['median'], '.3f'):>9}{spread:>17}"
            f"{entry['peak_bytes'] / GIB:>10.2f}{_error(entry):>9}  {_served(entry)}"
        )
        if "compiled" in entry:
            rows.append(f"  {'':<36}{_compiled(entry)}")
        if entry["warnings"]:
            rows.append(f"  {'':<36}{entry['warnings']}")
    rows.append(_repeatable(line["repeatable"]))
    return "\n".join([*rows, *_judged(line)])


def markdown(report: dict[str, Any]) -> str:
    """The whole run, ready to paste: lines of the run side by side, with the machine and the versions."""
    environment = report["environment"]
    devices = ", ".join(f"{device['name']} ({device['arch']})" for device in environment["devices"]) or "CPU"
    packages = [f"{package['name']} {package['version']}" for package in environment["packages"] if package["version"]]
    versions = [
        f"pack {report['pack']}",
        f"ComfyUI {environment['comfyui']}",
        f"torch {environment['torch']}",
        f"driver {environment['driver']}",
        *packages,
        environment["platform"],
    ]
    done = [line for line in report["lines"] if line["status"] == "ok"]
    rows = [
        "Paste from here:",
        "",
        f"**{devices}**; {', '.join(versions)}"
        + (f"; compiled with {report['compile_with']}" if report["compile_with"] else "")
        + ("; tiny models: no measurement" if report["tiny"] else ""),
        "",
    ]
    if done:
        rows += _side_by_side(done)
    for line in report["lines"]:
        if line["status"] != "ok":
            rows.append(f"- {line['title']}: {line['error']}")
            continue
        note = f"; {line['note']}" if line["note"] else ""
        rows.append(f"- {line['title']}: {line['steps']} steps, {line['rounds']} rounds{note}")
        rows.append(f"  - {_repeatable(line['repeatable'])}")
        rows += [f"  - {text}" for text in _judged(line)]
        rows += [f"  - {name}: {_compiled(entry)}" for name, entry in line["entries"].items() if "compiled" in entry]
        rows += [
            f"  - {name}: {entry['status']}: {entry['error']}"
            for name, entry in line["entries"].items()
            if entry["status"] != "ok"
        ]
    return "\n".join(["", *rows, ""])


def _side_by_side(lines: list[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for line in lines for name in line["entries"])
    cold = [line["repeatable"].get("cold_over_warm") for line in lines]
    return [
        "Times as fast as native, the whole sampler run (relative L2 of one model call; peak memory in GiB)",
        "",
        _row("", [line["title"] for line in lines]),
        _row("---", ["---"] * len(lines)),
        *(_row(name, [_cell(line["entries"].get(name)) for line in lines]) for name in names),
        _row("noise", [f"{line['noise']:.1%}" for line in lines]),
        _row("first run of auto over the second", ["-" if share is None else f"{share:.2f}" for share in cold]),
        "",
    ]


def _row(first: str, cells: list[str]) -> str:
    return "| " + " | ".join([first, *cells]) + " |"


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None or entry["status"] != "ok":
        return "-" if entry is None else entry["status"]
    return f"x{entry['ratio']['median']:.3f} ({_error(entry)}; {entry['peak_bytes'] / GIB:.2f})"


def _error(entry: dict[str, Any]) -> str:
    return "not finite" if entry["relative_l2"] is None else f"{entry['relative_l2']:.4f}"


def _served(entry: dict[str, Any]) -> str:
    return ", ".join(f"{kernel} {calls}" for kernel, calls in entry["calls_by_kernel"].items())


def _compiled(entry: dict[str, Any]) -> str:
    found = entry["compiled"]
    counts = f"graph breaks {found['graph_breaks']}, recompiles {found['recompiles']}"
    return f"compiled in {found['compile_s']:.1f} s, {counts}"


def _judged(line: dict[str, Any]) -> list[str]:
    timed = line.get("verdicts", []) if line["judged"] else []
    return [verdict["text"] for verdict in [*line.get("graph_verdicts", []), *timed]]


def _repeatable(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"auto could not be run again: {found['error']}"
    same = found["warm_bits_equal"] and found["from_disk_bits_equal"]
    first, second, restarted = (f"{found[name]:.2f} s" for name in ("cold_s", "warm_s", "from_disk_s"))
    bits = "the same bits" if same else "NOT the same bits"
    return f"auto: first run {first}, second {second}, after a restart {restarted}: {bits} each time"
