"""What comes through the router is what a worker gives, whole or streamed, with its errors; the router adds its own."""

import json

import pytest
from openai import OpenAI

from tests.server.conftest import chat, events
from tests.server.fake_engine import FakeEngine
from tests.server.routing import Router, Worker, routed, until
from tests.server.test_disconnect import begin

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VARYING = ("id", "created")


@pytest.fixture(scope="module")
def pair():
    """A router before two workers that nothing happens to."""
    with routed(FakeEngine(), FakeEngine(), server={"max_body_bytes": 2048}) as (router, workers):
        yield router, workers


def steady(answer):
    return {key: value for key, value in answer.items() if key not in VARYING}


BODIES: list[tuple[str, dict]] = [
    (CHAT, chat(max_tokens=8)),
    (CHAT, chat(max_tokens=6, n=2, seed=3, logprobs=True, top_logprobs=2, return_token_ids=True)),
    (CHAT, chat(max_tokens=12, stop=["one"])),
    (COMPLETIONS, {"prompt": ["Hi", "you"], "max_tokens": 9}),
    (COMPLETIONS, {"prompt": "Hi", "max_tokens": 9, "echo": True, "logprobs": 1}),
    (COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 9, "return_token_ids": True}),
    ("/tokenize", chat()),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]


@pytest.mark.supports("routing", "chat, completions and tokenize as the workers give them")
@pytest.mark.parametrize("path, body", BODIES)
def test_an_answer_is_the_workers(pair, path, body):
    router, workers = pair
    direct = workers[0].client.post(path, json=body).json()
    response = router.client.post(path, json=body)
    assert steady(response.json()) == steady(direct)
    assert response.headers["x-jaxserve-worker"] in [worker.url for worker in workers]


OPTIONS = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
]


@pytest.mark.parametrize("path, body", [BODIES[i] for i in (0, 1, 3, 4)])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_stream_is_the_workers_chunk_by_chunk(pair, path, body, options):
    router, workers = pair
    body = body | {"stream": True} | options
    direct = events(workers[0].client.post(path, json=body))
    through = events(router.client.post(path, json=body))
    assert [c if c == "[DONE]" else steady(c) for c in through] == [
        c if c == "[DONE]" else steady(c) for c in direct
    ]


REFUSED = [
    (CHAT, chat(temperature=-1)),
    (CHAT, chat(nonsense=1)),
    (CHAT, chat(max_tokens=9999)),
    (CHAT, {"messages": "none"}),
    (CHAT, chat(stream=True, stream_options=7)),
    (CHAT, chat(stream=True, temperature=-9)),
    (COMPLETIONS, {"prompt": [-1, 2]}),
    (COMPLETIONS, []),
    ("/v1/nothing", {}),
]


@pytest.mark.parametrize("path, body", REFUSED)
def test_a_refusal_is_the_workers_and_is_not_tried_again(pair, path, body):
    router, workers = pair
    direct = workers[0].client.post(path, json=body)
    before = router.counted("requests_again_total")
    response = router.client.post(path, json=body)
    assert response.status_code == direct.status_code >= 400
    assert response.json() == direct.json()
    assert router.counted("requests_again_total") == before


def test_a_model_that_nobody_serves_is_refused_with_those_there_are(pair):
    router, _ = pair
    answer = router.client.post(CHAT, json=chat(model="other"))
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert "models/fake" in answer.json()["error"]["message"]
    assert [card["id"] for card in router.client.get("/v1/models").json()["data"]] == ["models/fake"]
    assert router.client.get("/v1/models/models/fake").json()["max_model_len"] == 256
    assert router.client.get("/v1/models/x").status_code == 404


def test_bodies_are_bounded_and_must_be_json(pair):
    router, _ = pair
    assert router.client.post(CHAT, json=chat("x" * 3000)).status_code == 413
    head = {"Content-Type": "application/json"}
    assert router.client.post(CHAT, content=b"{", headers=head).json()["error"]["code"] == "invalid_json"
    assert router.client.post(CHAT, content=b"{}").status_code == 415


def test_the_openai_client_works_through_it(pair):
    router, _ = pair
    client = OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    said = [{"role": "user", "content": "Hi"}]
    stream = client.chat.completions.create(model=model, messages=said, max_tokens=20, stream=True)  # type: ignore
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    whole = client.chat.completions.create(model=model, messages=said, max_tokens=20)  # type: ignore
    assert text == whole.choices[0].message.content


def test_request_ids_go_along(pair):
    router, _ = pair
    answer = router.client.post(CHAT, json=chat(max_tokens=2), headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine" and answer.json()["id"] == "chatcmpl-mine"


def test_nothing_is_held_back_while_a_stream_runs():
    with routed(FakeEngine(delay=0.05)) as (router, _):
        with router.client.stream("POST", CHAT, json=chat(max_tokens=8, stream=True)) as response:
            parts = list(response.iter_raw())
        assert all(part.count(b"data: {") <= 1 for part in parts) and len(parts) >= 6


@pytest.mark.supports("routing", "a client that leaves takes its request with it")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_with_it(stream):
    with routed(FakeEngine(first_delay=3600)) as (router, (worker,)):
        sock = begin(router.url, CHAT, chat(stream=stream))
        until(lambda: len(worker.engine.active) == 1)
        sock.close()
        until(lambda: len(worker.engine.aborted) == 1)
        until(lambda: not router.worker(worker.url).tickets)


def test_keys_are_checked_or_passed_on():
    guarded = Worker(FakeEngine(), api_key=("theirs",))
    checking = Router([guarded], {"api_key": ("ours",)}, worker_api_key="theirs")
    ours = {"Authorization": "Bearer ours"}
    assert checking.client.post(CHAT, json=chat()).status_code == 401
    assert checking.client.get("/router/workers").status_code == 401
    assert checking.client.get("/readyz").status_code == 200
    assert checking.client.post(CHAT, json=chat(max_tokens=2), headers=ours).status_code == 200
    checking.stop()
    guarded.stop()


def test_metrics_and_health_are_its_own(pair):
    router, workers = pair
    text = router.client.get("/metrics").text
    assert f'jaxserve_router:worker_state{{role="both",state="ready",worker="{workers[0].url}"}} 1.0' in text
    assert "jaxserve_router:predicted_hit_tokens_total" in text
    for path in ("/health", "/livez", "/readyz"):
        assert router.client.get(path).status_code == router.client.head(path).status_code == 200
    known = router.client.get("/router/workers").json()
    assert [worker["state"] for worker in known] == ["ready", "ready"]


def test_timelines_are_written_as_json_lines(tmp_path):
    path = tmp_path / "trace.jsonl"
    with routed(FakeEngine(), server={"trace_file": str(path)}) as (router, (worker,)):
        router.client.post(CHAT, json=chat(max_tokens=6, stream=True), headers={"X-Request-Id": "r1"})
        until(lambda: path.read_text().endswith("\n"))
    (span,) = map(json.loads, path.read_text().splitlines())
    names = [event["name"] for event in span["events"]]
    assert names == ["understood", "given", "first token"]
    assert span["events"][1]["attributes"]["worker"] == worker.url
    assert span["attributes"]["output_tokens"] == 6 and span["attributes"]["status"] == 200
    times = [span["start"], *(event["time"] for event in span["events"]), span["end"]]
    assert times == sorted(times) and len(span["attributes"]["piece_seconds"]) >= 4
