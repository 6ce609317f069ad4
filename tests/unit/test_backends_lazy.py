"""Importing the kernels' declarations imports none of their packages and wakes no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CORE = Path(__file__).parents[2] / "sage_core"
OPTIONAL = ["triton", "sageattention", "sageattn3", "comfy_kitchen", "kernels", "huggingface_hub"]
OPTIONAL += ["flash_attn", "flash_attn_interface", "flash_attn_config"]

SCRIPT = f"""
import json, sys, types
package = types.ModuleType("sage_core")  # without the __init__ of the whole core, whose imports are another matter
package.__path__ = [{str(CORE)!r}]
sys.modules["sage_core"] = package
import torch
before = set(sys.modules)
import sage_core.backends
from sage_core.environment import Environment
imported = sorted(set({OPTIONAL!r}) & (set(sys.modules) - before))
print(json.dumps({{"imported": imported, "cuda": torch.cuda.is_initialized()}}))
"""


def test_importing_the_declarations_imports_no_package_and_touches_no_gpu():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"imported": [], "cuda": False}
