"""Models compiled as ComfyUI's TorchCompileModel node compiles them, and what torch.compile did in their runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import comfyui
from .entries import AGAIN, NATIVE

INDUCTOR = "inductor"
WITHOUT_COMPILER = "aot_eager"
"""The backend that traces and checks like inductor, and makes no code."""
THE_PACK = "the pack"
RECOMPILE_LIMIT = 64
"""How often one piece of code may be compiled: torch's 8, for each of the graphs of a line."""


def backend(device: torch.device) -> tuple[str, str]:
    """Inductor; on a CPU without a C++ compiler the backend that needs none, and why it is taken."""
    if device.type != "cpu":
        return INDUCTOR, ""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        return WITHOUT_COMPILER, f"backend {WITHOUT_COMPILER}, as {INDUCTOR} needs a C++ compiler: {error}"
    return INDUCTOR, ""


@dataclass(frozen=True)
class OwnGraph:
    """A backend of torch under a name, called by torch.compile with what it traced.

    ComfyUI drops the guards on transformer_options, and torch takes code that is there for every equal backend: without
    the name, the code of the first entry would run for all the others.
    """

    backend: str
    name: str

    def __call__(self, graph: Any, inputs: Any) -> Any:
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)


def no_guards_on_options(guards: Any) -> list[bool]:
    """What ComfyUI's node asks of torch since 0.30: what is in transformer_options makes no model be traced again."""
    return ["transformer_options" not in guard.name for guard in guards]


class Counts(NamedTuple):
    """What torch.compile has done in this process so far."""

    graph_breaks: int
    traced: int
    """Pieces of Python code, each time that one was traced."""

    @classmethod
    def now(cls) -> Counts:
        counters = torch._dynamo.utils.counters
        return cls(sum(counters["graph_break"].values()), counters["frames"]["total"])


class Compiler:
    """Compiles the models of a line, and keeps what it was told of their runs.

    Entries of one graph share what is compiled: the two native ones, and all that are the pack's, whose graph does not
    depend on what its node is set to.
    """

    def __init__(self, backend: str) -> None:
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        self.backend = backend
        self.graphs: dict[str, dict[str, Any]] = {}
        self._graph_of: dict[str, str] = {}

    def compile(self, name: str, model: Any) -> Any:
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        graph = THE_PACK if comfyui.dispatcher_of(model) is not None else NATIVE if name == AGAIN else name
        self._graph_of[name] = graph
        compiled = model.clone()
        # torch takes the filter out of the options that it is given
        options = {"guard_filter_fn": no_guards_on_options}
        set_torch_compile_wrapper(model=compiled, backend=OwnGraph(self.backend, graph), options=options)
        return compiled

    def saw(self, name: str, seconds: float, before: Counts) -> None:
        """A run of the entry is over; ``before`` are the counts at its start. The first of a graph compiles it."""
        graph_breaks, traced = (now - then for now, then in zip(Counts.now(), before, strict=True))
        graph = self._graph_of[name]
        if graph not in self.graphs:
            self.graphs[graph] = {"compile_s": round(seconds, 3), "graph_breaks": graph_breaks, "recompiles": 0}
        else:
            self.graphs[graph]["recompiles"] += traced

    def found(self, name: str) -> Mapping[str, Any]:
        """What compiling the entry's graph took, the breaks in it, and how often code of it was traced again: whichever
        entry runs first after a change has that done for all."""
        return dict(self.graphs[self._graph_of[name]])

    def reset(self) -> None:
        """Forget all code: of another size it would be traced as one for any size, and it holds the weights."""
        torch.compiler.reset()
