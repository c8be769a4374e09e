"""Bad words become token sequences within limits, and a request that leaves no token to choose is refused."""

import pytest

from jaxserve.errors import RequestError
from jaxserve.sampling.admission import check_possible, encode_bad_words, stop_tokens
from jaxserve.sampling.params import MAX_BAD_WORD_TOKENS, SamplingParams


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_a_bad_word_is_spelled_with_and_without_a_space_before_it():
    params = SamplingParams(bad_words=["ab", " ab"])
    assert encode_bad_words(params, letters) == [tuple(letters("ab")), tuple(letters(" ab"))]


def test_a_tokenizer_that_adds_the_space_itself_gives_one_spelling():
    assert encode_bad_words(SamplingParams(bad_words=["ab"]), lambda text: letters(text.strip())) == [
        (97, 98)
    ]


def test_a_bad_word_of_too_many_tokens_is_refused_with_the_limit():
    params = SamplingParams(bad_words=["ok", "x" * (MAX_BAD_WORD_TOKENS + 1)])
    with pytest.raises(RequestError, match=f"at most {MAX_BAD_WORD_TOKENS} tokens") as refusal:
        encode_bad_words(params, letters)
    assert refusal.value.param == "bad_words"


@pytest.mark.parametrize(
    "name, given, bad_words",
    [
        ("bad_words", {"allowed_token_ids": [1, 2]}, [(1,), (2,), (3, 4)]),
        ("bad_words", {}, [(token,) for token in range(10)]),
        ("min_tokens", {"allowed_token_ids": [0, 5], "min_tokens": 1, "stop_token_ids": [5]}, []),
        ("min_tokens", {"allowed_token_ids": [0, 1], "min_tokens": 1}, [(1,)]),
        ("stop_token_ids", {"min_tokens": 1, "stop_token_ids": list(range(1, 129))}, []),
    ],
)
def test_masks_that_leave_no_token_are_refused(name, given, bad_words):
    with pytest.raises(RequestError) as refusal:
        check_possible(SamplingParams(**given), 10, bad_words, eos_token_ids=[0])
    assert refusal.value.param == name


def test_masks_that_leave_a_token_are_taken():
    check_possible(SamplingParams(allowed_token_ids=[1, 2]), 10, [(1,), (2, 1)], [0])
    check_possible(SamplingParams(allowed_token_ids=[0], min_tokens=3, ignore_eos=True), 10, [], [0])


def test_ignoring_the_end_of_sequence_keeps_the_stop_tokens():
    assert stop_tokens(SamplingParams(stop_token_ids=[7, 0]), [0, 1]) == [0, 1, 7]
    assert stop_tokens(SamplingParams(stop_token_ids=[7], ignore_eos=True), [0, 1]) == [7]
