"""Plain completions: every kind of prompt, echo, logprobs, and several prompts at once."""

import threading

import pytest

from server.answers import Completion, Tokens
from server.prompts import LARGE
from tests.server.conftest import events
from tests.server.fake_engine import WORDS, FakeEngine, byte_tokenizer

URL = "/v1/completions"


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([65, 66], [[65, 66]]),
        ([[65], [66, 67]], [[65], [66, 67]]),
    ],
)
async def test_every_kind_of_prompt_is_taken(client, engine, prompt, prompts):
    answer = Completion.model_validate((await client.post(URL, json={"prompt": prompt, "n": 2})).json())
    seen = [request.prompt_token_ids for request in engine.seen]
    assert seen == [engine.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(prompts)))
    assert answer.usage.prompt_tokens == sum(map(len, seen))
    assert answer.usage.completion_tokens == 2 * 16 * len(prompts)


async def test_echo_gives_the_prompt_back(client):
    (choice,) = (await client.post(URL, json={"prompt": "Say: ", "echo": True, "max_tokens": 200})).json()[
        "choices"
    ]
    assert choice["text"] == "Say: " + WORDS


async def test_echo_of_token_ids_is_their_text(client, engine):
    ids = engine.tokenizer.encode("Say: ")
    (choice,) = (await client.post(URL, json={"prompt": ids, "echo": True, "max_tokens": 1})).json()[
        "choices"
    ]
    assert choice["text"] == "Say: G"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_output_scores_the_prompt(client, stream):
    body = {"prompt": "one two", "echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
    response = await client.post(URL, json=body)
    answer = events(response)[0] if stream else response.json()
    (choice,) = answer["choices"]
    assert choice["text"] == "one two" and choice["finish_reason"] == "length"
    scores = choice["logprobs"]
    assert scores["tokens"][1:] == ["one", "Ġ".replace("Ġ", " "), "two"]
    assert scores["token_logprobs"] == [None, -9.5, -9.5, -9.5]
    assert scores["top_logprobs"][0] is None and len(scores["top_logprobs"][1]) == 2
    if not stream:
        assert answer["usage"]["completion_tokens"] == 0


async def test_text_offsets_run_on_over_prompt_and_output(client):
    body = {"prompt": "one", "echo": True, "max_tokens": 2, "logprobs": 0}
    scores = (await client.post(URL, json=body)).json()["choices"][0]["logprobs"]
    lengths = [len(token) for token in scores["tokens"]]
    assert scores["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
    assert len(scores["tokens"]) == 2 + 2


async def test_a_log_probability_of_minus_infinity_is_still_json(client, engine):
    body = {"prompt": [65, 7], "echo": True, "max_tokens": 0, "logprobs": 0}
    assert (await client.post(URL, json=body)).json()["choices"][0]["logprobs"]["token_logprobs"] == [
        None,
        -9999.0,
    ]


async def test_an_empty_prompt_is_the_beginning_of_sequence(client, engine):
    assert (await client.post(URL, json={"prompt": ""})).status_code == 200
    assert engine.seen[0].prompt_token_ids == [engine.tokenizer.bos_token_id]


@pytest.mark.parametrize("prompt", ["", [""], [[]]])
@pytest.mark.parametrize("named", [True, False], ids=["a token that is never added", "no such token"])
async def test_an_empty_prompt_is_refused_where_no_such_token_is_added(make_client, prompt, named):
    tokenizer = byte_tokenizer(bos=None)
    if named:
        tokenizer.named_tokens["bos_token"] = "<|bos|>"
    client = make_client(FakeEngine(tokenizer=tokenizer))
    response = await client.post(URL, json={"prompt": prompt})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


async def test_an_empty_list_of_tokens_is_not_blamed_on_the_model(client):
    error = (await client.post(URL, json={"prompt": [[]]})).json()["error"]
    assert error["code"] == "empty_prompt" and "this model" not in error["message"]


async def test_a_prompt_may_be_cut_to_fit(client, engine):
    await client.post(URL, json={"prompt": list(range(200)), "truncate_prompt_tokens": 5})
    await client.post(URL, json={"prompt": [65] * 500, "truncate_prompt_tokens": -1, "max_tokens": 6})
    assert engine.seen[0].prompt_token_ids == [195, 196, 197, 198, 199]
    assert len(engine.seen[1].prompt_token_ids) == 250


async def test_when_one_prompt_is_refused_none_runs(client, engine):
    response = await client.post(URL, json={"prompt": ["fine", "x" * 400]})
    assert response.status_code == 400 and engine.active == set()


async def test_tokenize_and_detokenize_are_inverse(client, engine):
    said = (await client.post("/tokenize", json={"prompt": "one Küche", "return_token_strs": True})).json()
    assert said["tokens"] == engine.tokenizer.encode("one Küche")
    assert (said["count"], said["max_model_len"]) == (len(said["tokens"]), 256)
    assert said["token_strs"][:2] == ["<|bos|>", "one"]
    back = await client.post("/detokenize", json={"tokens": said["tokens"]})
    assert back.json() == {"prompt": "<|bos|>one Küche"}


@pytest.mark.parametrize("url", ["/tokenize", "/detokenize"])
async def test_a_long_text_is_worked_on_by_another_thread_than_the_event_loops(
    client, engine, url, monkeypatch
):
    seen: set[int] = set()

    def noted(work):
        def run(*args, **kwargs):
            seen.add(threading.get_ident())
            return work(*args, **kwargs)

        return run

    for name in ("encode", "id_to_token", "decode"):
        monkeypatch.setattr(engine.tokenizer, name, noted(getattr(engine.tokenizer, name)))
    monkeypatch.setattr(Tokens, "model_dump_json", noted(Tokens.model_dump_json))
    long = {
        "/tokenize": {"prompt": "one " * LARGE, "return_token_strs": True},
        "/detokenize": {"tokens": [65] * LARGE},
    }
    assert (await client.post(url, json=long[url])).status_code == 200
    assert seen and threading.get_ident() not in seen


async def test_clients_without_a_tokenizer_learn_its_special_tokens(client, engine):
    said = (await client.get("/tokenizer_info")).json()
    for name, token in (("bos_token", "<|bos|>"), ("eos_token", "<|im_end|>")):
        assert said[name] == token
        body = {"prompt": token, "add_special_tokens": False}
        ids = (await client.post("/tokenize", json=body)).json()["tokens"]
        assert [engine.tokenizer.id_to_token(i) for i in ids] == [token]
    assert said["chat_template"] == engine.tokenizer.chat_template.templates["default"]


async def test_tokenize_takes_a_conversation(client, engine):
    messages = [{"role": "user", "content": "Hi"}]
    said = (await client.post("/tokenize", json={"messages": messages})).json()
    assert said["tokens"] == engine.tokenizer.encode_chat(messages)[0] and said["token_strs"] is None


async def test_detokenize_refuses_what_is_not_in_the_vocabulary(client):
    for token in (-1, 10**6, 10**30):
        response = await client.post("/detokenize", json={"tokens": [token]})
        assert response.status_code == 400 and response.json()["error"]["param"] == "tokens"
