"""What the server tells of runs: while they go on, over HTTP, and to whom it does what it is asked."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
import uuid
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

import demo
from comfyui_server import Server
from demo import APPLY, REPORT, SAMPLER
from hosts import Host

WORKFLOW = {"extra_pnginfo": {"workflow": {"id": "the-workflow", "nodes": []}}}
FORGET, LOG_LEVEL = "/sagescope/measurements/forget", "/sagescope/log_level"


async def sampled(server: Server, steps: int, seed: int) -> tuple[str, list[tuple[float, dict[str, Any]]]]:
    """(prompt id, the status messages with the time of each) of a run that a page queued, until its summary came."""
    graph = demo.graph("int8_reference")
    graph[SAMPLER]["inputs"].update(steps=steps, seed=seed)
    client = uuid.uuid4().hex
    queued = {"prompt": graph, "client_id": client, "extra_data": WORKFLOW}
    messages: list[tuple[float, dict[str, Any]]] = []
    async with (
        aiohttp.ClientSession(server.address) as session,
        session.ws_connect(f"/ws?clientId={client}", max_msg_size=0) as socket,
    ):
        async with session.post("/prompt", json=queued) as response:
            prompt_id = (await response.json())["prompt_id"]
        async for message in socket:
            event = json.loads(message.data) if message.type == aiohttp.WSMsgType.TEXT else {}
            if event.get("type") == "sagescope.status" and event["data"]["prompt_id"] == prompt_id:
                messages.append((time.monotonic(), event["data"]))
                if event["data"]["status"] != "running":
                    return prompt_id, messages
    raise AssertionError("the server closed the connection")


def answer(server: Server, method: str, path: str, **request: Any) -> tuple[int, dict[str, Any]]:
    async def asked() -> tuple[int, dict[str, Any]]:
        async with (
            aiohttp.ClientSession(server.address) as session,
            session.request(method, path, **request) as response,
        ):
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else {}

    return asyncio.run(asked())


def test_a_page_is_told_at_most_twice_a_second_how_a_run_goes_and_the_last_word_is_its_summary(server: Server) -> None:
    prompt_id, messages = asyncio.run(asyncio.wait_for(sampled(server, steps=150, seed=71), 120))
    times = [at for at, _ in messages]
    told = [status for _, status in messages]
    assert len(told) >= 3
    # they leave half a second apart; on the way here one may catch up with the one before it a little
    assert all(later - earlier > 0.4 for earlier, later in itertools.pairwise(times))
    assert len(told) <= 2 * (times[-1] - times[0]) + 1.5
    steps = [status["steps"] for status in told]
    assert steps == sorted(steps)
    assert steps[0] < steps[-2] <= steps[-1] == 150
    for status in told:
        assert (status["apply_node_id"], status["node_id"], status["workflow_id"]) == (APPLY, SAMPLER, "the-workflow")
    assert all(re.match(r"Step \d+ of 150: ", status["summary"]) for status in told[:-1])
    assert told[-2]["summary"].split(": ")[1].startswith("int8_reference serves 100.0% of ")
    last = told[-1]
    assert last["status"] == "finished"
    assert re.match(
        r"int8_reference served 100\.0% of 600 calls; (x[\d.]+ against native; )?worst error ", last["summary"]
    )
    # the same words in the report, from which a page takes them when it restores a run
    (history,) = server.get(f"/history/{prompt_id}").values()
    report = history["outputs"][REPORT]["sagescope_report"][0]
    assert last["summary"] in [run["summary"] for run in report["runs"] if run["uid"] == last["uid"]]


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_runs_are_listed_newest_first_and_told_one_by_one(server: Server, prefix: str) -> None:
    finished = [server.run(graph_with(seed)).prompt_id for seed in (len(prefix) + 81, len(prefix) + 91)]
    listed = server.get(f"{prefix}/sagescope/runs")
    assert (listed["schema"], listed["version"]) == (1, "0.1.0")
    newest, second = listed["runs"][:2]
    assert [newest["prompt_id"], second["prompt_id"]] == finished[::-1]
    assert newest["workflow_id"] is None  # no page queued it
    assert len(listed["runs"]) <= 32
    told = server.get(f"{prefix}/sagescope/runs/{newest['uid']}")
    (run,) = told["runs"]
    assert (run["uid"], run["summary"], run["prompt_id"]) == (newest["uid"], newest["summary"], finished[1])
    assert told["shown"] == [run["id"]]
    assert f"### Run {run['id']}: " in told["text"]
    assert answer(server, "GET", f"{prefix}/sagescope/runs/{'0' * 32}")[0] == 404


def graph_with(seed: int, **widgets: Any) -> dict[str, Any]:
    graph = demo.graph("int8_reference")
    graph[SAMPLER]["inputs"]["seed"] = seed
    graph[APPLY]["inputs"].update(widgets)
    return graph


def test_no_folder_of_the_machine_is_told(server: Server) -> None:
    server.run(graph_with(101, kernel="sageattn3_blackwell"))
    newest = server.get("/sagescope/runs")["runs"][0]
    text = json.dumps(server.get(f"/sagescope/runs/{newest['uid']}"))
    for folder in (str(server.base_directory), str(server.base_directory.parent), "site-packages", "/usr/", "/home/"):
        assert folder not in text


def test_forgetting_empties_the_file_and_models_that_are_patched_measure_again(server: Server) -> None:
    """The same node, from ComfyUI's cache, compares with native anew."""
    file = server.base_directory / "user" / "sagescope" / "measurements.json"
    server.run(graph_with(111, compare_with_native="first time", skip_blocks="900"))
    assert comparison(server)["remembered"] in (True, False)
    server.run(graph_with(112, compare_with_native="first time", skip_blocks="900"))
    assert comparison(server)["remembered"] is True
    assert json.loads(file.read_text())["fingerprints"]
    for prefix in ("", "/api"):
        assert answer(server, "POST", f"{prefix}{FORGET}", json={}) == (
            200,
            {"schema": 1, "forgotten": True, "on_disk": True},
        )
    assert not json.loads(file.read_text())["fingerprints"]
    server.run(graph_with(113, compare_with_native="first time", skip_blocks="900"))
    assert comparison(server)["remembered"] is False


def comparison(server: Server) -> dict[str, Any]:
    newest = server.get("/sagescope/runs")["runs"][0]
    (found,) = server.get(f"/sagescope/runs/{newest['uid']}")["runs"][0]["comparisons"]
    return dict(found)


@pytest.mark.parametrize("path", [FORGET, LOG_LEVEL, f"/api{FORGET}"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
    ids=lambda value: str(value),
)
def test_another_site_can_change_nothing(server: Server, path: str, headers: dict[str, str], status: int) -> None:
    body = json.dumps({"level": "error"})
    kept = {"Content-Type": "application/json", **headers}
    assert answer(server, "POST", path, data=body, headers=kept)[0] == status
    assert answer(server, "GET", path)[0] in (404, 405)


@pytest.fixture
def level_put_back(server: Server) -> Iterator[None]:
    yield
    assert answer(server, "POST", LOG_LEVEL, json={"level": None})[0] == 200


def test_the_level_of_the_log_is_set_and_put_back(server: Server, level_put_back: None) -> None:
    def lines_of_a_run(seed: int) -> int:
        before = server.log().count("attention calls in")
        server.run(graph_with(seed))
        return server.log().count("attention calls in") - before

    assert lines_of_a_run(121) == 1
    assert answer(server, "POST", LOG_LEVEL, json={"level": "warning"}) == (200, {"schema": 1, "level": "warning"})
    assert lines_of_a_run(122) == 0
    assert answer(server, "POST", LOG_LEVEL, json={"level": None}) == (200, {"schema": 1, "level": None})
    assert lines_of_a_run(123) == 1


@pytest.mark.parametrize("body", ["", "{", "[]", "{}", '{"level": "loud"}', '{"level": ["info"]}', '{"level": 10}'])
def test_a_level_that_there_is_not_is_refused(server: Server, body: str) -> None:
    status, told = answer(server, "POST", LOG_LEVEL, data=body, headers={"Content-Type": "application/json"})
    assert status == 400
    assert '"warning"' in told["error"]


def test_comfyui_reads_no_peak_of_memory_that_a_run_could_reset(host: Host) -> None:
    sources = [
        *host.root.glob("*.py"),
        *(host.root / "comfy").rglob("*.py"),
        *(host.root / "comfy_execution").glob("*.py"),
    ]
    assert len(sources) > 100
    peaks = re.compile(r"max_memory_(allocated|reserved)|reset_(peak|max)_memory|\.peak\b")
    assert [path.name for path in sources if peaks.search(path.read_text(encoding="utf-8"))] == []
