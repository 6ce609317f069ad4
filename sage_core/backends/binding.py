"""From a package that may be missing, broken or another one than expected to a function that can be called."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from ..refusal import Refusal, RefusalCode

TENSORS = (("q", "query"), ("k", "key"), ("v", "value"))
"""What the first three parameters of an attention function are called."""


def import_package(name: str, install: str) -> ModuleType | Refusal:
    """The imported package ``name``; ``install`` says how to get it when it is absent."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):  # itself or a package that it lies in
            return Refusal(RefusalCode.NOT_INSTALLED, f"{name} is not installed; {install}")
        return Refusal(RefusalCode.BUILD, f"{name} cannot be imported: {error}")
    except (Exception, SystemExit) as error:  # code of others runs here, and a broken build raises whatever it likes
        return Refusal(RefusalCode.BUILD, f"{name} cannot be imported: {describe(error)}")


def describe(error: BaseException) -> str:
    """The type of ``error`` and the start of its text on one line, short enough for a report."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def find_function(places: Iterable[Any], names: Sequence[str]) -> Callable[..., Any] | None:
    """The first callable in ``places`` with one of ``names``; an earlier name wins over an earlier place."""
    places = tuple(places)
    for name in names:
        for place in places:
            function: Callable[..., Any] | None = getattr(place, name, None)
            if callable(function):
                return function
    return None


def declared(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of ``function`` after query, key and value that can be passed by name.

    ``**kwargs`` declares nothing: upstream functions swallow unknown keywords, masks among them.
    """
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter for parameter in _parameters(function)[3:] if parameter.kind in by_name}


def refuse_parameters(function: Callable[..., Any], title: str, passed: Iterable[str]) -> Refusal | None:
    """Why ``function`` cannot be called with query, key and value and the keywords ``passed``."""
    passed = tuple(passed)
    first = [parameter.name for parameter in _parameters(function)[: len(TENSORS)]]
    if len(first) < len(TENSORS) or any(name not in known for name, known in zip(first, TENSORS, strict=True)):
        detail = f"{title} starts with the parameters {', '.join(first) or 'none'}; expected are query, key, value"
        return Refusal(RefusalCode.FUNCTION_MISSING, detail)
    parameters = declared(function)
    if missing := [name for name in passed if name not in parameters]:
        detail = f"{title} does not declare {', '.join(missing)}; it declares {', '.join(parameters) or 'nothing'}"
        return Refusal(RefusalCode.FUNCTION_MISSING, detail)
    unknown = [name for name, p in parameters.items() if p.default is p.empty and name not in passed]
    if unknown:
        detail = f"{title} needs {', '.join(unknown)}, which this pack does not know"
        return Refusal(RefusalCode.FUNCTION_MISSING, detail)
    return None


def output_of(result: Any) -> Any:
    """The attention output in what a flash-attn function returned: it alone, or before the logsumexp in a tuple."""
    return result[0] if isinstance(result, tuple) else result


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a compiled function may tell nothing
        return []
