"""Draws follow the model's distribution, and depend on nothing but seed, step and the row's own logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.draw import draw, exponential, noise
from jaxserve.sampling.knobs import pack_knobs, unpack_knobs
from jaxserve.sampling.params import SamplingParams
from tests.jaxserve.sampling.steps import VOCAB, Sampler, peaked

DRAWS = 4096
drawn = jax.jit(draw)
bits = jax.jit(noise, static_argnums=1)


def knobs(params: SamplingParams, *, seeds=None, steps=None):
    size = len(seeds if seeds is not None else steps)
    rows = zip(
        seeds if seeds is not None else [0] * size, steps if steps is not None else [0] * size, strict=True
    )
    return unpack_knobs(jnp.asarray(pack_knobs([(params, *row) for row in rows], size)), size)


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """(Pearson's statistic, degrees of freedom); tokens expected fewer than ten times are one class."""
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), "a token of no probability was drawn"
    often = expected >= 10
    expected = np.append(expected[often], expected[~often].sum())
    counts = np.append(counts[often], counts[~often].sum())
    expected, counts = expected[expected > 0], counts[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1


def filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The probabilities that min-p, top-k and top-p leave, in float64, by sorting."""
    p = np.exp((logits - logits.max()).astype(np.float64) / params.temperature)
    p = np.where(p >= params.min_p * p.max(), p, 0)
    if params.top_k:
        p = np.where(p >= np.sort(p)[-params.top_k], p, 0)
    ordered = np.sort(p)[::-1]
    least = ordered[np.searchsorted(np.cumsum(ordered), params.top_p * p.sum())] if params.top_p < 1 else 0
    p = np.where(p >= least, p, 0)
    return p / p.sum()


@pytest.mark.supports("sampling", "temperature, top_p, top_k, min_p")
@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_p": 0.8}, {"top_p": 0.1},
        {"top_k": 5}, {"top_k": 100}, {"min_p": 0.1}, {"min_p": 1.0},
        {"temperature": 1.5, "min_p": 0.01, "top_k": 20, "top_p": 0.9},
    ],
)  # fmt: skip
@pytest.mark.parametrize("over", ["seeds", "steps"])
def test_frequencies_are_the_filtered_probabilities(given, over):
    params = SamplingParams(**given)
    logits = peaked(np.random.default_rng(3))[0]
    tokens = np.asarray(
        drawn(jnp.broadcast_to(jnp.asarray(logits), (DRAWS, VOCAB)), knobs(params, **{over: range(DRAWS)}))
    )
    statistic, freedom = chi_square(tokens, filtered(logits, params))
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom) + 1  # beyond 1 in 100,000 for a right sampler


def test_consecutive_draws_are_independent():
    logits = jnp.zeros((DRAWS, 16))
    by_step = np.asarray(drawn(logits, knobs(SamplingParams(), steps=range(DRAWS))))
    by_seed = np.asarray(drawn(logits, knobs(SamplingParams(), seeds=range(DRAWS))))
    for tokens in (by_step, by_seed):
        pairs = tokens[:-1] * 16 + tokens[1:]
        statistic, freedom = chi_square(pairs, np.full(256, 1 / 256))
        assert statistic < freedom + 4.5 * np.sqrt(2 * freedom)


def test_noise_is_uniform_in_every_bit_and_differs_in_every_row():
    seeds = [0, 1, 2**32, 2**33, -1, 2**63 - 1]
    rows = np.asarray(bits(knobs(SamplingParams(), seeds=seeds), 65536))
    ones = np.unpackbits(rows.view(np.uint8), axis=-1).reshape(len(seeds), 65536, 32).mean(axis=1)
    assert np.abs(ones - 0.5).max() < 0.5 / np.sqrt(65536) * 5
    agree = [np.mean(np.unpackbits((rows[i] ^ rows[j]).view(np.uint8))) for i in range(6) for j in range(i)]
    assert np.abs(np.array(agree) - 0.5).max() < 0.5 / np.sqrt(65536 * 32) * 6


def test_exponential_variates_are_never_zero_or_infinite():
    edges = np.asarray(exponential(jnp.asarray([[0, 1, 2**31, 2**32 - 2, 2**32 - 1]], jnp.uint32)))
    assert np.isfinite(edges).all() and (edges > 0).all() and (np.diff(edges) >= 0).all()
    assert edges[0, 2] == pytest.approx(np.log(2))


@pytest.mark.supports("sampling", "seeds: the same text in any batch")
def test_the_same_seed_and_step_give_the_same_token_in_any_batch():
    rng = np.random.default_rng(0)
    kinds = [
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.9, top_p=0.9),
        SamplingParams(temperature=1.1, top_k=70, min_p=0.001),
        SamplingParams(temperature=1.0, top_p=0.7, top_k=30, repetition_penalty=1.3, logprobs=5),
        SamplingParams(temperature=0, frequency_penalty=1, logit_bias={7: 3}),
        SamplingParams(temperature=0),
    ]
    logits = peaked(rng, 32)
    rows = [
        (kinds[i % len(kinds)], int(rng.integers(-(2**63), 2**63)), int(rng.integers(0, 999)))
        for i in range(32)
    ]
    prompts = [rng.integers(0, VOCAB, 9).tolist() for _ in range(32)]

    def run(order: list[int], size: int, slots) -> dict[int, tuple]:
        sampler = Sampler()
        for i, slot in zip(order, slots, strict=False):
            sampler.admit(slot, rows[i][0], prompts[i])
        padding = [None] * (size - len(order))
        padded = np.concatenate([logits[order], np.full((len(padding), VOCAB), np.nan, np.float32)])
        out = sampler.step(padded, [rows[i] for i in order] + padding, slots)
        return {i: (int(out.tokens[at]), bool(out.finite[at])) for at, i in enumerate(order)}

    together = run(list(range(32)), 32, range(32))
    shuffled = rng.permutation(32).tolist()
    assert run(shuffled, 32, rng.permutation(32)) == together
    for size in (1, 4):
        for start in range(0, 32, 11):
            order = shuffled[start : start + max(1, size - 1)]
            assert run(order, size, rng.permutation(40)[:size]) == {i: together[i] for i in order}


def test_another_seed_or_step_gives_other_tokens():
    flat = np.zeros(VOCAB, np.float32)
    sampler = Sampler()
    by_seed = sampler.step(flat, [(SamplingParams(), seed, 0) for seed in range(32)]).tokens
    by_step = sampler.step(flat, [(SamplingParams(), 0, n_out) for n_out in range(32)]).tokens
    high_word = sampler.step(flat, [(SamplingParams(), seed << 32, 0) for seed in range(32)]).tokens
    for tokens in (by_seed, by_step, high_word):
        assert len(set(tokens)) > 25
