"""What this machine is: exact arch names, package versions, and builds told apart by their bytes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from sage_core import device, environment
from sage_core.environment import Device, Environment, package_build
from tests.unit.conftest import fake_environment


@pytest.mark.parametrize(
    ("place", "arch"),
    [
        ("cpu", "cpu"),
        ("meta", "meta"),
        ("mps", "mps"),
        ("xpu:0", "xpu"),
        ("cuda", "sm90"),
        ("cuda:0", "sm90"),
        ("cuda:1", "sm89"),
        ("cuda:2", "unknown"),
    ],
)
def test_each_device_has_its_own_arch_and_an_unheard_of_one_is_unknown(place, arch):
    machine = Environment(devices=(Device(0, "sm90", "one"), Device(1, "sm89", "other")))
    assert machine.arch_of(torch.device(place)) == arch


def test_without_a_gpu_nothing_is_known_of_one():
    assert fake_environment().arch_of(torch.device("cuda:0")) == "unknown"


class FakeTorch:
    """torch on a machine with these GPUs, as far as Environment asks it."""

    __version__ = "2.9.0+fake"

    def __init__(self, *properties, cuda=None, hip=None):
        self.version = SimpleNamespace(cuda=cuda, hip=hip)
        self.cuda = SimpleNamespace(
            is_available=lambda: bool(properties),
            device_count=lambda: len(properties),
            get_device_properties=lambda index: properties[index],
        )


def gpu(major, minor, gfx="", name="GPU"):
    return SimpleNamespace(major=major, minor=minor, gcnArchName=gfx, name=name, total_memory=2**34)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((6, 1), "sm61"), ((7, 5), "sm75"), ((8, 7), "sm87"), ((9, 0), "sm90"), ((10, 0), "sm100"), ((12, 1), "sm121")],
)
def test_a_cuda_device_is_named_by_its_capability(monkeypatch, capability, arch):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(gpu(*capability), cuda="12.8"))
    monkeypatch.setattr(environment, "_nvidia_driver", lambda: "570.1")
    found = Environment.detect()
    assert found.devices == (Device(0, arch, "GPU", 2**34),)
    assert (found.torch_version, found.cuda, found.hip, found.driver) == ("2.9.0+fake", "12.8", None, "570.1")


@pytest.mark.parametrize("gfx", ["gfx1201", "gfx942:sramecc+:xnack-"])
def test_a_rocm_device_is_named_by_its_gfx_name_never_by_a_number(monkeypatch, gfx):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(gpu(12, 0, gfx), hip="6.4"))
    found = Environment.detect()
    assert found.devices[0].arch == gfx.split(":")[0]
    assert (found.cuda, found.driver) == (None, None)


def test_several_devices_are_told_apart(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(gpu(9, 0), gpu(8, 9), cuda="12.8"))
    monkeypatch.setattr(environment, "_nvidia_driver", lambda: None)
    assert [known.arch for known in Environment.detect().devices] == ["sm90", "sm89"]


def test_a_machine_without_a_gpu_has_no_devices_and_no_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(cuda="12.8"))
    monkeypatch.setattr(environment, "_nvidia_driver", lambda: pytest.fail("asked for a driver"))
    found = Environment.detect()
    assert (found.devices, found.driver, found.cuda) == ((), None, "12.8")


def test_a_missing_driver_library_is_no_error(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(environment.ctypes, "CDLL", missing)
    assert environment._nvidia_driver() is None


@pytest.mark.parametrize("failing", ["nvmlInit_v2", "nvmlSystemGetDriverVersion"])
def test_a_driver_library_that_answers_with_an_error_is_no_error(monkeypatch, failing):
    calls = {"nvmlInit_v2": 0, "nvmlSystemGetDriverVersion": 0, "nvmlShutdown": 0, failing: 9}
    library = SimpleNamespace(**{name: lambda *_, code=code: code for name, code in calls.items()})
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: library)
    assert environment._nvidia_driver() is None


@pytest.mark.parametrize(("cuda", "numbers"), [(None, None), ("12.8", (12, 8)), ("13.0.1", (13, 0)), ("9.10", (9, 10))])
def test_the_cuda_version_compares_as_numbers(cuda, numbers):
    assert Environment(cuda=cuda).cuda_version == numbers


def test_versions_are_those_given_or_those_installed():
    assert Environment(packages={"a": "1"}).package_version("a") == "1"
    assert Environment(packages={"a": "1"}).package_version("torch") is None
    assert Environment().package_version("pytest") == pytest.__version__
    assert Environment().package_version("no-such-distribution") is None


# -- builds


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """build(files) installs version 1.0 of fake-kernels with these files and returns its package_build."""
    monkeypatch.syspath_prepend(tmp_path)

    def build(files, listed=None):
        info = tmp_path / "fake_kernels-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-kernels\nVersion: 1.0\n")
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in (listed or files)))
        package_build.cache_clear()
        return package_build("fake-kernels")

    yield build
    package_build.cache_clear()


@pytest.mark.parametrize("name", ["k/core.cpython-311-x86_64-linux-gnu.so", "k/core.pyd", "k/core.hsaco", "k/c.cubin"])
def test_two_builds_of_one_version_differ_by_a_byte_of_a_compiled_file(distribution, name):
    first = distribution({"k/__init__.py": b"", name: b"\x00" * 9})
    assert len(first) == 12
    assert distribution({"k/__init__.py": b"", name: b"\x00" * 9}) == first
    assert distribution({"k/__init__.py": b"", name: b"\x00" * 8 + b"\x01"}) != first
    assert Environment().package_version("fake-kernels") == "1.0"


def test_python_files_count_only_without_compiled_ones(distribution):
    compiled = distribution({"k/__init__.py": b"a", "k/core.so": b"x"})
    assert distribution({"k/__init__.py": b"b", "k/core.so": b"x"}) == compiled
    python = distribution({"k/__init__.py": b"a", "k/data.json": b"{}"})
    assert distribution({"k/__init__.py": b"a", "k/data.json": b"[]"}) == python
    assert distribution({"k/__init__.py": b"b", "k/data.json": b"{}"}) != python


def test_the_place_of_a_file_counts_and_one_that_is_gone_is_not_there(distribution):
    one = distribution({"k/a.so": b"x"})
    assert distribution({"k/b.so": b"x"}) != one
    assert distribution({"k/a.so": b"x"}, listed=["k/a.so", "k/gone.so"]) == one


def test_a_build_is_none_without_a_package_or_without_files(distribution):
    assert package_build("no-such-distribution") is None
    assert distribution({"k/notes.txt": b"x"}) is None


# -- the current device


@pytest.fixture
def current(monkeypatch):
    """Device numbers as they become current; number 0 at first."""
    seen = [0]

    class Current:
        def __init__(self, wanted):
            self.wanted = wanted if isinstance(wanted, int) else wanted.index

        def __enter__(self):
            seen.append(self.wanted)

        def __exit__(self, *error):
            seen.append(seen[-2])

    monkeypatch.setattr(torch.cuda, "current_device", lambda: seen[-1])
    monkeypatch.setattr(torch.cuda, "device", Current)
    return seen


@pytest.mark.parametrize(("place", "expected"), [("cuda:1", [0, 1, 0]), ("cuda:0", [0]), ("cpu", [0])])
def test_the_device_of_a_tensor_is_current_for_as_long_as_it_is_needed(current, place, expected):
    with device.on_device(torch.device(place)):
        assert current[-1] == (torch.device(place).index or 0)
    assert current == expected


def test_the_device_is_restored_after_an_error(current):
    with pytest.raises(KeyError), device.on_device(torch.device("cuda:1")):
        raise KeyError
    assert current == [0, 1, 0]
