"""The router's HTTP application: OpenAI's paths are passed on to workers, the rest is about the router itself."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from jaxserve.errors import OverloadedError, RequestError
from jaxserve.trace import Trace, open_trace
from server.app import dress
from server.body import JsonRoute
from server.config import ServerConfig
from server.router.config import RouterConfig
from server.router.fleet import Asked, Fleet
from server.router.metrics import RouterMetrics
from server.router.prompt_tokens import CHAT, COMPLETIONS, PromptTokens, Tokenized
from server.router.prompt_tokens import Asked as AskedTokens
from server.router.relay import Relay
from server.router.role_moves import keep_planning
from server.router.timeline import Timeline
from server.served import VERSION

router = APIRouter(route_class=JsonRoute)
TOKENIZE_WITHIN = 2.0  # seconds; a choice without the tokens is better than a late one


@dataclass
class Routed:
    """What the router's routes work with; a field of the app's state."""

    config: ServerConfig
    fleet: Fleet
    registry: CollectorRegistry
    tokens: PromptTokens
    trace: Trace | None
    draining: bool = False

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, and let running ones finish for up to `timeout` seconds."""
        self.draining = True
        deadline = time.monotonic() + timeout
        while self.fleet.under_way and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


def create_app(router_config: RouterConfig, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI application that routes; it follows the workers from its start to its end."""
    config = config or ServerConfig()
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    fleet = Fleet(router_config, metrics)
    metrics.follow(lambda: list(fleet.workers.values()), time.monotonic)
    tokens: PromptTokens = AskedTokens(lambda path, body: _ask(fleet, path, body))
    if router_config.tokenizer:
        tokens = Tokenized(router_config.tokenizer, config)
    trace = open_trace(config.trace_file, config.otlp_endpoint, "jaxserve-route")

    @asynccontextmanager
    async def followed(app: FastAPI) -> AsyncIterator[None]:
        await fleet.start()
        planning = asyncio.create_task(keep_planning(fleet)) if router_config.plan_roles else None
        try:
            yield
        finally:
            if planning:
                planning.cancel()
            await fleet.close()

    app = FastAPI(title="jaxserve route", version=VERSION, redoc_url=None, lifespan=followed)
    app.state.served = Routed(config, fleet, registry, tokens, trace)
    app.include_router(router)
    dress(app, config)
    return app


async def routed(request: Request) -> Routed:
    """What this request's app works with (a FastAPI dependency)."""
    return request.app.state.served


async def _ask(fleet: Fleet, path: str, body: dict[str, Any]) -> httpx.Response | None:
    """A worker's answer to a question of the router's own; None if none answers in time."""
    able = fleet.candidates(None)
    if not able:
        return None
    worker = min(able, key=lambda worker: worker.requests)
    try:
        return await fleet.client.post(
            worker.url + path, json=body, headers=fleet.own_headers(), timeout=TOKENIZE_WITHIN
        )
    except httpx.HTTPError:
        return None


# What is passed on


@router.post("/tokenize")
@router.post("/detokenize")
@router.post("/v1/{path:path}")
async def pass_on(request: Request, routed: Annotated[Routed, Depends(routed)]) -> Response:
    """Give the request to a worker, and its answer back as it comes."""
    if routed.draining:
        raise OverloadedError(
            "the router is shutting down; send the request again", retry_after=5, draining=True
        )
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    timeline = Timeline(routed.trace, request.state.request_id, path)
    body = await request.json()
    body = body if isinstance(body, dict) else {}
    asked = await _asked(routed, request, path, body)
    timeline.mark("understood", prompt_tokens=asked.prompt_tokens)
    return Relay(routed.fleet, request, await request.body(), body, asked, timeline)


async def _asked(routed: Routed, request: Request, path: str, body: dict[str, Any]) -> Asked:
    """What the choice of a worker depends on."""
    tokens = None
    if path in (CHAT, COMPLETIONS) and routed.fleet.config.routing_policy == "cost":
        tokens = await routed.tokens(path, body)
    limit = body.get("max_completion_tokens", body.get("max_tokens", 16 if path == COMPLETIONS else None))
    model, session = body.get("model"), request.headers.get("x-session-id") or body.get("user")
    salt = body.get("cache_salt")
    return Asked(
        model if isinstance(model, str) else None,
        tokens,
        len(await request.body()) if path.startswith("/v1/") else 0,
        salt if isinstance(salt, str) else "",
        session if isinstance(session, str) and session else None,
        limit if isinstance(limit, int) and limit > 0 else None,
    )


# What the router says of itself


@router.get("/v1/models")
async def models(routed: Annotated[Routed, Depends(routed)]) -> JSONResponse:
    """The models of all workers."""
    cards = _cards(routed)
    if not cards:
        raise OverloadedError("no worker has said yet what it serves", retry_after=1.0, draining=True)
    return JSONResponse({"object": "list", "data": list(cards.values())})


@router.get("/v1/models/{model:path}")
async def model(model: str, routed: Annotated[Routed, Depends(routed)]) -> JSONResponse:
    """One of them."""
    cards = _cards(routed)
    if model not in cards:
        raise RequestError(
            f"the model {model[:256]!r} does not exist here; there is {', '.join(cards)}",
            param="model",
            code="model_not_found",
        )
    return JSONResponse(cards[model])


def _cards(routed: Routed) -> dict[str, dict[str, Any]]:
    cards: dict[str, dict[str, Any]] = {}
    for worker in routed.fleet.workers.values():
        for name in worker.models:
            card = {
                "id": name,
                "object": "model",
                "created": worker.about["created"],
                "owned_by": "jaxserve",
                "root": worker.about["root"],
                "parent": None,
                "max_model_len": worker.about["max_model_len"],
            }
            if name in cards:  # what every worker takes
                card["max_model_len"] = min(card["max_model_len"], cards[name]["max_model_len"])
            cards[name] = card
    return cards


@router.get("/version")
async def version() -> dict[str, str]:
    """The release that runs."""
    return {"version": VERSION}


@router.get("/metrics")
async def metrics(request: Request, routed: Annotated[Routed, Depends(routed)]) -> Response:
    """Prometheus metrics of the router; the workers have their own."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(routed.registry), media_type=None, headers={"Content-Type": content_type})


@router.api_route("/health", methods=["GET", "HEAD"])
@router.api_route("/livez", methods=["GET", "HEAD"])
async def live() -> JSONResponse:
    """Whether the router runs."""
    return JSONResponse({"status": "ready", "detail": ""})


@router.api_route("/readyz", methods=["GET", "HEAD"])
async def ready(routed: Annotated[Routed, Depends(routed)]) -> JSONResponse:
    """Whether to send requests: 503 while draining, and while no worker can take one."""
    if routed.draining:
        return JSONResponse({"status": "draining", "detail": ""}, 503)
    able = routed.fleet.candidates(None)
    states = f"{len(able)} of {len(routed.fleet.workers)} workers take requests"
    return JSONResponse({"status": "ready" if able else "starting", "detail": states}, 200 if able else 503)


@router.get("/router/workers")
async def workers(routed: Annotated[Routed, Depends(routed)]) -> list[dict[str, Any]]:
    """Each worker as the router knows it."""
    now = time.monotonic()
    return [
        {
            "url": worker.url,
            "state": worker.state,
            "detail": worker.why,
            "leaving": worker.leaving,
            "role": worker.role,
            "breaker": worker.breaker.state(now),
            "models": worker.models,
            "requests": len(worker.tickets),
            "pages": len(worker.mirror.pages),
            "load": worker.load,
        }
        for worker in routed.fleet.workers.values()
    ]


@router.post("/router/workers/{action}")
async def drain_worker(
    action: str, request: Request, routed: Annotated[Routed, Depends(routed)]
) -> dict[str, Any]:
    """`drain` a worker, `{"url": ...}`: it gets no new requests, and `requests` are still running; or `restore` it."""
    body = await request.json()
    url = body.get("url") if isinstance(body, dict) else None
    worker = routed.fleet.workers.get(url.rstrip("/")) if isinstance(url, str) else None
    if action not in ("drain", "restore"):
        raise RequestError(f"a worker cannot be asked to {action[:64]!r}; there is drain and restore")
    if worker is None:
        known = ", ".join(routed.fleet.workers) or "none"
        raise RequestError(f"no worker has the url {str(url)[:256]!r}; there is {known}", param="url")
    worker.drained = action == "drain"
    return {"url": worker.url, "leaving": worker.leaving, "requests": len(worker.tickets)}
