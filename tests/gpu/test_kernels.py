"""Every kernel that this machine has, through the pack's own path, against attention in fp64.

On a machine without a GPU the kernels that run on a CPU take its place. The text of a skip is the refusal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from sage_core import BACKENDS, Dispatcher, Policy, Session
from sage_core.accuracy import compare
from sage_core.backends import Backend
from sage_core.environment import Environment
from sage_core.refusal import RefusalCode
from tests.gpu.cases import BASE, CASES, Case
from tests.gpu.conftest import Table
from tests.unit.fp64 import exact

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ARCHS = {device.arch for device in Environment.detect().devices} or {"cpu"}
SITE_TOLERANCE = 0.10
DECLARED = {
    *(RefusalCode.ARCH, RefusalCode.DTYPE, RefusalCode.HEAD_DIM, RefusalCode.ATTN_MASK, RefusalCode.SM_SCALE),
    *(RefusalCode.SMOOTH_K, RefusalCode.KV_LEN, RefusalCode.SHAPE, RefusalCode.OFFSET),
}
"""Limits that a kernel states by itself."""
NOT_THERE = {
    *(RefusalCode.NOT_INSTALLED, RefusalCode.FUNCTION_MISSING, RefusalCode.BUILD, RefusalCode.UNTRUSTED_PUBLISHER),
    *(RefusalCode.DOWNLOAD_NOT_ALLOWED, RefusalCode.DOWNLOAD_FAILED),
}
"""What the machine lacks. Any other refusal is a kernel that failed."""


def is_for_this_machine(backend: Backend) -> bool:
    return backend.support.archs is None or not ARCHS.isdisjoint(backend.support.archs)


# a kernel for other GPUs says so once
ITEMS = [(backend, case) for backend in BACKENDS for case in (CASES if is_for_this_machine(backend) else CASES[:1])]


class Tensors:
    """query, key and value of a case as ComfyUI hands them over, and the same in HND for the reference."""

    def __init__(self, case: Case, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(len(case.name))
        (query_heads, key_heads), (qo_len, kv_len) = case.heads, case.lengths

        def draw(heads: int, length: int, offset: float = 0.0) -> torch.Tensor:
            shape = (case.batch, length, heads, case.head_dim)
            return (torch.randn(shape, generator=generator) + offset).to(device, case.dtype)

        nhd = [draw(query_heads, qo_len), draw(key_heads, kv_len, case.key_offset), draw(key_heads, kv_len)]
        self.hnd = [tensor.transpose(1, 2) for tensor in nhd]
        if case.memory == "fused":
            self.storage = [torch.stack(nhd, dim=2)]
            nhd = list(self.storage[0].unbind(2))
            self.given = [t.transpose(1, 2) for t in nhd] if case.layout == "HND" else [t.flatten(2) for t in nhd]
        elif case.layout == "HND":
            copies = nhd if case.memory == "transposed" else [t.transpose(1, 2).contiguous() for t in nhd]
            self.storage = [tensor.clone() for tensor in copies]
            self.given = [t.transpose(1, 2) for t in self.storage] if case.memory == "transposed" else self.storage
        else:
            self.storage = self.given = [tensor.flatten(2).clone() for tensor in nhd]
        self.hnd = [tensor.clone() for tensor in self.hnd]
        self.contents = [tensor.clone() for tensor in self.storage]

    def unchanged(self) -> bool:
        return all(map(torch.equal, self.storage, self.contents))

    def arrive_late(self) -> None:
        """Write the contents again, behind work that takes longer than a launch, on the current stream."""
        work = torch.zeros(4_096, 4_096, device=self.storage[0].device, dtype=torch.bfloat16)
        for tensor in self.storage:
            tensor.fill_(math.nan)
        for _ in range(40):
            work = work @ work
        for tensor, content in zip(self.storage, self.contents, strict=True):
            tensor.copy_(content)


def mask_of(case: Case, device: torch.device) -> torch.Tensor | None:
    if case.mask is None:
        return None
    generator = torch.Generator().manual_seed(0)
    allowed = torch.rand((case.batch, 1, *case.lengths), generator=generator) > 1 / 3
    allowed[..., 0] = True
    if case.mask == "bool":
        return allowed.to(device)
    return torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf).to(device, case.dtype)


def poison(tensor: torch.Tensor) -> None:
    """Have the allocator hand out memory full of NaN: in every float format, all bits set is one."""
    sizes = [tensor.numel() * tensor.element_size() * share // 4 for share in (1, 2, 4, 4, 8)]
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=tensor.device) for size in sizes]
    del blocks


def no_native(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Stands where ComfyUI's own attention would: what comes from it is no output of the kernel."""
    return args[0].new_full(args[0].shape, math.nan)


def arguments(case: Case, mask: torch.Tensor | None) -> dict[str, Any]:
    heads_first = case.layout == "HND"
    keywords: dict[str, Any] = {"mask": mask, "skip_reshape": heads_first, "skip_output_reshape": heads_first}
    if case.sm_scale is not None:
        keywords["scale"] = case.sm_scale
    if case.heads[0] != case.heads[1]:
        keywords["enable_gqa"] = True
    return keywords


def stream_of(case: Case, device: torch.device) -> AbstractContextManager[Any]:
    if not case.stream:
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def served_twice(
    attend: Callable[..., torch.Tensor], case: Case, tensors: Tensors, mask: torch.Tensor | None
) -> list[torch.Tensor]:
    """The output of the call that makes the plan and of one that follows it."""
    outputs = []
    for _ in range(2):
        if case.stream:
            tensors.arrive_late()
        poison(tensors.given[0])
        outputs.append(attend(no_native, *tensors.given, case.heads[0], **arguments(case, mask)))
    return outputs


@pytest.mark.parametrize(("backend", "case"), ITEMS, ids=[f"{backend.name}-{case.name}" for backend, case in ITEMS])
def test_kernel_is_right(backend: Backend, case: Case, session: Session, table: Table) -> None:
    if case.gpu_only and not GPUS:
        pytest.skip("no GPU here")
    if case.device >= max(GPUS, 1):
        pytest.skip("one GPU here")
    device = torch.device("cuda", case.device) if GPUS else torch.device("cpu")
    tensors, mask = Tensors(case, device), mask_of(case, device)
    tolerance = max(SITE_TOLERANCE, backend.tolerance.relative_l2)
    dispatcher = Dispatcher(Policy(kernel=backend.name, smooth_k=case.smooth_k, tolerance=tolerance), session)
    with torch.inference_mode(), stream_of(case, device):
        outputs = served_twice(dispatcher.attend, case, tensors, mask)
        if GPUS:
            torch.cuda.synchronize(device)
            assert torch.cuda.current_device() == 0
    (run,) = dispatcher.snapshot()["runs"]
    if {entry["kernel"]: entry["calls"] for entry in run["calls_by_kernel"]} != {backend.name: 2}:
        skip_or_fail(run["refusals"], table, backend, case)
    first, second = (output if case.layout == "HND" else heads_first(output, case) for output in outputs)
    accuracy = compare(first, exact(*tensors.hnd, sm_scale=case.sm_scale, attn_mask=mask))
    table.rows[backend.name].add(case.name, accuracy.relative_l2)
    assert outputs[0].dtype == case.dtype
    assert tensors.unchanged()
    assert accuracy.relative_l2 <= backend.tolerance.relative_l2, accuracy
    assert accuracy.cosine >= backend.tolerance.cosine, accuracy
    assert torch.equal(first, second), "the same call gave other bits the second time"


def heads_first(output: torch.Tensor, case: Case) -> torch.Tensor:
    return output.unflatten(2, (case.heads[0], case.head_dim)).transpose(1, 2)


def skip_or_fail(refusals: list[dict[str, Any]], table: Table, backend: Backend, case: Case) -> None:
    """A limit that the kernel states, or a kernel that is not there, is a skip; anything else is a failure.

    The plain call is within the limits of every kernel for this machine, so that none can skip all of its calls.
    """
    text = "; ".join(refusal["detail"] for refusal in refusals)
    codes = {RefusalCode(refusal["code"]) for refusal in refusals}
    assert codes, f"{backend.name} did not serve the call, and no reason was given"
    limits = {RefusalCode.ARCH} if case is BASE else DECLARED
    assert codes <= limits or codes <= NOT_THERE, text
    table.rows[backend.name].refuse(refusal["detail"] for refusal in refusals)
    pytest.skip(text)
