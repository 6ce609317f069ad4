"""Diffusion models with the real architectures, tiny sizes and random weights; only for inside ComfyUI, on the CPU."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.ldm.flux.model
import comfy.ldm.wan.model
import comfy.model_patcher
import comfy.ops
import comfy.sample
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy import supported_models

WAN_FILE = "tiny-wan.safetensors"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TinyModel:
    """A MODEL as nodes get it, with a latent and conditioning that fit it."""

    model: comfy.model_patcher.ModelPatcher
    latent: tuple[int, ...]
    text: tuple[int, int]
    pooled: int = 64
    masked_tokens: int | None = None
    audio: tuple[int, ...] | None = None
    """Of a model of video and sound: the latent of the sound."""

    def sample(self, model: Any = None, *, seed: int = 1, steps: int = 3, cfg: float = 3.0) -> torch.Tensor:
        """The latent that KSampler's own code samples with `model` (default: this one), a patched clone say."""
        latent = torch.zeros(self.latent)
        if self.audio is not None:
            from comfy.nested_tensor import NestedTensor

            latent = NestedTensor([latent, torch.zeros(self.audio)])
        with torch.inference_mode():
            sampled = comfy.sample.sample(
                self.model if model is None else model,
                comfy.sample.prepare_noise(latent, seed),
                steps,
                cfg,
                "euler",
                "simple",
                conditioning(*self.text, self.pooled, seed=10, masked_tokens=self.masked_tokens),
                conditioning(*self.text, self.pooled, seed=11, masked_tokens=self.masked_tokens),
                latent,
                denoise=1.0,
                disable_pbar=True,
                seed=seed,
            )
        return sampled if self.audio is None else torch.cat([part.flatten() for part in sampled.unbind()])


def conditioning(tokens: int, dim: int, pooled: int, seed: int, masked_tokens: int | None = None) -> list[Any]:
    """What a text encoder would give. `masked_tokens` of 0 gives a mask that hides nothing, None gives no mask."""
    generator = torch.Generator().manual_seed(seed)
    extra: dict[str, torch.Tensor] = {"pooled_output": torch.randn(1, pooled, generator=generator)}
    if masked_tokens is not None:
        extra["attention_mask"] = (torch.arange(tokens) < tokens - masked_tokens).long()[None]
    return [[torch.randn(1, tokens, dim, generator=generator), extra]]


def wan() -> TinyModel:
    """Wan 2.1 text to video through ComfyUI's own file format and loader; self and cross attention, 2 heads of 128."""
    return TinyModel(comfy.sd.load_diffusion_model(str(wan_file())), latent=(1, 16, 2, 16, 16), text=(8, 4096))


def wan_file() -> Path:
    """The file that UNETLoader lists as WAN_FILE, written when it is not there."""
    path = Path(folder_paths.models_dir) / "diffusion_models" / WAN_FILE
    if not path.exists():
        model = comfy.ldm.wan.model.WanModel(
            model_type="t2v",
            dim=256,
            ffn_dim=512,
            num_heads=2,
            num_layers=2,
            in_dim=16,
            out_dim=16,
            device="cpu",
            dtype=torch.float32,
            operations=comfy.ops.disable_weight_init,
        )
        _fill(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        comfy.utils.save_torch_file({name: weight.half() for name, weight in model.state_dict().items()}, str(path))
    return path


def flux() -> TinyModel:
    """Joint attention over text and image, 2 heads of 128, a double and a single block, calls with skip_reshape."""
    sizes = {"in_channels": 16, "out_channels": 16, "vec_in_dim": 64, "context_in_dim": 128, "hidden_size": 256}
    blocks = {"mlp_ratio": 4.0, "num_heads": 2, "depth": 1, "depth_single_blocks": 1, "axes_dim": [16, 56, 56]}
    rest = {"image_model": "flux", "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": False}
    parameters = inspect.signature(comfy.ldm.flux.model.FluxParams).parameters
    newer: dict[str, Any] = {"txt_ids_dims": []} if "txt_ids_dims" in parameters else {}
    return _built("Flux", sizes | blocks | rest | newer, latent=(1, 16, 16, 16), text=(8, 128))


def sdxl() -> TinyModel:
    """The UNet of SDXL with two levels: convolutions, self and cross attention, 2 heads of 64, 77 text tokens."""
    sizes = {"in_channels": 4, "out_channels": 4, "model_channels": 64, "context_dim": 64, "adm_in_channels": 2816}
    blocks = {"channel_mult": [1, 2], "num_res_blocks": [1, 1], "num_head_channels": 64, "num_classes": "sequential"}
    depths = {"transformer_depth": [0, 1], "transformer_depth_middle": 1, "transformer_depth_output": [0, 0, 1, 1]}
    rest = {"image_size": 32, "use_spatial_transformer": True, "use_linear_in_transformer": True, "legacy": False}
    return _built("SDXL", sizes | blocks | depths | rest, latent=(1, 4, 16, 16), text=(77, 64), pooled=1280)


def omnigen2() -> TinyModel:
    """4 query heads of 64 with 2 key heads: enable_gqa from 0.30 on, expanded by the model itself on 0.3.75."""
    sizes = {"in_channels": 16, "hidden_size": 256, "text_feat_dim": 64, "num_attention_heads": 4, "num_kv_heads": 2}
    blocks = {"num_layers": 1, "num_refiner_layers": 1, "axes_dim_rope": (16, 24, 24), "axes_lens": (1024, 256, 256)}
    rest = {"image_model": "omnigen2", "timestep_scale": 1000.0}
    return _built("Omnigen2", sizes | blocks | rest, latent=(1, 16, 16, 16), text=(8, 64), masked_tokens=0)


def ltxv() -> TinyModel:
    """LTX video with 3 of 8 text tokens masked: cross attention gets an additive mask of 4 dimensions."""
    sizes = {"in_channels": 128, "cross_attention_dim": 128, "caption_channels": 64}
    blocks = {"attention_head_dim": 64, "num_attention_heads": 2, "num_layers": 1, "image_model": "ltxv"}
    return _built("LTXV", sizes | blocks, latent=(1, 128, 2, 8, 8), text=(8, 64), masked_tokens=3)


def qwen_image() -> TinyModel:
    """Joint attention with 3 of 8 text tokens masked: an additive mask of 3 dimensions from 0.30 on, none on 0.3.75."""
    sizes = {"num_layers": 1, "attention_head_dim": 64, "num_attention_heads": 2, "joint_attention_dim": 64}
    rest = {"axes_dims_rope": (16, 24, 24), "image_model": "qwen_image"}
    return _built("QwenImage", sizes | rest, latent=(1, 16, 1, 16, 16), text=(8, 64), masked_tokens=3)


def minimax_h3() -> TinyModel:
    """Video and sound, 2 heads of 64 over 56 tokens, whose attention calls come in containers; 0.33 and newer."""
    sizes = {"hidden_size": 128, "ffn_hidden_size": 128, "text_dim": 64, "latents_dim": 24, "audio_latents_dim": 32}
    blocks = {"num_layers": 2, "token_refiner_num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 64}
    times = {"timestep_input_dim": 32, "time_embed_hidden_size": 64, "time_embed_dim": 64, "rope_inv_freq_len": 8}
    shapes: dict[str, Any] = {"latent": (1, 24, 2, 8, 8), "audio": (1, 32, 2, 8), "text": (8, 64)}
    tiny = _built("MiniMaxH3", sizes | blocks | times | {"image_model": "minimax_h3"}, **shapes)
    frequencies = tiny.model.model.diffusion_model.rope.inv_freq  # a buffer that only a file fills
    frequencies.copy_(10000.0 ** -(torch.arange(len(frequencies)) / len(frequencies)))
    return tiny


ALL: dict[str, Callable[[], TinyModel]] = {
    "wan": wan,
    "flux": flux,
    "sdxl": sdxl,
    "omnigen2": omnigen2,
    "ltxv": ltxv,
    "qwen_image": qwen_image,
}


def _built(config_name: str, unet_config: dict[str, Any], **shapes: Any) -> TinyModel:
    """Built without a file where the loader takes the number of heads from tables of the released models."""
    config = getattr(supported_models, config_name)(unet_config)
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, device=CPU)
    _fill(model.diffusion_model)
    return TinyModel(comfy.model_patcher.ModelPatcher(model, load_device=CPU, offload_device=CPU), **shapes)


def _fill(model: torch.nn.Module) -> None:
    """Weights that keep activations near 1, the same in every process: each is seeded by its own name."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weight.data = torch.randn(weight.shape, generator=generator) * weight[0].numel() ** -0.5
        else:
            weight.data = torch.full(weight.shape, float(name.endswith(("weight", "scale"))))
