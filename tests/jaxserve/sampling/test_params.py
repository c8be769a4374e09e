"""Every field of SamplingParams is checked when it is made, and a refusal names the field."""

import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest

from jaxserve.errors import RequestError
from jaxserve.sampling.params import MAX_BAD_WORDS, MAX_STOP_STRINGS, MAX_STOP_TOKENS, SamplingParams

HUGE = 10**5000  # Python refuses to print it

NO_NUMBER = ["1", True, [1], {}, float("nan"), float("inf"), -float("inf"), HUGE, -HUGE, 1j, object()]
NO_INTEGER = ["1", True, [1], 1.0, float("nan"), HUGE, -HUGE, object()]
NO_FLAG = [None, 0, 1, "true", [], float("nan")]

REFUSED = {
    "n": [None, 0, -1, 129, 5_000_000, *NO_INTEGER],
    "best_of": [0, -1, 129, *NO_INTEGER],
    "presence_penalty": [None, -2.01, 2.01, *NO_NUMBER],
    "frequency_penalty": [None, -2.01, 2.01, *NO_NUMBER],
    "repetition_penalty": [None, 0, -1, 1e-9, 101, *NO_NUMBER],
    "temperature": [None, -0.1, 101, *NO_NUMBER],
    "top_p": [None, 0, -0.1, 1.1, *NO_NUMBER],
    "top_k": [None, -2, 2**31, *NO_INTEGER],
    "min_p": [None, -0.1, 1.1, *NO_NUMBER],
    "seed": [2**63, -(2**63) - 1, *NO_INTEGER],
    "stop": ["", [""], [1], 1, True, {"a": 1}, "x" * 1025, ["x"] * (MAX_STOP_STRINGS + 1), [None],
        "\ud800"],
    "stop_token_ids": [1, "1", [-1], ["1"], [True], [1.0], [HUGE], list(range(MAX_STOP_TOKENS + 1)), {1: 2}],
    "bad_words": ["word", [""], ["  "], [1], 1, ["x"] * (MAX_BAD_WORDS + 1), ["x" * 129]],
    "include_stop_str_in_output": NO_FLAG,
    "ignore_eos": NO_FLAG,
    "max_tokens": [-1, 2**31, *NO_INTEGER],
    "min_tokens": [None, -1, 17, *NO_INTEGER],
    "logprobs": [-1, -2, 21, 10**9, *NO_INTEGER],
    "prompt_logprobs": [-1, -2, 21, 10**9, *NO_INTEGER],
    "detokenize": NO_FLAG,
    "skip_special_tokens": NO_FLAG,
    "spaces_between_special_tokens": NO_FLAG,
    "logit_bias": [1, [1], "1", {"1": 1}, {-1: 1}, {True: 1}, {1: 101}, {1: -101}, {1: float("nan")}, {1: None},
        {HUGE: 1}, {1: "1"}, {1: True}, {1.0: 1}],
    "allowed_token_ids": [[], (), 1, "1", [-1], [True], ["1"], [HUGE]],
    "truncate_prompt_tokens": [0, -2, *NO_INTEGER],
}  # fmt: skip


def test_every_field_has_absurd_values_to_refuse():
    assert set(REFUSED) == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize("name", REFUSED)
def test_an_absurd_value_is_refused_by_name(name):
    for value in REFUSED[name]:
        with pytest.raises(RequestError) as refusal:
            SamplingParams(**{name: value})
        assert refusal.value.param == name
        assert str(refusal.value).startswith(name)
        assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    "name, value",
    [
        ("n", 128), ("best_of", 3), ("presence_penalty", -2), ("repetition_penalty", 1.3), ("temperature", 0),
        ("top_p", 1), ("top_p", 1e-300), ("top_k", 10**9), ("min_p", 1), ("seed", -(2**63)), ("seed", 2**63 - 1),
        ("max_tokens", None), ("max_tokens", 0), ("min_tokens", 16), ("logprobs", 20), ("prompt_logprobs", 0),
        ("logit_bias", {0: -100}), ("logit_bias", {}), ("allowed_token_ids", (3,)), ("truncate_prompt_tokens", -1),
        ("n", np.int64(2)), ("temperature", np.float32(0.5)),
    ],
)  # fmt: skip
def test_values_at_the_limits_are_taken(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_lists_become_tuples_and_synonyms_one_form():
    params = SamplingParams(
        stop="a", stop_token_ids=[5, 5, 6], bad_words=["x"], allowed_token_ids=[2, 1], top_k=-1
    )
    assert params.stop == ("a",) and params.stop_token_ids == (5, 6) and params.bad_words == ("x",)
    assert params.allowed_token_ids == (2, 1) and params.top_k == 0
    none = SamplingParams()
    assert none.stop == () and none.stop_token_ids == () and none.bad_words == ()
    assert SamplingParams(temperature=1e-6).greedy and not SamplingParams(temperature=1e-2).greedy


@pytest.mark.parametrize(
    "name, given",
    [
        ("best_of", {"n": 3, "best_of": 2}),
        ("min_tokens", {"max_tokens": 4, "min_tokens": 5}),
        ("stop", {"stop": "a", "detokenize": False}),
        ("logit_bias", {"logit_bias": {1: 1, 2: 1}, "allowed_token_ids": [2, 3]}),
    ],
)
def test_fields_that_contradict_each_other_are_refused(name, given):
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**given)
    assert refusal.value.param == name


@pytest.mark.parametrize(
    "name, value", [("logit_bias", {9: 1, 10: 1}), ("allowed_token_ids", [10]), ("stop_token_ids", [2, 10])]
)
def test_tokens_that_the_model_has_not_are_refused(name, value):
    params = SamplingParams(**{name: value})
    params.check(vocab_size=11)
    with pytest.raises(RequestError, match="vocabulary size, 10") as refusal:
        params.check(vocab_size=10)
    assert refusal.value.param == name


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_the_server_gives_are_refused(name):
    SamplingParams(**{name: 5}).check(vocab_size=10, max_logprobs=5)
    with pytest.raises(RequestError, match="max_logprobs") as refusal:
        SamplingParams(**{name: 6}).check(vocab_size=10, max_logprobs=5)
    assert refusal.value.param == name


def test_it_needs_neither_jax_nor_numpy():
    code = "import sys, jaxserve.sampling.params; sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
