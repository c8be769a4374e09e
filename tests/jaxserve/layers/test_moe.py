"""Routing by hand, one token at a time; the experts' rows come back to their tokens; padding goes nowhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.layers.moe import Routing, experts, gated, loads, route
from sharding.experts import mixture

E, T = 12, 17
ROUTINGS = {
    "mixtral": Routing(E, 2, normalised=True),
    "qwen3, weights as they are": Routing(E, 3),
    "v2 groups": Routing(E, 3, groups=4, top_groups=2, scale=4.0),
    "v3": Routing(E, 4, scores="sigmoid", groups=3, top_groups=2, group_score=2, normalised=True, scale=2.5),
    "kimi": Routing(E, 5, scores="sigmoid", normalised=True, scale=2.827),
    "one of a group": Routing(E, 2, scores="sigmoid", groups=12, top_groups=3, group_score=2),
}


def by_hand(r: Routing, logits: np.ndarray, bias: np.ndarray) -> tuple[list[int], list[float]]:
    """One token's experts and their weights."""
    scores = 1 / (1 + np.exp(-logits)) if r.scores == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    choice, size = scores + bias, r.experts // r.groups
    groups = [sorted(choice[g * size : (g + 1) * size])[-r.group_score :] for g in range(r.groups)]
    best = sorted(range(r.groups), key=lambda g: -sum(groups[g]))[: r.top_groups]
    allowed = [e for e in range(r.experts) if e // size in best]
    ids = sorted(allowed, key=lambda e: -choice[e])[: r.top]
    weights = scores[ids]
    return ids, list((weights / weights.sum() if r.normalised else weights) * r.scale)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_every_way_of_routing(name, biased):
    r, rng = ROUTINGS[name], np.random.default_rng(3)
    logits = rng.normal(size=(T, E)).astype(np.float32)
    bias = rng.normal(size=E).astype(np.float32) * biased
    real = np.arange(T) < T - 3
    ids, weights = route(r, jnp.asarray(logits), jnp.asarray(real), jnp.asarray(bias) if biased else None)
    for t in range(T - 3):
        expected = by_hand(r, logits[t].astype(np.float64), bias)
        np.testing.assert_array_equal(ids[t], expected[0])
        np.testing.assert_allclose(weights[t], expected[1], rtol=1e-5)
    assert (np.asarray(ids[T - 3 :]) == E).all() and (np.asarray(weights[T - 3 :]) == 0).all()
    assert np.asarray(loads(ids, E)).tolist() == [int((ids == e).sum()) for e in range(E)]


def test_the_softmax_of_the_chosen_is_that_of_all_made_to_sum_to_one():
    """Why gpt-oss needs no way of its own."""
    logits = np.random.default_rng(0).normal(size=(T, E)).astype(np.float32)
    ids, weights = route(Routing(E, 4, normalised=True), jnp.asarray(logits), jnp.ones(T, bool))
    chosen = np.take_along_axis(logits, np.asarray(ids), axis=1)
    np.testing.assert_allclose(weights, jax.nn.softmax(chosen), rtol=1e-5)


def weights_of(rng: np.random.Generator, biases: bool) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"gate": (E, 6, 5), "up": (E, 6, 5), "down": (E, 5, 6)}
    if biases:
        shapes |= {"gate_bias": (E, 6), "up_bias": (E, 6), "down_bias": (E, 5)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def one_expert(
    w: dict[str, np.ndarray], e: int, x: np.ndarray, clamp: tuple[float, float] | None
) -> np.ndarray:
    def product(x, name):
        return w[name][e] @ x + (w[name + "_bias"][e] if "gate_bias" in w else 0)

    gate, up = jnp.asarray(product(x, "gate")), jnp.asarray(product(x, "up"))
    return product(np.asarray(gated(gate, up, clamp)), "down")


@partial(jax.jit, static_argnames="clamp")
def computed(x, ids, weights, w, clamp):
    return mixture(partial(experts, clamp=clamp), x, ids, weights, w, E)[0]


@pytest.mark.parametrize("clamp", [None, (0.7, 1.3)])
@settings(max_examples=10)
@given(seed=st.integers(0, 1000), real=st.integers(0, T))
def test_a_token_gets_the_weighted_sum_of_its_experts(clamp, seed, real):
    rng = np.random.default_rng(seed)
    w, x = weights_of(rng, clamp is not None), rng.normal(size=(T, 5)).astype(np.float32)
    x[real:] = np.nan  # what stands in rows of padding must not matter
    logits = jnp.asarray(rng.normal(size=(T, E)), jnp.float32)
    ids, weights = route(Routing(E, 3), logits, jnp.arange(T) < real)
    made = computed(jnp.asarray(x), ids, weights, w, clamp)
    for t in range(real):
        pairs = zip(np.asarray(ids[t]), np.asarray(weights[t]), strict=True)
        expected = sum(weight * one_expert(w, e, x[t], clamp) for e, weight in pairs)
        np.testing.assert_allclose(made[t], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(made[real:]), 0)


def test_rows_of_no_expert_stay_zero_in_spite_of_biases():
    w = weights_of(np.random.default_rng(0), biases=True)
    sizes = jnp.asarray([1, 0, 2] + [0] * 9, jnp.int32)
    made = experts(jnp.ones((8, 5)), sizes, jax.tree.map(jnp.asarray, w), (7.0, 1.702))
    assert np.asarray(made[:3]).any(axis=1).all()
    np.testing.assert_array_equal(np.asarray(made[3:]), 0)


def test_the_clamp_is_gpt_osss():
    gate, up = jnp.asarray([-9.0, 9.0, 1.0]), jnp.asarray([9.0, -9.0, 0.5])
    expected = [
        (7 + 1) * -9 / (1 + np.exp(1.702 * 9)),
        (-7 + 1) * 7 / (1 + np.exp(-1.702 * 7)),
        1.5 / (1 + np.exp(-1.702)),
    ]
    np.testing.assert_allclose(gated(gate, up, (7.0, 1.702)), expected, rtol=1e-5)
