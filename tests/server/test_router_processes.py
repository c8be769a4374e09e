"""The router before real `jaxserve serve` processes: prefixes are found, and a killed worker loses nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import chat
from tests.server.routing import until
from tests.server.test_router_faults import parsed, text
from tests.tiny import tiny_checkpoint

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
ENGINE = [
    "--max-model-len", "256", "--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--num-gpu-blocks-override",
    "96", "--block-size", "8", "--served-model-name", "tiny",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Process:
    """A `jaxserve` command that listens."""

    def __init__(self, *words: str):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "server.cli", *words, "--host", "127.0.0.1", "--port", str(port)]
        self.popen = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )

    def wait_until_ready(self, words: str = "") -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                answer = httpx.get(self.url + "/readyz", verify=False)
                if answer.status_code == 200 and words in answer.text:
                    return
            except httpx.TransportError:
                assert self.popen.poll() is None, self.popen.communicate()[0]
            time.sleep(0.1)
        raise AssertionError(f"{self.url} is not ready")

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, compilation_cache_dir):
    """A router process and its three workers on one tiny model."""
    path = str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True, max_position_embeddings=256))
    cache = ["--compilation-cache-dir", compilation_cache_dir]
    trace = tmp_path_factory.mktemp("traces") / "router.jsonl"
    first = Process("serve", path, *ENGINE, *cache)
    first.wait_until_ready()  # the others find its compiled steps
    workers = [first, *(Process("serve", path, *ENGINE, *cache) for _ in range(2))]
    for worker in workers:
        worker.wait_until_ready()
    urls = [worker.url for worker in workers]
    router = Process("route", "--workers", *urls, "--tokenizer", path, "--trace-file", str(trace))
    router.wait_until_ready("3 of 3")
    yield router, workers, trace
    for process in (router, *workers):
        process.end()


@pytest.fixture
def client(fleet):
    with httpx.Client(base_url=fleet[0].url, timeout=60, verify=False) as client:
        yield client


def counted(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"jaxserve_router:{name}"))


@pytest.mark.supports(
    "routing", "requests go where their prompt's beginning is cached; predicted hits are real"
)
def test_a_conversation_goes_on_where_it_was_and_its_hits_are_as_predicted(client):
    said, served = chat("Tell me of the sea, and of ships.")["messages"], set()
    for _ in range(4):
        body = {"messages": said, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        served.add(answer.headers["x-jaxserve-worker"])
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        said = [*said, {"role": "assistant", "content": "So it is."}, {"role": "user", "content": "Go on."}]
        time.sleep(0.1)  # events are on their way
    assert len(served) == 1
    assert cached >= 48
    assert counted(client, "real_hit_tokens_total") == counted(client, "predicted_hit_tokens_total") > 0


def test_a_killed_worker_loses_no_token(fleet, client):
    _, workers, trace = fleet
    body = chat("Tell me of the sea.", max_tokens=150, ignore_eos=True, stream=True, temperature=1.0, seed=7)
    with client.stream("POST", CHAT, json=body) as response:
        whole = text(parsed([line for line in response.iter_lines() if line]))
    lines: list[str] = []
    with client.stream("POST", CHAT, json=body) as response:
        serving = next(w for w in workers if w.url == response.headers["x-jaxserve-worker"])
        for line in filter(None, response.iter_lines()):
            lines.append(line)
            if len(lines) == 5:
                serving.popen.send_signal(signal.SIGKILL)
    assert lines[-1] == "data: [DONE]"
    assert text(parsed(lines)) == whole
    assert counted(client, 'requests_again_total{reason="continued"}') == 1

    def given() -> int:
        last = json.loads(trace.read_text().splitlines()[-1])
        return [event["name"] for event in last["events"]].count("given")

    until(lambda: given() == 2)
