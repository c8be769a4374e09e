"""The device side of paged_attention on TPU: copies pages ahead and folds each block of keys into the softmax."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SLOTS = 3  # blocks in VMEM: one being read, one arriving, one asked for while the latency passes
MASKED = -1e30
LOG2E = math.log2(math.e)


class Form(NamedTuple):
    """What the caller asked for, known when the kernel is built."""

    scale: float
    soft_cap: float | None
    windowed: bool


class Static(NamedTuple):
    """Every size of one launch."""

    form: Form
    rows: int  # tokens of a tile
    keys: int  # keys of a block
    page: int
    table_width: int  # pages of a sequence in the table
    kv_heads: int
    height: int  # query rows of a tile and kv head: tokens times heads, and padding
    head: int
    width: int  # of a key and its value side by side
    rows_at_once: int  # query rows of one head multiplied together


class Pairs(NamedTuple):
    """A tile and a sequence that has rows in it, [pairs + 1] int32 each."""

    tile: Any
    seq: Any
    first: Any  # rows first:end are the sequence's
    end: Any
    shift: Any  # row + shift is the position in the sequence
    length: Any  # keys that the last row sees; 0: nothing to do
    low: Any  # first block that any row sees
    next: Any  # the next pair with something to do


class Cursor(NamedTuple):
    """Where to copy from next, and to; scalars that the core keeps."""

    pair: Any  # [1]
    block: Any  # [1]
    slot: Any  # [1]
    arriving: Any  # [1]: slot of the block to be waited for next


class Refs(NamedTuple):
    """The memory of one core."""

    q: Any  # [1, K, height, H or 2H]
    sinks: Any  # [K, height, 128] or None
    pages: Any  # [L, pages, K, page, 2H] in HBM
    out: Any  # like q
    kv: Any  # [SLOTS, K, keys, 2H]
    arrived: Any  # [SLOTS] DMA semaphores
    cursor: Any
    top: Any  # [K, height, 128]: largest score, the same in every lane
    weight: Any  # [K, height, 128]: sum of exp2(score - top), one partial sum a lane
    sums: Any  # [K, height, H or 2H]
    scores: Any  # [2, rows_at_once, keys]: of the part being folded and of the next


def scratch(s: Static, dtype) -> list:
    """Memory of the kernel, in the order of `Refs` from `kv` on."""
    lanes = s.head if s.head % LANES == 0 else s.width
    return [
        pltpu.VMEM((SLOTS, s.kv_heads, s.keys, s.width), dtype),
        pltpu.SemaphoreType.DMA((SLOTS,)),
        Cursor(*[pltpu.SMEM((1,), jnp.int32)] * 4),
        pltpu.VMEM((s.kv_heads, s.height, LANES), jnp.float32),
        pltpu.VMEM((s.kv_heads, s.height, LANES), jnp.float32),
        pltpu.VMEM((s.kv_heads, s.height, lanes), jnp.float32),
        pltpu.VMEM((2, s.rows_at_once, s.keys) if s.rows > 1 else (8, LANES), jnp.float32),
    ]


class _Call(NamedTuple):
    """Everything that one grid step works with."""

    s: Static
    r: Refs
    pairs: Pairs
    layer: Any
    window: Any
    table: Any
    last: Any  # end of this core's pairs


def body(s: Static, scalars: int, has_sinks: bool, *refs) -> None:
    """One grid step: one pair of this core's share."""
    (shares, options, table, *columns), rest = refs[:scalars], list(refs[scalars:])
    if not has_sinks:
        rest.insert(1, None)
    core, step = pl.program_id(0), pl.program_id(1)
    c = _Call(s, Refs(*rest), Pairs(*columns), options[0], options[1], table, shares[core + 1])
    pairs, pair = c.pairs, shares[core] + step

    @pl.when(step == 0)
    def _():
        _start(c, pair)

    @pl.when(pair < c.last)
    def _():
        @pl.when((step == 0) | (pairs.tile[pair] != pairs.tile[jnp.maximum(pair - 1, 0)]))
        def _():
            c.r.top[...] = jnp.full(c.r.top.shape, MASKED, jnp.float32)
            c.r.weight[...] = jnp.zeros(c.r.weight.shape, jnp.float32)
            c.r.sums[...] = jnp.zeros(c.r.sums.shape, jnp.float32)

        lax.fori_loop(pairs.low[pair], pl.cdiv(pairs.length[pair], s.keys), partial(_block, c, pair), None)

        @pl.when((pair + 1 == c.last) | (pairs.tile[pair] != pairs.tile[pair + 1]))
        def _():
            _finish(c.r)


def _start(c: _Call, pair) -> None:
    """Point at this core's first block and have all slots but one filled."""
    cursor = c.r.cursor
    begin = jnp.where(c.pairs.length[pair] > 0, pair, c.pairs.next[pair])
    cursor.pair[0], cursor.block[0] = begin, c.pairs.low[begin]
    cursor.slot[0] = cursor.arriving[0] = 0
    lax.fori_loop(0, SLOTS - 1, lambda _, x: _fetch(c), None)


def _fetch(c: _Call) -> None:
    """Start to copy the block under the cursor, and move on; past the end, nothing."""
    s, cursor = c.s, c.r.cursor
    pair, block, slot = cursor.pair[0], cursor.block[0], cursor.slot[0]

    @pl.when(pair < c.last)
    def _():
        at = c.pairs.seq[pair] * s.table_width + block * (s.keys // s.page)

        def copy(i, _):
            pltpu.make_async_copy(
                c.r.pages.at[c.layer, c.table[at + i]],
                c.r.kv.at[slot, :, pl.ds(pl.multiple_of(i * s.page, s.page), s.page)],
                c.r.arrived.at[slot],
            ).start()

        count = _pages_of(c, pair, block)

        @pl.when(count == s.keys // s.page)
        def _():
            for i in range(s.keys // s.page):
                copy(i, None)

        @pl.when(count < s.keys // s.page)
        def _():
            lax.fori_loop(0, count, copy, None)

        more = (block + 1) * s.keys < c.pairs.length[pair]
        ahead = jnp.where(more, pair, c.pairs.next[pair])
        cursor.pair[0] = ahead
        cursor.block[0] = jnp.where(more, block + 1, c.pairs.low[ahead])
        cursor.slot[0] = jnp.where(slot == SLOTS - 1, 0, slot + 1)


def _pages_of(c: _Call, pair, block):
    """How many pages of this block hold keys of the pair."""
    s = c.s
    return jnp.minimum(pl.cdiv(c.pairs.length[pair] - block * s.keys, s.page), s.keys // s.page)


def _block(c: _Call, pair, block, _) -> None:
    """Have one more block copied, and fold this one into the softmax."""
    s, pairs = c.s, c.pairs
    _fetch(c)
    slot = c.r.cursor.arriving[0]
    c.r.cursor.arriving[0] = jnp.where(slot == SLOTS - 1, 0, slot + 1)
    _wait(c, pair, block, slot)
    place = _Place(pair, block, slot)
    if s.rows == 1:
        _attend(c, place, True)
        return
    first, end, shift = pairs.first[pair], pairs.end[pair], pairs.shift[pair]
    begin = block * s.keys
    whole = (end - first == s.rows) & (begin + s.keys <= first + shift + 1)
    if s.form.windowed:
        whole &= begin > end - 1 + shift - c.window
    lax.cond(whole, lambda: _attend(c, place, False), lambda: _attend(c, place, True))


def _wait(c: _Call, pair, block, slot) -> None:
    """Until the block is there; then zero what it lacks, since 0 * NaN must not reach the sums."""
    s, r = c.s, c.r
    count = _pages_of(c, pair, block)
    whole, arrived = r.kv.at[slot], r.arrived.at[slot]
    left = c.pairs.length[pair] - block * s.keys

    @pl.when(count == s.keys // s.page)
    def _():
        pltpu.make_async_copy(whole, whole, arrived).wait()

    @pl.when(count < s.keys // s.page)
    def _():
        one = whole.at[:, pl.ds(0, s.page)]
        lax.fori_loop(0, count, lambda i, _: pltpu.make_async_copy(one, one, arrived).wait(), None)

    @pl.when(left < s.keys)
    def _():
        def clear(i, _):
            rows = pl.ds(pl.multiple_of(i * s.page, s.page), s.page)
            at = i * s.page + lax.broadcasted_iota(jnp.int32, (1, s.page, s.width), 1)
            r.kv[slot, :, rows] = jnp.where(at < left, r.kv[slot, :, rows], jnp.zeros((), r.kv.dtype))

        lax.fori_loop(left // s.page, s.keys // s.page, clear, None)


class _Place(NamedTuple):
    """A block of a pair, and the slot that it lies in."""

    pair: Any
    block: Any
    slot: Any


def _attend(c: _Call, place: _Place, masked: bool) -> None:
    """Fold one block of keys into the tile's softmax, `rows_at_once` query rows of one head at a time."""
    s = c.s
    chunks = s.height // s.rows_at_once
    steps = s.kv_heads * chunks

    def part(i):
        return i // chunks, pl.multiple_of(i % chunks * s.rows_at_once, s.rows_at_once)

    if s.rows == 1:  # few rows: all heads at once fit the registers
        scores = [_scores(c, place, *part(i)) for i in range(steps)]
        for i in range(steps):
            _fold(c, place, masked, *part(i), scores[i])
        return

    # The next part's product goes to the matrix unit while this part's exponentials are computed.
    def two(i, _):
        for parity in (0, 1):
            now = 2 * i + parity
            c.r.scores[1 - parity] = _scores(c, place, *part(jnp.minimum(now + 1, steps - 1)))
            _fold(c, place, masked, *part(now), c.r.scores[parity])

    c.r.scores[0] = _scores(c, place, 0, 0)
    lax.fori_loop(0, steps // 2, two, None)
    if steps % 2:
        _fold(c, place, masked, *part(steps - 1), c.r.scores[0])


def _scores(c: _Call, place: _Place, head, row) -> Array:
    """Products of some query rows with the block's keys, [rows_at_once, keys]."""
    s, r = c.s, c.r
    keys = r.kv[place.slot, head, :, slice(0, s.head) if s.head % LANES == 0 else slice(None)]
    return _dot(r.q[0, head, pl.ds(row, s.rows_at_once)], keys, contract=1)


def _fold(c: _Call, place: _Place, masked: bool, head, row, scores: Array) -> None:
    """One step of the online softmax."""
    s, r, rows = c.s, c.r, pl.ds(row, c.s.rows_at_once)
    scores = _bent(s.form, scores)
    if masked:
        scores = jnp.where(_seen(c, place, row, scores.shape), scores, MASKED)
    old = r.top[head, rows]
    top = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - _wide(top, s.keys))
    shrink = jnp.exp2(old - top)
    lanes = [weights[:, i : i + LANES] for i in range(0, s.keys, LANES)]
    r.top[head, rows] = top
    r.weight[head, rows] = r.weight[head, rows] * shrink + sum(lanes[1:], lanes[0])
    values = r.kv[place.slot, head, :, slice(s.head, None) if s.head % LANES == 0 else slice(None)]
    found = _dot(weights.astype(values.dtype), values, contract=0)
    r.sums[head, rows] = r.sums[head, rows] * _wide(shrink, found.shape[1]) + found


def _dot(x: Array, y: Array, contract: int) -> Array:
    """Rows of `x` times dimension `contract` of `y`, summed in float32."""
    precision = lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    return lax.dot_general(
        x, y, (((1,), (contract,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _wide(x: Array, lanes: int) -> Array:
    """[R, 128], the same in every lane -> [R, lanes]."""
    return x if lanes == LANES else jnp.concatenate([x] * (lanes // LANES), axis=1)


def _bent(form: Form, scores: Array) -> Array:
    """Scores in base 2."""
    if form.soft_cap is None:
        return scores * np.float32(form.scale * LOG2E)
    return np.float32(form.soft_cap * LOG2E) * jnp.tanh(scores * np.float32(form.scale / form.soft_cap))


def _seen(c: _Call, place: _Place, row, shape) -> Array:
    """Which keys of the block each query row may see."""
    s, pairs, pair = c.s, c.pairs, place.pair
    key = place.block * s.keys + lax.broadcasted_iota(jnp.int32, shape, 1)
    if s.rows == 1:
        position = pairs.first[pair] + pairs.shift[pair]
        seen = key <= position
    else:
        token = (row + lax.broadcasted_iota(jnp.int32, shape, 0)) % s.rows + pairs.tile[pair] * s.rows
        position = token + pairs.shift[pair]
        seen = (key <= position) & (token >= pairs.first[pair]) & (token < pairs.end[pair])
    if s.form.windowed:
        seen &= key > position - c.window
    return seen


def _finish(r: Refs) -> None:
    """Divide by the weights, the sinks' included."""

    def head(k, _):
        weight, sums = jnp.sum(r.weight[k], axis=1, keepdims=True), r.sums[k]
        if r.sinks is not None:
            top = jnp.maximum(r.top[k], r.sinks[k])
            shrink = jnp.exp2(r.top[k] - top)
            weight = weight * shrink + jnp.exp2(r.sinks[k] - top)
            sums = sums * _wide(shrink, sums.shape[1])
            weight = _wide(weight, sums.shape[1])
        r.out[0, k] = (sums / jnp.maximum(weight, 1e-30)).astype(r.out.dtype)

    lax.fori_loop(0, r.q.shape[1], head, None)
