"""A line's model with random weights, and runs of it through ComfyUI's own sampler."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from .lines import Line

TINY_STEPS = 3


class Absent(Exception):
    """Why a line cannot be measured with this ComfyUI."""


@dataclass(frozen=True)
class Sampling:
    """A built model with the settings of its line. ``model`` is the plain MODEL, as loader nodes give it."""

    line: Line
    model: Any
    latent: tuple[int, ...]
    audio: tuple[int, ...] | None
    text: tuple[int, int]
    steps: int

    @classmethod
    def build(
        cls, line: Line, device: torch.device, *, tiny: bool, steps: int | None, offload: torch.device | None = None
    ) -> Sampling:
        """Weights are drawn on the device, in the dtypes that ComfyUI gives them: some stay in fp32.

        ``offload`` is where ComfyUI finds them and puts them when it unloads the model. Without it they stay: nothing
        is moved to the host for a model that is thrown away then. Raises Absent for a model that is newer than ComfyUI.
        """
        import comfy.model_patcher
        from comfy import supported_models

        if not hasattr(supported_models, line.config):
            raise Absent(f"this ComfyUI has no {line.config}")
        unet = {**line.unet, **(line.tiny if tiny else {})}
        if line.known:
            module, _, name = line.known.partition(":")
            known = {"image_model", *getattr(importlib.import_module(module), name).__dataclass_fields__}
            unet = {key: value for key, value in unet.items() if key in known}
        config = getattr(supported_models, line.config)(unet)
        config.set_inference_dtype(torch.float32 if tiny else torch.bfloat16, None)
        model = config.get_model({}, device=device)
        _fill(model.diffusion_model)
        offload = model.device = offload or device
        return cls(
            line,
            comfy.model_patcher.ModelPatcher(model.to(offload), load_device=device, offload_device=offload),
            line.tiny_latent if tiny else line.latent,
            line.tiny_audio if tiny else line.audio,
            line.tiny_text if tiny else line.text,
            steps or (TINY_STEPS if tiny else line.steps),
        )

    def sample(self, model: Any, steps: int | None = None) -> torch.Tensor:
        """The latent of one sampler run with ``model``, the plain one or a patched clone; the same noise each time."""
        import comfy.sample

        generator = torch.Generator().manual_seed(0)
        latent, noise = torch.zeros(self.latent), torch.randn(self.latent, generator=generator)
        if self.audio is not None:
            from comfy.nested_tensor import NestedTensor

            latent = NestedTensor([latent, torch.zeros(self.audio)])
            noise = NestedTensor([noise, torch.randn(self.audio, generator=generator)])
        with torch.inference_mode():
            sampled = comfy.sample.sample(
                model,
                noise,
                steps or self.steps,
                self.line.cfg,
                "euler",
                "simple",
                self._conditioning(1),
                self._conditioning(2),
                latent,
                denoise=1.0,
                disable_pbar=True,
                seed=1,
            )
        return sampled if self.audio is None else torch.cat([part.flatten() for part in sampled.unbind()])

    def model_output(self, model: Any) -> torch.Tensor:
        """What the diffusion model itself gives in a run of one step: every entry's input is equal there.

        The last of its calls: where one was made again, that is the one that was handed on. It is kept where ComfyUI
        takes it from the model, as a hook on the module would be compiled with it.
        """
        outputs: list[torch.Tensor] = []
        schedule = self.model.model.model_sampling
        calculate = schedule.calculate_denoised

        def keep(sigma: torch.Tensor, output: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            outputs[:] = [output.detach().clone()]
            return calculate(sigma, output, given)

        schedule.calculate_denoised = keep
        try:
            self.sample(model, steps=1)
        finally:
            del schedule.calculate_denoised
        return outputs[0]

    def _conditioning(self, seed: int) -> list[Any]:
        """What a text encoder would give."""
        tokens, width = self.text
        generator = torch.Generator().manual_seed(seed)
        extra: dict[str, torch.Tensor] = {"pooled_output": torch.randn(1, self.line.pooled, generator=generator)}
        if self.line.masked is not None:
            extra["attention_mask"] = (torch.arange(tokens) < tokens - self.line.masked).long()[None]
        return [[torch.randn(1, tokens, width, generator=generator), extra]]


@torch.no_grad()
def _fill(model: torch.nn.Module) -> None:
    """Weights that keep activations near 1, in place: a dtype that ComfyUI chose for a layer stays."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, weight[0].numel() ** -0.5)
        else:
            weight.fill_(float(name.endswith(("weight", "scale"))))
    for name, frequencies in model.named_buffers():
        if name.endswith("inv_freq"):  # which only a file fills
            frequencies.copy_(10000.0 ** -(torch.arange(len(frequencies)) / len(frequencies)))
