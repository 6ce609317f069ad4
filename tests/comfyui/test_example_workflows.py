"""The example workflows against the nodes of a real ComfyUI: only the model files may be missing."""

from __future__ import annotations

import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from comfyui_server import OPEN, ROOT, Server

FOLDER = ROOT / "example_workflows"
EXAMPLES = sorted(FOLDER.glob("*.json"))
WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3"}
"""The last one shows further widgets for some choices; `auto`, used here, has none."""
AFTER_GENERATE = {"fixed", "increment", "decrement", "randomize"}
NOT_IN_OLDER = {"CreateVideo": ["bit_depth"]}
"""Inputs at the end that came with a newer ComfyUI; an older page drops them."""
OF_THE_PAGE = {"MarkdownNote"}
"""Nodes that only the page knows."""
TEMPLATES = "comfyui_workflow_templates_json"

examples = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def real_nodes(workflow: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {node["id"]: node for node in workflow["nodes"] if node["type"] not in OF_THE_PAGE}


def declared(info: dict[str, Any]) -> dict[str, Any]:
    """The definition of every input of a node, in its order."""
    given = info["input"]
    return {name: spec for kind in ("required", "optional") for name, spec in given.get(kind, {}).items()}


def is_widget(spec: list[Any]) -> bool:
    return isinstance(spec[0], list) or spec[0] in WIDGET_TYPES


def unknown(node: dict[str, Any], info: dict[str, Any]) -> set[str]:
    """Inputs that this ComfyUI is too old for."""
    return set(NOT_IN_OLDER.get(node["type"], [])) - declared(info).keys()


def widgets(node: dict[str, Any], info: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of a node's widgets: they are saved by position, a seed with what follows each run after it."""
    values = iter(node.get("widgets_values", []))
    for name, spec in declared(info).items():
        if is_widget(spec):
            yield name, next(values)
            if len(spec) > 1 and spec[1].get("control_after_generate"):
                assert next(values) in AFTER_GENERATE
    assert len([*values]) == len(unknown(node, info))


def as_prompt(workflow: dict[str, Any], infos: dict[str, Any]) -> dict[str, Any]:
    """The workflow as the page sends it to the server."""
    links = {link[0]: link for link in workflow["links"]}
    prompt = {}
    for node_id, node in real_nodes(workflow).items():
        linked = {
            entry["name"]: [str(links[entry["link"]][1]), links[entry["link"]][2]]
            for entry in node["inputs"]
            if entry["link"] is not None
        }
        inputs = {**dict(widgets(node, infos[node["type"]])), **linked}
        prompt[str(node_id)] = {"class_type": node["type"], "inputs": inputs}
    return prompt


@pytest.fixture(scope="session")
def infos(server: Server) -> dict[str, Any]:
    return server.get("/object_info")


def test_there_is_an_example_for_each_of_these_models(server: Server) -> None:
    names = {"sageattention_flux_dev", "sageattention_qwen_image", "sageattention_sdxl", "sageattention_wan2_2_t2v"}
    assert set(server.get("/workflow_templates")["ComfyUI-SageScope"]) == names == {path.stem for path in EXAMPLES}


@examples
def test_every_node_input_and_link_exists(path: Path, infos: dict[str, Any]) -> None:
    workflow = load(path)
    nodes = real_nodes(workflow)
    for node in nodes.values():
        assert node["type"] in infos
        info = infos[node["type"]]
        assert {entry["name"] for entry in node["inputs"]} <= declared(info).keys() | unknown(node, info)
    for _, source, slot, target, entry, type_ in workflow["links"]:
        name = nodes[target]["inputs"][entry]["name"]
        for end in (infos[nodes[source]["type"]]["output"][slot], declared(infos[nodes[target]["type"]])[name][0]):
            assert end in (type_, "*")


@examples
def test_comfyui_misses_nothing_but_the_model_files(path: Path, server: Server, infos: dict[str, Any]) -> None:
    """Its own validation of a queued prompt: required inputs, types of links, ranges, choices."""
    body = json.dumps({"prompt": as_prompt(load(path), infos)}).encode()
    request = urllib.request.Request(f"{server.address}/prompt", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        OPEN(request, timeout=30)
    answer = json.load(refused.value)
    assert answer["error"]["type"] == "prompt_outputs_failed_validation"
    errors = [error for node in answer["node_errors"].values() for error in node["errors"]]
    assert {error["type"] for error in errors} == {"value_not_in_list"}
    missing = {(error["extra_info"]["input_name"], error["extra_info"]["received_value"]) for error in errors}
    assert missing == model_files(path, infos)


@examples
def test_model_files_are_those_of_comfyui_s_own_templates(path: Path, infos: dict[str, Any]) -> None:
    package = importlib.util.find_spec(TEMPLATES)
    if package is None:
        pytest.skip(f"{TEMPLATES}, a requirement of newer ComfyUIs, is not installed")
    (folder,) = package.submodule_search_locations or []
    texts = [file.read_text(encoding="utf-8") for file in Path(folder, "templates").glob("*.json")]
    for _, name in model_files(path, infos):
        assert any(f'"{name}"' in text for text in texts), name


@examples
def test_latent_goes_through_the_report_of_its_model(path: Path) -> None:
    workflow = load(path)
    nodes = real_nodes(workflow)
    source = {
        (target, nodes[target]["inputs"][entry]["name"]): origin for _, origin, _, target, entry, _ in workflow["links"]
    }
    samplers = [node_id for node_id, node in nodes.items() if node["type"].startswith("KSampler")]
    reports = [node_id for node_id, node in nodes.items() if node["type"] == "AttentionBackendReport"]
    (decode,) = [node_id for node_id, node in nodes.items() if node["type"] == "VAEDecode"]
    assert sorted(source[report, "after"] for report in reports) == sorted(samplers)
    for report in reports:
        apply = source[report, "model"]
        assert nodes[apply]["type"] == "ApplySageAttention"
        assert source[source[report, "after"], "model"] == apply
    assert source[decode, "samples"] in reports


@examples
def test_note_names_every_file_and_kernels_are_left_to_auto(path: Path, infos: dict[str, Any]) -> None:
    workflow = load(path)
    (note,) = [node for node in workflow["nodes"] if node["type"] == "MarkdownNote"]
    for _, name in model_files(path, infos):
        assert f"[{name}](https://" in note["widgets_values"][0]
    for node in real_nodes(workflow).values():
        assert "models" not in node["properties"]  # ComfyUI's page would ask their hosts when the workflow is opened
        if node["type"] == "ApplySageAttention":
            defaults = {
                name: spec[1]["default"] for name, spec in declared(infos[node["type"]]).items() if is_widget(spec)
            }
            assert dict(widgets(node, infos[node["type"]])) == defaults


@examples
def test_thumbnail_is_small(path: Path) -> None:
    picture = path.with_suffix(".jpg")
    with Image.open(picture) as image:
        assert (image.format, image.width) == ("JPEG", 400)
    assert picture.stat().st_size < 40_000


def model_files(path: Path, infos: dict[str, Any]) -> set[tuple[str, str]]:
    """(input, file name) of every model file that the workflow names."""
    nodes = real_nodes(load(path)).values()
    named = {pair for node in nodes for pair in widgets(node, infos[node["type"]])}
    return {(name, value) for name, value in named if str(value).endswith(".safetensors")}
