"""What an exception out of a kernel says: about memory, a file, the kernel, or that the device is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError

import torch

from .refusal import Refusal, RefusalCode

LOST_CONTEXT = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "hardware exception",
)
"""Texts of CUDA and HIP errors after which every later call on the device fails as well, native attention included."""


class DeviceLost(RuntimeError):
    """A kernel broke the device context; only a restart of ComfyUI brings it back."""


class GivenAway(RuntimeError):
    """A kernel failed after query, key and value had been released: the whole forward has to be run again."""


def explain(error: Exception, kernel: str) -> Refusal:
    """The refusal that ``error``, raised by ``kernel``, stands for.

    Raises DeviceLost when nothing can run on the device any more, so that the person reads the cause and not the
    next call's error.
    """
    text = " ".join(str(error).split())
    described = f"{kernel} raised {type(error).__name__}: {text[:300]}"
    if any(sign in text.lower() for sign in LOST_CONTEXT):
        raise DeviceLost(
            f"{described}. The GPU context is lost and cannot be used any more: restart ComfyUI, and choose another "
            f"kernel in Apply SageAttention if this happens again."
        ) from error
    # Triton and HIP wrap running out of memory in errors of their own
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower():
        return Refusal(RefusalCode.OUT_OF_MEMORY, described)
    # what a kernel may not do then it may do at any other time, and after one such call every later one fails
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return Refusal(RefusalCode.STREAM_CAPTURE, f"{described} (while a CUDA graph was captured)")
    if _is_about_a_file(error):
        return Refusal(RefusalCode.FILE_ERROR, described)
    return Refusal(RefusalCode.KERNEL_ERROR, described)


def _is_about_a_file(error: BaseException | None) -> bool:
    """Whether it is, or was raised from, a file that is missing, half written or refused: Triton and its like keep
    what they compiled in a folder that other processes use and clear too."""
    while error is not None:
        if isinstance(error, (OSError, JSONDecodeError)):
            return True
        error = error.__cause__
    return False


@contextmanager
def naming(kernels: str) -> Iterator[None]:
    """Around a wait for the device, where the errors of what ran before come out: a lost device is named with
    ``kernels``, any other error passes through."""
    try:
        yield
    except Exception as error:
        explain(error, kernels)
        raise
