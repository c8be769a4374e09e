"""Workers that fail, die, drain, are slow or silent: the client gets every token once, or a clear error in time."""

import json
import threading
import time

import pytest

from server.config import ServerConfig
from server.router.app import create_app
from server.router.config import RouterConfig
from tests.server.conftest import chat, events
from tests.server.fake_engine import FakeEngine
from tests.server.routing import Live, Router, Worker, routed, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"ignore_eos": True, "max_tokens": 60, "stream": True, "temperature": 0}


def text(chunks) -> str:
    """What a client shows, of a chat or a completion."""
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices
    )


def begun(router: Router, path: str, body: dict):
    """A stream that another thread reads: (thread, its lines so far)."""
    lines: list[str] = []

    def read() -> None:
        with router.client.stream("POST", path, json=body) as response:
            for line in filter(None, response.iter_lines()):
                lines.append(line)

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: len(lines) >= 3)
    return thread, lines


def parsed(lines: list[str]) -> list:
    data = [line[6:] for line in lines if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def serving(workers: list[Worker]) -> Worker:
    return next(worker for worker in workers if worker.engine.active)


@pytest.mark.supports("routing", "a worker's death in mid-stream: another goes on after the same tokens")
@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, chat(**LONG)),
        (COMPLETIONS, {"prompt": "Hi", **LONG}),
        (COMPLETIONS, {"prompt": [1, 2, 3], **LONG, "stream_options": {"include_usage": True}}),
        (CHAT, chat(**LONG, stop=["nine te"], return_token_ids=True)),
    ],
)
def test_another_worker_goes_on_when_one_dies_in_the_middle(path, body):
    with routed(FakeEngine(delay=0.02), FakeEngine(delay=0.02)) as (router, workers):
        undisturbed = events(router.client.post(path, json=body))
        thread, lines = begun(router, path, body)
        serving(workers).kill()
        thread.join(20)
        chunks = parsed(lines)
        assert chunks[-1] == "[DONE]"
        assert text(chunks) == text(undisturbed)
        same = [{**c, "id": 0, "created": 0} for c in chunks[:-1]]
        assert same == [{**c, "id": 0, "created": 0} for c in undisturbed[:-1]]
        assert len({chunk["id"] for chunk in chunks[:-1]}) == 1
        assert router.counted("requests_again_total", reason="continued") == 1


def test_what_cannot_be_gone_on_with_ends_with_an_error_event():
    with routed(FakeEngine(delay=0.02), FakeEngine(delay=0.02)) as (router, workers):
        thread, lines = begun(router, CHAT, chat(n=2, **LONG))
        serving(workers).kill()
        thread.join(20)
        error = parsed(lines)[-1]["error"]
        assert error["type"] == "service_unavailable_error" and "no other one could go on" in error["message"]


def test_without_another_worker_the_stream_ends_with_an_error_event():
    with routed(FakeEngine(delay=0.02)) as (router, workers):
        thread, lines = begun(router, CHAT, chat(**LONG))
        workers[0].kill()
        thread.join(20)
        assert "no worker can take this request" in parsed(lines)[-1]["error"]["message"]


def test_an_engine_that_fails_in_the_middle_is_gone_on_from_elsewhere():
    with routed(FakeEngine(), FakeEngine()) as (router, workers):
        whole = text(events(router.client.post(CHAT, json=chat(**LONG))))
        workers[0].engine.fails_at = 20
        for _ in range(20):
            assert text(events(router.client.post(CHAT, json=chat(**LONG)))) == whole
            if router.counted("requests_again_total", reason="continued"):
                break
        assert router.counted("requests_failed_total", worker=workers[0].url) == 1


def test_an_engine_error_everywhere_ends_in_an_error_event_and_not_in_endless_tries():
    with routed(FakeEngine(fails_at=20), FakeEngine(fails_at=20)) as (router, _):
        chunks = events(router.client.post(CHAT, json=chat(**LONG)))
        assert chunks[-1]["error"]["type"] == "service_unavailable_error"
        assert router.counted("requests_given_total") == 2


def test_before_the_first_byte_another_worker_is_asked():
    with routed(FakeEngine(), FakeEngine()) as (router, workers):
        workers[0].kill()
        for stream in (False, True, False, True):
            answer = router.client.post(CHAT, json=chat(max_tokens=3, stream=stream))
            assert answer.status_code == 200
            assert answer.headers["x-jaxserve-worker"] == workers[1].url
        until(lambda: router.worker(workers[0].url).state == "unreachable")


def test_when_every_worker_fails_the_answer_comes_in_bounded_tries():
    with routed(FakeEngine(), FakeEngine(), FakeEngine(), retries=1) as (router, workers):
        for worker in workers:
            worker.engine.explodes_at = 0
        answer = router.client.post(CHAT, json=chat())
        assert answer.status_code == 500
        assert router.counted("requests_given_total") == 2


def test_a_full_worker_is_the_callers_to_wait_for():
    with routed(FakeEngine(), FakeEngine()) as (router, workers):
        for worker in workers:
            worker.engine.full = True
        answer = router.client.post(CHAT, json=chat())
        assert answer.status_code == 429 and answer.headers["retry-after"] == "2"
        assert router.counted("requests_given_total") == 1


@pytest.mark.supports("routing", "workers drain without losing a request")
def test_a_worker_that_drains_gets_nothing_new_and_finishes_what_it_has():
    with routed(FakeEngine(delay=0.02), FakeEngine()) as (router, workers):
        router.client.post("/router/workers/drain", json={"url": workers[1].url})
        thread, lines = begun(router, CHAT, chat(**LONG))
        router.client.post("/router/workers/restore", json={"url": workers[1].url})
        drained = router.client.post("/router/workers/drain", json={"url": workers[0].url}).json()
        assert drained == {"url": workers[0].url, "leaving": True, "requests": 1}
        for _ in range(3):
            answer = router.client.post(CHAT, json=chat(max_tokens=2))
            assert answer.headers["x-jaxserve-worker"] == workers[1].url
        thread.join(20)
        assert parsed(lines)[-1] == "[DONE]"
        assert router.client.post("/router/workers/drain", json={"url": "http://x"}).status_code == 400


def test_a_worker_that_is_shutting_down_tells_so_and_is_left_out():
    with routed(FakeEngine(), FakeEngine()) as (router, workers):
        workers[0].engine.state = "draining"
        until(lambda: router.worker(workers[0].url).state == "draining")
        answer = router.client.post(CHAT, json=chat(max_tokens=2))
        assert answer.headers["x-jaxserve-worker"] == workers[1].url
        workers[1].engine.state = "stalled"
        until(lambda: router.client.get("/readyz").status_code == 503)
        refused = router.client.post(CHAT, json=chat(max_tokens=2))
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert "is stalled" in refused.json()["error"]["message"]


@pytest.mark.supports("routing", "a worker that falls silent is left within a bounded time")
def test_a_worker_that_falls_silent_is_left_and_its_stream_goes_on_elsewhere():
    with routed(FakeEngine(delay=0.02), FakeEngine(delay=0.02), lost_after=1.5) as (router, workers):
        whole = text(events(router.client.post(CHAT, json=chat(**LONG))))
        thread, lines = begun(router, CHAT, chat(**LONG))
        silent = serving(workers)
        silent.loop.call_soon_threadsafe(time.sleep, 4.0)  # as a stopped process: connections stay open
        until(lambda: router.worker(silent.url).state == "unreachable")
        thread.join(20)
        assert text(parsed(lines)) == whole
        until(lambda: router.worker(silent.url).state == "ready")


def test_a_slow_first_byte_is_hedged_if_asked_for():
    slow = FakeEngine(first_delay=3600)
    with routed(slow, FakeEngine(), hedge_after=0.1, hedge_limit=1.0) as (router, workers):
        for _ in range(20):
            answer = router.client.post(CHAT, json=chat(max_tokens=2))
            assert answer.headers["x-jaxserve-worker"] == workers[1].url
            if slow.seen:
                break
        assert router.counted("requests_again_total", reason="hedge") >= 1
        until(lambda: len(slow.aborted) == 1)


def test_addresses_in_a_file_are_read_again_when_it_changes(tmp_path):
    workers = [Worker(), Worker()]
    path = tmp_path / "workers.txt"
    path.write_text(f"# ours\n{workers[0].url}\n")
    router = Live(create_app(RouterConfig(workers_file=str(path)), ServerConfig()))
    until(lambda: router.client.get("/readyz").status_code == 200)
    path.write_text(f"{workers[1].url}/\n")
    until(lambda: [w["url"] for w in router.client.get("/router/workers").json()] == [workers[1].url])
    until(lambda: router.client.get("/readyz").status_code == 200)
    assert router.client.post(CHAT, json=chat(max_tokens=2)).status_code == 200
    path.write_text("nonsense\n")
    time.sleep(1.2)
    assert [w["url"] for w in router.client.get("/router/workers").json()] == [workers[1].url]
    for live in (router, *workers):
        live.stop()
