"""What an exception out of a kernel is taken for: the kernel's fault, too little memory, or a lost device."""

from __future__ import annotations

import json

import pytest
import torch

from sage_core.failure import LOST_CONTEXT, DeviceLost, explain
from sage_core.refusal import RefusalCode


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("HIP out of memory"),
        RuntimeError("Triton Error [CUDA]: Out of Memory"),
    ],
)
def test_running_out_of_memory_is_not_held_against_the_kernel(error):
    assert explain(error, "k").code is RefusalCode.OUT_OF_MEMORY


def raised_from(cause):
    error = RuntimeError("cannot compile")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "/cache/kernel.json"),
        PermissionError(13, "Permission denied"),
        OSError(28, "No space left on device"),
        json.JSONDecodeError("Expecting value", "", 0),
        raised_from(FileNotFoundError("gone")),
        raised_from(raised_from(OSError("gone"))),
    ],
    ids=repr,
)
def test_a_file_error_says_little_about_the_kernel(error):
    refusal = explain(error, "k")
    assert refusal.code is RefusalCode.FILE_ERROR
    assert refusal.detail.startswith(f"k raised {type(error).__name__}: ")


@pytest.mark.parametrize("error", [raised_from(None), raised_from(ValueError("bad"))])
def test_an_error_raised_from_another_kind_is_the_kernels(error):
    assert explain(error, "k").code is RefusalCode.KERNEL_ERROR


@pytest.mark.parametrize("error", [ValueError("bad"), AssertionError(), RuntimeError("no kernel image"), KeyError(3)])
def test_any_other_error_is_the_kernels_and_is_quoted(error):
    refusal = explain(error, "k")
    assert refusal.code is RefusalCode.KERNEL_ERROR
    assert refusal.detail.startswith(f"k raised {type(error).__name__}: ")
    assert str(error) in refusal.detail


def test_a_long_error_is_quoted_on_one_line_of_bounded_length():
    detail = explain(RuntimeError("line\n\tnext " * 500), "k").detail
    assert "line next line" in detail
    assert "\n" not in detail
    assert len(detail) < 350


@pytest.mark.parametrize("sign", LOST_CONTEXT)
def test_a_lost_device_is_said_at_once_with_its_cause(sign):
    cause = RuntimeError(f"CUDA error: an {sign.title()} was encountered")
    with pytest.raises(DeviceLost, match=r"k raised RuntimeError: .*restart ComfyUI") as error:
        explain(cause, "k")
    assert error.value.__cause__ is cause


def test_a_lost_device_is_seen_at_the_end_of_a_long_error_too():
    with pytest.raises(DeviceLost):
        explain(RuntimeError("frame " * 100 + "CUDA error: an illegal memory access was encountered"), "k")


def test_running_out_of_memory_is_seen_at_the_end_of_a_long_error_too():
    assert explain(RuntimeError("frame " * 100 + "out of memory"), "k").code is RefusalCode.OUT_OF_MEMORY


@pytest.fixture
def capturing(monkeypatch):
    """As if a CUDA graph were captured."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@pytest.mark.usefixtures("capturing")
def test_an_error_while_a_cuda_graph_is_captured_is_not_the_kernels():
    refusal = explain(RuntimeError("operation not permitted when stream is capturing"), "k")
    assert refusal.code is RefusalCode.STREAM_CAPTURE
    assert refusal.detail.startswith("k raised RuntimeError: operation not permitted")
    assert explain(torch.OutOfMemoryError("CUDA out of memory"), "k").code is RefusalCode.OUT_OF_MEMORY
