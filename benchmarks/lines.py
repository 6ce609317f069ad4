"""The models that are measured: real architectures and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Line:
    """One model at one size. ``tiny`` are the entries of ``unet`` that differ in a model small enough for a CPU.

    ``unet`` is what ComfyUI finds in a file of that model. ``text`` is (tokens, width) of the conditioning, and
    ``masked`` how many of the tokens are masked: None for a text encoder that gives no mask.
    ``weight`` is the line's share of the time budget beside the others'.
    """

    title: str
    config: str
    unet: Mapping[str, Any]
    tiny: Mapping[str, Any]
    latent: tuple[int, ...]
    tiny_latent: tuple[int, ...]
    text: tuple[int, int]
    tiny_text: tuple[int, int]
    audio: tuple[int, ...] | None = None
    """The latent of the sound, for a model that makes it along with the video."""
    tiny_audio: tuple[int, ...] | None = None
    pooled: int = 768
    masked: int | None = None
    cfg: float = 1.0
    steps: int = 8
    weight: float = 1.0
    note: str = ""
    target: float | None = None
    """How many times as fast as native `auto` should be on an H200."""
    known: str = ""
    """The dataclass that takes ``unet``; entries that it does not have are newer than this ComfyUI."""
    compiled: Mapping[str, Any] = field(default_factory=dict)
    """Entries of ``unet`` that differ where models are compiled: torch.compile works on every layer by itself."""
    compiled_note: str = ""

    def for_compiling(self) -> Line:
        """The line with fewer layers; its target is for the model that is not compiled."""
        return replace(
            self,
            title=f"{self.title}, compiled",
            unet={**self.unet, **self.compiled},
            note=self.compiled_note or self.note,
            target=None,
        )


FLUX: dict[str, Any] = (
    {"image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096}
    | {"hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19, "depth_single_blocks": 38}
    | {"axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": False}
    | {"txt_ids_dims": []}
)
TINY_FLUX = {"hidden_size": 256, "num_heads": 2, "depth": 1, "depth_single_blocks": 1, "context_in_dim": 128}
FEW_FLUX = {"depth": 3, "depth_single_blocks": 6}
SDXL: dict[str, Any] = (
    {"in_channels": 4, "out_channels": 4, "model_channels": 320, "context_dim": 2048, "adm_in_channels": 2816}
    | {"channel_mult": [1, 2, 4], "num_res_blocks": [2, 2, 2], "num_head_channels": 64, "num_classes": "sequential"}
    | {"transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10}
    | {"transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10]}
    | {"image_size": 32, "use_spatial_transformer": True, "use_linear_in_transformer": True, "legacy": False}
)
TINY_SDXL = {"model_channels": 64, "context_dim": 64, "channel_mult": [1, 2], "num_res_blocks": [1, 1]} | {
    "transformer_depth": [0, 1],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [0, 0, 1, 1],
}
WAN: dict[str, Any] = {"image_model": "wan2.1", "model_type": "t2v", "dim": 5120, "ffn_dim": 13824, "num_heads": 40} | {
    "in_dim": 16,
    "out_dim": 16,
}
TINY_WAN = {"dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 2}
OMNIGEN2: dict[str, Any] = (
    {"image_model": "omnigen2", "axes_dim_rope": (40, 40, 40), "axes_lens": (1024, 1664, 1664)}
    | {"hidden_size": 2520, "in_channels": 16, "num_attention_heads": 21, "num_kv_heads": 7, "num_layers": 32}
    | {"text_feat_dim": 2048, "timestep_scale": 1000.0}
)
TINY_OMNIGEN2 = {
    "axes_dim_rope": (16, 24, 24),
    "axes_lens": (1024, 256, 256),
    "hidden_size": 256,
    "num_attention_heads": 4,
} | {"num_kv_heads": 2, "num_layers": 1, "text_feat_dim": 64}
LTX: dict[str, Any] = {
    "image_model": "ltxv",
    "in_channels": 128,
    "cross_attention_dim": 4096,
    "caption_channels": 4096,
} | {"attention_head_dim": 128, "num_attention_heads": 32, "num_layers": 48}
TINY_LTX = {"cross_attention_dim": 128, "caption_channels": 64, "attention_head_dim": 64, "num_attention_heads": 2} | {
    "num_layers": 1
}
QWEN: dict[str, Any] = {"image_model": "qwen_image", "num_layers": 60}
TINY_QWEN = {"num_layers": 1, "attention_head_dim": 64, "num_attention_heads": 2, "joint_attention_dim": 64} | {
    "axes_dims_rope": (16, 24, 24)
}
MINIMAX: dict[str, Any] = {
    "image_model": "minimax_h3",
    "hidden_size": 5376,
    "ffn_hidden_size": 14336,
    "text_dim": 5120,
    "latents_dim": 24,
} | {"num_attention_heads": 56, "attention_head_dim": 128, "token_refiner_num_layers": 2, "audio_latents_dim": 32}
TINY_MINIMAX = (
    {"hidden_size": 128, "ffn_hidden_size": 128, "text_dim": 64, "num_attention_heads": 2, "attention_head_dim": 64}
    | {"timestep_input_dim": 32, "time_embed_hidden_size": 64, "time_embed_dim": 64, "rope_inv_freq_len": 8}
    | {"num_layers": 2, "token_refiner_num_layers": 1}
)
FLUX_FIELDS = "comfy.ldm.flux.model:FluxParams"

LINES: dict[str, Line] = {
    "flux-1024": Line(
        title="FLUX 1024 x 1024",
        config="Flux",
        unet=FLUX,
        tiny=TINY_FLUX,
        latent=(1, 16, 128, 128),
        tiny_latent=(1, 16, 16, 16),
        text=(512, 4096),
        tiny_text=(8, 128),
        steps=12,
        weight=1.5,
        target=1.12,
        known=FLUX_FIELDS,
        compiled=FEW_FLUX,
        compiled_note="3 of its 19 double and 6 of its 38 single blocks, which are alike",
    ),
    "flux-2048": Line(
        title="FLUX 2048 x 2048",
        config="Flux",
        unet=FLUX,
        tiny=TINY_FLUX,
        latent=(1, 16, 256, 256),
        tiny_latent=(1, 16, 16, 32),
        text=(512, 4096),
        tiny_text=(8, 128),
        weight=3.0,
        target=1.40,
        known=FLUX_FIELDS,
        compiled=FEW_FLUX,
        compiled_note="3 of its 19 double and 6 of its 38 single blocks, which are alike",
    ),
    "sdxl-1024": Line(
        title="SDXL 1024 x 1024, CFG",
        config="SDXL",
        unet=SDXL,
        tiny=TINY_SDXL,
        latent=(1, 4, 128, 128),
        tiny_latent=(1, 4, 16, 16),
        text=(77, 2048),
        tiny_text=(77, 64),
        pooled=1280,
        cfg=5.0,
        steps=12,
        weight=2.0,  # limited by the host, whose speed varies: more rounds
        compiled={"transformer_depth": [0, 0, 1, 1, 5, 5], "transformer_depth_middle": 5}
        | {"transformer_depth_output": [0, 0, 0, 1, 1, 1, 5, 5, 5]},
        compiled_note="half of its transformer blocks, which are alike",
    ),
    "wan-480p": Line(
        title="Wan 14B 480p, 81 frames",
        config="WAN21_T2V",
        unet={**WAN, "num_layers": 6},
        tiny=TINY_WAN,
        latent=(1, 16, 21, 60, 104),
        tiny_latent=(1, 16, 2, 16, 16),
        text=(512, 4096),
        tiny_text=(8, 4096),
        weight=2.0,
        note="6 of its 40 layers, which are alike",
        target=1.56,
        compiled={"num_layers": 4},
        compiled_note="4 of its 40 layers, which are alike",
    ),
    "wan-720p": Line(
        title="Wan 14B 720p, 81 frames",
        config="WAN21_T2V",
        unet={**WAN, "num_layers": 2},
        tiny=TINY_WAN,
        latent=(1, 16, 21, 90, 160),
        tiny_latent=(1, 16, 2, 16, 32),
        text=(512, 4096),
        tiny_text=(8, 4096),
        weight=2.0,
        note="2 of its 40 layers, which are alike",
    ),
    "qwen-1328": Line(
        title="Qwen-Image 1328 x 1328",
        config="QwenImage",
        unet=QWEN,
        tiny=TINY_QWEN,
        latent=(1, 16, 1, 166, 166),
        tiny_latent=(1, 16, 1, 16, 16),
        text=(256, 3584),
        tiny_text=(8, 64),
        compiled={"num_layers": 6},
        compiled_note="6 of its 60 layers, which are alike",
    ),
    "omnigen2-1024": Line(
        title="OmniGen2 1024 x 1024, CFG, 21 query heads on 7 key heads",
        config="Omnigen2",
        unet=OMNIGEN2,
        tiny=TINY_OMNIGEN2,
        latent=(1, 16, 128, 128),
        tiny_latent=(1, 16, 16, 16),
        text=(256, 2048),
        tiny_text=(8, 64),
        masked=0,
        cfg=5.0,
        compiled={"num_layers": 6},
        compiled_note="6 of its 32 layers, which are alike",
    ),
    "ltx-704": Line(
        title="LTX 13B 1216 x 704, 97 frames, masked text",
        config="LTXV",
        unet=LTX,
        tiny=TINY_LTX,
        latent=(1, 128, 13, 22, 38),
        tiny_latent=(1, 128, 2, 8, 8),
        text=(128, 4096),
        tiny_text=(8, 64),
        masked=3,
        compiled={"num_layers": 6},
        compiled_note="6 of its 48 layers, which are alike",
    ),
    "minimax-h3-5s": Line(
        title="MiniMax H3 1344 x 768, 124 frames",
        config="MiniMaxH3",
        unet={**MINIMAX, "num_layers": 3},
        tiny=TINY_MINIMAX,
        latent=(1, 24, 37, 48, 84),
        tiny_latent=(1, 24, 2, 8, 8),
        text=(256, 5120),
        tiny_text=(8, 64),
        audio=(1, 32, 2, 207),
        tiny_audio=(1, 32, 2, 8),
        weight=2.0,
        note="3 of its 50 layers, which are alike",
    ),
    "minimax-h3-15s": Line(
        title="MiniMax H3 1344 x 768, 362 frames",
        config="MiniMaxH3",
        unet={**MINIMAX, "num_layers": 1},
        tiny=TINY_MINIMAX,
        latent=(1, 24, 107, 48, 84),
        tiny_latent=(1, 24, 3, 8, 8),
        text=(256, 5120),
        tiny_text=(8, 64),
        audio=(1, 32, 2, 603),
        tiny_audio=(1, 32, 2, 12),
        steps=4,
        weight=2.0,
        note="1 of its 50 layers, which are alike",
    ),
}
MAIN = ("flux-1024", "flux-2048", "sdxl-1024", "wan-480p")
"""The lines of a run that asks for none."""
