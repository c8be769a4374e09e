"""A step of the sampler: what each knob does to the token, and what it leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.knobs import KNOB_WIDTH
from jaxserve.sampling.params import SamplingParams
from jaxserve.sampling.state import new_state
from tests.jaxserve.sampling.steps import SLOTS, VOCAB, Sampler, peaked, ramp, step, traced

GREEDY = SamplingParams(temperature=0)


def greedy(**fields) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)


@pytest.mark.supports("sampling", "greedy")
def test_temperature_0_takes_the_most_likely_and_the_first_of_equals():
    logits = peaked(np.random.default_rng(0), 4)
    logits[3, [9, 40]] = 50
    out = Sampler().step(logits, [(GREEDY, 1, 0)] * 4)
    np.testing.assert_array_equal(out.tokens, logits.argmax(-1))


def test_a_very_low_temperature_is_stable():
    logits = peaked(np.random.default_rng(0)) * 1e4
    assert Sampler().token(logits, SamplingParams(temperature=1e-4)) == logits.argmax()


@pytest.mark.supports("sampling", "repetition, presence and frequency penalties")
@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 1.7}, {"repetition_penalty": 0.6}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.3, "presence_penalty": -0.4, "frequency_penalty": -0.3, "logit_bias": {3: 2.5, 4: -1}},
    ],
)  # fmt: skip
def test_penalties_follow_the_counts_of_prompt_and_output(given):
    rng = np.random.default_rng(7)
    params = greedy(**given)
    sampler, prompt, output = Sampler(), rng.integers(0, VOCAB, 200).tolist(), []
    sampler.admit(0, params, prompt)
    for n_out in range(12):
        logits = peaked(rng)
        logits[0, rng.integers(0, VOCAB, 40)] += 6
        logits[0, output] += 4  # tempts it to repeat itself
        expected = _penalized(logits[0], params, prompt, output).argmax()
        assert sampler.token(logits, params, n_out=n_out) == expected
        output.append(int(expected))
    assert len(set(output)) > 1


def _penalized(logits, params, prompt, output) -> np.ndarray:
    x = logits.astype(np.float64)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return x


def test_presence_and_frequency_ignore_the_prompt_and_repetition_does_not():
    for params, expected in [
        (greedy(presence_penalty=2), 5), (greedy(frequency_penalty=2), 5), (greedy(repetition_penalty=2), 6),
    ]:  # fmt: skip
        sampler = Sampler()
        sampler.admit(0, params, [5, 5, 5])
        assert sampler.token(ramp(5, 6), params) == expected


def test_counts_stop_growing_before_they_overflow():
    params = greedy(frequency_penalty=2)
    sampler = Sampler()
    sampler.admit(0, params, [1] + [5] * 40000, n_prompt=1)
    for n_out in range(3):
        assert sampler.token(ramp(5, 6, 7, 8, 9), params, n_out=n_out) != 5


@pytest.mark.supports("sampling", "logit_bias")
def test_logit_bias_is_added():
    params = greedy(logit_bias={7: 0.4, 5: -0.6})
    sampler = Sampler()
    sampler.admit(0, params)
    assert sampler.token(ramp(5, 6, 7), params) == 6
    params = greedy(logit_bias={7: 1.1})
    sampler.admit(0, params)
    assert sampler.token(ramp(5, 6, 7), params) == 7


@pytest.mark.supports("sampling", "allowed_token_ids")
def test_only_allowed_tokens_are_chosen():
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=5, allowed_token_ids=[3, 400, 77], repetition_penalty=1.5)
    sampler = Sampler()
    sampler.admit(0, params, [77])
    tokens = {sampler.token(peaked(rng), params, n_out=n_out) for n_out in range(40)}
    assert tokens == {3, 77, 400}


@pytest.mark.supports("sampling", "bad_words")
def test_a_bad_word_is_never_completed():
    params = greedy(bad_words=["a", "b", "c"])
    sampler = Sampler()
    sampler.admit(0, params, [9, 8], bad_words=[(5,), (6, 7), (6, 8, 4)])
    assert sampler.token(ramp(5, 6), params) == 6  # 5 alone is bad
    assert sampler.token(ramp(7, 8), params) == 8  # 6 7 is bad
    assert sampler.token(ramp(4, 3), params) == 3  # 6 8 4 is bad
    assert sampler.token(ramp(7, 8), params) == 7  # after another token than 6 it is not
    assert sampler.token(ramp(4, 3), params) == 4


def test_bad_words_are_looked_for_in_the_output_only():
    params = greedy(bad_words=["a"])
    sampler = Sampler()
    sampler.admit(0, params, [1, 6], bad_words=[(6, 7)])
    assert sampler.token(ramp(7, 8), params) == 7


@pytest.mark.supports("sampling", "min_tokens, ignore_eos, stop_token_ids")
def test_neither_eos_nor_stop_tokens_come_before_min_tokens():
    params = greedy(min_tokens=2, stop_token_ids=[6])
    sampler = Sampler()
    sampler.admit(0, params, eos=(5,))
    assert [sampler.token(ramp(5, 6, 7), params, n_out=n) for n in range(3)] == [7, 7, 5]
    ignoring = greedy(min_tokens=2, stop_token_ids=[6], ignore_eos=True)
    sampler.admit(0, ignoring, eos=(5,))
    assert [sampler.token(ramp(6, 5, 7), ignoring, n_out=n) for n in range(3)] == [5, 5, 6]


def test_when_every_allowed_token_is_masked_the_likeliest_allowed_is_taken():
    params = greedy(bad_words=["a"], allowed_token_ids=[6, 7], min_tokens=9, stop_token_ids=[6])
    sampler = Sampler()
    sampler.admit(0, params, [1, 9], n_prompt=1, bad_words=[(9, 7)])
    out = sampler.step(ramp(5, 7, 6), [(params, 0, 1)])
    assert out.tokens[0] == 7 and out.finite[0]


@pytest.mark.supports("sampling", "NaN and Inf found, in their row only")
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(top_p=0.9, top_k=40, min_p=0.01), greedy(presence_penalty=1)]
)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_nan_or_inf_marks_its_own_row_and_no_other(params, broken):
    rng = np.random.default_rng(0)
    logits = peaked(rng, 4)
    alone = Sampler().step(logits, [(params, i, 0) for i in range(4)]).tokens
    logits[1, 100] = broken
    logits[2, 50] = -np.inf  # a mask of the model's own is no fault
    out = Sampler().step(logits, [(params, i, 0) for i in range(4)])
    np.testing.assert_array_equal(out.finite, [True, False, True, True])
    np.testing.assert_array_equal(out.tokens[[0, 3]], alone[[0, 3]])
    assert 0 <= out.tokens[1] < VOCAB


def test_a_row_of_nothing_but_minus_infinity_or_nan_is_not_finite():
    logits = np.full((4, VOCAB), -np.inf, np.float32)
    logits[2:] = np.nan
    out = Sampler().step(logits, [(SamplingParams(top_p=0.5, logprobs=1), 0, 0)] * 4)
    assert not out.finite.any() and ((out.tokens >= 0) & (out.tokens < VOCAB)).all()


def test_invalid_rows_change_no_state():
    params = greedy(frequency_penalty=2, bad_words=["a"], min_tokens=3)
    sampler = Sampler()
    for slot in range(4):
        sampler.admit(slot, params, [1, 2], n_prompt=1, bad_words=[(6, 7)], eos=(2,))
    sampler.step(ramp(5, 6), [(params, 0, 1)] * 4)
    before = jax.tree.map(np.asarray, sampler.state)
    sampler.step(ramp(8, 9), [(params, 0, 2)] * 4, valid=[False, True, False, False])
    after = jax.tree.map(np.asarray, sampler.state)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.delete(old, 1, 0), np.delete(new, 1, 0))
    assert after.last_token[1] == 8 and before.last_token[1] == 5
    sampler.step(ramp(8), [None] * 4, slots=[0, 0, 0, SLOTS - 1])  # padding may name any slot
    assert np.asarray(sampler.state.last_token)[0] == 5


def test_a_request_without_features_is_not_touched_by_its_slots_past():
    params = greedy(
        frequency_penalty=2, repetition_penalty=3, logit_bias={5: -100}, bad_words=["a"], min_tokens=9,
        stop_token_ids=[5],
    )  # fmt: skip
    sampler = Sampler()
    sampler.admit(3, params, [5, 5, 5], n_prompt=1, bad_words=[(5,)])
    assert sampler.token(ramp(5, 6), params, slot=3, n_out=2) == 6
    assert sampler.token(ramp(5, 6), GREEDY, slot=3) == 5
    fresh = greedy(presence_penalty=0.4)
    sampler.admit(3, fresh, [1])
    assert [sampler.token(ramp(5, 6), fresh, slot=3, n_out=n) for n in range(2)] == [5, 5]


@pytest.mark.supports("sampling", "state restored after preemption")
def test_after_preemption_the_state_is_what_it_was():
    rng = np.random.default_rng(5)
    params = SamplingParams(
        temperature=0.8, frequency_penalty=2, repetition_penalty=1.2, bad_words=["a"], min_tokens=4,
        logit_bias={9: 1},
    )  # fmt: skip
    prompt, words, eos = [3, 4, 5], [(7,), (11, 12), (1, 2, 3, 4, 5, 6, 7, 8)], (2,)
    logits = peaked(rng, 20)
    logits[:, 20:26] += 8  # few favourites, so that what was counted matters
    whole = Sampler()
    whole.admit(0, params, prompt, bad_words=words, eos=eos)
    tokens = [whole.token(logits[n], params, seed=6, n_out=n) for n in range(20)]
    for cut in (1, 5, 19):
        resumed = Sampler()
        resumed.admit(2, params, prompt + tokens[:cut], n_prompt=3, bad_words=words, eos=eos)
        assert [resumed.token(logits[n], params, slot=2, seed=6, n_out=n) for n in range(cut, 20)] == tokens[
            cut:
        ]


@pytest.mark.supports("sampling", "any mix of features in one compiled step")
def test_no_mix_of_features_compiles_anew():
    sampler = Sampler()
    sampler.step(ramp(5), [None] * 4)
    before = len(traced)
    for params in (
        GREEDY,
        SamplingParams(top_p=0.5, top_k=5),
        greedy(bad_words=["a"], logprobs=3, min_tokens=1),
    ):
        sampler.admit(0, params, bad_words=[(1,)])
        sampler.step(ramp(5), [(params, 0, 0), None, (GREEDY, 0, 0), None])
    assert len(traced) == before


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_step_lowers_for_accelerators(platform):
    state = jax.eval_shape(lambda: new_state(64, 151936))
    shapes = (
        jax.ShapeDtypeStruct((32, 151936), jnp.float32), jax.ShapeDtypeStruct((32 * KNOB_WIDTH,), jnp.int32), state,
        jax.ShapeDtypeStruct((32,), jnp.int32), jax.ShapeDtypeStruct((32,), jnp.bool_),
    )  # fmt: skip
    assert step.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
