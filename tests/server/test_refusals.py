"""What cannot be served is refused with an OpenAI error body that names the field, and the server goes on."""

import json

import pytest

from server.errors import ErrorBody
from tests.server.conftest import chat

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def error_of(response, status=400):
    assert response.status_code == status, response.text
    return ErrorBody.model_validate(response.json()).error


@pytest.mark.parametrize("field", ["guided_json", "guided_regex", "guided_choice", "structured_outputs"])
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_removed_names_of_structured_output_are_refused(client, url, field):
    body = (chat() if url == CHAT else {"prompt": "x"}) | {field: {"type": "object"}}
    error = error_of(await client.post(url, json=body))
    assert error.param == field and "structured output" in error.message


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"functions": [{}]}, "functions"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"strange-name!": 1}, "strange-name!"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stream": True, "stream_options": {"x": True}}, "stream_options.x"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"priority": 1}, "priority"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"request_id": "a b"}, "request_id"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
async def test_what_would_have_no_effect_is_refused_by_name(client, engine, fields, param):
    error = error_of(await client.post(CHAT, json=chat(**fields)))
    assert error.param.startswith(param) and param in error.message
    assert engine.seen == []


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1}, {"temperature": "hot"}, {"temperature": True}, {"top_p": 0}, {"top_p": 1e999},
        {"top_k": -2}, {"top_k": 1.5}, {"n": 0}, {"n": 5_000_000}, {"n": 10**400}, {"seed": 2**64},
        {"logit_bias": {"99999999": 1}}, {"logit_bias": {"x": 1}}, {"logit_bias": [1]}, {"stop": [""]},
        {"stop": ["a"] * 1000}, {"stop": [1]}, {"stop_token_ids": [10**9]}, {"stop_token_ids": [-1]},
        {"allowed_token_ids": []}, {"allowed_token_ids": [10**9]}, {"bad_words": [""]},
        {"max_tokens": 0}, {"max_tokens": -5}, {"max_completion_tokens": 0}, {"min_tokens": -1},
        {"logprobs": 5}, {"presence_penalty": 9}, {"prompt_logprobs": 10**9}, {"truncate_prompt_tokens": 0},
    ],
)  # fmt: skip
async def test_a_poisonous_value_is_refused_by_name(client, engine, fields):
    (name,) = fields
    body = json.dumps(chat(**fields)).replace("Infinity", "1e999")
    error = error_of(await client.post(CHAT, content=body, headers={"Content-Type": "application/json"}))
    assert name in error.param and name in error.message
    assert engine.active == set()
    assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_a_value_of_the_wrong_kind_is_shown(client):
    error = error_of(await client.post(CHAT, json=chat(max_tokens=True)))
    assert error.message == "max_tokens is True; it should be a valid integer"


async def test_half_of_a_surrogate_pair_is_called_so(client):
    headers = {"Content-Type": "application/json"}
    error = error_of(await client.post(COMPLETIONS, content=rb'{"prompt": "\ud800"}', headers=headers))
    assert error.code == "invalid_json" and "half of a surrogate pair" in error.message


async def test_too_many_alternatives_are_refused_under_the_chats_name(client):
    error = error_of(await client.post(CHAT, json=chat(logprobs=True, top_logprobs=10**9)))
    assert error.param == "top_logprobs"


@pytest.mark.parametrize(
    "messages, param",
    [
        ([], "messages"),
        ("Hi", "messages"),
        ([{"role": "user"}], "messages.0"),
        ([{"role": "pope", "content": "Hi"}], "messages.0.role"),
        ([{"role": "tool", "content": "Hi", "tool_call_id": "x"}], "messages.0"),
        ([{"role": "user", "content": 7}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": "Hi", "mood": "good"}], "messages.0.mood"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages.0.tool_calls"),
    ],
)
async def test_malformed_messages_are_refused_where_they_are_wrong(client, messages, param):
    assert error_of(await client.post(CHAT, json={"messages": messages})).param.startswith(param)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_parts_that_are_not_text_are_refused_by_kind(client, kind):
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "x"}}]
    error = error_of(await client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]}))
    assert error.param == "messages.0.content" and kind in error.message and "part 1" in error.message


@pytest.mark.parametrize(
    "prompt", [[], ["a", 1], [1.5], [True], [[1], "a"], [["a"]], {}, None, 7, [-1], [10**9], [10**40]]
)
async def test_malformed_prompts_are_refused(client, prompt):
    assert error_of(await client.post(COMPLETIONS, json={"prompt": prompt})).param == "prompt"


async def test_more_prompts_than_are_ever_taken_are_refused(client):
    assert error_of(await client.post(COMPLETIONS, json={"prompt": ["x"] * 1000})).param == "prompt"


async def test_best_of_cannot_be_streamed_and_no_tokens_without_echo_asked(client):
    body = {"prompt": "x", "best_of": 2, "stream": True}
    assert error_of(await client.post(COMPLETIONS, json=body)).param == "best_of"
    assert (
        error_of(await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 0})).param == "max_tokens"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_context_overflow_says_so_in_the_words_clients_look_for(client, engine, stream):
    body = chat("x" * 300, max_tokens=10, stream=stream)
    error = error_of(await client.post(CHAT, json=body))
    assert error.code == "context_length_exceeded" and error.param == "messages"
    assert (
        "maximum context length is 256 tokens" in error.message and "However, you requested" in error.message
    )
    error = error_of(await client.post(COMPLETIONS, json={"prompt": [65] * 250, "max_tokens": 10}))
    assert error.code == "context_length_exceeded" and error.param == "prompt"
    assert "requested 260 tokens (250 in the prompt, 10 in the completion)" in error.message
    assert error_of(await client.post(COMPLETIONS, json={"prompt": [65] * 256, "max_tokens": 1}))
    assert (await client.post(COMPLETIONS, json={"prompt": [65] * 246, "max_tokens": 10})).status_code == 200


async def test_an_unknown_model_is_404(client):
    for url, body in ((CHAT, chat(model="gpt-4")), (COMPLETIONS, {"prompt": "x", "model": "gpt-4"})):
        error = error_of(await client.post(url, json=body), 404)
        assert (error.code, error.param) == ("model_not_found", "model") and "gpt-4" in error.message
    assert error_of(await client.get("/v1/models/gpt-4"), 404).code == "model_not_found"


async def test_unknown_addresses_and_methods_are_errors_of_the_same_form(client):
    assert error_of(await client.get("/v1/nothing"), 404).code == "unknown_url"
    response = await client.get(CHAT)
    assert error_of(response, 405).code == "method_not_allowed" and response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000, b'{"a":' * 50_000,
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"metadata":{"k":"\\udfff"}}', b'{"n":' + b"1" * 5000 + b"}",
        b'{"messages":[{"role":"user","content":"x"}],"temperature":Infinity}',
    ],
)  # fmt: skip
async def test_what_is_not_proper_json_is_refused(client, content):
    response = await client.post(
        CHAT, content=content, headers={"Content-Type": "application/json"} if content else {}
    )
    assert error_of(response).type == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_other_kinds_of_body_are_415(client, kind):
    response = await client.post(
        CHAT, content=json.dumps(chat()), headers={"Content-Type": kind} if kind else {}
    )
    assert error_of(response, 415).code == "unsupported_media_type"


async def test_a_body_too_large_is_413_announced_or_not(make_client):
    client = make_client(max_body_bytes=2000)
    body = json.dumps(chat("x" * 3000)).encode()
    headers = {"Content-Type": "application/json"}

    async def in_pieces():
        for i in range(0, len(body), 500):
            yield body[i : i + 500]

    assert error_of(await client.post(CHAT, content=body, headers=headers), 413).code == "body_too_large"
    assert error_of(await client.post(CHAT, content=in_pieces(), headers=headers), 413)
    assert (await client.post(CHAT, json=chat("x"))).status_code == 200


async def test_a_full_queue_is_429_with_a_time_to_come_back(client, engine):
    engine.full = True
    for body in (chat(), chat(stream=True)):
        response = await client.post(CHAT, json=body)
        assert (
            error_of(response, 429).code == "rate_limit_exceeded" and response.headers["retry-after"] == "2"
        )


@pytest.mark.parametrize("state", ["starting", "draining", "stalled", "dead"])
async def test_an_engine_that_is_not_ready_is_503_with_a_time_to_come_back(client, engine, state):
    engine.state = state
    response = await client.post(CHAT, json=chat())
    assert error_of(response, 503) and int(response.headers["retry-after"]) >= 1
    assert engine.seen == []


async def test_an_engine_failure_is_500_and_its_reason_told(client, engine):
    engine.fails_at = 3
    assert "not finite" in error_of(await client.post(CHAT, json=chat()), 500).message
    assert engine.active == set()


async def test_an_unforeseen_failure_is_500_and_its_details_kept(client, engine):
    engine.explodes_at = 1
    response = await client.post(CHAT, json=chat(request_id="mine"))
    error = error_of(response, 500)
    assert "secret" not in error.message and error.code == "internal_error"
    assert response.headers["x-request-id"] == "mine"
