"""Latent attention with keys and values made from the latents again: fewer operations where many tokens see a key."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.int4_rows import PACKED, latents_of
from pallas_kernels.pages import ScaledPages, of_tokens, plain_and_scales, unpacked

KEYS_AT_ONCE, ROWS_AT_ONCE = 512, 128
NOTHING = -1e30


class Keys(NamedTuple):
    """A block of one sequence's keys and values, for all heads."""

    keys: Array  # [S, N, nope]
    ropes: Array  # [S, R]: the same for all heads
    values: Array  # [S, N, V]
    at: Array  # [S] int32: position in the sequence


class Sums(NamedTuple):
    """Attention over the keys so far: `sums / weight` is the output."""

    top: Array  # [T, N]: largest score
    weight: Array  # [T, N]: sum of exp(score - top)
    sums: Array  # [T, N, V]: sum of exp(score - top) * value


def expanded_attention(
    q: Float[Array, "T N H"],
    pages: Float[Array, "pages slabs half lanes"] | ScaledPages,
    page_table: Int[Array, "B P"],
    q_starts: Int[Array, "B+1"],
    kv_lens: Int[Array, "B"],
    k_up: Float[Array, "N nope C"],
    v_up: Float[Array, "N V C"],
    *,
    scale: float,
    shortest: int = 1,
) -> Float[Array, "T N V"]:
    """Causal attention of every sequence's newest tokens over all its latents; see `mla_attention` for the cache.

    A key is [k_up @ latent | rope], a value v_up @ latent. Sequences with fewer new tokens than `shortest` are left
    out: their rows come back as zeros, as those of no sequence.
    """
    t, n, _ = q.shape
    rows = min(t, ROWS_AT_ONCE)
    state = Sums(
        jnp.full((t + rows, n), NOTHING, jnp.float32),
        jnp.zeros((t + rows, n), jnp.float32),
        jnp.zeros((t + rows, n, v_up.shape[1]), jnp.float32),
    )
    padded = jnp.pad(q, ((0, rows), (0, 0), (0, 0)))
    page = 2 * plain_and_scales(pages)[0].shape[-2]
    at_once = min(page_table.shape[1], max(1, KEYS_AT_ONCE // page))
    size = at_once * page

    def sequence(s, state):
        new = q_starts[s + 1] - q_starts[s]
        first = kv_lens[s] - new

        def block(j, state):
            keys = _expand(pages, page_table[s], j * at_once, at_once, kv_lens[s], k_up, v_up)
            step = partial(_rows, padded, keys, q_starts[s], new, first, scale, rows)
            seen_from = jnp.maximum(j * size - first, 0) // rows
            return lax.fori_loop(seen_from, (new + rows - 1) // rows, step, state)

        blocks = jnp.where(new >= shortest, (kv_lens[s] + size - 1) // size, 0)
        return lax.fori_loop(0, blocks, block, state)

    state = lax.fori_loop(0, kv_lens.shape[0], sequence, state)
    out = state.sums[:t] / jnp.maximum(state.weight[:t], 1e-30)[..., None]
    return out.astype(q.dtype)


def _expand(pages, table, first, count: int, length, k_up: Array, v_up: Array) -> Keys:
    """Keys and values of the `count` pages from number `first` of `table` on."""
    values, scales = plain_and_scales(pages)
    # The last block may reach past the table: it starts earlier then, and what was seen before is masked.
    begin = jnp.minimum(first, table.shape[0] - count)
    ids = lax.dynamic_slice_in_dim(table, begin, count)
    page = 2 * values.shape[-2]
    latent, rope = (x.reshape(count * page, -1) for x in unpacked(values[ids]))
    at = begin * page + jnp.arange(count * page, dtype=jnp.int32)
    if values.dtype == PACKED:
        scale = of_tokens(scales[ids]).reshape(count * page, -1)
        latent, rope = latents_of(latent, rope, scale, k_up.shape[-1])
    elif scales is not None:
        scale = of_tokens(scales[ids]).reshape(-1, 1)
        latent, rope = latent.astype(jnp.float32) * scale, rope.astype(jnp.float32) * scale
    # A page may still hold what another request left there, NaN included: 0 * NaN must not reach the sum.
    written = (at < length)[:, None]
    latent, rope = (jnp.where(written, x, jnp.zeros((), x.dtype)).astype(k_up.dtype) for x in (latent, rope))
    up = partial(jnp.einsum, "sc,nhc->snh", latent, preferred_element_type=jnp.float32)
    at = jnp.where((at >= first * page) & (at < length), at, jnp.iinfo(jnp.int32).max)
    return Keys(up(k_up).astype(k_up.dtype), rope, up(v_up).astype(k_up.dtype), at)


def _rows(q, keys: Keys, start, new, first, scale, rows: int, i, state: Sums) -> Sums:
    """`state` after `rows` rows of a sequence, from its row i * rows on, have seen these keys."""
    begin = start + i * rows
    q = lax.dynamic_slice_in_dim(q, begin, rows)
    own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, begin, rows), state)
    row = i * rows + jnp.arange(rows, dtype=jnp.int32)
    split = keys.keys.shape[-1]
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = dot("tnh,snh->tns", q[..., :split], keys.keys) + dot("tnr,sr->tns", q[..., split:], keys.ropes)
    # Rows past the sequence's end are the next one's: they must see nothing here.
    seen = (keys.at[None] <= first + row[:, None]) & (row < new)[:, None]
    scores = jnp.where(seen[:, None], scores * scale, NOTHING)
    top = jnp.maximum(own.top, jnp.max(scores, axis=-1))
    weights = jnp.where(seen[:, None], jnp.exp(scores - top[..., None]), 0.0)
    shrink = jnp.exp(own.top - top)
    sums = dot("tns,snv->tnv", weights.astype(keys.values.dtype), keys.values)
    after = Sums(top, own.weight * shrink + jnp.sum(weights, -1), own.sums * shrink[..., None] + sums)
    return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, begin, 0), state, after)
