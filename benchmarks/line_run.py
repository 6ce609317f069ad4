"""One line of benchmarks.whole_models: its model built, every entry patched and run, and what came of it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import comfyui
from .compiling import Compiler, Counts
from .entries import AGAIN, AUTO, NATIVE, OBSERVE, Missing, chosen, entries, served
from .lines import Line
from .machine import Log, Machine
from .ratios import AtMost, Verdict, graph_verdicts, memory_verdict, noise, ratio, verdicts
from .sampling import Sampling

TINY_ROUNDS = 2
TARGET_GPU = "H200"
"""The targets of the lines are for this GPU."""


class LineRun:
    """All measurements of one line, as the dictionary that the JSON file holds; with a compiler, of compiled models."""

    def __init__(
        self,
        name: str,
        line: Line,
        machine: Machine,
        options: argparse.Namespace,
        log: Log,
        compiler: Compiler | None = None,
    ) -> None:
        self.machine = machine
        self.options = options
        self.log = log
        self.compiler = compiler
        self.models: dict[str, Any] = {}
        self.result: dict[str, Any] = {"name": name, "title": line.title, "note": line.note, "entries": {}}
        self.result["judged"] = machine.cuda  # no bar is for tiny models on a CPU

    def measure(self, line: Line, session: Callable[[], Any], deadline: float) -> None:
        """Everything, in the order in which a user meets it: native, the first run with the pack, later runs."""
        started = time.perf_counter()
        sampling = Sampling.build(line, self.machine.device, tiny=self.options.tiny, steps=self.options.steps)
        self.result |= {"steps": sampling.steps, "cfg": line.cfg, "latent": sampling.latent, "text": sampling.text}
        sampling.sample(sampling.model, steps=1)  # what loads on a first launch is nobody's cost
        self.result["build_s"] = round(time.perf_counter() - started, 3)
        all_entries = entries(self.machine.device, compiled=self.compiler is not None)
        native = self.models[NATIVE] = self._patched(NATIVE, all_entries[NATIVE], sampling)
        reference, _, _ = self._run(NATIVE, lambda: sampling.model_output(native))
        try:
            if self.compiler is not None:  # the pack's graph is made before what is timed, by a node that only observes
                observed = self._patched(AUTO, all_entries[OBSERVE], sampling)
                self._run(AUTO, lambda: sampling.sample(observed, steps=1))
            self.result["repeatable"] = self._repeat(sampling, all_entries[AUTO], session)
        except Exception as error:
            self.result["repeatable"] = {"error": describe(error)}
            self.machine.clean()
        longest = 0.0
        for name, entry in all_entries.items():
            start = time.perf_counter()
            if not chosen(name, self.options.entries):
                continue
            if name not in (NATIVE, AGAIN, AUTO) and start + longest > deadline:
                self.result["entries"][name] = {"status": "left out", "error": "no time was left for it"}
                continue
            self._prepare(name, entry, sampling, reference)
            longest = max(longest, time.perf_counter() - start)
        for name in self.options.entries or ():
            if not any(name == each.partition(",")[0] for each in all_entries):
                self.result["entries"][name] = {"status": "missing", "error": "there is no entry of that name here"}
        self._rounds(sampling, deadline)
        self._finish(line)

    def _patched(self, name: str, entry: Any, sampling: Sampling) -> Any:
        """The entry's MODEL."""
        model = entry(sampling.model)
        return model if self.compiler is None else self.compiler.compile(name, model)

    def _run(self, name: str, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float, int]:
        """What Machine.run gives for a run of the entry."""
        if self.compiler is None:
            return self.machine.run(function)
        before = Counts.now()
        done = self.machine.run(function)
        self.compiler.saw(name, done[1], before)
        return done

    def _repeat(self, sampling: Sampling, auto: Any, session: Callable[[], Any]) -> dict[str, Any]:
        """Auto on a machine that never measured this model, then again, then as after a restart of ComfyUI."""

        def run(model: Any) -> tuple[torch.Tensor, float]:
            latent, seconds, _ = self._run(AUTO, lambda: sampling.sample(model))
            return latent, seconds

        session()
        model = self._patched(AUTO, auto, sampling)
        cold, cold_s = run(model)
        warm, warm_s = run(model)
        session()
        restarted = self._patched(AUTO, auto, sampling)
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
            model = self.models.get(name) or self._patched(name, entry, sampling)
            output, _, _ = self._run(name, lambda: sampling.model_output(model))
            if self.compiler is not None:  # what is traced again at a later step is counted and not timed
                self._run(name, lambda: sampling.sample(model))
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
                    _, seconds, peak = self._run(name, lambda model=model: sampling.sample(model))
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
            if self.compiler is not None:
                entry["compiled"] = self.compiler.found(name)
        self.result["noise"] = noise(native, found[AGAIN]["seconds"])
        self.result["rounds"] = len(native)
        if AUTO in found:
            medians = {name: entry["ratio"]["median"] for name, entry in found.items() if name not in (NATIVE, AGAIN)}
            target = line.target if TARGET_GPU in self.machine.name else None
            judged = verdicts(medians, self.result["noise"], target)
            if self.machine.cuda:  # no peak is read elsewhere
                peaks = (found[name]["peak_bytes"] for name in (NATIVE, AUTO))
                judged.append(memory_verdict(*peaks, compiled=self.compiler is not None))
            self.result["verdicts"] = as_json(judged)
            if self.compiler is not None:
                graphs = graph_verdicts(found[AUTO]["compiled"], found[NATIVE]["compiled"])
                self.result["graph_verdicts"] = as_json(graphs)
            shapes = comfyui.dispatcher_of(self.models[AUTO]).snapshot()["runs"][-1]["shapes"]
            longest = max((shape["spec"] for shape in shapes if shape["spec"]), key=lambda spec: spec["qo_len"])
            self.result["longest_call"] = longest["text"]


def as_json(judged: Sequence[Verdict | AtMost]) -> list[dict[str, Any]]:
    return [{**verdict.to_json(), "text": verdict.text()} for verdict in judged]


def describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
