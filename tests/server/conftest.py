"""The app around a fake engine, called in this process or, where sockets matter, through a real server."""

import asyncio
import contextlib
import json
import threading
from typing import Any

import httpx
import pytest
import uvicorn

from server.app import create_app
from server.config import ServerConfig
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def make_client(engine):
    """A client of a new app, with the server settings given."""

    def make(served=engine, **settings) -> httpx.AsyncClient:
        app = create_app(served, ServerConfig(**settings))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    return make


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture
def live(engine):
    """Starts a real server, with the settings given; gives its address."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running(engine, ServerConfig(**settings)))


@contextlib.contextmanager
def running(engine, config):
    server = uvicorn.Server(uvicorn.Config(create_app(engine, config), port=0, log_level="error"))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(),))
    thread.start()
    while not server.started:
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def chat(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    """A chat request's body."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def events(response: httpx.Response) -> list[Any]:
    """The data of each server-sent event, the final [DONE] as it is."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    data = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
