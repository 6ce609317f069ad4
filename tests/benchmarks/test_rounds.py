"""The rounds of one line with models that do nothing: their order, failures, the time limit, and what fails a run."""

from __future__ import annotations

import argparse
import logging
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import line_run as line_run_module
from benchmarks.line_run import LineRun
from benchmarks.lines import LINES
from benchmarks.machine import Log, Machine
from benchmarks.whole_models import broken, parse

LATENT = torch.zeros(1)


class Sampling:
    """Counts its runs; the model named in ``fails`` raises at its run of that number."""

    def __init__(self, fails=None):
        self.runs = []
        self.fails = fails or {}

    def sample(self, model, steps=None):
        self.runs.append(model)
        if self.runs.count(model) == self.fails.get(model):
            raise torch.OutOfMemoryError(f"no memory for {model}")
        time.sleep(0.001)
        return LATENT


def line_run(*names, rounds=4):
    options = argparse.Namespace(tiny=False, rounds=rounds, entries=None)
    run = LineRun("flux-1024", LINES["flux-1024"], Machine(torch.device("cpu")), options, Log())
    run.models = {name: name for name in names}
    run.result["entries"] = {name: {"status": "ok", "seconds": [], "peak_bytes": 0, "error": ""} for name in names}
    return run


def test_every_second_round_runs_backwards():
    run, sampling = line_run("a", "b", "c", rounds=3), Sampling()
    run._rounds(sampling, time.perf_counter() + 60)
    assert "".join(sampling.runs) == "abccbaabc"
    assert [len(entry["seconds"]) for entry in run.result["entries"].values()] == [3, 3, 3]
    assert all(seconds > 0.001 for entry in run.result["entries"].values() for seconds in entry["seconds"])


def test_an_entry_that_raises_leaves_and_the_others_go_on():
    run, sampling = line_run("a", "b", "c", rounds=3), Sampling(fails={"b": 2})
    run._rounds(sampling, time.perf_counter() + 60)
    assert "".join(sampling.runs) == "abccbaac"
    assert run.result["entries"]["b"]["status"] == "failed"
    assert run.result["entries"]["b"]["error"] == "OutOfMemoryError: no memory for b"
    assert set(run.models) == {"a", "c"}
    assert len(run.result["entries"]["a"]["seconds"]) == 3


def test_no_round_starts_that_would_end_after_the_deadline_but_the_first():
    run, sampling = line_run("a", rounds=9), Sampling()
    run._rounds(sampling, time.perf_counter() - 1)
    assert sampling.runs == ["a"]


@pytest.mark.parametrize(("left_s", "measured"), [(60, "all"), (-1, "needed")])
def test_when_the_time_of_a_line_is_over_only_what_is_needed_is_still_started(monkeypatch, left_s, measured):
    class Built(Sampling):
        model, steps, latent, text = "model", 1, (1,), (1, 1)

        def model_output(self, model):
            return LATENT

    names = ["native", "other", "auto", "native again"]
    accuracy = SimpleNamespace(compare=lambda output, reference: SimpleNamespace(finite=True, relative_l2=0.0))
    monkeypatch.setattr(line_run_module, "Sampling", SimpleNamespace(build=lambda *_, **__: Built()))
    monkeypatch.setattr(
        line_run_module, "entries", lambda *_, **__: {name: lambda model, name=name: name for name in names}
    )
    monkeypatch.setattr(line_run_module.comfyui, "pack", lambda name: accuracy)
    monkeypatch.setattr(LineRun, "_repeat", lambda *_: {})
    monkeypatch.setattr(LineRun, "_finish", lambda *_: None)
    run = line_run(rounds=1)
    run.options.steps = None
    run.measure(LINES["flux-1024"], lambda: None, time.perf_counter() + left_s)
    found = {name: entry["status"] for name, entry in run.result["entries"].items()}
    expected = dict.fromkeys(names, "ok")
    assert found == (expected if measured == "all" else {**expected, "other": "left out"})


def result(**fields):
    entries = {name: {"status": "ok"} for name in ("native", "native again", "auto", "native (observe only)")}
    repeatable = {"warm_bits_equal": True, "from_disk_bits_equal": True}
    defaults = {"status": "ok", "title": "Model", "judged": True, "entries": entries, "repeatable": repeatable}
    return {**defaults, "verdicts": [], **fields}


def test_a_run_in_which_all_is_well_does_not_fail():
    verdict = {"held": True, "target": False, "text": "met"}
    missed_target = {"held": False, "target": True, "text": "MISSED"}
    other = {**result()["entries"], "plain sageattn": {"status": "failed", "error": "no kernel"}}
    assert broken(result()) == []
    assert broken(result(verdicts=[verdict, missed_target])) == []
    assert broken(result(entries=other)) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "failed", "error": "out of memory"},
        {"entries": {"auto": {"status": "failed", "error": "raised"}}},
        {"repeatable": {"warm_bits_equal": False, "from_disk_bits_equal": True}},
        {"repeatable": {"warm_bits_equal": True, "from_disk_bits_equal": False}},
        {"repeatable": {"error": "raised"}},
        {"verdicts": [{"held": False, "target": False, "text": "MISSED"}]},
        {"graph_verdicts": [{"held": False, "text": "MISSED"}]},
        {"judged": False, "graph_verdicts": [{"held": False, "text": "MISSED"}]},
    ],
)
def test_each_thing_that_fails_a_run_does(fields):
    (text,) = broken(result(**fields))
    assert text.startswith("Model: ")


def test_a_bar_is_for_a_gpu_only():
    assert broken(result(judged=False, verdicts=[{"held": False, "target": False, "text": "MISSED"}])) == []


def test_warnings_are_counted_and_the_first_is_kept():
    log = Log()
    for text in ("first", "second"):
        log.emit(log_record(text))
    assert log.take() == "logged 2 warnings, first: first"
    assert log.take() == ""


def log_record(text):
    return logging.LogRecord("any", logging.WARNING, "file", 1, text, None, None)


def test_unknown_lines_are_refused_with_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        parse(["--tiny", "--lines", "flux-1024,flux-4096"])
    assert "flux-4096; there are flux-1024" in capsys.readouterr().err
    assert parse(["--tiny", "--lines", "all"]).lines == list(LINES)
