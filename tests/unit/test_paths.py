"""No folder of the machine in what is shown to others, and nothing else taken out."""

from __future__ import annotations

from pathlib import Path

import pytest

from sage_core.paths import without_paths


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/lib/kernel.so: undefined symbol", "kernel.so: undefined symbol"),
        ("cannot open '/home/Ann B/my lib/a b.so'", "cannot open 'a b.so'"),
        ("in /home/Ann B/lib/kernel.so, line 3", "in kernel.so, line 3"),
        (r"C:\Users\Ann B\ComfyUI\custom_nodes\Pack.nodes.f", "Pack.nodes.f"),
        (r'File "C:\Users\Ann\x.py", line 1', 'File "x.py", line 1'),
        (r"\\server\share\models\x.so is missing", "x.so is missing"),
        ("C:/Users/Ann/x.so", "x.so"),
        ("/opt/ComfyUI/custom_nodes/Pack.nodes.f", "Pack.nodes.f"),
        ("file:///home/ann/x.so", "x.so"),
        ("two: /a/b/c and /d/e/f", "two: c and f"),
        (f"{Path.home()} cannot be written", "~ cannot be written"),
        (f"{Path.home()}/.cache/triton/x.lock", "x.lock"),
        ("(/tmp/triton/cache)", "(cache)"),
        ("LOCAL_KERNELS=/srv/kernels/sage", "LOCAL_KERNELS=sage"),
    ],
)
def test_of_a_path_the_last_part_stays(text: str, shown: str) -> None:
    assert without_paths(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "1 x 24/8 x 4096->77 x 128 bfloat16 NHD",
        "kernels-community/sage-attention is not on this disk",
        "see https://github.com/thu-ml/SageAttention/issues",
        "NaN/Inf and calls/s",
        "either / or",
        r"a regular \w+ expression",
        "built for CUDA 12.8",
    ],
)
def test_what_is_no_path_stays(text: str) -> None:
    assert without_paths(text) == text


def test_all_texts_of_a_document_are_looked_at() -> None:
    document = {"a": ["/x/y/z", {"b": "/x/y/z", "n": 1.5}], "c": None, "d": ("/x/y/z",)}
    assert without_paths(document) == {"a": ["z", {"b": "z", "n": 1.5}], "c": None, "d": ["z"]}
