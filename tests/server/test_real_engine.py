"""The app around the real engine and a tiny model: nothing about the fake one made the other tests pass."""

import asyncio
import time
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from jaxserve import AsyncLLM
from server.app import create_app
from server.config import ServerConfig
from tests.server.conftest import chat, events, running
from tests.server.test_disconnect import begin, wait_for
from tests.server.test_stream import put_together, whole
from tests.tiny import tiny_checkpoint

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def engine(tmp_path_factory, compilation_cache_dir):
    path = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)
    llm = AsyncLLM(
        str(path), max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32, num_gpu_blocks_override=48,
        max_num_queued_reqs=8, compilation_cache_dir=compilation_cache_dir,
    )  # fmt: skip
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def app(engine):
    return create_app(engine, ServerConfig(served_model_name=("tiny",)))


@pytest.fixture
def client(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60)


def used_pages(engine) -> int:
    return engine._engine.scheduler.cache.used


BODIES = [
    (CHAT, chat(temperature=0, max_tokens=12, logprobs=True, top_logprobs=3)),
    (CHAT, chat(seed=5, n=3, max_tokens=20, return_token_ids=True)),
    (CHAT, chat(seed=1, max_tokens=40, stop=["a", "e", " "], ignore_eos=True)),
    (COMPLETIONS, {"prompt": ["ab", "cdefgh"], "n": 2, "seed": 7, "max_tokens": 9, "logprobs": 2, "echo": True}),
    (COMPLETIONS, {"prompt": [65, 66, 67], "temperature": 0, "max_tokens": 0, "logprobs": 1, "echo": True}),
    (COMPLETIONS, {"prompt": "x" * 60, "seed": 3, "max_tokens": 30, "min_tokens": 30, "logit_bias": {"65": 5}}),
]  # fmt: skip


@pytest.mark.parametrize("url, body", BODIES)
async def test_the_pieces_put_together_are_the_whole_answer(client, engine, url, body):
    plain = (await client.post(url, json=body)).json()
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(await client.post(url, json=streamed))
    assert put_together(chunks) == whole(plain)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][name] for name in counts] == [plain["usage"][name] for name in counts]
    assert done == "[DONE]" and used_pages(engine) == 0


async def test_a_seed_gives_the_same_text_among_any_mates(client):
    body = chat(seed=11, max_tokens=16)

    async def text(**fields: Any) -> str:
        answer = (await client.post(CHAT, json=body | fields)).json()
        return answer["choices"][0]["message"]["content"]

    alone = await text()
    crowd = await asyncio.gather(*(text() if i % 2 else text(seed=i, max_tokens=5 + i) for i in range(8)))
    assert set(crowd[1::2]) == {alone}
    assert alone not in crowd[::2]


async def test_echo_scores_the_prompt_the_same_whether_cached_or_not(client):
    body = {"prompt": list(range(65, 115)), "max_tokens": 0, "echo": True, "logprobs": 2}
    first, second = [(await client.post(COMPLETIONS, json=body)).json()["choices"] for _ in range(2)]
    assert first == second and len(first[0]["logprobs"]["tokens"]) == 50


async def test_repeated_prompts_are_found_in_the_cache(client):
    body = {"prompt": list(range(100, 160)), "max_tokens": 2}
    await client.post(COMPLETIONS, json=body)
    usage = (await client.post(COMPLETIONS, json=body)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 32


async def test_more_requests_than_the_queue_holds_are_429_and_the_rest_answered(client, engine):
    body = {"prompt": "abc", "max_tokens": 30, "ignore_eos": True}
    responses = await asyncio.gather(*(client.post(COMPLETIONS, json=body) for _ in range(40)))
    statuses = [response.status_code for response in responses]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 8
    assert all(int(r.headers["retry-after"]) >= 1 for r in responses if r.status_code == 429)
    assert used_pages(engine) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_pages_come_home_when_clients_leave(engine, stream):
    with running(engine, ServerConfig()) as url:
        body = {"prompt": ["ab"] * 6, "max_tokens": 120, "ignore_eos": True, "stream": stream}
        sock = begin(url, COMPLETIONS, body)
        wait_for(lambda: engine.load().running >= 1)
        sock.close()
        wait_for(lambda: engine.load().running == engine.load().waiting == 0)
        wait_for(lambda: used_pages(engine) == 0)


async def test_metrics_tell_what_was_done(client):
    def total(text: str, name: str) -> float:
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{"))

    before = (await client.get("/metrics")).text
    usage = (
        await client.post(COMPLETIONS, json={"prompt": "abcd", "max_tokens": 7, "ignore_eos": True})
    ).json()["usage"]
    deadline = time.monotonic() + 10
    while total(after := (await client.get("/metrics")).text, "vllm:request_success_total") == total(
        before, "vllm:request_success_total"
    ):
        assert time.monotonic() < deadline
    for name, count in (
        ("vllm:generation_tokens_total", usage["completion_tokens"]),
        ("vllm:prompt_tokens_total", usage["prompt_tokens"]),
        ("vllm:time_to_first_token_seconds_count", 1),
        ("vllm:request_success_total", 1),
    ):
        assert total(after, name) - total(before, name) == count, name


def test_the_engine_survives_a_fuzz_of_every_field(engine, app):
    compiles = engine.registry.get_sample_value(
        "jaxserve:compiles_total", {"model_name": engine.config.model}
    )
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    for path in (CHAT, COMPLETIONS):

        @given(case=schema[path]["POST"].as_strategy())
        @settings(max_examples=20, suppress_health_check=list(HealthCheck))
        def fuzz(case):
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        fuzz()
    assert engine.health().state == "ready"
    after = engine.registry.get_sample_value("jaxserve:compiles_total", {"model_name": engine.config.model})
    assert after == compiles
