"""Measurements: they come back, nobody's are lost, and no disk, file or other process can do more than cost them."""

from __future__ import annotations

import builtins
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_core import file_lock, measurements
from sage_core.environment import Device, Environment
from sage_core.file_lock import locked
from sage_core.measurements import Measurements, fingerprint

ROOT = Path(__file__).resolve().parents[2]
VALUE = {"native": {"device_ms": 0.41, "host_ms": 0.031}, "list": [1, None, "text", True]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "measurements.json"


def kept(path, name="this machine"):
    """What another process would find."""
    return Measurements(path, name).entries()


def written(path, *, version=1, sections=None, name="this machine"):
    path.write_text(json.dumps({"version": version, "fingerprints": {name: sections or {"spec": {"a": VALUE}}}}))


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- what was put comes back


def test_what_was_put_comes_back_at_once_and_after_a_restart(path):
    ours = Measurements(path, "this machine")
    assert ours.get("spec", "a") is None
    ours.put("spec", "a", VALUE)
    assert ours.get("spec", "a") == VALUE
    assert ours.get("spec", "b") is None
    assert ours.get("site", "a") is None
    assert ours.flush() is True
    assert Measurements(path, "this machine").get("spec", "a") == VALUE
    assert kept(path) == {"spec": {"a": VALUE}}


def test_without_a_path_all_stays_in_memory():
    ours = Measurements(None, "this machine")
    ours.put("spec", "a", VALUE)
    assert ours.flush() is False
    assert ours.get("spec", "a") == VALUE
    ours.forget()
    assert ours.entries() == {}


def test_nothing_is_shared_with_the_caller(path):
    ours = Measurements(path, "this machine")
    value = {"list": [1]}
    ours.put("spec", "a", value)
    value["list"].append(2)
    ours.get("spec", "a")["list"].append(3)
    ours.entries()["spec"]["a"]["list"].append(4)
    assert ours.get("spec", "a") == {"list": [1]}


def test_what_is_no_json_is_refused_when_it_is_put(path):
    ours = Measurements(path, "this machine")
    with pytest.raises(TypeError):
        ours.put("spec", "a", {"tensor": object()})
    assert ours.entries() == {}


def test_memory_and_disk_return_the_same(path):
    ours = Measurements(path, "this machine")
    ours.put("spec", "a", {"shape": (1, 2), "error": float("inf")})
    assert ours.get("spec", "a") == {"shape": [1, 2], "error": float("inf")}
    ours.flush()
    assert kept(path) == ours.entries()


def test_entries_of_another_fingerprint_are_kept_and_not_used(path):
    for name in ("this machine", "another"):
        ours = Measurements(path, name)
        assert ours.get("spec", "a") is None
        ours.put("spec", "a", {"of": name})
        ours.flush()
    assert kept(path) == {"spec": {"a": {"of": "this machine"}}}
    assert kept(path, "another") == {"spec": {"a": {"of": "another"}}}


def test_a_run_is_written_once(path, monkeypatch):
    writes = []
    write = measurements._write
    monkeypatch.setattr(measurements, "_write", lambda *args: (writes.append(1), write(*args)))
    ours = Measurements(path, "this machine")
    for number in range(100):
        ours.put("spec", str(number), VALUE)
    assert not path.exists()
    assert ours.flush()
    assert ours.flush()
    assert len(writes) == 1
    ours.put("spec", "one more", VALUE)
    assert ours.flush()
    assert len(writes) == 2
    assert len(kept(path)["spec"]) == 101


def test_reading_leaves_nothing_behind(path):
    ours = Measurements(path, "this machine")
    ours.get("spec", "a")
    ours.flush()
    assert list(path.parent.iterdir()) == []


# -- bounds


def test_the_oldest_entries_and_fingerprints_go_first(path, monkeypatch):
    monkeypatch.setattr(measurements, "MAX_ENTRIES", 3)
    ours = Measurements(path, "this machine")
    for key in ("a", "b", "c", "a", "d"):
        ours.put("spec", key, {"key": key})
    ours.put("site", "x", VALUE)
    assert list(ours.entries()["spec"]) == ["c", "a", "d"]
    ours.flush()
    other = Measurements(path, "this machine")
    other.put("spec", "e", VALUE)
    other.flush()
    assert list(kept(path)["spec"]) == ["a", "d", "e"]
    for number in range(measurements.MAX_FINGERPRINTS - 1):
        newer = Measurements(path, f"machine {number}")
        newer.put("spec", "a", VALUE)
        newer.flush()
    assert kept(path)["site"] == {"x": VALUE}
    ours.put("spec", "f", VALUE)  # the machine that was written longest ago is now machine 0
    ours.flush()
    newest = Measurements(path, "newest")
    newest.put("spec", "a", VALUE)
    newest.flush()
    assert kept(path, "machine 0") == {}
    assert kept(path)["spec"]["f"] == kept(path, "machine 1")["spec"]["a"] == VALUE


def test_memory_is_bounded_when_nothing_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "MAX_ENTRIES", 10)
    ours = Measurements(tmp_path / "missing" / "measurements.json", "this machine")
    for number in range(50):
        ours.put("spec", str(number), VALUE)
        ours.flush()
    assert len(ours._unsaved["spec"]) == len(ours._known["spec"]) == 10


# -- forgetting


def test_forgetting_forgets_everything_on_this_machine(path, caplog):
    for name in ("this machine", "another"):
        ours = Measurements(path, name)
        ours.put("spec", "a", VALUE)
        ours.flush()
    path.with_name(path.name + ".unreadable").write_text("of an earlier version")
    ours.put("spec", "unsaved", VALUE)
    assert ours.forget() is True
    assert ours.entries() == {}
    assert json.loads(path.read_bytes()) == {"version": 1, "fingerprints": {}}
    assert not path.with_name(path.name + ".unreadable").exists()
    for process in (Measurements(path, "this machine"), ours):  # what others put since then is not forgotten
        process.put("spec", f"new {id(process)}", VALUE)
        process.flush()
    assert len(kept(path, "another")["spec"]) == 1
    assert len(kept(path)["spec"]) == 1
    assert warnings_of(caplog) == []


def test_what_one_process_forgot_does_not_come_back_from_another(path):
    ours, other = Measurements(path, "this machine"), Measurements(path, "this machine")
    other.put("spec", "old", VALUE)
    other.flush()
    ours.forget()
    other.put("spec", "new", VALUE)
    other.flush()
    assert kept(path) == other.entries() == {"spec": {"new": VALUE}}


def test_forgetting_before_anything_was_read_or_while_the_disk_fails_holds(path, monkeypatch):
    written(path)
    ours = Measurements(path, "this machine")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", raising(errno.EROFS))
        assert ours.forget() is False
        assert ours.entries() == {}
        assert kept(path) != {}
    assert ours.flush() is True
    assert ours.entries() == kept(path) == {}


# -- files that are not ours to read


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00broken",
        b'{"version": 1, "fingerprints": {"this machine": {"spec"',
        b"[]",
        b"null",
        b"1",
        b'{"version": 99, "fingerprints": {}}',
        b'{"version": 0, "fingerprints": {}}',
        b'{"version": [1], "fingerprints": {}}',
        b'{"fingerprints": {}}',
        b'{"version": 1}',
        b'{"version": 1, "fingerprints": []}',
        b"[" * 100_000,
        b"\x00" * 4096,
    ],
    ids=lambda content: repr(content[:40]),
)
def test_a_file_that_cannot_be_read_is_set_aside_with_one_warning_and_rebuilt(path, content, caplog):
    path.write_bytes(content)
    ours = Measurements(path, "this machine")
    assert ours.get("spec", "a") is None
    ours.put("spec", "a", VALUE)
    assert ours.flush() is True
    ours.put("spec", "b", VALUE)
    assert ours.flush() is True
    assert kept(path) == {"spec": {"a": VALUE, "b": VALUE}}
    assert path.with_name("measurements.json.unreadable").read_bytes() == content
    (warning,) = warnings_of(caplog)
    assert str(path) in warning
    assert "measurements.json.unreadable" in warning


def test_the_warning_names_both_versions(path, caplog):
    written(path, version=99)
    ours = Measurements(path, "this machine")
    ours.put("spec", "a", VALUE)
    ours.flush()
    assert "its version is 99; this version of the pack reads 1" in caplog.text


def test_a_file_too_large_to_be_ours_is_not_even_read(path, monkeypatch):
    monkeypatch.setattr(measurements, "MAX_BYTES", 1000)
    written(path, sections={"spec": {"a": {"text": "x" * 1000}}})
    ours = Measurements(path, "this machine")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: pytest.fail("it was read"))
        assert ours.entries() == {}
    ours.put("spec", "b", VALUE)
    assert ours.flush()
    assert kept(path) == {"spec": {"b": VALUE}}


def test_entries_of_a_wrong_type_are_dropped_and_the_others_kept(path):
    sections = {
        "spec": {"a": VALUE, "b": 1, "c": None, "d": [VALUE], "e": "text"},
        "site": [1, 2],
        "model": None,
        "forward": {"x": {}},
    }
    content = {"version": 1, "fingerprints": {"this machine": sections, "b": 1, "c": [], "d": {"spec": {"z": VALUE}}}}
    path.write_text(json.dumps(content))
    assert kept(path) == {"spec": {"a": VALUE}, "forward": {"x": {}}}
    ours = Measurements(path, "this machine")
    ours.put("site", "y", VALUE)
    ours.flush()
    assert kept(path) == {"spec": {"a": VALUE}, "forward": {"x": {}}, "site": {"y": VALUE}}
    assert kept(path, "d") == {"spec": {"z": VALUE}}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
contents = st.one_of(
    st.binary(max_size=60),
    json_values.map(lambda value: json.dumps(value).encode()),
    json_values.map(lambda value: json.dumps({"version": 1, "fingerprints": value}).encode()),
    st.dictionaries(st.sampled_from(["this machine", "b"]), st.dictionaries(st.text(max_size=3), json_values)).map(
        lambda value: json.dumps({"version": 1, "fingerprints": value}).encode()
    ),
)


@settings(max_examples=40, deadline=None)
@given(content=contents)
def test_no_file_at_all_stops_us(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "measurements.json"
    path.write_bytes(content)
    ours = Measurements(path, "this machine")
    ours.put("spec", "a", VALUE)
    assert ours.flush() is True
    assert ours.get("spec", "a") == kept(path)["spec"]["a"] == VALUE
    for entries in ours.entries().values():
        assert all(isinstance(value, dict) for value in entries.values())


# -- disks that do not take it


def raising(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


def no_new_file(number):
    """``open`` on a disk that takes no new file."""

    def fails(file, mode="r", *args, **kwargs):
        if "w" in mode:
            raise OSError(number, os.strerror(number))
        return real(file, mode, *args, **kwargs)

    real = builtins.open
    return fails


BROKEN_DISKS = {
    "full when written": ("os.fsync", raising(errno.ENOSPC)),
    "full when opened": ("builtins.open", no_new_file(errno.ENOSPC)),
    "read-only": ("os.open", raising(errno.EROFS)),
    "not ours": ("builtins.open", no_new_file(errno.EACCES)),
    "in use": ("os.replace", raising(errno.EACCES)),
    "broken": ("os.fsync", raising(errno.EIO)),
}


@pytest.mark.parametrize(("function", "failing"), BROKEN_DISKS.values(), ids=BROKEN_DISKS)
def test_a_disk_that_cannot_be_written_costs_one_warning_until_it_can(path, monkeypatch, caplog, function, failing):
    written(path)
    before = path.read_bytes()
    ours = Measurements(path, "this machine")
    with monkeypatch.context() as patch:
        patch.setattr(function, failing)
        for key in ("b", "c"):
            ours.put("spec", key, VALUE)
            assert ours.flush() is False
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir() if file.suffix == ".new"] == []
    assert set(ours.entries()["spec"]) == {"a", "b", "c"}
    (warning,) = warnings_of(caplog)
    assert str(path) in warning
    assert ours.flush() is True
    assert set(kept(path)["spec"]) == {"a", "b", "c"}


@pytest.mark.parametrize("parts", ["missing/measurements.json", "file/measurements.json"])
def test_a_missing_folder_costs_one_warning(tmp_path, caplog, parts):
    (tmp_path / "file").write_text("no folder")
    ours = Measurements(tmp_path / parts, "this machine")
    for key in ("a", "b"):
        ours.put("spec", key, VALUE)
        assert ours.flush() is False
    assert ours.entries() == {"spec": {"a": VALUE, "b": VALUE}}
    assert ours.forget() is False
    assert len(warnings_of(caplog)) == 1


def test_a_folder_in_the_place_of_the_file_is_set_aside(path):
    path.mkdir()
    ours = Measurements(path, "this machine")
    ours.put("spec", "a", VALUE)
    assert ours.flush() is True
    assert kept(path) == {"spec": {"a": VALUE}}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write to every folder")
def test_what_is_in_a_read_only_folder_is_still_used(path):
    written(path)
    path.parent.chmod(0o500)
    try:
        ours = Measurements(path, "this machine")
        ours.put("spec", "b", VALUE)
        assert ours.flush() is False
        assert set(ours.entries()["spec"]) == {"a", "b"}
    finally:
        path.parent.chmod(0o700)


# -- other processes and threads


PRELUDE = """
import sys, types
from pathlib import Path
package = types.ModuleType("sage_core")
package.__path__ = [sys.argv[1] + "/sage_core"]  # without what its __init__ loads
sys.modules["sage_core"] = package
from sage_core import file_lock, measurements
from sage_core.measurements import Measurements
path, name = Path(sys.argv[2]), sys.argv[3]
assert "torch" not in sys.modules
"""


def started(path, name, code):
    """A process that says a line when it is ready."""
    command = [sys.executable, "-I", "-c", PRELUDE + textwrap.dedent(code), str(ROOT), str(path), name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_that_write_at_once_lose_nothing(path):
    code = """
        file_lock.LOCK_SECONDS = 20  # a loaded machine is no failure
        ours = Measurements(path, "this machine")
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(20):
            ours.put("spec", f"{name} {number}", {"value": number})
            ours.put("shared", str(number), {"by": name})
            assert ours.flush()
    """
    processes = [started(path, f"process {number}", code) for number in range(3)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    seen = []
    while any(process.poll() is None for process in processes):
        if path.exists():
            seen.append(json.loads(path.read_bytes())["version"])  # whole at any time
        time.sleep(0.01)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert set(seen) == {1}
    everything = kept(path)
    assert len(everything["spec"]) == 60
    assert len(everything["shared"]) == 20


@pytest.mark.parametrize("step", ["json.dump", "os.fsync", "os.replace"])
def test_a_process_killed_while_it_writes_leaves_the_old_file_and_no_lock(path, monkeypatch, step):
    written(path)
    before = path.read_bytes()
    process = started(
        path,
        "this machine",
        f"""
        import json, os, time
        ours = Measurements(path, name)
        ours.put("spec", "b", {{"value": 1}})
        def hang(*args):
            if args[1:] and hasattr(args[1], "write"):
                args[1].write("half of it")
                args[1].flush()
            print("ready", flush=True)
            time.sleep(60)
        {step} = hang
        ours.flush()
        """,
    )
    monkeypatch.setattr(file_lock, "LOCK_SECONDS", 0.1)
    with pytest.raises(TimeoutError), locked(path.with_name(path.name + ".lock")):
        pytest.fail("two processes hold one lock")
    process.kill()
    process.wait()
    assert path.read_bytes() == before
    ours = Measurements(path, "this machine")
    ours.put("spec", "c", VALUE)
    assert ours.flush() is True
    assert set(kept(path)["spec"]) == {"a", "c"}
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, path.name + ".lock"]


def test_a_busy_lock_is_waited_for_a_moment_only_and_costs_one_write(path, monkeypatch, caplog):
    ours = Measurements(path, "this machine")
    ours.put("spec", "a", VALUE)
    assert file_lock.LOCK_SECONDS <= 1.0
    monkeypatch.setattr(file_lock, "LOCK_SECONDS", 0.1)
    with locked(path.with_name(path.name + ".lock")):
        began = time.monotonic()
        assert ours.flush() is False
        assert 0.1 <= time.monotonic() - began < 1.0
    assert ours.get("spec", "a") == VALUE
    assert "another process holds" in warnings_of(caplog)[0]
    assert ours.flush() is True
    assert kept(path) == {"spec": {"a": VALUE}}


def test_a_lock_that_is_given_back_in_time_is_taken(path):
    lock, held = path.with_name("lock"), threading.Event()

    def hold():
        with locked(lock):
            held.set()
            time.sleep(0.1)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    with locked(lock):
        assert not holder.is_alive() or holder.join(1) is None
    holder.join()


def test_the_lock_is_given_back_when_the_work_under_it_fails(path):
    free = os.open(path, os.O_RDWR | os.O_CREAT)
    os.close(free)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locked(path):
            raise ZeroDivisionError
    handle = os.open(path, os.O_RDWR)
    os.close(handle)
    assert handle == free  # the lowest number that is free: none is left open


def test_threads_lose_nothing(path):
    ours = Measurements(path, "this machine")

    def work(number):
        for key in range(25):
            ours.put("spec", f"{number} {key}", {"value": key})
            if key % 10 == 0:
                ours.flush()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ours.flush()
    assert len(kept(path)["spec"]) == 100


def test_an_interrupt_while_writing_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    written(path)
    ours = Measurements(path, "this machine")
    ours.put("spec", "b", VALUE)
    # a process that a script started in the background ignores the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda handle: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                ours.flush()
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(kept(path)["spec"]) == {"a"}
    assert ours.flush() is True
    assert set(kept(path)["spec"]) == {"a", "b"}


# -- the fingerprint


MACHINE = Environment(
    devices=(Device(0, "sm90", "NVIDIA H200", 2**37),),
    torch_version="2.11.0+cu130",
    cuda="13.0",
    driver="580.1",
    platform="Linux x86_64",
    python="3.12.1",
)
BUILDS = {"sageattention": "0123456789ab", "kernels": None}


def changed(**fields):
    return Environment(**{**vars(MACHINE), **fields})


@pytest.mark.parametrize(
    "other",
    [
        (changed(devices=(Device(0, "sm90", "NVIDIA H100", 2**37),)), "0.30.0", BUILDS),
        (changed(devices=(Device(0, "sm100", "NVIDIA H200", 2**37),)), "0.30.0", BUILDS),
        (changed(devices=(*MACHINE.devices, Device(1, "sm90", "NVIDIA H200"))), "0.30.0", BUILDS),
        (changed(devices=()), "0.30.0", BUILDS),
        (changed(torch_version="2.11.1+cu130"), "0.30.0", BUILDS),
        (changed(cuda="13.1"), "0.30.0", BUILDS),
        (changed(cuda=None, hip="13.0"), "0.30.0", BUILDS),
        (changed(driver="580.2"), "0.30.0", BUILDS),
        (changed(platform="Windows AMD64"), "0.30.0", BUILDS),
        (MACHINE, "0.30.1", BUILDS),
        (MACHINE, "0.30.0", {**BUILDS, "sageattention": "ba9876543210"}),
        (MACHINE, "0.30.0", {**BUILDS, "kernels": "0123456789ab"}),
        (MACHINE, "0.30.0", {**BUILDS, "flash-attn": None}),
    ],
)
def test_everything_that_a_measurement_depends_on_changes_the_fingerprint(other):
    assert fingerprint(*other) != fingerprint(MACHINE, "0.30.0", BUILDS)


def test_the_same_machine_has_the_same_fingerprint():
    free = changed(devices=(Device(0, "sm90", "NVIDIA H200", 2**36),), python="3.12.2")
    assert fingerprint(free, "0.30.0", dict(reversed(BUILDS.items()))) == fingerprint(MACHINE, "0.30.0", BUILDS)
    assert fingerprint(MACHINE, "0.30.0", BUILDS) == "aec38a787670fb87"
