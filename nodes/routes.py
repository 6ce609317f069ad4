"""The HTTP routes: the runs of this process, forgetting what was measured, and the level of the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from ..sage_core import HOMEPAGE, SCHEMA, __version__, build_report, refusal_of, to_markdown
from .host import LIVE, SESSION

LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, None: logging.NOTSET}
"""Of the logger of the pack, by name; without one it goes by ComfyUI's own level."""

Handler = Callable[[web.Request], Awaitable[web.Response]]


def add_routes(routes: web.RouteTableDef) -> None:
    """Put our routes among ComfyUI's, which offers each with and without /api in front."""
    routes.get("/sagescope/runs")(get_runs)
    routes.get("/sagescope/runs/{uid}")(get_run)
    routes.post("/sagescope/measurements/forget")(_guarded(post_forget))
    routes.post("/sagescope/log_level")(_guarded(post_log_level))


async def get_runs(request: web.Request) -> web.Response:
    """The last runs over all patched models, newest first, each in a few numbers and a line."""
    # a summary goes through all sites of a run, and the page waits for other answers meanwhile
    runs = await asyncio.to_thread(lambda: [record.status() for record in LIVE.newest_first()])
    return _answer({"version": __version__, "homepage": HOMEPAGE, "runs": runs})


async def get_run(request: web.Request) -> web.Response:
    """One run as a report, and the report as Markdown."""
    record = LIVE.find(request.match_info["uid"])
    if record is None:
        return _answer({"error": "no such run: it is older than the last ones kept, or of another process"}, 404)

    def report() -> dict[str, Any]:
        runs = [record.run.snapshot()]
        snapshot = {"environment": SESSION.snapshot(), **record.about, "runs": runs}
        built = build_report(snapshot, __version__, prompt_id=None, after=True)
        return {**built, "text": to_markdown(built)}

    return _answer(await asyncio.to_thread(report))


async def post_forget(request: web.Request) -> web.Response:
    """Forget what was measured; the next runs measure again."""
    return _answer({"forgotten": True, "on_disk": await asyncio.to_thread(SESSION.forget)})


async def post_log_level(request: web.Request) -> web.Response:
    """Set how much the pack writes into ComfyUI's log, until ComfyUI ends."""
    try:
        level = (await request.json())["level"]
        number = LEVELS[level]
    except (ValueError, TypeError, KeyError):
        names = ", ".join("null" if name is None else f'"{name}"' for name in LEVELS)
        return _answer({"error": f'the body must be {{"level": ...}} with one of {names}'}, 400)
    logging.getLogger("sagescope").setLevel(number)
    return _answer({"level": level})


def _guarded(handler: Handler) -> Handler:
    """The handler of a request that changes something, for those that may."""

    async def guarded(request: web.Request) -> web.Response:
        refusal = refusal_of(request.headers)
        return await handler(request) if refusal is None else _answer({"error": refusal[1]}, refusal[0])

    return guarded


def _answer(content: dict[str, Any], status: int = 200) -> web.Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return web.json_response({"schema": SCHEMA, **content}, status=status, headers=headers)
