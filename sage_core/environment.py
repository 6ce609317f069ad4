"""Environment: the devices and package versions of this machine; only here are they asked for."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

UNKNOWN_ARCH = "unknown"
COMPILED_SUFFIXES = (".so", ".pyd", ".dll", ".hsaco", ".cubin", ".co")


@dataclass(frozen=True)
class Device:
    """One accelerator: ``arch`` is the exact name ("sm90", "gfx1201"), ``total_memory`` is in bytes."""

    index: int
    arch: str
    name: str
    total_memory: int = 0


@dataclass(frozen=True)
class Environment:
    """What this machine is, as plain values, so that a test can write any other machine."""

    devices: tuple[Device, ...] = ()
    torch_version: str = ""
    cuda: str | None = None
    hip: str | None = None
    driver: str | None = None
    python: str = field(default_factory=platform.python_version)
    platform: str = field(default_factory=lambda: f"{platform.system()} {platform.machine()}")
    packages: Mapping[str, str] | None = None
    """Distribution name to version; None asks the installed distributions."""

    @classmethod
    def detect(cls) -> Environment:
        """The environment of this process; initialises CUDA or ROCm when there is any."""
        import torch

        devices: tuple[Device, ...] = ()
        if torch.cuda.is_available():
            devices = tuple(_device(torch, index) for index in range(torch.cuda.device_count()))
        return cls(
            devices=devices,
            torch_version=str(torch.__version__),
            cuda=torch.version.cuda,
            hip=torch.version.hip,
            driver=_nvidia_driver() if torch.version.cuda and devices else None,
        )

    def arch_of(self, device: torch.device) -> str:
        """The exact arch name of ``device``; its type ("cpu", "mps", "xpu") when it is no CUDA or ROCm device."""
        if device.type != "cuda":
            return device.type
        index = device.index or 0
        return next((known.arch for known in self.devices if known.index == index), UNKNOWN_ARCH)

    @property
    def cuda_version(self) -> tuple[int, int] | None:
        """The CUDA version that torch was built with, as numbers that compare."""
        if self.cuda is None:
            return None
        major, minor = self.cuda.split(".")[:2]
        return int(major), int(minor)

    def package_version(self, name: str) -> str | None:
        """The installed version of the distribution ``name``; None when it is not installed."""
        if self.packages is not None:
            return self.packages.get(name)
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None


@cache
def package_build(name: str) -> str | None:
    """A short hash over the compiled files of the distribution ``name``, over its Python files when it has none.

    Two builds with one version string differ here. A file that is listed but gone counts as not there. None
    when the distribution is not installed or has no such files.
    """
    try:
        files = metadata.distribution(name).files
    except metadata.PackageNotFoundError:
        return None
    wanted = (*COMPILED_SUFFIXES, ".py")
    files = [file for file in files or () if file.suffix in wanted and Path(str(file.locate())).is_file()]
    files = [file for file in files if file.suffix in COMPILED_SUFFIXES] or files
    digest = hashlib.sha256()
    for file in sorted(files, key=str):
        digest.update(str(file).encode())
        try:
            with open(str(file.locate()), "rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        except OSError:  # not ours to read: its name still counts
            continue
    return digest.hexdigest()[:12] if files else None


def _device(torch: Any, index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    # ROCm reports a capability too, but it is no sm number; its name is like "gfx1201:sramecc-:xnack-"
    hip = torch.version.hip is not None
    arch = properties.gcnArchName.split(":")[0] if hip else f"sm{properties.major}{properties.minor}"
    return Device(index, arch, properties.name, properties.total_memory)


def _nvidia_driver() -> str | None:
    """The driver version from NVML, which comes with every NVIDIA driver; torch does not tell it."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:  # WSL and containers may lack it
        return None
    version = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return None
    found = nvml.nvmlSystemGetDriverVersion(version, ctypes.c_uint(len(version))) == 0
    nvml.nvmlShutdown()
    return version.value.decode() if found else None
