"""The definition of ring_attention, in plain JAX."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels import context_parts
from pallas_kernels.ring_attention.layout import lowest

KEYS_AT_ONCE = 512  # keys whose scores are in memory at once
NOTHING = context_parts.NOTHING


class Form(NamedTuple):
    """What is the same for every block of one call."""

    q: Array  # [K, G, T, H]
    places: Array  # [T]
    lows: Array  # [T]: place of the first key that a query sees
    scale: float
    soft_cap: float | None
    values: slice  # which columns of a row are its value


class Partial(NamedTuple):
    """Attention over the keys so far: divide `sums` by `weight` to get the output."""

    top: Array  # [K, G, T]: largest score
    weight: Array  # [K, G, T]: sum of exp(score - top)
    sums: Array  # [K, G, T, V]: sum of exp(score - top) * value


def ring_attention(
    q: Float[Array, "T N H"],
    kv: Float[Array, "S K W"],
    q_places: Int[Array, "T"],
    kv_places: Int[Array, "S"],
    starts: Int[Array, "T"],
    *,
    scale: float,
    axis_name: str,
    latent: int | None = None,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """Attention of sequences that are spread over the devices of a mesh axis, and the log-sum-exp of the scores.

    For use under `shard_map`: every device holds some queries and some keys, and the keys go round the ring until all
    queries have met all keys. A query sees the keys with starts <= kv_place <= q_place, so with places as
    `layout.zigzag` gives them, several sequences share one ring, causally, and all devices have the same work.
    Keys may be more than queries: an earlier context that stayed where it was computed. Rows at place -1 are nobody's
    and may hold anything finite.

    kv holds what a kv head keeps of a token: its key and value side by side (W = 2H, V = H), and query head n uses kv
    head n // (N / K). With `latent`, for absorbed latent attention (DeepSeek-V2, arXiv 2405.04434), the row is the key
    (W = H, K = 1) and its first `latent` values are the value. Scores and sums are float32. Parts of a context
    that are attended apart are put together by `context_parts.combine`. Rows that see nothing are zeros.

    With `window` > 0 a query sees the last `window` keys up to itself; blocks of keys that no query sees are passed
    over. `soft_cap` bends the scores to cap * tanh(score / cap). `sinks` adds one more score a head to the softmax,
    without a value, and to the log-sum-exp.
    """
    (t, n, h), (_, k, _) = q.shape, kv.shape
    ring = [(i, (i + 1) % lax.axis_size(axis_name)) for i in range(lax.axis_size(axis_name))]
    values = slice(h, None) if latent is None else slice(0, latent)
    q_KGTH = q.reshape(t, k, n // k, h).transpose(1, 2, 0, 3)
    fold = partial(_fold, Form(q_KGTH, q_places, lowest(q_places, starts, window), scale, soft_cap, values))
    width = kv[..., values].shape[-1]
    state = Partial(
        jnp.full((k, n // k, t), NOTHING, jnp.float32),
        jnp.zeros((k, n // k, t), jnp.float32),
        jnp.zeros((k, n // k, t, width), jnp.float32),
    )

    def step(_, carry):
        state, kv, places = carry
        return (fold(kv, places, state), *lax.ppermute((kv, places), axis_name, ring))

    state, kv, places = lax.fori_loop(0, len(ring) - 1, step, (state, kv, kv_places))
    top, weight, sums = fold(kv, places, state)
    out = (sums / jnp.maximum(weight, 1e-30)[..., None]).transpose(2, 0, 1, 3).reshape(t, n, width)
    lse = context_parts.log_sum_exp(top, weight).transpose(2, 0, 1).reshape(t, n)
    if sinks is not None:
        out, lse = context_parts.with_sinks(out, lse, sinks)
    return out.astype(q.dtype), lse


def _fold(form: Form, kv, places, state: Partial) -> Partial:
    """`state` after one device's keys."""
    s = kv.shape[0]
    blocks = -(-s // KEYS_AT_ONCE)
    pad = (0, blocks * min(s, KEYS_AT_ONCE) - s)
    kv = jnp.pad(kv, (pad, (0, 0), (0, 0))).reshape(blocks, -1, *kv.shape[1:])
    places = jnp.pad(places, pad, constant_values=-1).reshape(blocks, -1)

    def block(state: Partial, one):
        kv_SKW, places = one
        seen = (places[None] >= form.lows[:, None]) & (places[None] <= form.places[:, None])
        return lax.cond(jnp.any(seen), lambda: _with_block(form, kv_SKW, seen, state), lambda: state), None

    return lax.scan(block, state, (kv, places))[0]


def _with_block(form: Form, kv_SKW, seen, state: Partial) -> Partial:
    keys = kv_SKW[..., : form.q.shape[-1]]
    scores = jnp.einsum("kgth,skh->kgts", form.q, keys, preferred_element_type=jnp.float32) * form.scale
    if form.soft_cap is not None:
        scores = form.soft_cap * jnp.tanh(scores / form.soft_cap)
    top = jnp.maximum(state.top, jnp.max(jnp.where(seen, scores, NOTHING), axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    shrink = jnp.exp(state.top - top)
    found = jnp.einsum(
        "kgts,skv->kgtv",
        weights.astype(kv_SKW.dtype),
        kv_SKW[..., form.values],
        preferred_element_type=jnp.float32,
    )
    weight = state.weight * shrink + jnp.sum(weights, axis=-1)
    return Partial(top, weight, state.sums * shrink[..., None] + found)


def cost(
    q: Any,
    kv: Any,
    q_places: Any,
    kv_places: Any,
    starts: Any,
    *,
    latent: int | None = None,
    window: int | None = None,
    devices: int,
    **_,
) -> tuple[int, int]:
    """(floating-point operations, bytes to and from HBM) of all devices together; the arrays are all devices'.

    Scores that no query sees are not computed; every device reads every key once, its queries once, and writes its
    results once.
    """
    (_, n, h), (s, k, w) = q.shape, kv.shape
    width = h if latent is None else latent
    order = np.sort(np.asarray(kv_places))
    upto = np.searchsorted(order, np.asarray(q_places), side="right")
    lows = np.asarray(lowest(np.asarray(q_places), np.asarray(starts), window))
    seen = np.maximum(upto - np.searchsorted(order, lows, side="left"), 0)
    pairs = int(np.sum(np.where(np.asarray(q_places) >= 0, seen, 0)))
    results = q.shape[0] * n * (width * q.dtype.itemsize + 4)
    return 2 * pairs * n * (
        h + width
    ), devices * s * k * w * kv.dtype.itemsize + q.size * q.dtype.itemsize + results


def link_bytes(kv: Any, devices: int) -> int:
    """Bytes that each device sends to its neighbour; `kv` is one device's."""
    return (devices - 1) * kv.size * kv.dtype.itemsize
