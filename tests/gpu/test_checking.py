"""The reference of a check in the middle of a run, which attends to long keys in parts, against the one in fp32.

On a machine without a GPU it is PyTorch's attention on the CPU that is called.
"""

from __future__ import annotations

import pytest
import torch

from sage_core import checking
from sage_core.call import AttentionCall
from sage_core.environment import Environment
from tests.unit.fp64 import normal

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ARCH = Environment.detect().arch_of(DEVICE)
KEYS = 5 * checking.KEYS_IN_A_PART + 77
ROUNDED = 0.005
"""Twice the error of attention in bf16."""


@pytest.mark.parametrize("layout", ["NHD", "HND", "fused"])
@pytest.mark.parametrize(
    ("batch", "heads", "head_dim", "dtype"),
    [(1, 24, 128, torch.bfloat16), (2, 10, 64, torch.float16), (1, 4, 72, torch.bfloat16), (1, 2, 256, torch.float16)],
)
def test_parts_are_put_together_to_the_whole(batch, heads, head_dim, dtype, layout, monkeypatch):
    lengths = [KEYS] * 3 if layout == "fused" else [300, KEYS, KEYS]
    tensors = [normal(batch, length, heads, head_dim, seed=seed) for seed, length in enumerate(lengths)]
    tensors = [tensor.to(DEVICE, dtype) for tensor in tensors]
    if layout == "fused":
        tensors = list(torch.stack(tensors, 2).unbind(2))
    given = [t.flatten(2) if layout == "NHD" else t.transpose(1, 2) for t in tensors]
    if layout == "HND":
        given = [tensor.contiguous() for tensor in given]
    call = AttentionCall.from_comfy(*given, heads, skip_reshape=layout != "NHD")
    spec, refusals = call.read(ARCH)
    assert not refusals
    parts = []
    flash = checking._flash
    monkeypatch.setattr(checking, "_flash", lambda *each: parts.append(each[1].shape[0]) or flash(*each))
    rows = torch.arange(0, lengths[0], 3, device=DEVICE)[:100]
    found = checking._reference(call, spec, rows, exact=False)
    if checking._parts(spec) == 1:
        pytest.skip(f"{ARCH} leaves {spec.describe()} to PyTorch as a whole")
    assert parts == [min(5, -(-checking.BLOCKS_AT_ONCE // (batch * heads))), 1] * batch
    expected = checking._reference(call, spec, rows, exact=True)
    assert ((found - expected).norm() / expected.norm()).item() < ROUNDED
