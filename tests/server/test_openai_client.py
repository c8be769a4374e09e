"""The openai package, as its users use it, against a real server."""

import openai
import pytest

from tests.server.fake_engine import WORDS

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def sdk(live):
    with openai.OpenAI(base_url=live(api_key=("secret",)) + "/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_models_are_listed(sdk):
    (model,) = sdk.models.list().data
    assert sdk.models.retrieve(model.id) == model


def test_it_chats(sdk):
    asked = {
        "model": "models/fake",
        "messages": HI,
        "seed": 2,
        "stop": ["nine"],
        "logprobs": True,
        "top_logprobs": 2,
    }
    (choice,) = sdk.chat.completions.create(**asked).choices
    assert choice.message.content == WORDS[2 : WORDS.index("nine")]
    assert choice.finish_reason == "stop" and len(choice.logprobs.content[0].top_logprobs) == 2


def test_it_streams(sdk):
    options = {"include_usage": True}
    chunks = list(
        sdk.chat.completions.create(model="models/fake", messages=HI, stream=True, stream_options=options)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == WORDS
    assert chunks[-1].usage.total_tokens > 0 and chunks[-1].choices == []


def test_it_streams_through_the_helper(sdk):
    with sdk.chat.completions.stream(model="models/fake", messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == WORDS


def test_it_completes(sdk):
    answer = sdk.completions.create(
        model="models/fake", prompt=["a", "b"], max_tokens=4, echo=True, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == ["aGrü", "bGrü"]
    assert len(answer.choices[0].logprobs.tokens) == 6


def test_failures_are_the_packages_own_exceptions(sdk, engine):
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(model="gpt-4", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        sdk.chat.completions.create(model="models/fake", messages=[{"role": "user", "content": "x" * 1000}])
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.AuthenticationError):
        sdk.with_options(api_key="wrong").models.list()
    engine.full = True
    with pytest.raises(openai.RateLimitError):
        sdk.completions.create(model="models/fake", prompt="x")


def test_a_failure_in_the_stream_is_raised(sdk, engine):
    engine.fails_at = 4
    with pytest.raises(openai.APIError, match="not finite"):
        list(sdk.chat.completions.create(model="models/fake", messages=HI, stream=True))
