"""Streams: the same answer as the whole one, in pieces that every OpenAI client can put together."""

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.app import create_app
from tests.server.conftest import chat, events
from tests.server.fake_engine import FakeEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def put_together(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a client makes of the chunks: text, logprobs, ids and the reason for each choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            one = choices.setdefault(
                piece["index"], {"text": "", "logprobs": [], "ids": [], "finish": [], "stop": None}
            )
            one["text"] += piece["delta"]["content"] if "delta" in piece else piece["text"]
            one["logprobs"] += _tokens(piece["logprobs"])
            one["ids"] += piece.get("token_ids") or []
            one["stop"] = piece.get("stop_reason") or one["stop"]
            if piece["finish_reason"]:
                one["finish"].append(piece["finish_reason"])
    return choices


def _tokens(logprobs: dict[str, Any] | None) -> list:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return logprobs["content"]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in names), strict=True))


def whole(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """A whole answer in the form of `put_together`."""
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "logprobs": _tokens(choice["logprobs"]),
            "ids": choice.get("token_ids") or [],
            "finish": [choice["finish_reason"]],
            "stop": choice["stop_reason"],
        }
        for choice in answer["choices"]
    }


COMMON = {
    "n": st.integers(1, 3), "max_tokens": st.integers(1, 90), "seed": st.integers(0, 80),
    "stop": st.sampled_from([None, "two", ["ü", "九", "nine ten"], "🎉", "three\nfour"]), "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(), "return_tokens_as_token_ids": st.booleans(),
    "return_token_ids": st.booleans(),
}  # fmt: skip
CHATS = st.fixed_dictionaries(COMMON, optional={"top_logprobs": st.integers(0, 3)})
PLAIN = st.fixed_dictionaries(
    COMMON | {"prompt": st.sampled_from(["one", ["one", "two"], [65, 66], ""]), "echo": st.booleans()},
    optional={"logprobs": st.integers(0, 3)},
)


@pytest.fixture(scope="module")
def app():
    return create_app(FakeEngine())


async def _same(app, url: str, body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        plain = (await client.post(url, json=body)).json()
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, done = events(await client.post(url, json=streamed))
    assert put_together(chunks) == whole(plain)
    assert (last["choices"], last["usage"]) == ([], plain["usage"])
    assert done == "[DONE]"


@given(fields=CHATS)
@settings(max_examples=40)
async def test_a_chats_chunks_put_together_are_the_whole_answer(app, fields):
    await _same(app, CHAT, chat(**fields, logprobs="top_logprobs" in fields))


@given(body=PLAIN)
@settings(max_examples=40)
async def test_a_completions_chunks_put_together_are_the_whole_answer(app, body):
    await _same(app, COMPLETIONS, body)


async def test_the_first_chunk_has_the_role_and_only_the_last_a_reason(client):
    *chunks, done = events(await client.post(CHAT, json=chat(stream=True, n=2)))
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [piece["delta"].get("role") for piece in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert done == "[DONE]"


async def test_usage_comes_only_when_asked_for(client):
    assert all("usage" not in chunk for chunk in events(await client.post(CHAT, json=chat(stream=True)))[:-1])
    body = chat(stream=True, stream_options={"include_usage": True})
    *chunks, last, _ = events(await client.post(CHAT, json=body))
    assert all(chunk["usage"] is None for chunk in chunks) and last["choices"] == []
    body = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    *chunks, last, _ = events(await client.post(CHAT, json=body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"]


async def test_a_failure_in_the_stream_is_its_last_event(client, engine):
    engine.fails_at = 5
    for url, body in ((CHAT, chat(stream=True)), (COMPLETIONS, {"prompt": ["a", "b"], "stream": True})):
        *chunks, last = events(await client.post(url, json=body))
        assert chunks and last["error"]["code"] == "engine_error" and "not finite" in last["error"]["message"]
        assert engine.active == set()


async def test_an_unforeseen_failure_in_the_stream_keeps_its_details(client, engine):
    engine.explodes_at = 5
    *chunks, last = events(await client.post(CHAT, json=chat(stream=True)))
    assert chunks and last["error"]["code"] == "internal_error" and "secret" not in last["error"]["message"]


async def test_a_failure_before_the_first_token_has_its_status(client, engine):
    engine.fails_at = 0
    response = await client.post(CHAT, json=chat(stream=True))
    assert response.status_code == 500 and response.json()["error"]["code"] == "engine_error"


@pytest.mark.parametrize("interval, comments", [(0.01, True), (0, False)])
async def test_silence_is_filled_with_comments_if_wanted(make_client, engine, interval, comments):
    engine.first_delay = 0.2
    response = await make_client(sse_keep_alive_interval=interval).post(
        CHAT, json=chat(stream=True, max_tokens=3)
    )
    assert response.text.startswith(": keep-alive\n\n") is comments
    assert put_together(events(response)[:-1])[0]["finish"] == ["length"]
