"""Run the server: listen at once, load the model beside it, and on SIGTERM or SIGINT finish what was begun."""

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.trace import open_trace
from server.app import create_app
from server.auth import OPEN
from server.config import ServerConfig
from server.roles import RoleConfig

log = logging.getLogger("uvicorn.error")

FLUSH = 5  # seconds that answers have to reach their clients once the engine is drained
IDLE = 75  # seconds an idle connection is kept, longer than usual proxies keep theirs


def run(engine: EngineConfig, config: ServerConfig, roles: RoleConfig) -> None:
    """Serve a model until a signal; raises what loading the model raised."""
    if roles.role and engine.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={engine.pipeline_parallel_size}: stages hand no pages over yet; leave role out, "
            "or use tensor_parallel_size and data_parallel_size"
        )
    from jaxserve import AsyncLLM  # brings in JAX, which the other commands start without
    from jaxserve.build import build, follow_leader

    if engine.node_rank:
        return follow_leader(engine)
    name = next(iter(config.served_model_name), None)
    trace = open_trace(config.trace_file, config.otlp_endpoint, "jaxserve")

    def load() -> Any:
        if roles.role is None:
            return AsyncLLM(engine, served_model_name=name, trace=trace)
        from server.clients import start

        made = partial(build, layer_groups=roles.kv_layer_groups)
        beside = start.beside(engine, roles) if roles.prefill_devices else None
        llm = AsyncLLM(engine, served_model_name=name, trace=trace, build=made)
        named = name or engine.model
        if beside:
            return start.paired(AsyncLLM(beside, build=made), llm, roles, named)
        return start.with_role(llm, roles, named, next(iter(config.api_key), None))

    serve(load, engine, config, hands_over=roles.role is not None)


def serve(
    load: Callable[[], Any], engine: EngineConfig, config: ServerConfig, *, hands_over: bool = False
) -> None:
    """Serve the engine that `load` makes; until it is there, health says starting and requests get 503."""
    sock = listen(config)
    app = create_app(Starting(engine), config)
    if hands_over:
        from server import handover

        app.include_router(handover.router)
    server = Server(app, config)
    loader = threading.Thread(target=server.load, args=(load,), name="load", daemon=True)
    loader.start()
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()
    if server.failure:
        raise server.failure
    if loader.is_alive():
        # Told to stop while the model was loading, which nothing can interrupt; unwinding under it would crash.
        _leave(0)
    served = app.state.served.engine
    dead = served.health().state == "dead"
    served.close()
    if dead:
        _leave(1)  # a thread of it may wait for a device that will never answer


def _leave(status: int) -> NoReturn:
    """End the process without waiting for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclass(frozen=True)
class Starting:
    """What is served while the engine is being made: its settings, and that it is not there yet."""

    config: EngineConfig
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def health(self) -> "NotYet":
        return NotYet()


class NotYet(NamedTuple):
    """The health of an engine that is being made."""

    state: str = "starting"
    detail: str = "the model is being loaded"


class Server(uvicorn.Server):
    """uvicorn that drains what it serves (`app.state.served`) before it closes its socket.

    So newcomers are told 503 meanwhile.
    """

    def __init__(self, app: FastAPI, config: ServerConfig):
        super().__init__(
            uvicorn.Config(
                app,
                root_path=config.root_path,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                log_level=config.uvicorn_log_level,
                timeout_keep_alive=IDLE,
                timeout_graceful_shutdown=FLUSH,
                server_header=False,
            )
        )
        logging.getLogger("uvicorn.access").addFilter(_is_news)
        self.failure: BaseException | None = None
        self._app, self._settings = app, config
        self._draining: asyncio.Task | None = None

    def load(self, load: Callable[[], Any]) -> None:
        """Make the engine, on the calling thread, and put it in the place of `Starting`."""
        try:
            engine = load()
        except BaseException as failure:
            self.failure = failure
            self.should_exit = True
            return
        self._app.state.served = replace(self._app.state.served, engine=engine)
        log.info("Ready to serve %s", ", ".join(self._app.state.served.names))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does; at a second signal, too, requests and then the application end in order."""
        await super().shutdown(sockets)
        if self.force_exit:
            unfinished = list(self.server_state.tasks)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second stops at once; both end in a normal exit."""
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        elif not self.force_exit:
            self.should_exit = self.force_exit = True
            log.warning("Stopped at once; requests left unfinished: %d", len(self.server_state.tasks))

    async def _drain(self) -> None:
        timeout = self._settings.shutdown_timeout
        log.info("Told to stop: running requests have %g s to finish; a second signal stops now", timeout)
        await self._app.state.served.drain(timeout)
        self.should_exit = True


def _is_news(access: logging.LogRecord) -> bool:
    """Whether a line of the access log is worth writing: probes ask for their health every few seconds."""
    return not (isinstance(access.args, tuple) and access.args[2] in OPEN)


def listen(config: ServerConfig) -> socket.socket:
    """The listening socket, taken before the model is loaded, which would be for nothing if it cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as why:
        sock.close()
        raise ConfigError(
            f"{config.host} port {config.port} cannot be listened on ({why.strerror}); use another --port or --host"
        ) from why
    sock.set_inheritable(True)
    return sock
