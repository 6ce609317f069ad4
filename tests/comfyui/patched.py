"""What the scenarios share: the nodes run on a model, and two ways to see its attention calls without the pack."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import inside

# Models this small only lose by threads, twenty times and more when other processes want the cores too.
torch.set_num_threads(1)

NATIVE = "native (observe only)"
OVERRIDE = "optimized_attention_override"
WIDGETS = {
    "kernel": "auto",
    "smooth_k": "auto",
    "start_percent": 0.0,
    "end_percent": 1.0,
    "skip_blocks": "",
    "if_unavailable": "use native",
    "allow_hub_download": False,
    "tolerance": "normal (0.10)",
    # the tests count calls and forwards; those made to compare have tests of their own
    "compare_with_native": "never",
}


def apply(model: Any, **widgets: Any) -> Any:
    """The MODEL that Apply SageAttention gives; widgets not named stand as in a new node, but nothing is compared."""
    return inside.execute("ApplySageAttention", model=model, **{**WIDGETS, **widgets}).args[0]


def report(model: Any, after: Any = True) -> dict[str, Any]:
    """The JSON that Attention Backend Report gives."""
    return strict_json(inside.execute("AttentionBackendReport", model=model, after=after).args[2])


def last_run(model: Any) -> dict[str, Any]:
    return report(model)["runs"][-1]


def with_dispatcher(model: Any, kernel: str, *backends: Any, previous: Any = None, **policy: Any) -> tuple[Any, Any]:
    """A clone of the model patched for kernels of the test's own, in a Session of its own, and its dispatcher."""
    core, patch = inside.pack_module("sage_core"), inside.pack_module("nodes.patch_attention")
    policy = core.Policy(kernel=kernel, **{"compare_with_native": "never", **policy})
    own = inside.pack_module("nodes.host").optimized_attention
    dispatcher = core.Dispatcher(policy, core.Session(backends), previous, optimized_attention=own)
    return patch._patched(model, dispatcher), dispatcher


def backend(
    name: str,
    function: Callable[..., Any],
    options: str = "attn_mask enable_gqa",
    prepare: Callable[..., Any] | None = None,
    **support: Any,
) -> Any:
    """A kernel of the test's own that any device and dtype may use."""
    base, limits = inside.pack_module("sage_core.backends.base"), inside.pack_module("sage_core.support")
    accepts = {"archs": None, "dtypes": ("float32", "float16", "bfloat16"), "mask_kinds": limits.EVERY_MASK, **support}
    kernel = base.Kernel(function, frozenset(options.split()), prepare)
    return base.Backend(
        name=name,
        support=limits.Support(**accepts),
        tolerance=base.Tolerance(relative_l2=0.01, cosine=0.999),
        load=lambda environment, arch, allow_download: kernel,
        exact=True,
    )


def calls_by_kernel(run: dict[str, Any]) -> dict[str, int]:
    return {entry["kernel"]: entry["calls"] for entry in run["calls_by_kernel"]}


def digest(tensor: torch.Tensor) -> str:
    """Equal for tensors of the same bits."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def distance(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2 in double precision."""
    tensor, reference = tensor.double(), reference.double()
    return float((tensor - reference).norm() / reference.norm())


def strict_json(text: str) -> Any:
    """As browsers parse it: NaN and Infinity are no JSON."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


class Witness:
    """An override on top of ours: for each call of the model, what reached native attention and what came back.

    ``adds`` are keywords that a host of the future adds to every call.
    """

    def __init__(self, patched: Any, **adds: Any) -> None:
        self.model = patched.clone()
        options = self.model.model_options["transformer_options"]
        self._ours = options[OVERRIDE]
        self._adds = adds
        options[OVERRIDE] = self
        self.calls: list[dict[str, Any]] = []

    def __deepcopy__(self, memo: Any) -> Witness:
        return self

    def __call__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs = {**kwargs, **self._adds}
        options = kwargs.get("transformer_options") or {}
        native = []

        def seen(*received: Any, **keywords: Any) -> Any:
            native.append(_same(received, args) and keywords.keys() == kwargs.keys())
            native.append(_same([keywords[name] for name in kwargs if name in keywords], list(kwargs.values())))
            return func(*received, **keywords)

        before = [tensor.clone() for tensor in args[:3]]
        expected = func(*args, **kwargs)
        output = self._ours(seen, *args, **kwargs)
        self.calls.append(
            {
                "native": len(native) // 2,
                "same_arguments": all(native),
                "unchanged": all(torch.equal(now, then) for now, then in zip(args[:3], before, strict=True)),
                "same_layout": (output.shape, output.dtype) == (expected.shape, expected.dtype),
                "error": distance(output, expected),
                "sigma": _first(options.get("sigmas")),
                "block": str(options.get("block") or options.get("block_type")),
                "extras": sorted({*kwargs} - {"transformer_options", "_inside_attn_wrapper"}),
            }
        )
        return output


def _first(sigmas: torch.Tensor | None) -> float | None:
    return None if sigmas is None else float(sigmas[0])


def _same(received: Any, given: Any) -> bool:
    return len(received) == len(given) and all(left is right for left, right in zip(received, given, strict=True))


@contextmanager
def calls_counted() -> Iterator[Callable[[], int]]:
    """Counts the attention calls that models make, by ComfyUI's own functions: whatever the override slot says.

    A function that hands over to another one is counted once, as ComfyUI's own mark on the call tells.
    """
    import comfy.ldm.modules.attention as attention

    decorated = {id(value) for value in vars(attention).values() if hasattr(value, "__wrapped__")}
    modules = [module for name, module in sys.modules.items() if name.startswith("comfy.")]
    names = [(module, name) for module in modules for name, value in vars(module).items() if id(value) in decorated]
    originals = [(module, name, getattr(module, name)) for module, name in names]
    count = 0

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += "_inside_attn_wrapper" not in kwargs
            return function(*args, **kwargs)

        return counted

    try:
        for module, name, function in originals:
            setattr(module, name, counting(function))
        yield lambda: count
    finally:
        for module, name, function in originals:
            setattr(module, name, function)
