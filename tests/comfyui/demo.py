"""The demo: one workflow in a real ComfyUI, once with native attention and once with another kernel, compared."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from comfyui_server import ROOT, PromptFailed, Server, ServerFailed

sys.path.insert(0, str(ROOT))

from sage_core import KERNEL_CHOICES

NATIVE = "native (observe only)"
MODEL = "tiny-wan.safetensors"
APPLY, SAMPLER, REPORT, SAVE = "5", "6", "7", "8"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("--kernel", default="int8_reference", choices=KERNEL_CHOICES)
    parser.add_argument("--port", type=free_port, default=0)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # so that the server ends with this process, also in the background
        signal.signal(number, signal.default_int_handler)
    cpu = not torch.cuda.is_available()
    started = time.monotonic()
    try:
        print(f"Starting ComfyUI on the {'CPU' if cpu else 'GPU'}", flush=True)
        with Server(options.comfyui, cpu=cpu, port=options.port) as server:
            print(f"ComfyUI answers at {server.address} after {time.monotonic() - started:.1f} s", flush=True)
            code = compare(server, options.kernel)
            if options.keep:
                print(f"\nOpen {server.address} in a browser; Ctrl+C ends the server.", flush=True)
                with suppress(KeyboardInterrupt):
                    while True:
                        time.sleep(1)
                print("Ended")
    except (ServerFailed, PromptFailed) as failure:
        print(f"The demo failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Ended before it was done", file=sys.stderr)
        return 130
    return code


def free_port(text: str) -> int:
    """A port that nothing listens on; 0 stands for any."""
    port = int(text)
    with socket.socket() as probe:
        if os.name == "posix":  # as ComfyUI's server does: connections of an earlier one may still be closing
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise argparse.ArgumentTypeError(f"{port} cannot be used: {error}") from error
    return port


def compare(server: Server, kernel: str) -> int:
    native_report, native_latent = sample(server, NATIVE)
    report, latent = sample(server, kernel)
    print(f"Distance of the latents, '{kernel}' from native, for a model with random weights:")
    print(f"  {distance(latent, native_latent)}")
    print("  Random weights say nothing about a picture: a trained model's attention is less even than this one's.")
    problems = [*found_wrong(native_report, "native"), *found_wrong(report, kernel)]
    for problem in problems:
        print(f"Wrong: {problem}", file=sys.stderr)
    return 1 if problems else 0


def sample(server: Server, kernel: str) -> tuple[dict[str, Any], torch.Tensor]:
    """The report and the latent of one prompt, which shows its Markdown report on the way."""
    print(f"\nRunning the workflow with kernel '{kernel}'", flush=True)
    started = time.monotonic()
    outputs = server.run(graph(kernel)).outputs
    print(f"Done after {time.monotonic() - started:.1f} s. The node Attention Backend Report shows:\n")
    print(outputs[REPORT]["text"][0], flush=True)
    saved = outputs[SAVE]["latents"][0]
    file = server.base_directory / "output" / saved["subfolder"] / saved["filename"]
    return outputs[REPORT]["sagescope_report"][0], load_file(file)["latent_tensor"]


def graph(kernel: str) -> dict[str, Any]:
    """The workflow in API format: a loader, Apply SageAttention, a sampler, the report, a saved latent."""
    conditioning = {"tokens": 8, "dim": 4096, "pooled": 64}
    return {
        "1": node("UNETLoader", unet_name=MODEL, weight_dtype="default"),
        "2": node("StandInConditioning", seed=1, **conditioning),
        "3": node("StandInConditioning", seed=2, **conditioning),
        "4": node("EmptyHunyuanLatentVideo", width=128, height=128, length=5, batch_size=1),
        APPLY: node(
            "ApplySageAttention",
            model=["1", 0],
            kernel=kernel,
            smooth_k="auto",
            start_percent=0.0,
            end_percent=1.0,
            skip_blocks="",
            if_unavailable="use native",
            allow_hub_download=False,
            tolerance="normal (0.10)",
            compare_with_native="first time",
        ),
        SAMPLER: node(
            "KSampler",
            model=[APPLY, 0],
            positive=["2", 0],
            negative=["3", 0],
            latent_image=["4", 0],
            seed=1,
            steps=3,
            cfg=3.0,
            sampler_name="euler",
            scheduler="simple",
            denoise=1.0,
        ),
        REPORT: node("AttentionBackendReport", model=[APPLY, 0], after=[SAMPLER, 0]),
        SAVE: node("SaveLatent", samples=[REPORT, 0], filename_prefix="demo"),
    }


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def distance(latent: torch.Tensor, reference: torch.Tensor) -> str:
    latent, reference = latent.double().flatten(), reference.double().flatten()
    difference = latent - reference
    relative = difference.norm() / reference.norm()
    cosine = torch.nn.functional.cosine_similarity(latent, reference, dim=0)
    return f"relative L2 {relative:.6f}, cosine {cosine:.8f}, largest difference {difference.abs().max():.6f}"


def found_wrong(report: dict[str, Any], kernel: str) -> Iterator[str]:
    """What contradicts the report's promises: every call is counted once, and the chosen kernel served some."""
    shown = [run for run in report["runs"] if run["id"] in report["shown"]]
    if len(shown) != 1:
        yield f"{kernel}: the report shows {len(shown)} runs of a prompt that sampled once"
        return
    served = {entry["kernel"]: entry["calls"] for entry in shown[0]["calls_by_kernel"]}
    if sum(served.values()) != shown[0]["calls"]:
        yield f"{kernel}: calls by kernel are {served}, which is not the {shown[0]['calls']} calls made"
    if kernel != "auto" and not served.get(kernel):
        yield f"{kernel} served no call; the report above says why"


if __name__ == "__main__":
    sys.exit(main())
