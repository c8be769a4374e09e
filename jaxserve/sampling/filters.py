"""Which tokens may be drawn: min-p, top-k and top-p, by exact search for the smallest logit kept."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxserve.sampling.knobs import Knobs

_HALVINGS = 4  # of the search interval, between looks at whether one value is left in it


def keep_likely(scores: Float[Array, "B V"], knobs: Knobs) -> Float[Array, "B V"]:
    """-inf where a token may not be drawn. `scores` are logits over temperature, 0 for the likeliest token.

    min-p keeps tokens at least min_p times as likely as the likeliest. top-k keeps the k likeliest of those, and
    all that tie with the k-th. top-p keeps the smallest set of the likeliest of those that has top_p of their
    mass, and all that tie with its least likely (Holtzman et al., arXiv:1904.09751).
    """
    scores = jnp.where(scores >= jnp.log(knobs.min_p)[:, None], scores, -jnp.inf)
    limited = (knobs.top_k > 0) & (knobs.top_k < scores.shape[1])
    scores = jax.lax.cond(jnp.any(limited), _top_k, lambda x, *_: x, scores, knobs, limited)
    nucleus = knobs.top_p < 1
    return jax.lax.cond(jnp.any(nucleus), _top_p, lambda x, *_: x, scores, knobs, nucleus)


def _top_k(scores: Array, knobs: Knobs, needed: Array) -> Array:
    least = threshold(scores, jnp.ones_like(scores), knobs.top_k.astype(jnp.float32), needed)
    return jnp.where(scores >= least[:, None], scores, -jnp.inf)


def _top_p(scores: Array, knobs: Knobs, needed: Array) -> Array:
    mass = jnp.exp(scores)
    least = threshold(scores, mass, knobs.top_p * jnp.sum(mass, axis=-1), needed)
    return jnp.where(scores >= least[:, None], scores, -jnp.inf)


def threshold(
    scores: Float[Array, "B V"],
    weights: Float[Array, "B V"],
    target: Float[Array, "B"],
    needed: Bool[Array, "B"],
) -> Float[Array, "B"]:
    """The largest score such that the tokens at or above it weigh `target`; -inf for rows not `needed`.

    If all together weigh less, the smallest finite score. Bisection over values: sorting a vocabulary costs
    ten times as much on a CPU. It ends when a single value is left, so the result is a score of the row.
    """
    lowest = float(jnp.finfo(jnp.float32).min)

    def weighs_enough(pivot: Array) -> Array:
        return jnp.sum(jnp.where(scores >= pivot[:, None], weights, 0), axis=-1) >= target

    def halve(low: Array, high: Array, pivot: Array) -> tuple[Array, Array]:
        enough = weighs_enough(pivot)
        return jnp.where(enough, pivot, low), jnp.where(enough, high, pivot)

    def narrow(interval: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, done = interval  # the answer is at or above low, and below high
        first = jnp.min(jnp.where(scores >= low[:, None], scores, jnp.inf), axis=-1)
        last = jnp.max(jnp.where(scores < high[:, None], scores, -jnp.inf), axis=-1)
        middle = first * 0.5 + last * 0.5
        # Halfway between neighbouring floats is one of them; `last` always splits the interval.
        new_low, new_high = halve(first, high, jnp.where(middle > first, middle, last))
        for _ in range(_HALVINGS - 1):
            new_low, new_high = halve(new_low, new_high, new_low * 0.5 + new_high * 0.5)
        found = done | (first >= last)
        low = jnp.where(done, low, jnp.where(found, first, new_low))
        return low, jnp.where(found, high, new_high), found

    low = jnp.where(needed, lowest, -jnp.inf)
    high = jnp.ones_like(low)
    low, _, _ = jax.lax.while_loop(lambda i: ~jnp.all(i[2]), narrow, (low, high, ~needed))
    return low
