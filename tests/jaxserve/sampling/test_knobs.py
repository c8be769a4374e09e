"""Knobs come out of the flat array as they went in, and say what a row needs."""

import jax
import numpy as np
import pytest

from jaxserve.sampling.knobs import (
    ALTERNATIVES,
    BAD_WORDS,
    BIAS,
    KNOB_WIDTH,
    LOGPROB,
    MIN_TOKENS,
    PENALTIES,
    needs_admit,
    pack_knobs,
    unpack_knobs,
)
from jaxserve.sampling.params import SamplingParams


def knobs_of(params: SamplingParams, seed: int = 0, n_out: int = 0):
    return jax.tree.map(
        np.asarray, unpack_knobs(jax.numpy.asarray(pack_knobs([(params, seed, n_out)], 1)), 1)
    )


def test_numbers_survive_the_flat_array():
    params = SamplingParams(
        temperature=0.7, top_p=0.9, min_p=0.05, top_k=40,
        repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.25,
    )  # fmt: skip
    flat = pack_knobs([None, (params, 0, 17)], 4)
    assert flat.shape == (4 * KNOB_WIDTH,) and flat.dtype == np.int32
    knobs = jax.tree.map(lambda x: np.asarray(x)[1], unpack_knobs(jax.numpy.asarray(flat), 4))
    floats = (knobs.temperature, knobs.top_p, knobs.min_p, knobs.repetition, knobs.presence, knobs.frequency)
    assert floats == tuple(np.float32([0.7, 0.9, 0.05, 1.2, -0.5, 0.25]))
    assert (knobs.top_k, knobs.n_out, knobs.flags) == (40, 17, PENALTIES)


def test_rows_without_a_request_ask_for_nothing():
    knobs = unpack_knobs(jax.numpy.asarray(pack_knobs([None], 2)), 2)
    assert not np.any(knobs.flags) and not np.any(knobs.temperature) and np.all(np.asarray(knobs.top_p) == 1)


def test_rows_without_a_token_to_choose_and_greedy_rows_ask_for_no_filters():
    params = {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1}
    kinds = [SamplingParams(**params), SamplingParams(**params), SamplingParams(**params, temperature=0)]
    flat = jax.numpy.asarray(pack_knobs([(kind, 0, 0) for kind in kinds], 3))
    knobs = unpack_knobs(flat, 3).of_use(jax.numpy.array([True, False, True]))
    np.testing.assert_array_equal(np.asarray(knobs.top_p), [0.5, 1, 1])
    np.testing.assert_array_equal(np.asarray(knobs.top_k), [3, 0, 0])
    np.testing.assert_array_equal(np.asarray(knobs.min_p) > 0, [True, False, False])
    np.testing.assert_array_equal(np.asarray(knobs.temperature), [1, 0, 0])
    np.testing.assert_array_equal(np.asarray(knobs.flags), [PENALTIES, 0, PENALTIES])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 2**63 + 5])
def test_all_64_bits_of_a_seed_arrive(seed):
    low, high = knobs_of(SamplingParams(), seed).seed[0]
    assert int(low) + (int(high) << 32) == seed % 2**64


@pytest.mark.parametrize(
    "given, flags, admitted",
    [
        ({}, 0, False),
        ({"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 3, "ignore_eos": True}, 0, False),
        ({"stop_token_ids": [1]}, 0, False),
        ({"repetition_penalty": 1.1}, PENALTIES, True),
        ({"presence_penalty": 1}, PENALTIES, True),
        ({"frequency_penalty": -1}, PENALTIES, True),
        ({"logit_bias": {1: 1}}, BIAS, True),
        ({"allowed_token_ids": [1]}, BIAS, True),
        ({"bad_words": ["a"]}, BAD_WORDS, True),
        ({"min_tokens": 3}, MIN_TOKENS, True),
        ({"logprobs": 0}, LOGPROB, False),
        ({"logprobs": 1}, LOGPROB | ALTERNATIVES, False),
        ({"n": 2, "best_of": 3}, LOGPROB, False),
        ({"n": 2, "best_of": 2}, 0, False),
    ],
)
def test_flags_say_what_a_row_needs(given, flags, admitted):
    params = SamplingParams(**given)
    assert knobs_of(params).flags[0] == flags
    assert needs_admit(params) == admitted


def test_min_tokens_is_over_once_they_are_there():
    params = SamplingParams(min_tokens=3)
    assert [int(knobs_of(params, n_out=n).flags[0]) for n in range(5)] == [MIN_TOKENS] * 3 + [0, 0]
