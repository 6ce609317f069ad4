"""Scenarios about the two nodes: their inputs, every kernel by name, bad input, the network, the report."""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from comfy_execution.utils import CurrentNodeContext

import inside
from patched import NATIVE, OVERRIDE, apply, digest, distance, last_run, report, strict_json
from stand_ins import tiny_models

# -- inputs and kernels


def declared(node_id: str) -> dict[str, Any]:
    """What a workflow file depends on: inputs with types and limits in their order, outputs, and how it is cached."""
    cls = inside.node(node_id)
    shown = ("default", "min", "max", "step", "options", "multiline")
    inputs, tooltips = {}, []
    for section, entries in cls.INPUT_TYPES().items():
        for name, entry in entries.items() if section != "hidden" else ():
            kind, settings = entry[0], entry[1] if len(entry) > 1 else {}
            options = {"options": kind} if isinstance(kind, list) else {}
            limits = {key: settings[key] for key in shown if key in settings}
            inputs[name] = [section, "COMBO" if options else kind, {**options, **limits}]
            tooltips.append(settings.get("tooltip", ""))
    return {
        "inputs": inputs,
        "tooltips": tooltips,
        "outputs": list(cls.RETURN_TYPES),
        "output node": cls.OUTPUT_NODE,
        "not idempotent": cls.GET_SCHEMA().not_idempotent,
    }


def every_kernel(kernels: list[str]) -> dict[str, Any]:
    """One step with each kernel by name on this machine."""
    tiny = tiny_models.wan()
    native = tiny.sample(steps=1)
    facts = {}
    for kernel in kernels:
        patched = apply(tiny.model, kernel=kernel)
        latent = tiny.sample(patched, steps=1)
        facts[kernel] = {"error": distance(latent, native), "run": last_run(patched)}
    return facts


def stopped(kernel: str) -> dict[str, Any]:
    """What the node raises for a kernel that cannot be used here, and whether the input model was touched."""
    return _refused(tiny_models.wan().model, kernel=kernel, if_unavailable="stop with an error")


def memory_asked_for() -> list[list[bool]]:
    """What the override says of its memory, and what ComfyUI takes its own attention for, in its two cases."""
    from comfy import model_management

    override = apply(tiny_models.wan().model).model_options["transformer_options"][OVERRIDE]
    found = []
    own = model_management.pytorch_attention_flash_attention
    for answer in (False, True):
        model_management.pytorch_attention_flash_attention = lambda answer=answer: answer
        found.append([override.memory_efficient, answer])
    model_management.pytorch_attention_flash_attention = own
    return found


# -- bad input


def bad_widgets(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    model = tiny_models.wan().model
    return [_refused(model, **widgets) for widgets in cases]


def good_widgets(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    model = tiny_models.wan().model
    return [report(apply(model, **widgets))["policy"] for widgets in cases]


def bad_models() -> dict[str, Any]:
    import comfy.model_patcher

    cpu = torch.device("cpu")
    sound = tiny_models.wan().model
    overridden = sound.clone()
    overridden.model_options["transformer_options"][OVERRIDE] = "sage"
    models = {
        "nothing": None,
        "text": "model",
        "a VAE": comfy.model_patcher.ModelPatcher(torch.nn.Linear(2, 2), load_device=cpu, offload_device=cpu),
        "an override that is text": overridden,
    }
    return {name: _refused(model, kernel=NATIVE) for name, model in models.items()}


def _refused(model: Any, **widgets: Any) -> dict[str, Any]:
    before = _state(model)
    try:
        apply(model, **widgets)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error), "untouched": _state(model) == before}
    return {"error": None, "message": "accepted", "untouched": _state(model) == before}


def _state(model: Any) -> Any:
    """All of a model patcher that a node may change."""
    if not hasattr(model, "model_options"):
        return repr(model)
    names = ("wrappers", "callbacks", "attachments", "object_patches", "injections", "patches_uuid")
    state = {name: copy.copy(getattr(model, name, None)) for name in names}
    return repr([model.model_options, state])


# -- the network


@contextmanager
def no_network() -> Iterator[list[str]]:
    """Every way out fails and is noted."""
    tried: list[str] = []

    def refuse(name: str) -> Any:
        def refused(*args: Any, **kwargs: Any) -> Any:
            tried.append(f"{name} {args[-1] if args else ''}")
            raise OSError("the network is not there")

        return refused

    places = [(socket.socket, name) for name in ("connect", "connect_ex", "sendto")]
    places += [(socket, name) for name in ("create_connection", "getaddrinfo", "gethostbyname")]
    # what socket.socket inherits from C is put back by deleting what stands in for it
    originals = [(place, name, vars(place).get(name)) for place, name in places]
    try:
        for place, name in places:
            setattr(place, name, refuse(name))
        yield tried
    finally:
        for place, name, original in originals:
            if original is None:
                delattr(place, name)
            else:
                setattr(place, name, original)


def offline(kernels: list[str]) -> dict[str, Any]:
    """Every kernel by name on this machine, then on every GPU that one is for, with the network gone."""
    tiny = tiny_models.wan()
    core, environment = inside.pack_module("sage_core"), inside.pack_module("sage_core.environment")

    class Elsewhere(environment.Environment):
        """This machine, as if its CPU were another device."""

        arch: str = ""

        def arch_of(self, device: torch.device) -> str:
            return self.arch

    refused = {}
    with no_network() as tried:
        for kernel in kernels:
            patched = apply(tiny.model, kernel=kernel)
            tiny.sample(patched, steps=1)
            report(patched)
        for backend in core.BACKENDS:
            for arch in backend.support.archs or ():
                session = core.Session(core.BACKENDS, Elsewhere())
                object.__setattr__(session.environment, "arch", arch)
                dispatcher = core.Dispatcher(core.Policy(kernel=backend.name), session)
                found = dispatcher.prepare(torch.device("cpu"))
                refused[f"{backend.name} on {arch}"] = [refusal.code.value for refusal in found]
    return {"tried": tried, "refused": refused}


def network_is_watched() -> list[str]:
    """What the guard notes when something does try."""
    import urllib.request

    with no_network() as tried:
        for attempt in (
            lambda: urllib.request.urlopen("http://127.0.0.1:9/", timeout=1),
            lambda: socket.socket().connect(("127.0.0.1", 9)),
        ):
            with suppress(OSError):
                attempt()
    return tried


# -- the report


def report_node(after: bool) -> dict[str, Any]:
    tiny = tiny_models.wan()
    patched = apply(tiny.model, kernel="int8_reference", start_percent=0.5)
    latent = {"samples": tiny.sample(patched)}
    inputs = {"model": patched, **({"after": latent} if after else {})}
    output = inside.execute("AttentionBackendReport", **inputs)
    passed, text, data = output.args
    return {
        "passed on": passed is latent,
        "text": text,
        "json": strict_json(data),
        "ui": strict_json(json.dumps(output.ui, allow_nan=False)),
        "ui is lists": all(isinstance(value, list) for value in output.ui.values()),
    }


def notes(kind: str) -> dict[str, Any]:
    """The report's notes in different places of a graph; "a" and "b" are prompts."""
    tiny = tiny_models.wan()
    patched = tiny.model if kind == "not patched" else apply(tiny.model, kernel=NATIVE)
    if kind == "cached":
        with CurrentNodeContext("a", "6"):
            tiny.sample(patched, steps=1)
        with CurrentNodeContext("b", "7"):
            return report(patched)
    if kind == "two samplers":
        with CurrentNodeContext("a", "5"):
            tiny.sample(patched, steps=1)
        for sampler in ("6", "7"):
            with CurrentNodeContext("b", sampler):
                tiny.sample(patched, steps=1)
        with CurrentNodeContext("b", "8"):
            return report(patched)
    if kind == "in a script":
        tiny.sample(patched, steps=1)
    return report(patched, after=None if kind == "no after" else True)


def many_runs(runs: int) -> dict[str, Any]:
    tiny = tiny_models.qwen_image()
    patched = apply(tiny.model, kernel=NATIVE)
    for _ in range(runs):
        tiny.sample(patched, steps=1)
    return report(patched)


def never_offered() -> dict[str, Any]:
    """A diffusion model that attends without telling ComfyUI's attention functions whose model it is."""
    tiny = tiny_models.wan()

    def withhold(module: Any, args: Any, keywords: dict[str, Any]) -> Any:
        return args, {name: value for name, value in keywords.items() if name != "transformer_options"}

    tiny.model.model.diffusion_model.register_forward_pre_hook(withhold, with_kwargs=True)
    patched = apply(tiny.model, kernel="int8_reference")
    latent = digest(tiny.sample(patched))
    return {
        "same latent": latent == digest(tiny.sample()),
        "run": last_run(patched),
        "text": inside.execute("AttentionBackendReport", model=patched, after=1).args[1],
    }
