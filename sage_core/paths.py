"""without_paths(): texts without the folders of this machine, which name its user and what else is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_ROOT = r"(?:~[\\/]|[A-Za-z]:[\\/]|\\\\|/)"
_PATH = re.compile(
    # in quotes, as Python writes file names, a path goes up to the closing quote
    rf"""(?P<quote>['"])(?:file://)?{_ROOT}(?:[^'"\n]*[\\/])(?P<quoted>[^'"\n]*)(?P=quote)"""
    # elsewhere a folder may hold spaces, and the name ends at one; an URL and "32/8" are no paths
    rf"""|(?<![\w/:.~-])(?:file://)?{_ROOT}(?:[^\\/'":;,()\n]*[^\\/'":;,()\s][\\/]+)+(?P<plain>[^\\/\s'":;,()]*)"""
)


def without_paths(value: Any) -> Any:
    """``value``, which is plain JSON, with every absolute path in its texts cut down to the last part."""
    if isinstance(value, dict):
        return {name: without_paths(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(entry) for entry in value]
    if not isinstance(value, str) or ("/" not in value and "\\" not in value):
        return value
    # the last part of the home folder is its user
    return _PATH.sub(_name, value.replace(str(Path.home()), "~"))


def _name(path: re.Match[str]) -> str:
    quote = path["quote"] or ""
    return f"{quote}{path['quoted'] if quote else path['plain']}{quote}"
