"""The one vocabulary for "no": why a kernel does not serve an attention call."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class RefusalCode(str, Enum):
    """What stands in the way, as a name to count and to test; the value is what the report's JSON carries."""

    # What the person asked for.
    OBSERVE_ONLY = "observe_only"
    OUTSIDE_WINDOW = "outside_window"
    SKIPPED_BLOCK = "skipped_block"
    DOWNLOAD_NOT_ALLOWED = "download_not_allowed"
    # What the model asked for.
    LOW_PRECISION_FORBIDDEN = "low_precision_forbidden"
    ATTN_PRECISION = "attn_precision"
    UNKNOWN_ARGUMENT = "unknown_argument"
    MALFORMED_CALL = "malformed_call"
    # The state around the call.
    GRADIENT = "gradient"
    AUTOCAST = "autocast"
    TENSOR_TYPE = "tensor_type"
    STREAM_CAPTURE = "stream_capture"
    # The call against what a kernel takes.
    ARCH = "arch"
    DTYPE = "dtype"
    HEAD_DIM = "head_dim"
    ATTN_MASK = "attn_mask"
    SM_SCALE = "sm_scale"
    SMOOTH_K = "smooth_k"
    KV_LEN = "kv_len"
    SHAPE = "shape"
    OFFSET = "offset"
    # What is installed, and what it did when it was tried.
    NOT_INSTALLED = "not_installed"
    FUNCTION_MISSING = "function_missing"
    BUILD = "build"
    DOWNLOAD_FAILED = "download_failed"
    UNTRUSTED_PUBLISHER = "untrusted_publisher"
    TRIAL = "trial"
    OUT_OF_MEMORY = "out_of_memory"
    FILE_ERROR = "file_error"
    KERNEL_ERROR = "kernel_error"
    NOT_WORTHWHILE = "not_worthwhile"
    # What the checks found on the model's own tensors.
    ACCURACY = "accuracy"
    NOT_FINITE = "not_finite"
    COMPARED = "compared"


BEYOND_A_LIMIT = "Nothing to do: other attention serves these calls. If only this kernel has the limit, choose another."

ADVICE: dict[RefusalCode, str] = {
    RefusalCode.OBSERVE_ONLY: "Nothing to do: kernel is set to 'native (observe only)'.",
    RefusalCode.OUTSIDE_WINDOW: "Widen start_percent and end_percent to cover these steps.",
    RefusalCode.SKIPPED_BLOCK: "Remove the block from skip_blocks to have it served.",
    RefusalCode.DOWNLOAD_NOT_ALLOWED: (
        "Turn on allow_hub_download, or name what is missing in LOCAL_KERNELS as repository=folder."
    ),
    RefusalCode.LOW_PRECISION_FORBIDDEN: "Nothing to do: the model asks for exact attention here.",
    RefusalCode.ATTN_PRECISION: "Nothing to do: the model asks for fp32 attention here.",
    RefusalCode.UNKNOWN_ARGUMENT: "Update the pack: this ComfyUI passes an argument it does not know yet.",
    RefusalCode.MALFORMED_CALL: "Report it: the shapes of this call do not fit its own arguments.",
    RefusalCode.GRADIENT: "Nothing to do: training needs gradients and the kernels are inference only.",
    RefusalCode.AUTOCAST: "Turn autocast off around the model, or leave these calls to native attention.",
    RefusalCode.TENSOR_TYPE: "Nothing to do: only plain dense tensors can be handed to a kernel.",
    RefusalCode.STREAM_CAPTURE: "Run the model once before a CUDA graph of it is captured, or leave the graph native.",
    RefusalCode.ARCH: "Choose a kernel by name that is made for this device, or leave these calls to native attention.",
    RefusalCode.DTYPE: "Run the model in bf16 or fp16 (for example with the ModelComputeDtype node).",
    RefusalCode.HEAD_DIM: BEYOND_A_LIMIT,
    RefusalCode.ATTN_MASK: BEYOND_A_LIMIT,
    RefusalCode.SM_SCALE: BEYOND_A_LIMIT,
    RefusalCode.SMOOTH_K: "Set smooth_k to 'auto': this kernel has no such switch.",
    RefusalCode.KV_LEN: BEYOND_A_LIMIT,
    RefusalCode.SHAPE: BEYOND_A_LIMIT,
    RefusalCode.OFFSET: (
        "Lower the resolution or the length: the kernel counts the elements of a head, or of its attn_mask, in 32 bits."
    ),
    RefusalCode.NOT_INSTALLED: "Install the package that the detail names, then restart ComfyUI.",
    RefusalCode.FUNCTION_MISSING: "Install a build of the package that has this function, then restart ComfyUI.",
    RefusalCode.BUILD: "Reinstall the package for this Python, torch and driver; the detail is its own error.",
    RefusalCode.DOWNLOAD_FAILED: "Check the connection to the Hub and run again; the detail is the error.",
    RefusalCode.UNTRUSTED_PUBLISHER: "If you trust the publisher, fetch the kernel into the local Hub cache yourself.",
    RefusalCode.TRIAL: "Update or reinstall the package: on a small known example it gave a wrong result.",
    RefusalCode.OUT_OF_MEMORY: "Lower the resolution or free VRAM; the next run tries again.",
    RefusalCode.FILE_ERROR: (
        "Make room on the disk, or let nothing else clear the folder that the detail names, such as Triton's cache."
    ),
    RefusalCode.KERNEL_ERROR: "See the log for the kernel's own error; restart ComfyUI to try it again.",
    RefusalCode.ACCURACY: "Nothing to do: other attention serves this site, where the kernel is not accurate enough.",
    RefusalCode.NOT_FINITE: "Nothing to do: other attention took over. bf16 values beyond fp16's range can do this.",
    RefusalCode.COMPARED: "Nothing to do. With compare_with_native on 'never' there are no such forwards.",
    RefusalCode.NOT_WORTHWHILE: "Nothing to do: other attention serves. A kernel that is chosen by name is not timed.",
}
"""What a person can do about each code."""


class Refusal(NamedTuple):
    """One reason: a code to count and a sentence that names both sides, what came and what is taken."""

    code: RefusalCode
    detail: str

    @property
    def advice(self) -> str:
        return ADVICE[self.code]
