"""The dispatch core: which kernel serves an attention call, and the record of it. Knows nothing of ComfyUI's code."""

from .backends import BACKENDS
from .dispatcher import OVERRIDE, OWN_KEY, Dispatcher, describe_function
from .live import Live
from .policy import (
    AUTO,
    COMPARE_CHOICES,
    NATIVE_ONLY,
    NORMAL_TOLERANCE,
    SMOOTH_K_CHOICES,
    STOP,
    TOLERANCES,
    UNAVAILABLE_CHOICES,
    USE_NATIVE,
    Policy,
    PolicyError,
)
from .report import build_report, to_markdown
from .same_origin import refusal_of
from .session import Session
from .stats import SCHEMA, Run

__version__ = "0.1.0"
HOMEPAGE = "https://github.com/sagescope/ComfyUI-SageScope"

KERNEL_CHOICES = (AUTO, NATIVE_ONLY, *(backend.name for backend in BACKENDS))
"""The options of the node's ``kernel`` input: the same on every machine, so that shared workflows load."""

__all__ = [
    "AUTO",
    "BACKENDS",
    "COMPARE_CHOICES",
    "HOMEPAGE",
    "KERNEL_CHOICES",
    "NATIVE_ONLY",
    "NORMAL_TOLERANCE",
    "OVERRIDE",
    "OWN_KEY",
    "SCHEMA",
    "SMOOTH_K_CHOICES",
    "STOP",
    "TOLERANCES",
    "UNAVAILABLE_CHOICES",
    "USE_NATIVE",
    "Dispatcher",
    "Live",
    "Policy",
    "PolicyError",
    "Run",
    "Session",
    "__version__",
    "build_report",
    "describe_function",
    "refusal_of",
    "to_markdown",
]
