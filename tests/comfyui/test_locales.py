"""The English texts are those of the nodes, and ComfyUI serves every language."""

from __future__ import annotations

import json
from typing import Any

import pytest

from comfyui_server import OPEN, ROOT, Server

NODES = ("ApplySageAttention", "AttentionBackendReport")


@pytest.mark.parametrize("node", NODES)
def test_english_texts_are_those_of_the_node(server: Server, node: str) -> None:
    """They take the place of the node's own, so a changed tooltip has to change here as well."""
    info = server.get(f"/object_info/{node}")[node]
    inputs = {name: spec for kind in ("required", "optional") for name, spec in info["input"].get(kind, {}).items()}
    assert texts("en", "nodeDefs")[node] == {
        "display_name": info["display_name"],
        "description": info["description"],
        "inputs": {name: {"name": name, "tooltip": options["tooltip"]} for name, (_, options) in inputs.items()},
        "outputs": {str(number): {"name": name} for number, name in enumerate(info["output_name"])},
    }
    assert set(texts("en", "nodeDefs")) == set(NODES)


def test_every_language_is_served(server: Server) -> None:
    served = server.get("/i18n")
    languages = [path.name for path in (ROOT / "locales").iterdir()]
    assert languages
    for language in languages:
        for file in ("nodeDefs", "settings", "commands"):
            assert texts(language, file).items() <= served[language][file].items()


def test_help_pages_and_pictures_are_served(server: Server) -> None:
    docs = ROOT / "web" / "docs"
    files = [path for path in docs.rglob("*.*") if path.is_file()]
    assert len(files) >= 2 * (1 + 2 + 1)
    for path in files:
        address = f"{server.address}/extensions/ComfyUI-SageScope/docs/{path.relative_to(docs).as_posix()}"
        with OPEN(address, timeout=30) as response:
            assert response.read() == path.read_bytes()


def texts(language: str, file: str) -> Any:
    return json.loads((ROOT / "locales" / language / f"{file}.json").read_text(encoding="utf-8"))
