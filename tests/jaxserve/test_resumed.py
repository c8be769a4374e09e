"""A request that goes on after output made elsewhere gives what it would have given in one piece."""

import pytest

from jaxserve.errors import RequestError
from jaxserve.request import Request
from jaxserve.sampling.params import SamplingParams
from tests.engines import Traffic, around, complete

PROMPT = "Once upon a time"
ASKED = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "penalties": {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    "least length": {"temperature": 0.0, "min_tokens": 9, "logit_bias": {257: 30.0}},
}


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12} | fields)


def resumed(engine, asked: SamplingParams, generated: list[int]):
    traffic = Traffic(engine)
    ids = engine.tokenizer.encode(PROMPT)
    traffic.add(Request("one", ids, asked, generated=generated))
    return traffic.finish()["one"].outputs[0]


@pytest.mark.supports("API", "requests that go on after output made elsewhere")
@pytest.mark.parametrize("name", ASKED)
def test_the_rest_is_what_the_whole_would_have_had(tiny, name):
    asked = params(**ASKED[name])
    whole = complete(around(tiny), PROMPT, asked).outputs[0]
    for done in (1, 5, len(whole.token_ids) - 1):
        rest = resumed(around(tiny), asked, whole.token_ids[:done])
        assert rest.token_ids == whole.token_ids[done:]
        assert rest.finish_reason == whole.finish_reason
        assert whole.text.endswith(rest.text)


def test_a_stop_string_that_had_begun_still_ends_it(tiny):
    letters = {"temperature": 0.0, "allowed_token_ids": list(range(97, 123))}
    whole = complete(around(tiny), PROMPT, params(**letters)).outputs[0]
    stop = whole.text[3:6]
    assert whole.text.index(stop) <= 3
    done = whole.text.index(stop) + 2
    rest = resumed(around(tiny), params(stop=[stop], **letters), whole.token_ids[:done])
    assert (rest.finish_reason, rest.stop_reason, rest.text) == ("stop", stop, "")


@pytest.mark.parametrize(
    "fields, generated, words",
    [
        ({"n": 2}, [1], "one choice"),
        ({"prompt_logprobs": 0}, [1], "one choice"),
        ({}, [99999], "99999"),
        ({"stop_token_ids": [7]}, [7], "nothing is left"),
        ({"max_tokens": 2}, [1, 2], "nothing is left"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(tiny, fields, generated, words):
    engine = around(tiny)
    request = Request("one", [1, 2, 3], params(ignore_eos=True, **fields), generated=generated)
    with pytest.raises(RequestError, match=words):
        engine.prepare(request)
