"""What the example workflows consist of: nodes in columns, with their widgets, links and note."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

HUB = "https://huggingface.co"
FLUX = f"{HUB}/Comfy-Org/flux1-dev/resolve/main"
FLUX_TEXT = f"{HUB}/comfyanonymous/flux_text_encoders/resolve/main"
FLUX_VAE = f"{HUB}/Comfy-Org/Lumina_Image_2.0_Repackaged/resolve/main/split_files"
WAN = f"{HUB}/Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files"
WAN_TEXT = f"{HUB}/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files"
QWEN = f"{HUB}/Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files"
SDXL = f"{HUB}/stabilityai/stable-diffusion-xl-base-1.0/resolve/main"

GAP = 60
"""Between two nodes: room for the title of the lower one."""
BLUE, GREEN, GREY = "#3f789e", "#3f7f5f", "#666666"


@dataclass
class Node:
    type: str
    widgets: dict[str, Any] = field(default_factory=dict)
    links: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Input name -> key of the node and number of its output."""
    title: str = ""
    size: tuple[int, int] = (0, 0)
    """Zero is what ComfyUI gives the node."""


@dataclass
class Column:
    nodes: dict[str, Node]
    width: int
    title: str = ""
    color: str = GREY


@dataclass
class Example:
    name: str
    columns: list[Column]


class File(NamedTuple):
    folder: str
    address: str

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]


def files(folder: str, *addresses: str) -> list[File]:
    return [File(folder, address) for address in addresses]


def note(title: str, models: list[File], *looks: str) -> Node:
    """Which file goes into which folder, and what to look at.

    The addresses are links for a person: as properties of the loaders ComfyUI's page would ask the hosts for them as
    soon as the workflow is opened.
    """
    lines = [f"## {title}", "**Files**, in ComfyUI's folder `models`:", ""]
    lines += [f"- `{model.folder}`: [{model.name}]({model.address})" for model in models]
    lines += [
        "",
        "**What to look at**, after a run, in Attention Backend Report:",
        "",
        *(f"- {look}" for look in looks),
    ]
    return Node("MarkdownNote", {"": "\n".join(lines)}, title="Read me", size=(400, 560))


def loader(type_: str, models: list[File], *names: str, **widgets: Any) -> Node:
    """Its first widgets take the files, in this order."""
    return Node(type_, {**{name: model.name for name, model in zip(names, models, strict=True)}, **widgets})


def prompt(text: str, title: str) -> Node:
    return Node("CLIPTextEncode", {"text": text}, {"clip": ("clip", 0)}, title=title, size=(0, 150))


def apply(model: str, title: str = "") -> Node:
    # as tall as it is drawn as a Vue node, so that one below it is not covered
    return Node("ApplySageAttention", links={"model": (model, 0)}, title=title, size=(0, 380))


def report(model: str, after: str, title: str = "", height: int = 560) -> Node:
    links = {"model": (model, 0), "after": (after, 0)}
    return Node("AttentionBackendReport", links=links, title=title, size=(0, height))


def ksampler(**widgets: Any) -> Node:
    links = {"model": "apply", "positive": "positive", "negative": "negative", "latent_image": "latent"}
    return Node("KSampler", {"seed": 1, "denoise": 1.0, **widgets}, {name: (key, 0) for name, key in links.items()})


def picture(vae: tuple[str, int]) -> Column:
    """Decodes what the report passes on, and saves it."""
    decode = Node("VAEDecode", links={"samples": ("report", 0), "vae": vae})
    save = Node("SaveImage", {"filename_prefix": "SageScope"}, {"images": ("decode", 0)}, size=(0, 420))
    return Column({"decode": decode, "save": save}, 380, "Picture")


WHO_SERVED = (
    "**At the top**: which kernel served how many calls, and what one model call takes with kernels and natively. "
    "The first run takes longer: kernels are measured, checked and compared."
)
NATIVE_IS_FINE = "**Why not**: the reason for each kernel that did not serve. *Native* is ComfyUI's own attention."


def flux() -> Example:
    unet = files("diffusion_models", f"{FLUX}/flux1-dev.safetensors")
    clip = files("text_encoders", f"{FLUX_TEXT}/clip_l.safetensors", f"{FLUX_TEXT}/t5xxl_fp16.safetensors")
    vae = files("vae", f"{FLUX_VAE}/vae/ae.safetensors")
    looks = (WHO_SERVED, NATIVE_IS_FINE, "Try 2048 x 2048 too: the more tokens, the more attention counts.")
    models = {
        "unet": loader("UNETLoader", unet, "unet_name", weight_dtype="default"),
        "clip": loader("DualCLIPLoader", clip, "clip_name1", "clip_name2", type="flux"),
        "vae": loader("VAELoader", vae, "vae_name"),
    }
    inputs = {
        "text": prompt("A lighthouse on a cliff at dusk, its beam over a calm sea, photograph, 35 mm", "Prompt"),
        "latent": Node("EmptySD3LatentImage", {"width": 1024, "height": 1024, "batch_size": 1}),
    }
    attention = {
        "apply": apply("unet"),
        "positive": Node("FluxGuidance", {"guidance": 3.5}, {"conditioning": ("text", 0)}),
        "negative": Node("ConditioningZeroOut", links={"conditioning": ("text", 0)}),
    }
    sampler = ksampler(steps=20, cfg=1.0, sampler_name="euler", scheduler="simple")
    return Example(
        "sageattention_flux_dev",
        [
            Column({"note": note("FLUX.1 dev", [*unet, *clip, *vae], *looks)}, 400),
            Column(models, 340, "Models"),
            Column(inputs, 360, "Prompt and size"),
            Column(attention, 360, "Attention: FLUX.1 dev", GREEN),
            Column({"sampler": sampler}, 320, "Sampling", BLUE),
            Column({"report": report("apply", "sampler")}, 520, "What ran", GREEN),
            picture(("vae", 0)),
        ],
    )


def wan() -> Example:
    high = files("diffusion_models", f"{WAN}/diffusion_models/wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors")
    low = files("diffusion_models", f"{WAN}/diffusion_models/wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors")
    clip = files("text_encoders", f"{WAN_TEXT}/text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors")
    vae = files("vae", f"{WAN}/vae/wan_2.1_vae.safetensors")
    looks = (
        "Wan 2.2 has two experts: one for the steps with much noise, one for the rest. Each has an Apply SageAttention "
        "and a report of its own.",
        WHO_SERVED,
        "If quality suffers in one expert only, set its `kernel` to `native (observe only)` or its `tolerance` to "
        "`strict (0.05)`, and leave the other as it is.",
        NATIVE_IS_FINE,
    )
    models = {
        "high": loader("UNETLoader", high, "unet_name", weight_dtype="default"),
        "low": loader("UNETLoader", low, "unet_name", weight_dtype="default"),
        "clip": loader("CLIPLoader", clip, "clip_name", type="wan"),
        "vae": loader("VAELoader", vae, "vae_name"),
    }
    inputs = {
        "shift high": Node("ModelSamplingSD3", {"shift": 8.0}, {"model": ("high", 0)}),
        "shift low": Node("ModelSamplingSD3", {"shift": 8.0}, {"model": ("low", 0)}),
        "positive": prompt("A sailing boat leaves a small harbour at sunrise, gulls, slow camera", "Prompt"),
        "negative": prompt("blurred, static, subtitles, deformed", "Negative prompt"),
        "latent": Node("EmptyHunyuanLatentVideo", {"width": 832, "height": 480, "length": 81, "batch_size": 1}),
    }
    attention = {
        "apply high": apply("shift high", "Apply SageAttention (high noise)"),
        "apply low": apply("shift low", "Apply SageAttention (low noise)"),
    }
    reports = {
        "report high": report("apply high", "sampler high", "Attention Backend Report (high noise)", 420),
        "report": report("apply low", "sampler low", "Attention Backend Report (low noise)", 420),
    }
    video = {
        "decode": Node("VAEDecode", links={"samples": ("report", 0), "vae": ("vae", 0)}),
        "video": Node("CreateVideo", {"fps": 16}, {"images": ("decode", 0)}),
        "save": Node("SaveVideo", {"filename_prefix": "video/SageScope"}, {"video": ("video", 0)}, size=(0, 380)),
    }
    return Example(
        "sageattention_wan2_2_t2v",
        [
            Column({"note": note("Wan 2.2 14B, text to video", [*high, *low, *clip, *vae], *looks)}, 400),
            Column(models, 400, "Models"),
            Column(inputs, 360, "Shift, prompt and size"),
            Column(attention, 380, "Attention: Wan 2.2", GREEN),
            Column(_two_samplers(), 320, "Sampling", BLUE),
            Column(reports, 520, "What ran", GREEN),
            Column(video, 380, "Video"),
        ],
    )


def _two_samplers() -> dict[str, Node]:
    """One schedule in two halves; the second half takes the latent with its noise as the first one left it."""
    both = {"steps": 20, "cfg": 3.5, "sampler_name": "euler", "scheduler": "simple"}
    first = {"add_noise": "enable", "noise_seed": 1, "start_at_step": 0, "end_at_step": 10}
    second = {"add_noise": "disable", "noise_seed": 0, "start_at_step": 10, "end_at_step": 10_000}
    prompts: dict[str, tuple[str, int]] = {"positive": ("positive", 0), "negative": ("negative", 0)}
    return {
        "sampler high": Node(
            "KSamplerAdvanced",
            {**both, **first, "return_with_leftover_noise": "enable"},
            {"model": ("apply high", 0), **prompts, "latent_image": ("latent", 0)},
            title="KSampler (high noise)",
        ),
        "sampler low": Node(
            "KSamplerAdvanced",
            {**both, **second, "return_with_leftover_noise": "disable", "control_after_generate": "fixed"},
            {"model": ("apply low", 0), **prompts, "latent_image": ("report high", 0)},
            title="KSampler (low noise)",
        ),
    }


def qwen_image() -> Example:
    unet = files("diffusion_models", f"{QWEN}/diffusion_models/qwen_image_fp8_e4m3fn.safetensors")
    clip = files("text_encoders", f"{QWEN}/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors")
    vae = files("vae", f"{QWEN}/vae/qwen_image_vae.safetensors")
    looks = (
        WHO_SERVED,
        "**Sites**: each place in the model is checked on its own tensors. Where a "
        "quantized kernel is beyond `tolerance`, another kernel or native attention serves that place.",
        NATIVE_IS_FINE,
    )
    models = {
        "unet": loader("UNETLoader", unet, "unet_name", weight_dtype="default"),
        "clip": loader("CLIPLoader", clip, "clip_name", type="qwen_image"),
        "vae": loader("VAELoader", vae, "vae_name"),
    }
    inputs = {
        "shift": Node("ModelSamplingAuraFlow", {"shift": 3.1}, {"model": ("unet", 0)}),
        "positive": prompt('A shop window at night with a neon sign that reads "OPEN LATE", rain', "Prompt"),
        "negative": prompt("", "Negative prompt"),
        "latent": Node("EmptySD3LatentImage", {"width": 1328, "height": 1328, "batch_size": 1}),
    }
    sampler = ksampler(steps=20, cfg=4.0, sampler_name="euler", scheduler="simple")
    return Example(
        "sageattention_qwen_image",
        [
            Column({"note": note("Qwen-Image", [*unet, *clip, *vae], *looks)}, 400),
            Column(models, 360, "Models"),
            Column(inputs, 360, "Shift, prompt and size"),
            Column({"apply": apply("shift")}, 360, "Attention: Qwen-Image", GREEN),
            Column({"sampler": sampler}, 320, "Sampling", BLUE),
            Column({"report": report("apply", "sampler")}, 520, "What ran", GREEN),
            picture(("vae", 0)),
        ],
    )


def sdxl() -> Example:
    checkpoint = files("checkpoints", f"{SDXL}/sd_xl_base_1.0.safetensors")
    looks = (
        WHO_SERVED,
        "At this size the calls are short, so `auto` may well keep them native. That is a result, not a failure. "
        "**Why not** says it.",
        "A larger picture gives kernels more to do.",
    )
    inputs = {
        "positive": prompt("A red fox in fresh snow, soft morning light, detailed fur, photograph", "Prompt"),
        "negative": prompt("text, watermark", "Negative prompt"),
        "latent": Node("EmptyLatentImage", {"width": 1024, "height": 1024, "batch_size": 1}),
    }
    for name in ("positive", "negative"):
        inputs[name].links = {"clip": ("checkpoint", 1)}
    sampler = ksampler(steps=25, cfg=7.0, sampler_name="euler", scheduler="normal")
    return Example(
        "sageattention_sdxl",
        [
            Column({"note": note("SDXL base", checkpoint, *looks)}, 400),
            Column({"checkpoint": loader("CheckpointLoaderSimple", checkpoint, "ckpt_name")}, 340, "Model"),
            Column(inputs, 360, "Prompt and size"),
            Column({"apply": apply("checkpoint")}, 360, "Attention: SDXL", GREEN),
            Column({"sampler": sampler}, 320, "Sampling", BLUE),
            Column({"report": report("apply", "sampler")}, 520, "What ran", GREEN),
            picture(("checkpoint", 2)),
        ],
    )


EXAMPLES = (flux, wan, qwen_image, sdxl)
