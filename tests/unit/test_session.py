"""What outlives a model: each kernel is loaded once, tried once, and out for good once it failed."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from sage_core import session as session_module
from sage_core.backends.base import Kernel
from sage_core.environment import Environment
from sage_core.refusal import Refusal, RefusalCode
from sage_core.selection import Use
from sage_core.session import Session
from tests.unit.conftest import (
    CPU,
    KERNEL,
    TRIAL_CALLS,
    FakeKernel,
    fake_backend,
    fake_environment,
    make_session,
    make_spec,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ABSENT = (Refusal(RefusalCode.NOT_INSTALLED, "fake is not installed"),)
BROKE = Refusal(RefusalCode.KERNEL_ERROR, "it broke")
CUDA_0, CUDA_1 = torch.device("cuda:0"), torch.device("cuda:1")


class Load:
    def __init__(self, result=None):
        self.result = result or Kernel(FakeKernel())
        self.asked = []

    def __call__(self, environment, arch, allow_download):
        self.asked.append((arch, allow_download))
        return self.result


def use_of(kernel, name=KERNEL):
    return Use(fake_backend(kernel, name=name), Kernel(kernel), "NHD", False, None)


@pytest.mark.parametrize("result", [None, ABSENT])
def test_a_kernel_is_looked_for_once_per_arch_and_permission(result):
    load = Load(result)
    backend = fake_backend(load=load)
    session = make_session(backend, arch="sm90")
    for _ in range(3):
        assert session.load(backend, CPU, False) is load.result
        assert session.load(backend, CUDA_0, False) is load.result
        assert session.load(backend, CUDA_0, True) is load.result
    assert load.asked == [("cpu", False), ("sm90", False), ("sm90", True)]


def test_a_kernel_that_was_not_to_be_had_is_looked_for_again_when_that_is_asked_for():
    load = Load((Refusal(RefusalCode.DOWNLOAD_FAILED, "no connection"),))
    backend = fake_backend(load=load)
    session = make_session(backend)
    session.load(backend, CPU, True)
    load.result = Kernel(FakeKernel())
    assert session.load(backend, CPU, True) != load.result
    assert session.load(backend, CPU, True, again=True) is load.result
    assert session.load(backend, CPU, True, again=True) is load.result
    assert len(load.asked) == 2


def test_a_retired_kernel_is_out_on_its_device_only_and_for_the_first_reason():
    backend, other = fake_backend(), fake_backend(name="other")
    session = make_session(backend, other)
    assert session.generation == 0
    session.retire(KERNEL, CPU, BROKE)
    session.retire(KERNEL, CPU, BROKE._replace(detail="later"))
    assert session.generation > 0
    assert session.load(backend, CPU, False) == (BROKE,)
    assert session.load(backend, CPU, True) == (BROKE,)
    assert session.load(backend, CPU, True, again=True) == (BROKE,)
    assert isinstance(session.load(backend, CUDA_0, False), Kernel)
    assert isinstance(session.load(other, CPU, False), Kernel)


def test_a_kernel_is_tried_once_for_calls_that_are_alike():
    kernel, session = FakeKernel(), make_session()
    for length in (4_096, 4_096 + 128, 8_192):
        assert session.trial(use_of(kernel), make_spec(qo_len=length, kv_len=length), CPU) is None
    assert len(kernel.calls) == TRIAL_CALLS


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"head_dim": 32}},
        {"spec": {"dtype": "bfloat16"}},
        {"spec": {"kv_len": 77}},
        {"spec": {"sm_scale": 1.0}},
        {"spec": {"num_qo_heads": 4}},
        {"use": {"layout": "HND"}},
        {"use": {"smooth_k": True}},
        {"use": {"smooth_k": False}},
    ],
)
def test_a_kernel_is_tried_again_for_calls_with_other_features(change):
    kernel, session = FakeKernel(), make_session()
    session.trial(use_of(kernel), make_spec(), CPU)
    session.trial(use_of(kernel)._replace(**change.get("use", {})), make_spec(**change.get("spec", {})), CPU)
    assert len(kernel.calls) == 2 * TRIAL_CALLS


def test_a_wrong_result_is_remembered_for_its_features_and_retires_nothing(caplog):
    kernel, session = FakeKernel(lambda query, *_: query), make_session()
    refusals = [session.trial(use_of(kernel), make_spec(), CPU) for _ in range(3)]
    assert refusals[0].code is RefusalCode.TRIAL
    assert refusals == refusals[:1] * 3
    assert len(kernel.calls) == 1
    assert session.generation == 0
    assert isinstance(session.load(fake_backend(), CPU, False), Kernel)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_kernel_that_raises_in_its_trial_is_out(caplog):
    def fail(*call):
        raise RuntimeError("cannot compile")

    backend, session = fake_backend(), make_session()
    refusal = session.trial(use_of(FakeKernel(fail)), make_spec(), CPU)
    assert refusal.code is RefusalCode.KERNEL_ERROR
    assert session.load(backend, CPU, False) == (refusal,)
    assert session.generation == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_kernel_that_runs_out_of_memory_in_its_trial_is_tried_again():
    memory = [False]

    def fail_once(query, key, value, layout, scale, mask):
        if not memory[0]:
            raise torch.OutOfMemoryError("full")
        return FakeKernel()(query, key, value, tensor_layout=layout, sm_scale=scale)

    session, use = make_session(), use_of(FakeKernel(fail_once))
    assert session.trial(use, make_spec(), CPU).code is RefusalCode.OUT_OF_MEMORY
    assert session.generation == 0
    memory[0] = True
    assert session.trial(use, make_spec(), CPU) is None


def test_the_machine_is_asked_when_it_is_first_needed_and_once(monkeypatch):
    asked = []

    def detect():
        asked.append(1)
        return fake_environment()

    monkeypatch.setattr(Environment, "detect", detect)
    session = Session((fake_backend(),))
    assert asked == []
    session.load(fake_backend(), CPU, False)
    session.snapshot()
    assert asked == [1]
    assert Session((), fake_environment("sm89")).environment.devices[0].arch == "sm89"
    assert asked == [1]


def test_an_unknown_name_is_no_backend():
    assert make_session().backend(KERNEL).name == KERNEL
    with pytest.raises(StopIteration):
        make_session().backend("no such kernel")


def test_the_machine_as_json_names_each_package_once_and_what_is_out(monkeypatch):
    monkeypatch.setattr(session_module, "package_build", lambda name: f"build of {name}")
    backends = [fake_backend(name="a", package="one"), fake_backend(name="b", package="one"), fake_backend(name="c")]
    session = Session(backends, fake_environment("sm90", cuda="12.8", packages={"one": "1.0"}), host="0.33.0")
    session.retire("a", CUDA_1, BROKE)
    written = json.loads(json.dumps(session.snapshot(), allow_nan=False))
    assert written["packages"] == [{"name": "one", "version": "1.0", "build": "build of one"}]
    assert written["retired"] == [{"kernel": "a", "device": "cuda:1", "detail": "it broke"}]
    assert written["devices"] == [{"index": 0, "arch": "sm90", "name": "Fake sm90", "total_memory": 2**34}]
    assert (written["comfyui"], written["cuda"], written["hip"]) == ("0.33.0", "12.8", None)
    assert set(written) == {
        *("comfyui", "python", "platform", "torch", "cuda", "hip", "driver", "devices", "packages", "retired")
    }
