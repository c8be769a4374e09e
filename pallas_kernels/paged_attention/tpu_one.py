"""Attention of one query row a head: all heads of a block at once, rows of scores along the lanes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_walk import (
    LANES,
    MASKED,
    Call,
    Static,
    bent,
    codes,
    dot,
    ended,
    inner_scale,
    next_block,
)


class State(NamedTuple):
    """The softmax so far."""

    top: Any  # [K, height, 128]: largest score, the same in every lane
    weight: Any  # [K, height, 128]: sum of exp2(score - top), one partial sum a lane
    sums: Any  # [K, height, lanes]


def state(s: Static) -> State:
    """Memory of a tile's softmax."""
    return State(*[pltpu.VMEM((s.kv_heads, s.height, x), jnp.float32) for x in (LANES, LANES, s.lanes)])


def begin(c: Call) -> None:
    """Nothing is seen yet."""
    for ref, value in zip(c.r.state, (MASKED, 0.0, 0.0), strict=True):
        ref[...] = jnp.full(ref.shape, value, jnp.float32)


def attend(c: Call, pair) -> None:
    """Fold all of a pair's blocks into the softmax."""

    def one(block, _):
        slot = next_block(c, pair, block)
        # The products of all heads come first, so that none is waited for.
        scores = [_scores(c, slot, k) for k in range(c.s.kv_heads)]
        for k in range(c.s.kv_heads):
            seen = _seen(c, pair, block, scores[k].shape)
            _fold(c, slot, k, jnp.where(seen, scores[k], MASKED))

    lax.fori_loop(c.pairs.low[pair], pl.cdiv(c.pairs.length[pair], c.s.keys), one, None)


def _scores(c: Call, slot, k: int) -> Array:
    """Products of a head's query row with the block's keys, [height, keys], in base 2."""
    s, r = c.s, c.r
    if s.form.packed:
        keys = codes(r.kv[slot, k], high=False).astype(r.q.dtype)
    else:
        keys = r.kv[slot, k, :, slice(0, s.head) if s.head % LANES == 0 else slice(None)]
    scale = inner_scale(s.form)
    if s.form.scaled:
        scale *= r.kv_scales[slot, 0, k : k + 1]
    return bent(s.form, dot(r.q[0, k], keys, contract=1) * scale)


def _fold(c: Call, slot, k: int, scores: Array) -> None:
    """One step of the online softmax."""
    s, r, (tops, weight, sums) = c.s, c.r, c.r.state
    top = jnp.maximum(tops[k], jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - _wide(top, s.keys))
    shrink = jnp.exp2(tops[k] - top)
    lanes = [weights[:, i : i + LANES] for i in range(0, s.keys, LANES)]
    tops[k] = top
    weight[k] = weight[k] * shrink + sum(lanes[1:], lanes[0])
    if s.form.scaled:
        weights *= r.kv_scales[slot, 1, k : k + 1]
    if s.form.packed:
        values = codes(r.kv[slot, k], high=True).astype(r.q.dtype)
    else:
        values = r.kv[slot, k, :, slice(s.head, None) if s.head % LANES == 0 else slice(None)]
    found = dot(weights.astype(r.q.dtype), values, contract=0)
    sums[k] = sums[k] * _wide(shrink, found.shape[1]) + found


def _seen(c: Call, pair, block, shape) -> Array:
    """Which keys of the block the row may see."""
    s, pairs = c.s, c.pairs
    key = block * s.keys + lax.broadcasted_iota(jnp.int32, shape, 1)
    seen = key < pairs.length[pair]
    position = pairs.first[pair] + pairs.shift[pair]
    return seen & (key > position - c.window) if s.form.windowed else seen


def finish(c: Call) -> None:
    """Divide by the weights, the sinks' included."""
    r, (tops, weights, summed) = c.r, c.r.state
    shape = c.s.height, r.lse.shape[-1]
    own = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)

    def head(k, _):
        weight = jnp.broadcast_to(jnp.sum(weights[k], axis=1, keepdims=True), tops[k].shape)
        share, lse = ended(tops[k], weight, None if r.sinks is None else r.sinks[k])
        r.out[0, k] = (summed[k] * _wide(share, summed.shape[-1])).astype(r.out.dtype)
        along_lanes = jnp.sum(jnp.where(own, _wide(lse, shape[1]), 0.0), axis=0, keepdims=True)
        r.lse[0, 0, pl.ds(k, 1)] = along_lanes

    lax.fori_loop(0, c.s.kv_heads, head, None)


def _wide(x: Array, lanes: int) -> Array:
    """[R, 128], the same in every lane -> [R, lanes]."""
    return x if lanes == LANES else jnp.concatenate([x] * (lanes // LANES), axis=1)
