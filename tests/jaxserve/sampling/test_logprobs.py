"""Log-probabilities are the log-softmax of the raw logits, whatever else a request asks for."""

import jax
import numpy as np
import pytest

from jaxserve.sampling.logprobs import score
from jaxserve.sampling.params import MAX_LOGPROBS, SamplingParams
from tests.jaxserve.sampling.steps import VOCAB, Sampler, peaked


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.supports("sampling", "logprobs and prompt_logprobs")
@pytest.mark.parametrize("width", [12, VOCAB, 50257])
def test_score_gives_logprob_rank_and_the_likeliest_of_each_target(width):
    rng = np.random.default_rng(0)
    logits = peaked(rng, 5, width) * 4
    targets = np.append(rng.integers(0, width, 3), [logits[3].argmax(), logits[4].argmin()]).astype(np.int32)
    logprob, rank, top_ids, top_logprobs = map(np.asarray, jax.jit(score)(logits, targets))
    expected = log_softmax(logits)
    at = np.arange(5)
    np.testing.assert_allclose(logprob, expected[at, targets], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rank, 1 + (logits > logits[at, targets][:, None]).sum(-1))
    assert rank[3] == 1 and rank[4] == width
    n = min(width, MAX_LOGPROBS)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :n]
    np.testing.assert_array_equal(top_ids[:, :n], order)
    np.testing.assert_allclose(
        top_logprobs[:, :n], np.take_along_axis(expected, order, -1), rtol=1e-5, atol=1e-5
    )
    assert (top_ids[:, n:] == -1).all() and (top_logprobs[:, n:] == -np.inf).all()


def test_penalties_bias_and_temperature_do_not_change_logprobs():
    logits = peaked(np.random.default_rng(1), 4)
    kinds = [
        SamplingParams(temperature=0, logprobs=3, logit_bias={5: 100}),
        SamplingParams(temperature=3.0, top_k=9, logprobs=0, repetition_penalty=2.0),
        SamplingParams(temperature=0, n=1, best_of=2),
        SamplingParams(top_p=0.5, logprobs=20, frequency_penalty=2),
    ]
    sampler = Sampler()
    for slot, params in enumerate(kinds):
        sampler.admit(slot, params, [1, 2, 3])
    out = sampler.step(logits, [(params, 1, 0) for params in kinds])
    assert out.tokens[0] == 5
    expected = log_softmax(logits)
    np.testing.assert_allclose(out.logprob, expected[np.arange(4), out.tokens], rtol=1e-5)
    np.testing.assert_array_equal(out.rank, 1 + (logits > logits[np.arange(4), out.tokens][:, None]).sum(-1))
    np.testing.assert_array_equal(out.top_ids[0], np.argsort(-logits[0], kind="stable")[:MAX_LOGPROBS])
