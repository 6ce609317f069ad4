"""Whole sampler runs inside ComfyUI: native, other ways to use SageAttention, and this pack, in turns in one process.

    python -m benchmarks.whole_models --comfyui /path/to/ComfyUI --out whole_models.json

Models have their real size and random weights, so no file is needed. Every entry is run once apart, then all of them
in rounds, every second round backwards; a ratio is native's time over the entry's own time in the same round. Prints a
table and a block to paste, and writes the JSON file after every line. Exit code 1 when a bar of ratios.py is missed on
a GPU, a result is not repeatable, or an entry of the pack fails. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from . import comfyui
from .compiling import Compiler, backend
from .entries import AGAIN, AUTO, NATIVE, OBSERVE
from .line_run import LineRun, describe
from .lines import LINES, MAIN
from .machine import Log, Machine
from .markdown import markdown, table
from .sampling import Absent

SCHEMA = 1
MAX_ROUNDS = 9
BUDGET_S = 480.0


def broken(result: dict[str, Any]) -> list[str]:
    """What makes the run fail on one line: the pack's own part of it, not that of others."""
    if result["status"] == "missing":
        return []
    if result["status"] != "ok":
        return [f"{result['title']}: {result['error']}"]
    found = [
        f"{result['title']}: {name}: {entry['error']}"
        for name, entry in result["entries"].items()
        if name in (NATIVE, AGAIN, AUTO, OBSERVE) and entry["status"] != "ok"
    ]
    repeatable = result["repeatable"]
    if not (repeatable.get("warm_bits_equal") and repeatable.get("from_disk_bits_equal")):
        found.append(f"{result['title']}: auto does not give the same bits each time: {repeatable}")
    missed = [verdict for verdict in result.get("graph_verdicts", []) if not verdict["held"]]
    found += [f"{result['title']}: {verdict['text']}" for verdict in missed]
    if result["judged"]:
        missed = [verdict for verdict in result.get("verdicts", []) if not verdict["held"] and not verdict["target"]]
        found += [f"{result['title']}: {verdict['text']}" for verdict in missed]
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_models", description=__doc__.split("\n")[0])
    parser.add_argument("--comfyui", help="folder of ComfyUI (default: COMFYUI_PATH, else the one dev.py has unpacked)")
    parser.add_argument(
        "--lines", default=",".join(MAIN), help=f"of: {', '.join(LINES)}, or all (default: %(default)s)"
    )
    parser.add_argument("--entries", help="leave out all but native, auto and these (default: every entry)")
    parser.add_argument("--compile", action="store_true", help="compile the models as TorchCompileModel does")
    parser.add_argument("--steps", type=int, help="steps of every run (default: 8 or 12, by line)")
    parser.add_argument("--rounds", type=int, default=MAX_ROUNDS, help="at most so many rounds (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds after which no round is started")
    parser.add_argument("--out", type=Path, default=Path("whole_models.json"), help="JSON file (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: shows that the script works")
    options = parser.parse_args(arguments)
    options.lines = list(LINES) if options.lines == "all" else options.lines.split(",")
    options.entries = options.entries and options.entries.split(",")
    if unknown := [name for name in options.lines if name not in LINES]:
        parser.error(f"no line is called {', '.join(unknown)}; there are {', '.join(LINES)}")
    if not options.tiny and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA or ROCm device here; --tiny runs tiny models on the CPU")
    return options


def main(arguments: list[str] | None = None) -> int:
    started = time.perf_counter()
    options = parse(arguments)
    log = Log()
    logging.getLogger().addHandler(log)
    machine = Machine(torch.device("cpu") if options.tiny else torch.device("cuda", torch.cuda.current_device()))
    if options.tiny:
        torch.set_num_threads(1)  # threads of calls this small wait for each other longer than they work
    with tempfile.TemporaryDirectory(prefix="sagescope-", ignore_cleanup_errors=True) as folder:
        root = comfyui.find(options.comfyui)
        stand_ins = comfyui.start(root, Path(folder), cpu=options.tiny)
        measurements = Path(folder) / "measurements.json"

        def session() -> Any:
            return comfyui.new_session(measurements)

        compile_with, instead = backend(machine.device) if options.compile else (None, "")
        if instead:
            print(instead)
        report = {
            "schema": SCHEMA,
            "tiny": options.tiny,
            "compile_with": compile_with,
            "pack": comfyui.pack("sage_core").__version__,
            "environment": session().snapshot(),
            "stand_ins": stand_ins,
            "lines": [],
        }
        for position, name in enumerate(options.lines):
            line = LINES[name].for_compiling() if compile_with else LINES[name]
            compiler = Compiler(compile_with) if compile_with else None
            now = time.perf_counter()
            left = started + options.budget - now
            share = line.weight / sum(LINES[later].weight for later in options.lines[position:])
            run = LineRun(name, line, machine, options, log, compiler)
            try:
                if left <= 0:
                    raise TimeoutError(f"the budget of {options.budget:g} s was used up before")
                run.measure(line, session, now + left * share)
                run.result["status"] = "ok"
            except Absent as absent:
                run.result |= {"status": "missing", "error": str(absent)}
            except Exception as error:  # a line that does not fit into memory must not cost the others
                run.result |= {"status": "failed", "error": describe(error)}
            run.models.clear()
            del run.models
            if compiler is not None:
                compiler.reset()
            machine.clean()
            report["lines"].append(run.result)
            report["seconds"] = round(time.perf_counter() - started, 1)
            options.out.write_text(json.dumps(report, indent=1, allow_nan=False), encoding="utf-8")
            print(table(run.result), flush=True)
    print(markdown(report))
    failures = [text for result in report["lines"] for text in broken(result)]
    print("\n".join(failures) or "nothing failed", f"\n{report['seconds']:g} s, written to {options.out}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
