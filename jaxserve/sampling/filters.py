"""Which tokens may be drawn, by rank and by likelihood: top-k, by exact search for the k-th, and min-p."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.sampling.knobs import Knobs
from jaxserve.sampling.largest import largest

_HEAD = 64  # likeliest tokens of a row that are looked at first; most k fall among them
_HALVINGS = 4  # of the search interval, between looks at whether one value is left in it


def keep_likely(mass: Float[Array, "B V"], knobs: Knobs) -> Float[Array, "B V"]:
    """0 where a token may not be drawn. `mass` is a token's probability over the likeliest one's.

    min-p keeps tokens at least min_p times as likely as the likeliest; top-k keeps the k likeliest of those, and
    all that tie with the k-th.
    """
    mass = at_least(mass, knobs.min_p)
    return jax.lax.cond(jnp.any(knobs.top_k > 0), _top_k, lambda x, _: x, mass, knobs)


def _top_k(mass: Array, knobs: Knobs) -> Array:
    k = jnp.where(knobs.top_k < mass.shape[1], knobs.top_k, 0)
    head = largest(mass, min(_HEAD, mass.shape[1]))[0]
    kth = jnp.take_along_axis(head, jnp.clip(k - 1, 0, head.shape[1] - 1)[:, None], axis=1)[:, 0]
    kth = find_kth(mass, k, head[:, -1], jnp.where(k > 0, kth, 0), k > _HEAD)
    return at_least(mass, kth)


def find_kth(
    mass: Float[Array, "B V"],
    k: Int32[Array, "B"],
    above: Float[Array, "B"],
    kth: Float[Array, "B"],
    needed: Bool[Array, "B"],
) -> Float[Array, "B"]:
    """The k-th largest mass of the needed rows, in which fewer than k are over `above`; `kth` of the others.

    If fewer than k are positive, the least positive one. By bisection, as sorting takes far longer on a CPU; it
    ends when a single value is left, so the result is exact.
    """

    def halve(low: Array, high: Array, pivot: Array) -> tuple[Array, Array]:
        enough = jnp.sum(mass >= pivot[:, None], axis=-1, dtype=jnp.int32) >= k
        return jnp.where(enough, pivot, low), jnp.where(enough, high, pivot)

    def narrow(interval: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, done = interval  # the answer is at or above low, and below high
        first = jnp.min(jnp.where(mass >= low[:, None], mass, jnp.inf), axis=-1)
        last = jnp.max(jnp.where(mass < high[:, None], mass, -jnp.inf), axis=-1)
        middle = _between(first, last)
        # Between neighbouring floats is one of them; `last` always splits the interval.
        middle = jnp.where((middle > first) & (middle <= last), middle, last)
        new_low, new_high = halve(first, high, middle)
        for _ in range(_HALVINGS - 1):
            new_low, new_high = halve(new_low, new_high, _between(new_low, new_high))
        found = done | (first >= last)
        low = jnp.where(done, low, jnp.where(found, first, new_low))
        return low, jnp.where(found, high, new_high), found

    low = jnp.where(needed, jnp.finfo(jnp.float32).tiny, kth)
    interval = (low, above * (1 + 2.0**-20), ~needed)
    return jax.lax.while_loop(lambda interval: ~jnp.all(interval[2]), narrow, interval)[0]


def at_least(mass: Float[Array, "B V"], least: Float[Array, "B"]) -> Float[Array, "B V"]:
    """0 where a row's mass is less than `least`."""
    return jnp.where(mass >= least[:, None], mass, 0)


def _between(low: Array, high: Array) -> Array:
    """The geometric mean: masses spread over many orders of magnitude."""
    return jnp.sqrt(low) * jnp.sqrt(high)
