"""min-p, top-k and top-p keep exactly the tokens that sorting in float64 keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.filters import keep_likely
from jaxserve.sampling.knobs import pack_knobs, unpack_knobs
from jaxserve.sampling.largest import highest, largest
from jaxserve.sampling.nucleus import nucleus_winner
from jaxserve.sampling.params import SamplingParams

WIDE = 16384  # enough for `largest` to look into chunks
keep = jax.jit(keep_likely)
winner_of = jax.jit(nucleus_winner)


def masses(rng, kind: str, size: int, width: int = WIDE) -> np.ndarray:
    logits = {
        "peaked": lambda: rng.gumbel(size=(size, width)) * 2,
        "flat": lambda: rng.normal(size=(size, width)) * 1e-3,
        "ties": lambda: rng.integers(-40, 1, (size, width)) / 4,
        "equal": lambda: np.zeros((size, width)),
        "steep": lambda: -np.arange(width) * rng.uniform(0.01, 30, (size, 1)),
        "masked": lambda: np.where(
            rng.random((size, width)) < 0.002, rng.normal(size=(size, width)), -np.inf
        ),
    }[kind]().astype(np.float32)
    return np.exp(logits - logits.max(axis=-1, keepdims=True))


KINDS = ["peaked", "flat", "ties", "equal", "steep", "masked"]


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_keeps_the_k_likeliest_and_their_ties(kind):
    ks = [1, 2, 63, 64, 65, 100, 1000, WIDE - 1, WIDE, 10**9, 0]
    mass = masses(np.random.default_rng(1), kind, len(ks))
    rows = [(SamplingParams(top_k=k), 0, 0) for k in ks]
    kept = np.asarray(keep(mass, unpack_knobs(jnp.asarray(pack_knobs(rows, len(ks))), len(ks))))
    for row, got, k in zip(mass, kept, ks, strict=True):
        kth = np.sort(row)[-k] if 0 < k < WIDE else 0
        told_apart = row >= np.finfo(np.float32).tiny  # less likely tokens are never drawn
        np.testing.assert_array_equal((got > 0)[told_apart], (row >= kth)[told_apart])
        np.testing.assert_array_equal(got[got > 0], row[got > 0])


def test_min_p_keeps_tokens_by_their_share_of_the_likeliest():
    mass = masses(np.random.default_rng(2), "peaked", 4)
    min_ps = [0.0, 0.01, 0.5, 1.0]
    knobs = unpack_knobs(jnp.asarray(pack_knobs([(SamplingParams(min_p=p), 0, 0) for p in min_ps], 4)), 4)
    expected = np.where(mass >= np.array(min_ps, np.float32)[:, None], mass, 0)
    np.testing.assert_array_equal(np.asarray(keep(mass, knobs)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_nucleus_is_the_smallest_set_with_top_p_of_the_mass(kind):
    rng = np.random.default_rng(4)
    top_p = np.float32([1e-38, 0.01, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0])
    mass = masses(rng, kind, len(top_p))
    for _ in range(8):
        race = (mass / rng.exponential(size=mass.shape)).astype(np.float32)
        got = np.asarray(winner_of(race, mass, race.argmax(-1).astype(np.int32), top_p))
        for row, runners, p, token in zip(mass, race, top_p, got, strict=True):
            assert token in {_first_in_nucleus(row, runners, float(p) + slack) for slack in (0, -1e-6, 1e-6)}


def _first_in_nucleus(mass: np.ndarray, race: np.ndarray, top_p: float) -> int:
    ordered = np.sort(mass.astype(np.float64))[::-1]
    before = np.concatenate([[0], np.cumsum(ordered)[:-1]])  # mass of the tokens ahead of each place
    least = ordered[before < max(top_p, 1e-38) * ordered.sum()][-1] if top_p < 1 else 0
    return int(np.where(mass >= least, race, -1).argmax())


@pytest.mark.parametrize("width, k", [(7, 5), (500, 20), (WIDE, 64), (16001, 20)])
def test_largest_is_top_k_with_ties_in_order(width, k):
    x = np.random.default_rng(5).integers(-50, 50, (6, width)).astype(np.float32)
    x[0] = 0
    x[1] = -np.inf
    values, ids = jax.jit(largest, static_argnums=1)(x, k)
    expected = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis=-1))


def test_highest_is_argmax_and_shows_nan():
    x = np.random.default_rng(6).integers(0, 9, (5, 300)).astype(np.float32)
    x[3] = -np.inf
    x[4, 17] = np.nan
    values, ids = highest(jnp.asarray(x))
    np.testing.assert_array_equal(ids[:4], x[:4].argmax(-1))
    np.testing.assert_array_equal(values[:4], x[:4].max(-1))
    assert np.isnan(values[4]) and 0 <= ids[4] < 300
