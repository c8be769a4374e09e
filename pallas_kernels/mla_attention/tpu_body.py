"""The device side of mla_attention on TPU: copies ahead, and a step that overlaps its own sums with the next scores."""

import math
from functools import partial, reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import guesses
from pallas_kernels.pages import LANES, ROPE

SLOTS = 4  # blocks in VMEM: one being summed, one being scored, two arriving
MASKED = -1e30
LOG2E = math.log2(math.e)


class Static(NamedTuple):
    """Every size of one launch."""

    rows: int  # tokens of a tile
    tokens: int  # tokens of a step
    keys: int  # keys of a block, the even ones and then the odd ones
    piece: int  # keys whose weights are computed together
    page: int
    table_width: int  # pages of a sequence in the table
    heads: int
    latent: int
    scale: float
    scaled: bool  # whether every token has a scale
    guessed: bool  # whether rows are guesses of a tree
    shrunk: float  # what the latents are multiplied by when they are read as another type of 8 bits

    @property
    def slabs(self) -> int:
        return self.latent // LANES

    @property
    def height(self) -> int:
        """Query rows of a step."""
        return self.tokens * self.heads


class Tiles(NamedTuple):
    """Tokens of one sequence, [tiles + 1] int32 each."""

    row: Any  # first row of the queries
    first: Any  # first row of the results
    count: Any  # tokens
    seq: Any
    shift: Any  # row + shift is the position in the sequence
    old: Any  # position of the sequence's first new token
    length: Any  # keys that the last row sees; 0: nothing to do
    next: Any  # this tile or the first one after it that has keys


class Place(NamedTuple):
    """A step: `tokens` of a tile from chunk * tokens on, against a block of keys."""

    tile: Any
    block: Any
    chunk: Any
    slot: Any  # where the block lies
    side: Any  # where the tile's queries lie and its results go: 0 or 1


class Refs(NamedTuple):
    """The memory of one core."""

    q_latent: Any  # [T, N, C] in HBM
    q_rope: Any  # [T, N, 64] in HBM
    pages: Any  # [L, pages, slabs, page/2, 128] in HBM
    scales: Any  # [L, pages, 2, page/2] in HBM, or None
    out: Any  # [T, N, C] in HBM
    lse: Any  # [T, 1, 128] in HBM
    kv: Any  # [SLOTS, slabs, keys/2, 128]
    kv_scales: Any  # [SLOTS, 2, keys/2] or None
    latents: Any  # [2, rows, N, C]: queries
    ropes: Any  # [2, rows, N, 64]
    wide: Any  # [2, rows, N, 128]: the rope queries beside zeros, for even and for odd keys
    scores: Any  # [height, keys]: of the step to come
    peak: Any  # [height, 128]: their largest
    top: Any  # [rows * N, 128]: largest score so far
    weight: Any  # [rows * N, 128]: sum of exp2(score - top), one partial sum a lane
    sums: Any  # [rows * N, C]
    result: Any  # [2, rows, N, C]
    result_lse: Any  # [2, rows, 1, 128]
    arrived: Any  # [SLOTS] DMA semaphores
    asked: Any  # [2]: queries
    sent: Any  # [2]: results
    cursor: Any  # [4] in SMEM: tile, block and slot to be copied next; unused
    pending: Any  # [2] in SMEM: results on their way


def scratch(s: Static, dtype, cache) -> list:
    """Memory of the kernel, in the order of `Refs` from `kv` on."""
    f32, rows = jnp.float32, s.rows * s.heads
    return [
        pltpu.VMEM((SLOTS, 2 * s.slabs + 1, s.keys // 2, LANES), cache),
        *([pltpu.VMEM((SLOTS, 2, s.keys // 2), f32)] if s.scaled else []),
        pltpu.VMEM((2, s.rows, s.heads, s.latent), dtype),
        pltpu.VMEM((2, s.rows, s.heads, ROPE), dtype),
        pltpu.VMEM((2, s.rows, s.heads, LANES), dtype),
        pltpu.VMEM((s.height, s.keys), f32),
        pltpu.VMEM((s.height, LANES), f32),
        pltpu.VMEM((rows, LANES), f32),
        pltpu.VMEM((rows, LANES), f32),
        pltpu.VMEM((rows, s.latent), f32),
        pltpu.VMEM((2, s.rows, s.heads, s.latent), dtype),
        pltpu.VMEM((2, s.rows, 1, LANES), f32),
        pltpu.SemaphoreType.DMA((SLOTS,)),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((3,), jnp.int32),
        pltpu.SMEM((2,), jnp.int32),
    ]


class _Call(NamedTuple):
    """Everything that a step works with."""

    s: Static
    r: Refs
    tiles: Tiles
    layer: Any
    table: Any
    tree: Any  # [T]: bits of the guesses that each token sees
    last: Any  # end of this core's tiles


def body(s: Static, scalars: int, inputs: int, *refs) -> None:
    """All of one core's tiles; inputs beyond the cache are the results' own memory."""
    (shares, layer, table, tree, *columns), rest = refs[:scalars], list(refs[scalars:])
    del rest[4 if s.scaled else 3 : inputs]
    if not s.scaled:
        rest.insert(3, None)
        rest.insert(7, None)
    core, tiles = pl.program_id(0), Tiles(*columns)
    begin, last = shares[core], shares[core + 1]
    c = _Call(s, Refs(*rest), tiles, layer[0], table, tree, last)
    start = Place(tiles.next[begin], np.int32(0), np.int32(0), np.int32(0), np.int32(0))
    c.r.pending[0] = c.r.pending[1] = 0

    @pl.when(start.tile < last)
    def _():
        _start(c, Place(start.tile, 0, 0, 0, 0))
        lax.while_loop(lambda at: at.tile < last, partial(_step, c), start)

    for side in range(2):
        _drain(c, side)
    _fill(c, begin)


def _start(c: _Call, at: Place) -> None:
    """Ask for the first tiles and blocks, and score the first step."""
    r, cursor = c.r, c.r.cursor
    cursor[0], cursor[1], cursor[2] = at.tile, 0, 0
    _ask(c, at.tile, at.side)
    lax.fori_loop(0, SLOTS - 1, lambda *_: _fetch(c), None)
    _ask(c, c.tiles.next[at.tile + 1], 1 - at.side)
    _receive(c, at)
    _wait(c, at)
    r.peak[...] = _across(reduce(jnp.maximum, [_score(c, at, h, x) for h, x in _pieces(c.s)]))


def _step(c: _Call, at: Place) -> Place:
    """Sum this step and score the next; finish the tile where it ends."""
    s, tiles = c.s, c.tiles
    then = _after(c, at)
    new_tile, real = then.tile != at.tile, then.tile < c.last

    @pl.when(new_tile & real)
    def _():
        _ask(c, tiles.next[then.tile + 1], at.side)
        _receive(c, then)

    @pl.when((then.slot != at.slot) & real)
    def _():
        _fetch(c)
        _wait(c, then)

    _fold(c, at, then)

    @pl.when((at.block + 1) * s.keys >= tiles.length[at.tile])
    def _():
        _finish(c, at)

    return then


def _after(c: _Call, at: Place) -> Place:
    """The step after this one: the tile's next tokens, or its next block, or the next tile."""
    s, tiles = c.s, c.tiles
    chunk_ends = np.bool_(True) if s.rows == 1 else (at.chunk + 1) * s.tokens >= tiles.count[at.tile]
    tile_ends = chunk_ends & ((at.block + 1) * s.keys >= tiles.length[at.tile])
    slot = jnp.where(at.slot == SLOTS - 1, 0, at.slot + 1)
    return Place(
        jnp.where(tile_ends, tiles.next[at.tile + 1], at.tile),
        jnp.where(tile_ends, 0, jnp.where(chunk_ends, at.block + 1, at.block)),
        jnp.where(chunk_ends, 0, at.chunk + 1),
        jnp.where(chunk_ends, slot, at.slot),
        jnp.where(tile_ends, 1 - at.side, at.side),
    )


def _ask(c: _Call, tile, side) -> None:
    """Start to copy a tile's queries; past the end, nothing."""

    @pl.when(tile < c.last)
    def _():
        def copy(i, _):
            for source, to in ((c.r.q_latent, c.r.latents), (c.r.q_rope, c.r.ropes)):
                pltpu.make_async_copy(
                    source.at[c.tiles.row[tile] + i], to.at[side, i], c.r.asked.at[side]
                ).start()

        _each(c, tile, copy)


def _each(c: _Call, tile, do) -> None:
    if c.s.rows == 1:
        do(0, None)
    else:
        lax.fori_loop(0, c.tiles.count[tile], do, None)


def _receive(c: _Call, at: Place) -> None:
    """Wait for a tile's queries, and lay the rope's out for even and for odd keys."""
    r = c.r

    def wait(i, _):
        for to in (r.latents.at[at.side, i], r.ropes.at[at.side, i]):
            pltpu.make_async_copy(to, to, r.asked.at[at.side]).wait()

    def widen(i, _):
        rope = r.ropes[at.side, i]
        zeros = jnp.zeros_like(rope)
        r.wide[0, i] = jnp.concatenate([rope, zeros], axis=1)
        r.wide[1, i] = jnp.concatenate([zeros, rope], axis=1)

    _each(c, at.tile, wait)  # all of them first: copies may arrive in any order
    _each(c, at.tile, widen)


def _fetch(c: _Call) -> None:
    """Start to copy the block under the cursor, and move on; past the end, nothing."""
    s, r, cursor = c.s, c.r, c.r.cursor
    tile, block, slot = cursor[0], cursor[1], cursor[2]

    @pl.when(tile < c.last)
    def _():
        at = c.tiles.seq[tile] * s.table_width + block * (s.keys // s.page)

        def copy(i, _):
            rows = pl.ds(i * (s.page // 2), s.page // 2)
            page = c.table[at + i]
            pltpu.make_async_copy(
                r.pages.at[c.layer, page], r.kv.at[slot, :, rows], r.arrived.at[slot]
            ).start()
            if s.scaled:
                scales = r.kv_scales.at[slot, :, rows]
                pltpu.make_async_copy(r.scales.at[c.layer, page], scales, r.arrived.at[slot]).start()

        _unrolled(_pages_of(c, tile, block), s.keys // s.page, copy)
        more = (block + 1) * s.keys < c.tiles.length[tile]
        cursor[0] = jnp.where(more, tile, c.tiles.next[tile + 1])
        cursor[1] = jnp.where(more, block + 1, 0)
        cursor[2] = jnp.where(slot == SLOTS - 1, 0, slot + 1)


def _unrolled(count, most: int, do) -> None:
    """`do` for 0 .. count - 1, without a loop where that is the most that there can be."""

    @pl.when(count == most)
    def _():
        for i in range(most):
            do(i, None)

    @pl.when(count < most)
    def _():
        lax.fori_loop(0, count, do, None)


def _pages_of(c: _Call, tile, block):
    """How many pages of this block hold keys of the tile."""
    return jnp.minimum(pl.cdiv(c.tiles.length[tile] - block * c.s.keys, c.s.page), c.s.keys // c.s.page)


def _wait(c: _Call, at: Place) -> None:
    """Until the block is there; then zero what it lacks, since 0 * NaN must not reach the sums."""
    s, r = c.s, c.r
    left = c.tiles.length[at.tile] - at.block * s.keys
    half = s.page // 2

    memories = (r.kv, r.kv_scales) if s.scaled else (r.kv,)

    def wait(rows) -> None:
        for memory in memories:
            pltpu.make_async_copy(
                memory.at[at.slot, :, rows], memory.at[at.slot, :, rows], r.arrived.at[at.slot]
            ).wait()

    pages = _pages_of(c, at.tile, at.block)
    pl.when(pages == s.keys // s.page)(lambda: wait(slice(None)))

    @pl.when(pages < s.keys // s.page)
    def _():
        lax.fori_loop(0, pages, lambda *_: wait(pl.ds(0, half)), None)

    @pl.when(left < s.keys)
    def _():
        lax.fori_loop(left // s.page, s.keys // s.page, partial(_clear, c, at.slot, left), None)


def _clear(c: _Call, slot, left, i, _) -> None:
    """Zero the tokens of page i from `left` on."""
    s, r, half = c.s, c.r, c.s.page // 2
    rows = pl.ds(pl.multiple_of(i * half, half), half)
    even = i * s.page + 2 * lax.broadcasted_iota(jnp.int32, (half, LANES), 0)
    rope = even + lax.broadcasted_iota(jnp.int32, (half, LANES), 1) // ROPE
    for slab in range(2 * s.slabs + 1):
        token = rope if slab == 2 * s.slabs else even + slab // s.slabs
        values = r.kv[slot, slab, rows].astype(jnp.float32)
        r.kv[slot, slab, rows] = jnp.where(token < left, values, 0.0).astype(r.kv.dtype)
    if s.scaled:
        token = i * s.page + 2 * lax.broadcasted_iota(jnp.int32, (2, half), 1)
        token += lax.broadcasted_iota(jnp.int32, (2, half), 0)
        r.kv_scales[slot, :, rows] = jnp.where(token < left, r.kv_scales[slot, :, rows], 0.0)


def _pieces(s: Static) -> list[tuple[int, int]]:
    """(0 for even keys and 1 for odd, first row of pages) of all pieces of a block."""
    return [(h, x) for h in range(2) for x in range(0, s.keys // 2, s.piece)]


def _columns(s: Static, h: int, x: int) -> slice:
    return slice(h * (s.keys // 2) + x, h * (s.keys // 2) + x + s.piece)


def _slabs(c: _Call, slot, h: int, x: int, rope: bool) -> Array:
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


def _score(c: _Call, at: Place, h: int, x: int) -> Array:
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


def _seen(c: _Call, at: Place, h: int, x: int) -> Array:
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


def _guesses_seen(c: _Call, at: Place, h: int, x: int, i: int) -> Array:
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


def _fold(c: _Call, at: Place, then: Place) -> None:
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


def _finish(c: _Call, at: Place) -> None:
    """Divide by the weights, and send the tile off when it is whole."""
    s, r = c.s, c.r

    @pl.when(at.chunk == 0)
    def _():
        _drain(c, at.side)

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
        _each(c, at.tile, partial(_send, c, at.side, c.tiles.first[at.tile]))
        r.pending[at.side] = c.tiles.count[at.tile]


def _send(c: _Call, side, first, i, _) -> None:
    """Start to copy the result of a tile's token i out."""
    for source, to in ((c.r.result, c.r.out), (c.r.result_lse, c.r.lse)):
        pltpu.make_async_copy(source.at[side, i], to.at[first + i], c.r.sent.at[side]).start()


def _drain(c: _Call, side) -> None:
    """Wait for the results of this side to be out."""
    r = c.r

    def wait(_i, _):
        for ref in (r.result.at[side, 0], r.result_lse.at[side, 0]):
            pltpu.make_async_copy(ref, ref, r.sent.at[side]).wait()

    lax.fori_loop(0, r.pending[side], wait, None)
    r.pending[side] = 0


def _fill(c: _Call, begin) -> None:
    """Zeros and a log-sum-exp of nothing for the rows of tiles without keys."""
    r = c.r
    r.result[0, 0] = jnp.zeros(r.result.shape[2:], r.result.dtype)
    r.result_lse[0, 0] = jnp.full(r.result_lse.shape[2:], MASKED, jnp.float32)

    def tile(i, _):
        def send(token, _):
            for source, to in ((r.result, r.out), (r.result_lse, r.lse)):
                copy = pltpu.make_async_copy(source.at[0, 0], to.at[c.tiles.first[i] + token], r.sent.at[0])
                copy.start()
                copy.wait()

        @pl.when(c.tiles.length[i] == 0)
        def _():
            lax.fori_loop(0, c.tiles.count[i], send, None)

    lax.fori_loop(begin, c.last, tile, None)
