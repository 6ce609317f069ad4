"""The dispatch core: which kernel serves an attention call, and the record of it. Knows nothing of ComfyUI's code."""

from .backends import BACKENDS
from .dispatcher import OVERRIDE, OWN_KEY, Dispatcher
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
from .session import Session

__version__ = "0.1.0"

KERNEL_CHOICES = (AUTO, NATIVE_ONLY, *(backend.name for backend in BACKENDS))
"""The options of the node's ``kernel`` input: the same on every machine, so that shared workflows load."""

__all__ = [
    "AUTO",
    "BACKENDS",
    "COMPARE_CHOICES",
    "KERNEL_CHOICES",
    "NATIVE_ONLY",
    "NORMAL_TOLERANCE",
    "OVERRIDE",
    "OWN_KEY",
    "SMOOTH_K_CHOICES",
    "STOP",
    "TOLERANCES",
    "UNAVAILABLE_CHOICES",
    "USE_NATIVE",
    "Dispatcher",
    "Policy",
    "PolicyError",
    "Session",
    "__version__",
    "build_report",
    "to_markdown",
]
