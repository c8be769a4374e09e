"""GET /internal/events: what a router needs to know of this worker, as it changes: load, pace, and which pages it has.

A stream of JSON lines, each with one of these keys:

    {"worker": {...}}     what it is, once the model is loaded
    {"load": {...}}       how much there is to do and how long steps take, when that changes and every second
    {"snapshot": {...}}   all pages that its cache can find, and the number of the last change
    {"changes": {...}}    pages that can be found from then on (+) or no more (-), after a number of changes

A follower that has pages already names the stream and the number it has reached (`?stream=...&after=...`) and gets
changes only, if they are still kept. Silence for longer than a few seconds means that the worker is gone.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import StreamingResponse

from kv.events import Change, Events
from server.errors import documented
from server.served import Served

router = APIRouter(responses=documented(401))
LOOK = 0.025  # seconds between two looks for something new
BEAT = 1.0  # seconds after which the load is told even if it is the same


@router.get("/internal/events", response_class=StreamingResponse, include_in_schema=False)
async def events(request: Request, stream: str = "", after: int = 0) -> StreamingResponse:
    """Everything a router follows."""
    lines = _lines(request.app, Reader(stream, after))
    return StreamingResponse(lines, media_type="application/x-ndjson")


class Reader:
    """How far one follower has read a worker's cache events."""

    def __init__(self, stream: str, number: int):
        self.stream, self.number = stream, number

    def news(self, events: Events) -> dict[str, Any] | None:
        """What the follower has not been told yet."""
        changes = events.since(self.number) if self.stream == events.stream else None
        if changes is None:
            self.stream = events.stream
            self.number, pages = events.snapshot()
            shown = [page.hex() for page in pages]
            return {"snapshot": {"stream": self.stream, "number": self.number, "pages": shown}}
        if not changes:
            return None
        after, self.number = self.number, self.number + len(changes)
        return {"changes": {"stream": self.stream, "after": after, "pages": [_shown(c) for c in changes]}}


async def _lines(app: FastAPI, reader: Reader) -> AsyncIterator[str]:
    clock = asyncio.get_running_loop().time
    told: dict[str, Any] = {}
    times: dict[str, Any] = {}
    due = 0.0  # when it is told even if it is the same
    known = None
    while True:
        served: Served = app.state.served
        loaded = served.engine.health().state != "starting"
        if loaded and known is not served.engine:
            known, due = served.engine, 0.0
            yield _line({"worker": about(served)})
        news = reader.news(served.engine.cache_events) if loaded else None
        if news:
            yield _line(news)
        beat = clock() >= due
        if beat:
            due = clock() + BEAT
            times = measured(served) if loaded else {}
        now = load(served) | times
        if now != told or beat:
            told = now
            yield _line({"load": now})
        if now["state"] == "draining" and not now["running"] + now["waiting"]:
            return  # an open stream would hold up the end of the process
        await asyncio.sleep(LOOK)


def about(served: Served) -> dict[str, Any]:
    """What stays as it is while the engine lives."""
    config = served.engine.config
    return {
        "models": list(served.names),
        "root": config.model,
        "created": served.created,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "page_size": config.block_size if config.enable_prefix_caching else None,
    }


def load(served: Served) -> dict[str, Any]:
    """How things stand."""
    health = served.engine.health()
    if health.state == "starting":
        return {"state": health.state}
    return {
        "state": health.state,
        **asdict(served.engine.load()),
        "role": getattr(served.engine, "role", None),
    }


def measured(served: Served) -> dict[str, Any]:
    """How long things take, in seconds; null until it was measured."""
    return {"pace": served.engine.step_times.pace(), "transfer_per_token": _transfer_per_token(served)}


def _transfer_per_token(served: Served) -> float | None:
    """Seconds that taking a prompt from another worker added to its first token, for each token; None without any."""
    if getattr(served.engine, "role", None) is None:
        return None
    value, label = served.engine.registry.get_sample_value, {"model_name": served.names[0]}
    tokens = value("jaxserve:kv_transfer_tokens_total", label)
    return value("jaxserve:kv_transfer_exposed_seconds_sum", label) / tokens if tokens else None


def _shown(change: Change) -> str:
    return ("+" if change.stored else "-") + change.page.hex()


def _line(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":")) + "\n"
