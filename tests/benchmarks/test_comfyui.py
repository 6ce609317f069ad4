"""Where ComfyUI is looked for, and what stands in for packages that sampling does not need."""

from __future__ import annotations

import importlib
import sys

import pytest

import dev
from benchmarks import comfyui

ABSENT = "sagescope_absent_package"


@pytest.fixture
def stand_ins():
    """The finder, and no trace of it afterwards."""
    finder = comfyui._StandIns([ABSENT])
    sys.meta_path.append(finder)
    yield
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.startswith(ABSENT)]:
        del sys.modules[name]


@pytest.mark.usefixtures("stand_ins")
def test_a_stand_in_has_modules_classes_and_constants():
    module = importlib.import_module(f"{ABSENT}.container.deep")
    assert sys.modules[f"{ABSENT}.container"].deep is module
    assert isinstance(module.InputContainer, type)
    table = {"HDR": module.ColorTrc.ARIB_STD_B67}
    assert isinstance(table["HDR"], type)
    assert not hasattr(module, "__nothing__")


@pytest.mark.usefixtures("stand_ins")
def test_nothing_else_is_stood_in_for():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{ABSENT}s")


def comfyui_in(folder):
    (folder / "comfy").mkdir(parents=True)
    (folder / "comfy" / "sample.py").touch()
    return folder.resolve()


def test_the_folder_that_is_named_wins_over_the_variable_and_that_over_the_unpacked(tmp_path, monkeypatch):
    named, variable = comfyui_in(tmp_path / "named"), comfyui_in(tmp_path / "variable")
    unpacked = comfyui_in(tmp_path / ".comfyui" / dev.CARRIED[1].version)
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setenv("COMFYUI_PATH", str(variable))
    assert comfyui.find(str(named)) == named
    assert comfyui.find(None) == variable
    monkeypatch.delenv("COMFYUI_PATH")
    assert comfyui.find(None) == unpacked


def test_a_folder_without_comfyui_is_told_by_name(tmp_path):
    with pytest.raises(SystemExit, match=r"no ComfyUI in .*nothing"):
        comfyui.find(str(tmp_path / "nothing"))
