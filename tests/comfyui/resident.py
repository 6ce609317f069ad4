"""The memory of the process, for scenarios that look for what stays in it."""

from __future__ import annotations

import sys


def resident_mib() -> float | None:
    """The memory of this process; None where the system does not say it in this way."""
    if not sys.platform.startswith("linux"):
        return None
    with open("/proc/self/status", encoding="utf-8") as status:
        (line,) = [line for line in status if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024
