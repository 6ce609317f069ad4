"""Measurements: what was measured on this machine, kept in one JSON file that several processes may share."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .file_lock import locked

if TYPE_CHECKING:
    from .environment import Environment

logger = logging.getLogger("sagescope")

VERSION = 1
"""Of the file's structure. A file of another version is set aside, not converted: measuring again takes seconds."""
MAX_ENTRIES = 5_000
"""Per section; the oldest go first. About 70 models of 70 sites, and less than a tenth of a second to write."""
MAX_FINGERPRINTS = 4
"""The machine before and after an update of driver, torch or ComfyUI, and once more: someone may go back."""
MAX_BYTES = 64 * 2**20
"""No file of ours gets that large: entries are a few hundred bytes each."""

Sections = dict[str, dict[str, dict[str, Any]]]
"""Section to key to value."""


class Measurements:
    """What was measured under one fingerprint; in memory only when ``path`` is None.

    ``put`` changes memory alone and ``flush`` writes, so that a run with hundreds of new entries writes once and a
    crash loses at most the run in which it happened. What other processes wrote meanwhile is merged, entry by entry.
    A disk that cannot be written costs what this process measured once it ends: one warning, never an exception.
    """

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._known: Sections = {}
        self._unsaved: Sections = {}
        self._loaded = path is None
        self._forgotten = False
        self._warned = False
        self._lock = threading.RLock()

    def get(self, section: str, key: str) -> dict[str, Any] | None:
        """A copy of what was put there by this or an earlier process; None when nothing was.

        A file can be edited by hand: whoever asks checks what is inside.
        """
        with self._lock:
            self._load()
            return copy.deepcopy(self._known.get(section, {}).get(key))

    def put(self, section: str, key: str, value: Mapping[str, Any]) -> None:
        """Keep a copy of ``value``, which is plain JSON; anything else raises TypeError here and not when writing."""
        kept = json.loads(json.dumps(value))
        with self._lock:
            self._load()
            _store(self._known, section, key, kept)
            _store(self._unsaved, section, key, kept)

    def entries(self) -> Sections:
        """A copy of everything known under this fingerprint, for reports."""
        with self._lock:
            self._load()
            return copy.deepcopy(self._known)

    def forget(self) -> bool:
        """Forget what was ever measured on this machine, under other fingerprints too; True when the disk has.

        When the disk cannot be written, this process has forgotten all the same and every later ``flush`` tries again.
        """
        with self._lock:
            self._known, self._unsaved = {}, {}
            self._loaded = self._forgotten = True
            return self.flush()

    def flush(self) -> bool:
        """Write what was put since the last time; True when everything known is on disk. Called when a run ends."""
        with self._lock:
            if self._path is None or not (self._unsaved or self._forgotten):
                return self._path is not None
            try:
                self._known = self._merge_into(self._path)
            except OSError as error:
                self._warn_once(error)
                return False
            self._unsaved, self._forgotten = {}, False
            return True

    def _load(self) -> None:
        if self._loaded or self._path is None:
            return
        self._loaded = True
        with suppress(OSError, ValueError, RecursionError):  # ``flush`` sees the same, and can do something about it
            self._known = _read(self._path).get(self._fingerprint, {})

    def _merge_into(self, path: Path) -> Sections:
        """Bring what is unsaved into the file; returns what the file now holds under this fingerprint."""
        with locked(_beside(path, ".lock")):
            everything = {} if self._forgotten else _read_or_set_aside(path)
            known = everything.pop(self._fingerprint, {})
            for section, entries in self._unsaved.items():
                for key, value in entries.items():
                    _store(known, section, key, value)
            if known:
                everything[self._fingerprint] = known  # last: the order tells which was written longest ago
            while len(everything) > MAX_FINGERPRINTS:
                del everything[next(iter(everything))]
            _write(path, everything)
            if self._forgotten:
                _beside(path, ".unreadable").unlink(missing_ok=True)
        return known

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("SageScope: measurements are kept until ComfyUI ends, and not in %s: %s", self._path, error)


def fingerprint(environment: Environment, host: str, builds: Mapping[str, str | None]) -> str:
    """A short hash of all that a measurement depends on beside the call; ``builds`` is package to hash of its files.

    Every device counts, in order. An entry that holds on one of several devices says in its key on which.
    """
    parts = [
        [[device.index, device.arch, device.name] for device in environment.devices],
        [environment.platform, environment.driver],
        [environment.torch_version, environment.cuda, environment.hip],
        host,
        sorted(builds.items()),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _store(sections: Sections, section: str, key: str, value: dict[str, Any]) -> None:
    """Put the value last in its section, and drop from the front what is too much."""
    entries = sections.setdefault(section, {})
    entries.pop(key, None)
    entries[key] = value
    while len(entries) > MAX_ENTRIES:
        del entries[next(iter(entries))]


def _read(path: Path) -> dict[str, Sections]:
    """The file's entries by fingerprint, the one written longest ago first; ValueError when it is none of ours."""
    try:
        size = path.stat().st_size
        text = path.read_bytes() if size <= MAX_BYTES else b""
    except FileNotFoundError:
        return {}
    if size > MAX_BYTES:
        raise ValueError(f"it has {size} bytes; at most {MAX_BYTES} are expected")
    content = json.loads(text)
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise ValueError(f"its version is {version}; this version of the pack reads {VERSION}")
    everything = content.get("fingerprints")
    if not isinstance(everything, dict):
        raise ValueError("it holds no fingerprints")
    return {name: _well_formed(sections) for name, sections in everything.items() if isinstance(sections, dict)}


def _well_formed(sections: dict[str, Any]) -> Sections:
    """The entries that are what ``put`` takes."""
    return {
        section: {key: value for key, value in entries.items() if isinstance(value, dict)}
        for section, entries in sections.items()
        if isinstance(entries, dict)
    }


def _read_or_set_aside(path: Path) -> dict[str, Sections]:
    """``_read``; a file that cannot be read makes way for a new one. Only under the lock: another may just be new."""
    try:
        return _read(path)
    except (OSError, ValueError, RecursionError) as error:
        aside = _beside(path, ".unreadable")
        os.replace(path, aside)
        logger.warning("SageScope: %s cannot be read (%s). It is now %s; measuring again.", path, error, aside.name)
        return {}


def _write(path: Path, everything: dict[str, Sections]) -> None:
    """Replace the file as a whole: whoever reads sees the old content or the new, even after a crash."""
    temporary = _beside(path, ".new")  # one name is enough under the lock, and a killed process leaves only one
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"version": VERSION, "fingerprints": everything}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
