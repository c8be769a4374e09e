"""The device side of mla_attention on TPU: a step, which overlaps its own sums with the next one's scores."""

import math
from functools import partial, reduce

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import guesses
from pallas_kernels.mla_attention.tpu_walk import (
    MASKED,
    SLOTS,
    Call,
    Place,
    Refs,
    Static,
    Tiles,
    after,
    ask,
    drain,
    each,
    fetch,
    fill,
    receive,
    send,
    wait_for,
)
from pallas_kernels.pages import LANES

LOG2E = math.log2(math.e)


def body(s: Static, scalars: int, inputs: int, *refs) -> None:
    """All of one core's tiles; inputs beyond the cache are the results' own memory."""
    (shares, layer, table, tree, *columns), rest = refs[:scalars], list(refs[scalars:])
    del rest[4 if s.scaled else 3 : inputs]
    if not s.scaled:
        rest.insert(3, None)
        rest.insert(7, None)
    core, tiles = pl.program_id(0), Tiles(*columns)
    begin, last = shares[core], shares[core + 1]
    c = Call(s, Refs(*rest), tiles, layer[0], table, tree, last)
    start = Place(tiles.next[begin], np.int32(0), np.int32(0), np.int32(0), np.int32(0))
    c.r.pending[0] = c.r.pending[1] = 0

    @pl.when(start.tile < last)
    def _():
        _start(c, Place(start.tile, 0, 0, 0, 0))
        lax.while_loop(lambda at: at.tile < last, partial(_step, c), start)

    for side in range(2):
        drain(c, side)
    fill(c, begin)


def _start(c: Call, at: Place) -> None:
    """Ask for the first tiles and blocks, and score the first step."""
    r, cursor = c.r, c.r.cursor
    cursor[0], cursor[1], cursor[2] = at.tile, 0, 0
    ask(c, at.tile, at.side)
    lax.fori_loop(0, SLOTS - 1, lambda *_: fetch(c), None)
    ask(c, c.tiles.next[at.tile + 1], 1 - at.side)
    receive(c, at)
    wait_for(c, at)
    r.peak[...] = _across(reduce(jnp.maximum, [_score(c, at, h, x) for h, x in _pieces(c.s)]))


def _step(c: Call, at: Place) -> Place:
    """Sum this step and score the next; finish the tile where it ends."""
    s, tiles = c.s, c.tiles
    then = after(c, at)
    new_tile, real = then.tile != at.tile, then.tile < c.last

    @pl.when(new_tile & real)
    def _():
        ask(c, tiles.next[then.tile + 1], at.side)
        receive(c, then)

    @pl.when((then.slot != at.slot) & real)
    def _():
        fetch(c)
        wait_for(c, then)

    _fold(c, at, then)

    @pl.when((at.block + 1) * s.keys >= tiles.length[at.tile])
    def _():
        _finish(c, at)

    return then


def _pieces(s: Static) -> list[tuple[int, int]]:
    """(0 for even keys and 1 for odd, first row of pages) of all pieces of a block."""
    return [(h, x) for h in range(2) for x in range(0, s.keys // 2, s.piece)]


def _columns(s: Static, h: int, x: int) -> slice:
    return slice(h * (s.keys // 2) + x, h * (s.keys // 2) + x + s.piece)


def _slabs(c: Call, slot, h: int, x: int, rope: bool) -> Array:
    """[piece, C or C + 128] as the matrix unit takes them: latents, and the slab of rope keys."""
    s = c.s
    ids = [h * s.slabs + i for i in range(s.slabs)] + ([2 * s.slabs] if rope else [])
    return jnp.concatenate([_pushable(s, c.r.kv[slot, i, x : x + s.piece]) for i in ids], axis=1)


def _pushable(s: Static, x: Array) -> Array:
    """`x`, times s.shrunk where the matrix unit takes 8 bits of another kind.

    Read as float8_e4m3b11fnuz, the bits of a float8_e4m3fn are 1/16 of its value (but for -0, see `pages.quantise`).
    """
    if s.shrunk == 1:
        return x
    return pltpu.bitcast(x, jnp.float8_e4m3b11fnuz)


def _score(c: Call, at: Place, h: int, x: int) -> Array:
    """Put the scores of one piece in place -> their largest in each lane, [height, 128]."""
    s, r = c.s, c.r
    tokens = pl.ds(at.chunk * s.tokens, s.tokens) if s.rows > 1 else slice(0, 1)
    q = [r.latents[at.side, tokens].reshape(s.height, s.latent), r.wide[h, tokens].reshape(s.height, LANES)]
    k = _slabs(c, at.slot, h, x, rope=True)
    scores = _dot(jnp.concatenate(q, axis=1), k, 1)
    scores *= np.float32(s.scale * LOG2E / s.shrunk)
    if s.scaled:
        scores *= r.kv_scales[at.slot, h : h + 1, x : x + s.piece]
    scores = jnp.where(_seen(c, at, h, x), scores, MASKED)
    r.scores[:, _columns(s, h, x)] = scores
    peak = scores[:, :LANES]
    for i in range(LANES, s.piece, LANES):
        peak = jnp.maximum(peak, scores[:, i : i + LANES])
    return peak


def _dot(x: Array, y: Array, axis: int) -> Array:
    """Sums over the last axis of `x` and this one of `y`, which may have fewer bits, in float32."""
    precision = None
    if x.dtype == jnp.float32:
        precision, y = lax.Precision.HIGHEST, y.astype(jnp.float32)
    dims = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _seen(c: Call, at: Place, h: int, x: int) -> Array:
    """Which keys of the piece each query row may see."""
    s, tiles = c.s, c.tiles
    if s.guessed:
        return jnp.concatenate([_guesses_seen(c, at, h, x, i) for i in range(s.tokens)], axis=0) != 0
    position = tiles.row[at.tile] + at.chunk * s.tokens + tiles.shift[at.tile]
    if s.tokens > 1:
        position += lax.broadcasted_iota(jnp.int32, (s.height, LANES), 0) // s.heads
    left = jnp.minimum(position + 1, tiles.length[at.tile]) - at.block * s.keys
    row = lax.broadcasted_iota(jnp.int32, (s.height, LANES), 1)
    return jnp.concatenate([row < (left + 1 - h) // 2 - i for i in range(x, x + s.piece, LANES)], axis=1)


def _guesses_seen(c: Call, at: Place, h: int, x: int, i: int) -> Array:
    """The same for the heads of the step's token i, in a tree of guesses: 0 or 1, [N, piece]."""
    s, tiles = c.s, c.tiles
    row = tiles.row[at.tile] + at.chunk * s.tokens + i
    position = row + tiles.shift[at.tile]
    bits = c.tree[jnp.minimum(row, c.tree.shape[0] - 1)]
    key = at.block * s.keys + 2 * (x + lax.broadcasted_iota(jnp.int32, (8, s.piece), 1)) + h
    seen = key < jnp.minimum(position + 1, tiles.length[at.tile])
    seen &= guesses.on_branch(bits, key, position, tiles.old[at.tile])
    return jnp.concatenate([jnp.where(seen, 1, 0)] * (s.heads // 8), axis=0)


def _across(x: Array) -> Array:
    """The largest of each row in every lane."""
    return jnp.broadcast_to(jnp.max(x, axis=1, keepdims=True), x.shape)


def _broad(x: Array, lanes: int) -> Array:
    """[R, 128], the same in every lane -> [R, lanes]."""
    return x if lanes == LANES else jnp.concatenate([x] * (lanes // LANES), axis=1)


def _fold(c: Call, at: Place, then: Place) -> None:
    """Fold the scores at hand into the softmax and the sums, and replace them by those of the step to come."""
    s, r = c.s, c.r
    rows = pl.ds(pl.multiple_of(at.chunk * s.height, s.height), s.height) if s.rows > 1 else slice(None)
    opens = at.block == 0
    old = jnp.where(opens, MASKED, r.top[rows])
    top = jnp.maximum(old, r.peak[...])
    shrink = jnp.exp2(old - top)
    r.top[rows] = top
    weight, peaks = jnp.where(opens, 0.0, r.weight[rows] * shrink), []

    def add(h, x, weight):
        weights = jnp.exp2(r.scores[:, _columns(s, h, x)] - _broad(top, s.piece))
        for i in range(0, s.piece, LANES):
            weight += weights[:, i : i + LANES]
        if s.scaled:
            weights *= r.kv_scales[at.slot, h : h + 1, x : x + s.piece]
        found = _dot(weights.astype(r.latents.dtype), _slabs(c, at.slot, h, x, rope=False), 0)
        if (h, x) == (0, 0):
            r.sums[rows] = jnp.where(opens, 0.0, r.sums[rows] * _broad(shrink, s.latent)) + found
        else:
            r.sums[rows] += found
        return weight

    for h, x in _pieces(s):
        weight = add(h, x, weight)
        peaks.append(_score(c, then, h, x))
    r.weight[rows] = weight
    r.peak[...] = _across(reduce(jnp.maximum, peaks))


def _finish(c: Call, at: Place) -> None:
    """Divide by the weights, and send the tile off when it is whole."""
    s, r = c.s, c.r

    @pl.when(at.chunk == 0)
    def _():
        drain(c, at.side)

    for i in range(s.tokens):
        token, rows = 0, slice(None)
        if s.rows > 1:
            token = at.chunk * s.tokens + i
            rows = pl.ds(pl.multiple_of(token * s.heads, s.heads), s.heads)
        top, weight = r.top[rows], jnp.sum(r.weight[rows], axis=1, keepdims=True)
        seen = top > MASKED
        lse = jnp.where(seen, (top + jnp.log2(weight)) * np.float32(1 / LOG2E), MASKED)
        diagonal = lax.broadcasted_iota(jnp.int32, lse.shape, 0) == lax.broadcasted_iota(
            jnp.int32, lse.shape, 1
        )
        r.result_lse[at.side, token] = jnp.sum(jnp.where(diagonal, lse, 0.0), axis=0, keepdims=True)
        share = jnp.where(seen, np.float32(1 / s.shrunk) / weight, 0.0)
        r.result[at.side, token] = (r.sums[rows] * _broad(share, s.latent)).astype(r.result.dtype)

    @pl.when((at.chunk + 1) * s.tokens >= c.tiles.count[at.tile])
    def _():
        each(c, at.tile, partial(send, c, at.side, c.tiles.first[at.tile]))
        r.pending[at.side] = c.tiles.count[at.tile]
