"""A router in front of workers with fake engines, all on real sockets; workers can be killed, and be silent."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from server.app import create_app
from server.config import ServerConfig
from server.router.app import create_app as create_router
from server.router.config import RouterConfig
from tests.server.fake_engine import FakeEngine


class Live:
    """An application on a socket of its own."""

    def __init__(self, app: FastAPI):
        self.app = app
        self._server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.002)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self.client = httpx.Client(base_url=self.url, timeout=30, verify=False)  # no certificates to read

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        with contextlib.suppress(asyncio.CancelledError):
            await self._server.serve()

    def kill(self) -> None:
        """Break every connection and listen no more, as a killed process does."""
        self.loop.call_soon_threadsafe(self._break)

    def _break(self) -> None:
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    def stop(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join()


class Worker(Live):
    """A worker whose engine is a fake one."""

    def __init__(self, engine: FakeEngine | None = None, **settings: Any):
        self.engine = engine or FakeEngine()
        super().__init__(create_app(self.engine, ServerConfig(**settings)))


class Router(Live):
    """A router that knows all its workers when it is made."""

    def __init__(self, workers: list[Worker], server: dict[str, Any] | None = None, **settings: Any):
        urls = tuple(worker.url for worker in workers)
        super().__init__(create_router(RouterConfig(urls, **settings), ServerConfig(**(server or {}))))
        self.fleet = self.app.state.served.fleet
        until(lambda: all(worker.state == "ready" for worker in self.fleet.workers.values()))

    def worker(self, url: str):
        """As the router knows it."""
        return self.fleet.workers[url]

    def counted(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return sum(
            sample.value
            for family in self.app.state.served.registry.collect()
            for sample in family.samples
            if sample.name == f"jaxserve_router:{name}" and labels.items() <= sample.labels.items()
        )


@contextlib.contextmanager
def routed(*engines: FakeEngine, **settings: Any) -> Iterator[tuple[Router, list[Worker]]]:
    """A router before workers with these engines; `settings` are the router's."""
    workers = [Worker(engine) for engine in engines]
    router = Router(workers, **settings)
    try:
        yield router, workers
    finally:
        router.stop()
        for worker in workers:
            worker.stop()


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that is to happen."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
