"""A client that leaves takes its request with it: streaming or not, running or still waiting."""

import json
import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import chat


def begin(url: str, path: str, body: dict) -> socket.socket:
    """A connection on which a request was sent and nothing is read."""
    address = urlsplit(url)
    data = json.dumps(body).encode()
    sock = socket.create_connection((address.hostname, address.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_request_ends_when_its_client_leaves(live, engine, path, stream, waiting):
    engine.first_delay, engine.delay = (3600, 0) if waiting else (0, 0.02)
    url = live()
    body = {"ignore_eos": True, "max_tokens": 200, "stream": stream}
    body |= chat() if "chat" in path else {"prompt": ["one", "two"]}
    sock = begin(url, path, body)
    number = 1 if "chat" in path else 2
    wait_for(lambda: len(engine.active) == number)
    if stream and not waiting:
        assert sock.recv(16).startswith(b"HTTP/1.1 200")
    sock.close()
    wait_for(lambda: not engine.active)
    assert len(engine.aborted) == number


def test_leaving_is_noticed_through_all_layers(live, engine):
    engine.first_delay = 3600
    url = live(allowed_origins=("*",), sse_keep_alive_interval=0.01)
    sock = begin(url, "/v1/chat/completions", chat(stream=True))
    received = b""
    while b": keep-alive" not in received:
        received += sock.recv(1000)
    sock.close()
    wait_for(lambda: len(engine.aborted) == 1)


def test_the_connection_serves_on_after_an_answer(live, engine):
    url = live()
    body = chat(max_tokens=2)
    sock = begin(url, "/v1/chat/completions", body)
    assert sock.recv(16).startswith(b"HTTP/1.1 200")
    sock.close()
    wait_for(lambda: not engine.active)
    assert engine.aborted == []
