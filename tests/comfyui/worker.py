"""A process with one ComfyUI in it: answers one request after another until its input closes (see hosts.Worker)."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from typing import Any

import inside


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("comfyui")
    parser.add_argument("base_directory")
    parser.add_argument("--without-pack", action="store_true")
    options = parser.parse_args()
    # Answers get a descriptor of their own; whatever anybody prints goes to the log instead.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        sys.stdout.reconfigure(line_buffering=True)  # in order with what is logged, and there when a scenario fails
        inside.start(options.comfyui, options.base_directory, pack=not options.without_pack)
        answers.write("{}\n")  # started
        answers.flush()
        for request in sys.stdin:
            answers.write(json.dumps(answer(**json.loads(request))) + "\n")
            answers.flush()


def answer(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    print(f"--- {function} {arguments}")
    module, _, name = function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(**arguments)
        json.dumps(result)
    except Exception:
        return {"error": traceback.format_exc()}
    return {"result": result}


if __name__ == "__main__":
    main()
