"""How models are compiled for the benchmark, what is counted, and the whole command with ``--compile``."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import compiling
from benchmarks.compiling import Compiler, Counts, OwnGraph
from benchmarks.lines import LINES
from benchmarks.markdown import table
from hosts import all_hosts
from tests.benchmarks.command import measure


@pytest.fixture(autouse=True)
def fresh():
    limit = torch._dynamo.config.recompile_limit
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = limit


class Model:
    """Clones share the network, as MODELs do; a wrapper is stored on them as ComfyUI stores it."""

    def __init__(self, network, dispatcher=None):
        self.network = network
        self.dispatcher = dispatcher
        self.options = None
        self.run = network

    def clone(self):
        return Model(self.network, self.dispatcher)


@pytest.fixture
def compiler(monkeypatch):
    def set_torch_compile_wrapper(*, model, backend, options):
        model.options = dict(options)
        model.run = torch.compile(model.network, backend=backend, options=options)

    helpers = SimpleNamespace(set_torch_compile_wrapper=set_torch_compile_wrapper)
    monkeypatch.setitem(sys.modules, "comfy_api.torch_helpers", helpers)
    monkeypatch.setattr(compiling.comfyui, "dispatcher_of", lambda model: model.dispatcher)
    return Compiler("aot_eager")


def network(x, transformer_options):
    return transformer_options["attention"](x * 2)


def run(compiler, name, model, function, x=None):
    before = Counts.now()
    output = model.run(torch.ones(3) if x is None else x, transformer_options={"attention": function})
    compiler.saw(name, 0.5, before)
    return output.tolist()


def test_each_way_has_code_of_its_own_though_torch_does_not_look_at_the_options(compiler):
    one, two = (compiler.compile(name, Model(network)) for name in ("one", "two"))
    assert run(compiler, "one", one, torch.neg) == [-2.0] * 3
    assert run(compiler, "two", two, torch.exp) == pytest.approx([7.389056] * 3)
    assert run(compiler, "one", one, torch.exp) == [-2.0] * 3  # ComfyUI's guard filter
    assert compiler.found("one") == compiler.found("two") == {"compile_s": 0.5, "graph_breaks": 0, "recompiles": 0}


def test_native_and_its_repetition_share_code_and_so_does_all_that_is_of_the_pack(compiler):
    first = compiler.compile("native", Model(network))
    again = compiler.compile("native again", Model(network))
    auto = compiler.compile("auto", Model(network, dispatcher=object()))
    kernel = compiler.compile("a kernel", Model(network, dispatcher=object()))
    for name, model in (("native", first), ("native again", again), ("auto", auto), ("a kernel", kernel)):
        run(compiler, name, model, torch.neg)
    assert list(compiler.graphs) == ["native", "the pack"]
    assert [compiler.found(name)["recompiles"] for name in ("native again", "a kernel")] == [0, 0]


def broken_once(x, transformer_options):
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


def test_breaks_are_those_of_the_first_run_and_recompiles_those_of_every_later_one(compiler):
    model, again = (compiler.compile(name, Model(broken_once)) for name in ("native", "native again"))
    run(compiler, "native", model, None)
    assert compiler.found("native")["graph_breaks"] == 1
    run(compiler, "native again", again, None, torch.ones(4))  # of any size from here on: both halves anew
    assert compiler.found("native again") == compiler.found("native")
    assert compiler.found("native")["recompiles"] == 2
    run(compiler, "native", model, None, torch.ones(5))
    assert compiler.found("native")["recompiles"] == 2


def test_forgetting_has_everything_compiled_again(compiler):
    model = compiler.compile("native", Model(network))
    run(compiler, "native", model, torch.neg)
    compiler.reset()
    run(compiler, "native", model, torch.neg)
    assert compiler.found("native")["recompiles"] == 1


def test_backends_are_equal_for_the_same_graph_only():
    assert OwnGraph("inductor", "native") == OwnGraph("inductor", "native") != OwnGraph("inductor", "auto")


def test_without_a_cxx_compiler_the_backend_is_one_that_needs_none_and_the_reason_is_told(monkeypatch):
    from torch._inductor import cpp_builder

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    assert compiling.backend(torch.device("cpu")) == ("inductor", "")

    def absent():
        raise RuntimeError("none found")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", absent)
    name, reason = compiling.backend(torch.device("cpu"))
    assert name == "aot_eager"
    assert "inductor needs a C++ compiler: none found" in reason
    assert compiling.backend(torch.device("cuda", 0)) == ("inductor", "")


def test_a_line_is_compiled_with_no_more_layers_and_says_how_many():
    for line in LINES.values():
        compiled = line.for_compiling()
        assert compiled.target is None
        assert compiled.title == f"{line.title}, compiled"
        assert compiled.unet.keys() == line.unet.keys() | line.compiled.keys()
        for name in line.compiled:
            assert compiled.unet[name] != line.unet[name]
        assert compiled.note
    flux = LINES["flux-1024"].for_compiling()
    assert str(flux.unet["depth"]) in flux.note
    assert str(LINES["flux-1024"].unet["depth"]) in flux.note


@pytest.fixture(scope="module", params=all_hosts(), ids=lambda host: host.name)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The line of a run of the command, with the text that it printed."""
    folder, own = tmp_path_factory.mktemp("out"), "native (observe only),int8_reference,misspelt"
    text, report = measure(request.param, folder, "--compile", "--lines", "flux-1024", "--entries", own)
    backend, reason = compiling.backend(torch.device("cpu"))
    assert report["compile_with"] == backend
    assert reason in text
    (line,) = report["lines"]
    return {"line": line, "text": text}


def test_every_entry_of_a_compiled_line_is_measured(done: dict[str, Any]) -> None:
    entries = dict(done["line"]["entries"])
    assert entries.pop("misspelt") == {"status": "missing", "error": "there is no entry of that name here"}
    assert set(entries) == {"native", "native (observe only)", "auto", "int8_reference", "native again"}
    for name, entry in entries.items():
        assert entry["status"] == "ok", (name, entry)
        assert entry["compiled"]["compile_s"] > max(entry["seconds"])
    assert entries["int8_reference"]["calls_by_kernel"] == {"int8_reference": 6}
    assert 0 < entries["int8_reference"]["relative_l2"] < 0.02
    assert table(done["line"]) in done["text"]


def test_the_pack_breaks_no_graph_and_has_none_made_again(done: dict[str, Any]) -> None:
    """Neither other settings of the node, nor another step, nor a node as after a restart."""
    for name in ("native (observe only)", "auto", "int8_reference"):
        found = done["line"]["entries"][name]["compiled"]
        assert (found["graph_breaks"], found["recompiles"]) == (0, 0), name
    assert [verdict["held"] for verdict in done["line"]["graph_verdicts"]] == [True, True]
    assert "graph breaks of auto: 0" in done["text"]


def test_compiled_runs_repeat_to_the_bit(done: dict[str, Any]) -> None:
    assert done["line"]["repeatable"]["warm_bits_equal"]
    assert done["line"]["repeatable"]["from_disk_bits_equal"]
