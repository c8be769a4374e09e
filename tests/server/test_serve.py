"""The whole server as a process: it listens while loading, and on SIGTERM it finishes what was begun."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from server.config import ServerConfig
from server.serve import serve
from tests.server.conftest import chat

PROGRAM = """
import json, sys, time
from jaxserve.config import EngineConfig
from server.config import ServerConfig
from server.serve import serve
from tests.server.fake_engine import FakeEngine

engine, server, load_seconds = json.loads(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
def load():
    time.sleep(load_seconds)
    if engine.get("broken"):
        raise SystemExit("the checkpoint is broken")
    return FakeEngine(**engine)
serve(load, EngineConfig("models/fake", max_model_len=256), ServerConfig(host="127.0.0.1", **server))
"""
CHAT = "/v1/chat/completions"
LONG = chat(ignore_eos=True, max_tokens=200, stream=True)


class Process:
    """A server process and its address."""

    def __init__(self, port: int, engine=None, load_seconds=0.0, **server):
        arguments = [json.dumps(engine or {}), json.dumps({"port": port, **server}), str(load_seconds)]
        command = [sys.executable, "-c", PROGRAM, *arguments]
        root = Path(__file__).parents[2]
        self.url = f"http://127.0.0.1:{port}"
        self.popen = subprocess.Popen(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait_for(self, path: str, status: int) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(self.url + path).status_code == status:
                    return
            except httpx.TransportError:
                assert self.popen.poll() is None, self.popen.communicate()[0]
            time.sleep(0.02)
        raise AssertionError(f"{path} is not {status}")

    def end(self) -> str:
        """What it wrote; it must end by itself, in good order, and leave no process behind."""
        output, _ = self.popen.communicate(timeout=60)
        assert self.popen.returncode == 0, output
        return output


@pytest.fixture
def start(unused_tcp_port):
    started: list[Process] = []

    def start(**settings) -> Process:
        started.append(Process(unused_tcp_port, **settings))
        return started[-1]

    yield start
    for process in started:
        process.popen.kill()
        process.popen.communicate()


def open_stream(process: Process) -> tuple[threading.Thread, list[str]]:
    """A stream that has begun and that another thread reads; its lines so far."""
    lines: list[str] = []

    def read() -> None:
        with httpx.stream("POST", process.url + CHAT, json=LONG, timeout=60) as response:
            for line in filter(None, response.iter_lines()):
                lines.append(line)

    thread = threading.Thread(target=read)
    thread.start()
    while not lines:
        assert thread.is_alive()
        time.sleep(0.01)
    return thread, lines


def test_a_stream_begun_before_sigterm_is_finished_and_newcomers_are_sent_away(start):
    process = start(engine={"first_delay": 3.0}, sse_keep_alive_interval=0.05)
    process.wait_for("/readyz", 200)
    thread, lines = open_stream(process)
    process.popen.send_signal(signal.SIGTERM)
    process.wait_for("/readyz", 503)
    refused = httpx.post(process.url + CHAT, json=chat())
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    thread.join()
    assert lines[-1] == "data: [DONE]"
    output = process.end()
    assert CHAT in output and "/readyz" not in output  # in the access log


def test_what_does_not_finish_in_time_ends_with_an_error_event(start):
    process = start(engine={"delay": 0.5}, shutdown_timeout=1.0)
    process.wait_for("/readyz", 200)
    thread, lines = open_stream(process)
    process.popen.send_signal(signal.SIGTERM)
    thread.join()
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["type"] == "service_unavailable_error" and "shutting down" in error["message"]
    process.end()


def test_a_second_signal_stops_at_once(start):
    process = start(engine={"first_delay": 3600}, shutdown_timeout=3600)
    process.wait_for("/readyz", 200)
    process.popen.send_signal(signal.SIGINT)
    process.popen.send_signal(signal.SIGINT)
    assert "Traceback" not in process.end()


@pytest.mark.supports("server", "a second signal answers what is unfinished: 503, or an error event")
def test_what_a_second_signal_leaves_unfinished_is_told_so(start):
    process = start(engine={"first_delay": 3600}, shutdown_timeout=3600, sse_keep_alive_interval=0.05)
    process.wait_for("/readyz", 200)
    answers: list[httpx.Response] = []
    whole = threading.Thread(
        target=lambda: answers.append(httpx.post(process.url + CHAT, json=chat(), timeout=60))
    )
    whole.start()
    stream, lines = open_stream(process)
    process.popen.send_signal(signal.SIGTERM)
    process.wait_for("/readyz", 503)
    process.popen.send_signal(signal.SIGTERM)
    for thread in (whole, stream):
        thread.join(30)
    output = process.end()
    assert "requests left unfinished: 2" in output and "Traceback" not in output
    (answer,) = answers
    assert answer.status_code == 503 and answer.headers["retry-after"] and answer.headers["x-request-id"]
    for error in (answer.json()["error"], json.loads(lines[-1].removeprefix("data: "))["error"]):
        assert error["type"] == "service_unavailable_error" and "told to stop" in error["message"]


def test_while_the_model_loads_the_server_is_alive_but_not_ready(start):
    process = start(load_seconds=3600)
    process.wait_for("/livez", 200)
    assert httpx.get(process.url + "/readyz").json()["status"] == "starting"
    for url, body in ((CHAT, chat()), ("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        response = httpx.post(process.url + url, json=body)
        assert response.status_code == 503 and response.headers["retry-after"]
    assert httpx.get(process.url + "/v1/models").status_code == 503
    assert httpx.get(process.url + "/metrics").status_code == 200
    process.popen.send_signal(signal.SIGTERM)
    process.end()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason(start):
    process = start(engine={"broken": True})
    output, _ = process.popen.communicate(timeout=60)
    assert process.popen.returncode == 1 and "the checkpoint is broken" in output
    assert not os.path.exists(f"/proc/{process.popen.pid}")


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(live, engine):
    port = int(live().rsplit(":", 1)[1])
    config = ServerConfig(host="127.0.0.1", port=port)
    with pytest.raises(ConfigError, match=f"port {port} cannot be listened on"):
        serve(lambda: pytest.fail("loaded"), EngineConfig("models/fake"), config)
