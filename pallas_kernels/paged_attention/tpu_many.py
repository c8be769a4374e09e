"""Attention of many query rows a head: scores are [keys, rows], and the weights are what the matrix unit holds.

With query rows along the lanes, the largest score of each comes from whole registers, its rescaling is one row
of a register, and the second product streams the 128 rows of the transposed values past 256 x 256 weights: it
fills a 256 x 256 matrix unit, which the same product the other way round half fills. Rows of ones under
the values make the same product sum the weights.

A step is `at_once` query rows of one kv head against a block of keys. Each step multiplies the next one's scores,
of the next block too, while it exponentiates its own; they share one buffer, unit by unit.
"""

from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import guesses
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

ROW = 8  # sublanes that hold one value for each query row
UNIT = 256  # keys, and query rows, whose weights are computed together: one load of the matrix unit
SPAN = 512  # keys whose weighted values the matrix unit adds up itself


class State(NamedTuple):
    """What is kept between blocks, and the buffers of one."""

    q: Any  # [steps, lanes, at_once]: the tile's queries, transposed, and scaled where keys have no scales
    top: Any  # [steps, 8, at_once]: largest score
    sums: Any  # [steps, head + 8, at_once]: weighted values, and under them the sum of the weights
    keys: Any  # [2, keys, lanes] of this head and the next one, widened; only where there are scales
    key_scales: Any  # [2, keys, 128] float32: what products with them are multiplied by; likewise
    values: Any  # [2, head + 8, keys] of this head and the next one, transposed, and ones
    scores: Any  # [keys, at_once]: of the step to come
    peak: Any  # [8, at_once]: their largest


class Step(NamedTuple):
    """`at_once` query rows of one kv head against one block."""

    block: Any
    slot: Any  # where the block lies
    step: Any  # number of the query rows
    side: Any  # where the head's own keys and values lie


def state(s: Static, dtype) -> State:
    """Memory of a tile's softmax."""
    steps, f32 = s.kv_heads * s.chunks, jnp.float32
    return State(
        pltpu.VMEM((steps, s.lanes, s.at_once), dtype),
        pltpu.VMEM((steps, ROW, s.at_once), f32),
        pltpu.VMEM((steps, s.head + ROW, s.at_once), f32),
        pltpu.VMEM((2, s.keys, s.lanes) if s.form.scaled else (2, ROW, LANES), dtype),
        pltpu.VMEM((2, s.keys, LANES) if s.form.scaled else (2, ROW, LANES), f32),
        pltpu.VMEM((2, s.head + ROW, s.keys), dtype),
        pltpu.VMEM((s.keys, s.at_once), f32),
        pltpu.VMEM((ROW, s.at_once), f32),
    )


def _rows(c: Call, step):
    """(kv head, its query rows) of a step."""
    s = c.s
    return step // s.chunks, pl.ds(pl.multiple_of(step % s.chunks * s.at_once, s.at_once), s.at_once)


def begin(c: Call) -> None:
    """Turn and scale the tile's queries; nothing is seen yet."""
    s, own = c.s, c.r.state
    own.top[...] = jnp.full(own.top.shape, MASKED, jnp.float32)
    own.sums[...] = jnp.zeros(own.sums.shape, jnp.float32)
    own.values[:, s.head :] = jnp.ones((2, ROW, s.keys), own.values.dtype)
    scale = np.float32(1) if s.form.scaled else inner_scale(s.form)

    def turn(step, _):
        head, rows = _rows(c, step)
        own.q[step] = (c.r.q[0, head, rows].astype(jnp.float32) * scale).T.astype(own.q.dtype)

    lax.fori_loop(0, s.kv_heads * s.chunks, turn, None)


def attend(c: Call, pair) -> None:
    """Fold all of a pair's blocks into the tile's softmax."""
    s, peak = c.s, c.r.state.peak
    low, high = c.pairs.low[pair], pl.cdiv(c.pairs.length[pair], s.keys)

    def one(_, at: Step) -> Step:
        then = _after(c, pair, at, high)
        whole = _whole(c, pair, then.block)
        lax.cond(whole, lambda: _fold(c, pair, at, then, False), lambda: _fold(c, pair, at, then, True))
        return then

    @pl.when(low < high)
    def _():
        at = Step(low, next_block(c, pair, low), 0, 0)
        _prepare(c, at)
        for u in _cut(slice(0, s.at_once)):
            peak[:, u] = _largest([_score(c, pair, at, True, x, u) for x in _cut(slice(0, s.keys))])
        at = at._replace(step=np.int32(0), side=np.int32(0))
        lax.fori_loop(0, (high - low) * s.kv_heads * s.chunks, one, at)


def _after(c: Call, pair, at: Step, high) -> Step:
    """The step after this one, its block and its head at hand; the pair's last one again where there is none."""
    s = c.s
    ends = at.step == s.kv_heads * s.chunks - 1
    more, over = ends & (at.block + 1 < high), ends & (at.block + 1 >= high)
    slot = lax.cond(more, lambda: next_block(c, pair, at.block + 1), lambda: at.slot)
    step = jnp.where(more, 0, jnp.where(over, at.step, at.step + 1))
    new_head = jnp.logical_not(over) & (step % s.chunks == 0)
    side = jnp.where(new_head, 1 - at.side, at.side)
    then = Step(jnp.where(more, at.block + 1, at.block), slot, step, side)
    pl.when(new_head)(lambda: _prepare(c, then))
    return then


def _whole(c: Call, pair, block):
    """Whether every row of the tile sees all keys of the block."""
    s, pairs, begin = c.s, c.pairs, block * c.s.keys
    first, end, shift = pairs.first[pair], pairs.end[pair], pairs.shift[pair]
    whole = (end - first == s.rows) & (begin + s.keys <= jnp.minimum(first + shift + 1, pairs.length[pair]))
    if s.form.windowed:
        whole &= begin > end - 1 + shift - c.window
    if s.form.tree:
        whole &= begin + s.keys <= pairs.old[pair]
    return whole


def _cut(whole: slice, unit: int = UNIT) -> list[slice]:
    return [slice(x, min(x + unit, whole.stop)) for x in range(whole.start, whole.stop, unit)]


def _prepare(c: Call, at: Step) -> None:
    """Transpose the values of the step's head, their scales multiplied in, and have the keys' scales at hand."""
    s, r, own, head = c.s, c.r, c.r.state, at.step // c.s.chunks
    if s.form.packed:
        keys, values = (codes(r.kv[at.slot, head], high=high) for high in (False, True))
    else:
        keys = r.kv[at.slot, head, :, : s.lanes]
        values = r.kv[at.slot, head, :, slice(s.head, None) if s.head % LANES == 0 else slice(None)]
    if not s.form.scaled:
        own.values[at.side, : s.head] = values.T[-s.head :]
        return
    key_scale, value_scale = (r.kv_scales[at.slot, i, pl.ds(head, 1)] for i in range(2))
    turned = values.astype(jnp.float32).T[-s.head :]
    own.values[at.side, : s.head] = (turned * value_scale).astype(own.values.dtype)
    own.keys[at.side] = keys.astype(jnp.float32).astype(own.keys.dtype)
    own.key_scales[at.side] = jnp.broadcast_to(key_scale * inner_scale(s.form), (LANES, s.keys)).T


def _score(c: Call, pair, at: Step, masked: bool, x: slice, u: slice) -> Array:
    """Put the scores of keys `x` and query rows `u` in place -> their largest in each sublane, [8, unit]."""
    s, r, own = c.s, c.r, c.r.state
    keys = own.keys[at.side, x] if s.form.scaled else r.kv[at.slot, at.step // s.chunks, x, : s.lanes]
    products = dot(keys, own.q[at.step, :, u], contract=0)
    if s.form.scaled:  # after the product, for rounded keys would move large scores
        products *= jnp.concatenate([own.key_scales[at.side, x]] * ((u.stop - u.start) // LANES), axis=1)
    scores = bent(s.form, products)
    if masked:
        scores = jnp.where(_seen(c, pair, at, x, u), scores, MASKED)
    own.scores[x, u] = scores
    return reduce(jnp.maximum, [scores[i : i + ROW] for i in range(0, x.stop - x.start, ROW)])


def _largest(peaks: list[Array]) -> Array:
    peak = reduce(jnp.maximum, peaks)
    return jnp.broadcast_to(jnp.max(peak, axis=0, keepdims=True), peak.shape)


def _fold(c: Call, pair, at: Step, then: Step, masked: bool) -> None:
    """Fold the scores at hand into the softmax and the sums, and replace them by those of step `then`."""
    s, own = c.s, c.r.state
    old = own.top[at.step]
    top = jnp.maximum(old, own.peak[...])
    shrink = jnp.exp2(old - top)[:1]
    own.top[at.step] = top

    def weights(x: slice, u: slice) -> Array:
        below = own.scores[x, u] - top[:1, u]
        return jnp.exp2(below.astype(jnp.bfloat16) if s.narrow else below).astype(own.values.dtype)

    for u in _cut(slice(0, s.at_once)):
        sums, peaks = own.sums[at.step, :, u] * shrink[:, u], []
        for span in _cut(slice(0, s.keys), SPAN):
            found = []
            for x in _cut(span):
                found.append(weights(x, u))
                peaks.append(_score(c, pair, then, masked, x, u))
            sums += dot(own.values[at.side, :, span], jnp.concatenate(found, axis=0), contract=0)
        own.sums[at.step, :, u] = sums
        own.peak[:, u] = _largest(peaks)


def _seen(c: Call, pair, at: Step, x: slice, u: slice) -> Array:
    """Which of the keys `x` each of the query rows `u` may see."""
    s, pairs, shape = c.s, c.pairs, (x.stop - x.start, u.stop - u.start)
    row = at.step % s.chunks * s.at_once + u.start + lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1)
    token = pairs.tile[pair] * s.rows + lax.rem(row, s.rows)
    position = jnp.where(
        (token >= pairs.first[pair]) & (token < pairs.end[pair]), token + pairs.shift[pair], -1
    )
    key = at.block * s.keys + x.start + lax.broadcasted_iota(jnp.int32, shape, 0)
    seen = key <= jnp.minimum(position, pairs.length[pair] - 1)
    if s.form.windowed:
        seen &= key > position - c.window
    if s.form.tree:
        tree = c.r.tree[0, 0, at.step % s.chunks, u][None]
        seen &= guesses.on_branch(tree, key, position, pairs.old[pair])
    return seen


def finish(c: Call) -> None:
    """Divide by the weights, the sinks' included, and turn the tile back."""
    s, r, own = c.s, c.r, c.r.state

    def write(step, _):
        head, rows = _rows(c, step)
        sink = None if r.sinks is None else r.sinks[head, rows].T[:1]
        share, r.lse[0, 0, pl.ds(step, 1)] = ended(
            own.top[step, :1], own.sums[step, s.head : s.head + 1], sink
        )
        found = (own.sums[step, : s.head] * share).T.astype(r.out.dtype)
        if s.lanes == s.head:
            r.out[0, head, rows] = found
        else:
            r.out[0, head, rows, s.lanes - s.head :] = found

    lax.fori_loop(0, s.kv_heads * s.chunks, write, None)
