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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import comfyui
from .entries import AGAIN, AUTO, NATIVE, OBSERVE, Missing, entries, served
from .lines import LINES, MAIN, Line, Sampling
from .machine import Log, Machine
from .markdown import markdown, table
from .ratios import noise, ratio, verdicts

SCHEMA = 1
MAX_ROUNDS = 9
TINY_ROUNDS = 2
BUDGET_S = 480.0
TARGET_GPU = "H200"
"""The targets of the lines are for this GPU."""


class LineRun:
    """All measurements of one line, as the dictionary that the JSON file holds."""

    def __init__(self, name: str, line: Line, machine: Machine, options: argparse.Namespace, log: Log) -> None:
        self.machine = machine
        self.options = options
        self.log = log
        self.models: dict[str, Any] = {}
        self.result: dict[str, Any] = {"name": name, "title": line.title, "note": line.note, "entries": {}}
        self.result["judged"] = machine.cuda  # no bar is for tiny models on a CPU

    def measure(self, line: Line, session: Callable[[], Any], deadline: float) -> None:
        """Everything, in the order in which a user meets it: native, the first run with the pack, later runs."""
        started = time.perf_counter()
        sampling = Sampling.build(line, self.machine.device, tiny=self.options.tiny, steps=self.options.steps)
        self.result |= {"steps": sampling.steps, "cfg": line.cfg, "latent": sampling.latent, "text": sampling.text}
        sampling.sample(sampling.model, steps=1)  # what loads on a first launch is nobody's cost
        reference = sampling.model_output(sampling.model)
        self.result["build_s"] = round(time.perf_counter() - started, 3)
        all_entries = entries(self.machine.device)
        try:
            self.result["repeatable"] = self._repeat(sampling, all_entries[AUTO], session)
        except Exception as error:
            self.result["repeatable"] = {"error": describe(error)}
            self.machine.clean()
        for name, entry in all_entries.items():
            if name in (NATIVE, AGAIN, AUTO) or self.options.entries is None or name in self.options.entries:
                self._prepare(name, entry, sampling, reference)
        self._rounds(sampling, deadline)
        self._finish(line)

    def _repeat(self, sampling: Sampling, auto: Any, session: Callable[[], Any]) -> dict[str, Any]:
        """Auto on a machine that never measured this model, then again, then as after a restart of ComfyUI."""

        def run(model: Any) -> tuple[torch.Tensor, float]:
            latent, seconds, _ = self.machine.run(lambda: sampling.sample(model))
            return latent, seconds

        session()
        model = auto(sampling.model)
        cold, cold_s = run(model)
        warm, warm_s = run(model)
        session()
        restarted = auto(sampling.model)
        from_disk, from_disk_s = run(restarted)
        self.models[AUTO] = restarted
        return {
            "cold_s": cold_s,
            "warm_s": warm_s,
            "from_disk_s": from_disk_s,
            "cold_over_warm": cold_s / warm_s,
            "warm_bits_equal": torch.equal(cold, warm),
            "from_disk_bits_equal": torch.equal(cold, from_disk),
            "comparisons": comfyui.dispatcher_of(restarted).snapshot()["runs"][-1]["comparisons"],
        }

    def _prepare(self, name: str, entry: Any, sampling: Sampling, reference: torch.Tensor) -> None:
        """Patch a model for the entry and run it apart: the run that finds out whether it works, and how exactly."""
        found = self.result["entries"][name] = {"status": "ok"}
        self.log.take()
        try:
            model = self.models.get(name) or entry(sampling.model)
            output = sampling.model_output(model)
        except Missing as missing:
            found |= {"status": "missing", "error": str(missing)}
            self.models.pop(name, None)
            return
        except Exception as error:
            self._failed(name, error)
            return
        accuracy = comfyui.pack("sage_core.accuracy").compare(output.float(), reference.float())
        found |= {
            "relative_l2": accuracy.relative_l2 if accuracy.finite else None,
            "warnings": self.log.take(),
            "seconds": [],
            "peak_bytes": 0,
        }
        self.models[name] = model

    def _failed(self, name: str, error: Exception) -> None:
        """An entry that raised leaves the rounds, with its error; the others go on."""
        self.result["entries"][name] = {"status": "failed", "error": describe(error), "warnings": self.log.take()}
        self.models.pop(name, None)
        self.machine.clean()

    def _rounds(self, sampling: Sampling, deadline: float) -> None:
        most = TINY_ROUNDS if self.options.tiny else self.options.rounds
        longest = 0.0
        for number in range(most):
            start = time.perf_counter()
            if number and start + longest > deadline:
                break
            order = [name for name in self.result["entries"] if name in self.models]
            for name in order[:: -1 if number % 2 else 1]:
                if name not in self.models:
                    continue
                model = self.models[name]
                try:
                    _, seconds, peak = self.machine.run(lambda model=model: sampling.sample(model))
                except Exception as error:
                    self._failed(name, error)
                    continue
                found = self.result["entries"][name]
                found["seconds"].append(seconds)
                found["peak_bytes"] = max(found["peak_bytes"], peak)
            longest = max(longest, time.perf_counter() - start)

    def _finish(self, line: Line) -> None:
        found = {name: self.result["entries"][name] for name in self.models}
        if NATIVE not in found or AGAIN not in found:
            raise RuntimeError(f"native attention itself failed: {self.result['entries'][NATIVE].get('error')}")
        native = found[NATIVE]["seconds"]
        for name, entry in found.items():
            entry["ratio"] = ratio(native, entry["seconds"])._asdict()
            entry["calls_by_kernel"] = dict(served(self.models[name]))
        self.result["noise"] = noise(native, found[AGAIN]["seconds"])
        self.result["rounds"] = len(native)
        if AUTO in found:
            medians = {name: entry["ratio"]["median"] for name, entry in found.items() if name not in (NATIVE, AGAIN)}
            target = line.target if TARGET_GPU in self.machine.name else None
            judged = verdicts(medians, self.result["noise"], target)
            self.result["verdicts"] = [{**verdict.to_json(), "text": verdict.text()} for verdict in judged]
            shapes = comfyui.dispatcher_of(self.models[AUTO]).snapshot()["runs"][-1]["shapes"]
            longest = max((shape["spec"] for shape in shapes if shape["spec"]), key=lambda spec: spec["qo_len"])
            self.result["longest_call"] = longest["text"]


def describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def broken(result: dict[str, Any]) -> list[str]:
    """What makes the run fail on one line: the pack's own part of it, not that of others."""
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

        report = {
            "schema": SCHEMA,
            "tiny": options.tiny,
            "pack": comfyui.pack("sage_core").__version__,
            "environment": session().snapshot(),
            "stand_ins": stand_ins,
            "lines": [],
        }
        for position, name in enumerate(options.lines):
            line = LINES[name]
            now = time.perf_counter()
            left = started + options.budget - now
            share = line.weight / sum(LINES[later].weight for later in options.lines[position:])
            run = LineRun(name, line, machine, options, log)
            try:
                if left <= 0:
                    raise TimeoutError(f"the budget of {options.budget:g} s was used up before")
                run.measure(line, session, now + left * share)
                run.result["status"] = "ok"
            except Exception as error:  # a line that does not fit into memory must not cost the others
                run.result |= {"status": "failed", "error": describe(error)}
            run.models.clear()
            del run.models
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
