"""Serves the page: HTML at first, and then each change over server-sent events.

Peers choose some of the texts on it. They are escaped where HTML is written, set as text by
page.js, and the browser is told to run nothing but our own files.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.templating import Jinja2Templates
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....protocol.ids import ModelId
from ..description import Description, describe
from ..history import list_held_out
from ..monitor import Monitor
from ..replica_depth import count_under_replicated, list_areas
from ..state import SwarmState, WatchedModel
from ..what_if import ChoosePlace, CountRoom, find_block_bytes, imagine_loss, imagine_newcomer
from .metrics import CONTENT_TYPE, write_metrics
from .view import COLUMNS, make_view, name_of

_FOLDER = Path(__file__).parent

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)

_LEAST_SECONDS = 1.0
"""Between two updates of one page."""

_MAX_VIEW_SHARE = 0.05
"""How much of its time the monitor spends on writing views, of 10,000 peers as well."""

_ALIVE_SECONDS = 15.0
"""After so long without a change a page is told that the monitor is there."""

_REDRAW_SECONDS = 10.0
"""How long what a chart shows is used again, unless something happens."""

_HISTORY_SECONDS = 24 * 3600.0
_MAX_AREAS = 2000
"""Rectangles of one chart: 1,600 take a browser 100 ms."""

_MAX_LOSSES = 1000
"""Points of one chart."""

_MAX_QUERY_CHARACTERS = 200
_MEMORY = re.compile(r"\d{1,5}(\.\d{1,3})?", re.ASCII)


class MonitorPage:
    """The page of one monitor, as an ASGI application: `MonitorPage(…).app`."""

    def __init__(
        self,
        monitor: Monitor,
        hosts: Sequence[str],
        choose_place: ChoosePlace,
        count_room: CountRoom,
    ) -> None:
        """`hosts` are the names under which the page may be asked for; others are refused."""
        self.monitor = monitor
        self._choose_place = choose_place
        self._count_room = count_room
        self._templates = Jinja2Templates(_FOLDER / "templates")
        self._is_ending = asyncio.Event()
        self._view: tuple[int, str] = (-1, "")
        self._view_seconds = 0.0
        self._histories: dict[ModelId, tuple[tuple[int, int], dict[str, Any]]] = {}
        self.app = Starlette(
            routes=[
                Route("/", self._show),
                Route("/events", self._send_events),
                Route("/state.json", self._send_state),
                Route("/model/{model_id}/history.json", self._send_history),
                Route("/canary/{index:int}/history.json", self._send_canary),
                Route("/what-if", self._show_what_if),
                Route("/healthz", _show_alive),
                Route("/metrics", self._send_metrics),
                Mount("/static", StaticFiles(directory=_FOLDER / "static")),
            ],
            middleware=[
                Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
                Middleware(_Headers),
            ],
        )

    def end(self) -> None:
        """End the streams of events, which would hold up the end of the server."""
        self._is_ending.set()

    async def _show(self, request: Request) -> Response:
        return self._render(request, "page.html", view=make_view(self.monitor.describe()))

    def _render(self, request: Request, template: str, **context: Any) -> Response:
        return self._templates.TemplateResponse(request, template, {"columns": COLUMNS, **context})

    async def _send_state(self, request: Request) -> Response:
        return Response(self.monitor.describe().to_json(), media_type="application/json")

    async def _send_metrics(self, request: Request) -> Response:
        text = write_metrics(self.monitor.describe(), self.monitor.num_events)
        return Response(text, media_type=CONTENT_TYPE)

    async def _send_events(self, request: Request) -> Response:
        return StreamingResponse(self._list_updates(), media_type="text/event-stream")

    async def _list_updates(self) -> AsyncIterator[str]:
        """Yield the newest view after each change; who reads slowly misses those in between."""
        revision = history_revision = -1
        ending = asyncio.create_task(self._is_ending.wait())
        try:
            while not ending.done():
                if revision != self.monitor.revision:
                    revision = self.monitor.revision
                    yield f"event: view\ndata: {self._write_view()}\n\n"
                else:
                    yield "event: alive\ndata:\n\n"
                if history_revision not in (-1, self.monitor.history_revision):
                    yield "event: history\ndata:\n\n"
                history_revision = self.monitor.history_revision
                pause_seconds = max(_LEAST_SECONDS, self._view_seconds / _MAX_VIEW_SHARE)
                await asyncio.wait([ending], timeout=pause_seconds)
                changing = asyncio.create_task(self.monitor.wait_for_change(revision))
                waiting = [ending, changing]
                try:
                    await asyncio.wait(
                        waiting, timeout=_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    changing.cancel()
        finally:
            ending.cancel()

    def _write_view(self) -> str:
        """Return the view of now, written once for all who look."""
        if self._view[0] != self.monitor.revision:
            started_at = self.monitor.clock.now()
            text = json.dumps(make_view(self.monitor.describe()), separators=(",", ":"))
            self._view = self.monitor.revision, text
            self._view_seconds = self.monitor.clock.now() - started_at
        return self._view[1]

    async def _send_history(self, request: Request) -> Response:
        model = self._find_model(request.path_params["model_id"])
        if model is None:
            return PlainTextResponse("this model is not watched", 404)
        key = self.monitor.history_revision, int(self.monitor.clock.now() // _REDRAW_SECONDS)
        known = self._histories.get(model.model_id)
        if known is None or known[0] != key:
            known = key, await self._describe_history(model)
            self._histories = {
                one: kept
                for one, kept in self._histories.items()
                if one in self.monitor.state.models
            } | {model.model_id: known}
        return JSONResponse(known[1])

    async def _describe_history(self, model: WatchedModel) -> dict[str, Any]:
        now = self.monitor.clock.wall()
        asked = model.model_id, now - _HISTORY_SECONDS
        changes = await self.monitor.read(lambda history: history.list_depths(*asked))
        losses = await self.monitor.read(lambda history: history.list_losses(*asked))
        since = min(changes[0].at if changes else now, now - 60.0)
        return {
            "losses": [one[:2] for one in losses[:: -(-len(losses) // _MAX_LOSSES) or 1]],
            "held_out_losses": list_held_out(losses)[-_MAX_LOSSES:],
            "since": since,
            "until": now,
            "num_blocks": model.num_blocks,
            "areas": list_areas(changes, now, _MAX_AREAS),
            "under_replicated": count_under_replicated(changes, now),
        }

    async def _send_canary(self, request: Request) -> Response:
        names, index = list(self.monitor.canaries), request.path_params["index"]
        if index >= len(names):
            return PlainTextResponse("there is no such canary", 404)
        now = self.monitor.clock.wall()
        asked = names[index], now - _HISTORY_SECONDS
        runs = await self.monitor.read(lambda history: history.list_canary_runs(*asked))
        since = min(runs[0].at if runs else now, now - 60.0)
        points = [[run.at, run.first_token_seconds, run.tokens_per_second] for run in runs]
        return JSONResponse({"since": since, "until": now, "runs": points})

    def _find_model(self, model_id: str) -> WatchedModel | None:
        return self.monitor.state.models.get(ModelId(model_id))

    async def _show_what_if(self, request: Request) -> Response:
        model = self._find_model(request.query_params.get("model", ""))
        if model is None:
            return PlainTextResponse("this model is not watched", 404)
        now = self.monitor.clock.wall()
        endings = request.query_params.get("lose", "")[:_MAX_QUERY_CHARACTERS]
        outcome = imagine_loss(model, endings.replace("…", " ").replace(",", " ").split())
        room, memory = (request.query_params.get(name, "") for name in ("room", "memory"))
        place = block_bytes = None
        if not room and _MEMORY.fullmatch(memory) and (block_bytes := find_block_bytes(model)):
            num_fitting = self._count_room(int(float(memory) * 2**30), block_bytes)
            room = str(min(num_fitting, model.num_blocks))
        if room.isdecimal() and 0 < len(room) < 6:
            num_blocks = min(int(room), model.num_blocks)
            if num_blocks:
                place = imagine_newcomer(outcome.model, num_blocks, now, self._choose_place)
        after = describe(SwarmState({model.model_id: outcome.model}, now), now)
        age_seconds = after.models[0].age_seconds
        return self._render(
            request,
            "what_if.html",
            name=name_of(after, model.model_id),
            before=_first_view(describe(SwarmState({model.model_id: model}, now), now)),
            after=_first_view(after),
            age="never" if age_seconds is None else f"{age_seconds:.0f} s ago",
            lost=[peer.announcement.peer_id for peer in outcome.lost],
            unknown=outcome.unknown,
            room=room,
            memory=memory,
            block_bytes=block_bytes,
            place=place,
        )


def _first_view(described: Description) -> dict[str, Any]:
    return make_view(described)["models"][0]


async def _show_alive(request: Request) -> Response:
    return PlainTextResponse("ok")


class _Headers:
    """Adds the headers that keep a browser from running anything but our own files."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", _POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cache-control", b"no-cache"),
                ]
            await send(message)

        if (b"sec-fetch-site", b"cross-site") in scope.get("headers", ()):
            refusal = PlainTextResponse("pages of other sites may not ask this monitor", 403)
            await refusal(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)
