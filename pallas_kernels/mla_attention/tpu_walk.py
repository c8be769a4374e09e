"""What mla_attention on TPU walks over: tiles, and blocks of pages copied ahead of their use; results copied out."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pages import LANES, ROPE

SLOTS = 4  # blocks in VMEM: one being summed, one being scored, two arriving
MASKED = -1e30


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


class Call(NamedTuple):
    """Everything that a step works with."""

    s: Static
    r: Refs
    tiles: Tiles
    layer: Any
    table: Any
    tree: Any  # [T]: bits of the guesses that each token sees
    last: Any  # end of this core's tiles


def after(c: Call, at: Place) -> Place:
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


def ask(c: Call, tile, side) -> None:
    """Start to copy a tile's queries; past the end, nothing."""

    @pl.when(tile < c.last)
    def _():
        def copy(i, _):
            for source, to in ((c.r.q_latent, c.r.latents), (c.r.q_rope, c.r.ropes)):
                pltpu.make_async_copy(
                    source.at[c.tiles.row[tile] + i], to.at[side, i], c.r.asked.at[side]
                ).start()

        each(c, tile, copy)


def each(c: Call, tile, do) -> None:
    if c.s.rows == 1:
        do(0, None)
    else:
        lax.fori_loop(0, c.tiles.count[tile], do, None)


def receive(c: Call, at: Place) -> None:
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

    each(c, at.tile, wait)  # all of them first: copies may arrive in any order
    each(c, at.tile, widen)


def fetch(c: Call) -> None:
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


def _pages_of(c: Call, tile, block):
    """How many pages of this block hold keys of the tile."""
    return jnp.minimum(pl.cdiv(c.tiles.length[tile] - block * c.s.keys, c.s.page), c.s.keys // c.s.page)


def wait_for(c: Call, at: Place) -> None:
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


def _clear(c: Call, slot, left, i, _) -> None:
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


def send(c: Call, side, first, i, _) -> None:
    """Start to copy the result of a tile's token i out."""
    for source, to in ((c.r.result, c.r.out), (c.r.result_lse, c.r.lse)):
        pltpu.make_async_copy(source.at[side, i], to.at[first + i], c.r.sent.at[side]).start()


def drain(c: Call, side) -> None:
    """Wait for the results of this side to be out."""
    r = c.r

    def wait(_i, _):
        for ref in (r.result.at[side, 0], r.result_lse.at[side, 0]):
            pltpu.make_async_copy(ref, ref, r.sent.at[side]).wait()

    lax.fori_loop(0, r.pending[side], wait, None)
    r.pending[side] = 0


def fill(c: Call, begin) -> None:
    """Zeros and a log-sum-exp of nothing for the rows of tiles without keys."""
    r = c.r
    r.result[0, 0] = jnp.zeros(r.result.shape[2:], r.result.dtype)
    r.result_lse[0, 0] = jnp.full(r.result_lse.shape[2:], MASKED, jnp.float32)

    def tile(i, _):
        def blank(token, _):
            for source, to in ((r.result, r.out), (r.result_lse, r.lse)):
                copy = pltpu.make_async_copy(source.at[0, 0], to.at[c.tiles.first[i] + token], r.sent.at[0])
                copy.start()
                copy.wait()

        @pl.when(c.tiles.length[i] == 0)
        def _():
            lax.fori_loop(0, c.tiles.count[i], blank, None)

    lax.fori_loop(begin, c.last, tile, None)
