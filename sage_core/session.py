"""Session: what outlives a model in one process: the environment, loaded kernels, trials, and kernels that failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from .backends import STARTING_ORDER, Preference
from .backends.base import Backend, Kernel
from .environment import Environment, package_build
from .measurements import Measurements, fingerprint
from .refusal import Refusal, RefusalCode
from .selection import Use
from .spec import AttentionSpec
from .timing import Stopwatch
from .trial import trial_spec, try_kernel

logger = logging.getLogger("sagescope")

FILE_ERRORS_IN_A_ROW = 3
"""After as many calls without a success a kernel is retired: a cache that another process cleared heals by itself, a
full disk does not."""


class Session:
    """One per process, handed to every Dispatcher. Holds no tensor and no model."""

    def __init__(
        self,
        backends: Sequence[Backend],
        environment: Environment | None = None,
        host: str = "",
        order: Mapping[str, Sequence[Preference]] = STARTING_ORDER,
        measurements_path: Path | None = None,
        stopwatch: Callable[[torch.device], Stopwatch] = Stopwatch.for_device,
    ) -> None:
        self.backends = tuple(backends)
        self.order = order
        self.stopwatch = cache(stopwatch)
        self._measurements_path = measurements_path
        self.host = host
        self.generation = 0
        """Raised when a kernel is retired or what was measured is forgotten: plans made before are out of date."""
        self._given_environment = environment
        self._loaded: dict[tuple[str, str, bool], Kernel | tuple[Refusal, ...]] = {}
        self._trials: dict[tuple[Any, ...], Refusal | None] = {}
        self._retired: dict[tuple[str, str], Refusal] = {}
        self.failing: dict[tuple[str, str], int] = {}
        """How many file errors a kernel had in a row on a device."""
        self._warned: set[tuple[str, str]] = set()
        self._lock = threading.RLock()

    @cached_property
    def environment(self) -> Environment:
        """Asked when first needed: importing the pack must not initialise a GPU."""
        return self._given_environment or Environment.detect()

    @cached_property
    def measurements(self) -> Measurements:
        """What was measured on this machine, with these versions and builds; kept where the nodes say."""
        # Triton compiles some kernels of these packages, and of ours
        packages = {backend.package for backend in self.backends if backend.package} | {"triton", "triton-windows"}
        builds = {name: package_build(name) for name in packages}
        return Measurements(self._measurements_path, fingerprint(self.environment, self.host, builds))

    def flush(self) -> None:
        """Write what was measured since the last time; nothing is read or hashed for a run that measured nothing."""
        if "measurements" in self.__dict__:
            self.measurements.flush()

    def forget(self) -> bool:
        """Forget what was measured, also in the plans of models that are patched now; True when the disk has."""
        forgotten = self.measurements.forget()
        with self._lock:
            self.generation += 1
        return forgotten

    def device_name(self, device: torch.device) -> str:
        """Index and name of a device, for what holds on one of several."""
        known = [entry for entry in self.environment.devices if device.type == "cuda" and entry.index == device.index]
        return f"{device} {known[0].name}" if known else str(device)

    def backend(self, name: str) -> Backend:
        return next(backend for backend in self.backends if backend.name == name)

    def load(
        self, backend: Backend, device: torch.device, allow_download: bool, again: bool = False
    ) -> Kernel | tuple[Refusal, ...]:
        """The kernel's function, bound once per arch; the refusals when it is not to be had or was retired.

        ``again`` looks once more for what was not to be had before: a download can succeed, or have been made since.
        """
        with self._lock:
            retired = self._retired.get((backend.name, str(device)))
            if retired is not None:
                return (retired,)
            arch = self.environment.arch_of(device)
            key = (backend.name, arch, allow_download)
            if key not in self._loaded or (again and not isinstance(self._loaded[key], Kernel)):
                self._loaded[key] = backend.load(self.environment, arch, allow_download)
            return self._loaded[key]

    def trial(self, use: Use, spec: AttentionSpec, device: torch.device) -> Refusal | None:
        """Why the kernel may not serve calls like ``spec``, tried once per device and set of features.

        A kernel that raises draws the consequence of ``after_failure``; one that may do better is tried again next
        time.
        """
        key = (use.backend.name, str(device), use.layout, use.expand_kv, use.smooth_k, trial_spec(spec))
        with self._lock:
            if key in self._trials:
                return self._trials[key]
            refusal = try_kernel(use, spec, device)
            if refusal is None:
                self.succeeded(use.backend.name, device)
            if refusal is None or refusal.code is RefusalCode.TRIAL:
                self._trials[key] = refusal
            if refusal is not None and refusal.code is RefusalCode.TRIAL:
                logger.warning("SageScope: %s. Other attention serves these calls.", refusal.detail)
            elif refusal is not None:
                self.after_failure(use.backend.name, device, refusal)
            return refusal

    def after_failure(self, name: str, device: torch.device, refusal: Refusal) -> Refusal:
        """Draw the consequence of a kernel's failure, and give the refusal back.

        Running out of memory says nothing about the kernel, nor does an error while a CUDA graph is captured, and a
        file error little: only FILE_ERRORS_IN_A_ROW of them retire it. Any other error does at once.
        """
        key = (name, str(device))
        if refusal.code in (RefusalCode.OUT_OF_MEMORY, RefusalCode.STREAM_CAPTURE):
            return refusal
        if refusal.code is RefusalCode.FILE_ERROR:
            with self._lock:
                self.failing[key] = self.failing.get(key, 0) + 1
                first, few = key not in self._warned, self.failing[key] < FILE_ERRORS_IN_A_ROW
                self._warned.add(key)
            if few:
                if first:
                    logger.warning("SageScope: %s. Native attention took the call; it is tried again.", refusal.detail)
                return refusal
        self.retire(name, device, refusal)
        logger.warning("SageScope: %s. It is not used again until ComfyUI restarts.", refusal.detail)
        return refusal

    def succeeded(self, name: str, device: torch.device) -> None:
        """A kernel's call went well: earlier file errors do not count any more."""
        with self._lock:
            self.failing.pop((name, str(device)), None)

    @property
    def has_retired(self) -> bool:
        """Whether a kernel is out that the next start of ComfyUI brings back."""
        return bool(self._retired)

    def retire(self, name: str, device: torch.device, refusal: Refusal) -> None:
        """Take a kernel out on one device until ComfyUI restarts."""
        with self._lock:
            self._retired.setdefault((name, str(device)), refusal)
            self.failing.pop((name, str(device)), None)
            self.generation += 1

    def snapshot(self) -> dict[str, Any]:
        """The machine and its kernel packages in plain JSON types."""
        environment = self.environment
        packages = dict.fromkeys(backend.package for backend in self.backends if backend.package)
        return {
            "comfyui": self.host,
            "python": environment.python,
            "platform": environment.platform,
            "torch": environment.torch_version,
            "cuda": environment.cuda,
            "hip": environment.hip,
            "driver": environment.driver,
            "devices": [asdict(device) for device in environment.devices],
            "packages": [
                {"name": name, "version": environment.package_version(name), "build": package_build(name)}
                for name in packages
            ],
            "retired": [
                {"kernel": name, "device": device, "detail": refusal.detail}
                for (name, device), refusal in dict(self._retired).items()
            ],
        }
