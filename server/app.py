"""The HTTP application: routes, keys, ids and errors around an engine."""

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware

from server import admin, errors, feed, openai_chat, openai_completions, tokenization
from server.auth import ApiKeys
from server.config import ServerConfig
from server.connection import ClientGone
from server.request_ids import HEADER, RequestIds
from server.schema import HINTS
from server.served import VERSION, Served
from server.stopping import Stopping


def create_app(engine: Any, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI application that serves `engine`, an AsyncLLM or anything with its interface."""
    config = config or ServerConfig()
    app = FastAPI(title="jaxserve", version=VERSION, redoc_url=None)
    app.state.served = Served(engine, config, config.template_text())
    for router in (
        openai_chat.router,
        openai_completions.router,
        tokenization.router,
        admin.router,
        admin.health,
        feed.router,
    ):
        app.include_router(router)
    dress(app, config)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def dress(app: FastAPI, config: ServerConfig) -> None:
    """What every application of ours has around its routes: error bodies, keys, ids, origins, and its end."""
    errors.install(app, HINTS)
    app.add_exception_handler(ClientGone, _nobody_to_answer)
    if config.api_key:
        app.add_middleware(ApiKeys, keys=config.api_key)
    app.add_middleware(RequestIds)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER, "Retry-After"],
        )
    app.add_middleware(Stopping)


async def _nobody_to_answer(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description without the 422 that it adds everywhere and this server never sends."""
    if app.openapi_schema is None:
        schema = FastAPI.openapi(app)
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for unused in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(unused, None)
    return app.openapi_schema  # type: ignore[return-value]
