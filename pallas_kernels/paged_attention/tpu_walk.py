"""What paged_attention on TPU walks over: (tile, sequence) pairs, and blocks of pages copied ahead of their use."""

import math
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
    scaled: bool  # whether every key and value has a scale
    sinks: bool
    tree: bool
    packed: bool = False  # whether a byte holds a code of a key and one of its value


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
    at_once: int  # query rows of one head multiplied together
    narrow: bool  # whether exponentials are taken in bfloat16, where the chip can

    @property
    def lanes(self) -> int:
        """Values of a query: heads that do not fill 128 lanes lie beside zeros, for the whole row of the cache."""
        return self.head if self.head % LANES == 0 else self.width

    @property
    def chunks(self) -> int:
        """In how many parts a head's query rows are multiplied."""
        return self.height // self.at_once


class Pairs(NamedTuple):
    """A tile and a sequence that has rows in it, [pairs + 1] int32 each."""

    tile: Any
    seq: Any
    first: Any  # rows first:end are the sequence's
    end: Any
    shift: Any  # row + shift is the position in the sequence
    old: Any  # position of the sequence's first new token
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

    q: Any  # [1, K, height, lanes]
    sinks: Any  # [K, height, 128] in base 2, or None
    tree: Any  # [1, 1, chunks, at_once] or None
    pages: Any  # [L, pages, K, page, 2H] in HBM
    scales: Any  # [L, pages, 2, K, page] in HBM, or None
    out: Any  # like q
    lse: Any  # [1, 1, K * chunks, at_once, or 128 if that is more]
    kv: Any  # [SLOTS, K, keys, 2H]
    kv_scales: Any  # [SLOTS, 2, K, keys] or None
    arrived: Any  # [SLOTS] DMA semaphores
    cursor: Any
    state: Any  # what the form for one row or for many keeps


def scratch(s: Static, cache, state) -> list:
    """Memory of the kernel, in the order of `Refs` from `kv` on."""
    return [
        pltpu.VMEM((SLOTS, s.kv_heads, s.keys, s.width), cache),
        *([pltpu.VMEM((SLOTS, 2, s.kv_heads, s.keys), jnp.float32)] if s.form.scaled else []),
        pltpu.SemaphoreType.DMA((SLOTS,)),
        Cursor(*[pltpu.SMEM((1,), jnp.int32)] * 4),
        state,
    ]


class Call(NamedTuple):
    """Everything that one grid step works with."""

    s: Static
    r: Refs
    pairs: Pairs
    layer: Any
    window: Any
    table: Any
    last: Any  # end of this core's pairs


def start(c: Call, pair) -> None:
    """Point at this core's first block and have all slots but one filled."""
    cursor = c.r.cursor
    begin = jnp.where(c.pairs.length[pair] > 0, pair, c.pairs.next[pair])
    cursor.pair[0], cursor.block[0] = begin, c.pairs.low[begin]
    cursor.slot[0] = cursor.arriving[0] = 0
    lax.fori_loop(0, SLOTS - 1, lambda _, x: _fetch(c), None)


def _fetch(c: Call) -> None:
    """Start to copy the block under the cursor, and move on; past the end, nothing."""
    s, r, cursor = c.s, c.r, c.r.cursor
    pair, block, slot = cursor.pair[0], cursor.block[0], cursor.slot[0]

    @pl.when(pair < c.last)
    def _():
        at = c.pairs.seq[pair] * s.table_width + block * (s.keys // s.page)

        def copy(i, _):
            page, tokens = c.table[at + i], pl.ds(pl.multiple_of(i * s.page, s.page), s.page)
            memories = [(r.pages, r.kv.at[slot, :, tokens])]
            if s.form.scaled:
                memories.append((r.scales, r.kv_scales.at[slot, :, :, tokens]))
            for source, to in memories:
                pltpu.make_async_copy(source.at[c.layer, page], to, r.arrived.at[slot]).start()

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


def _pages_of(c: Call, pair, block):
    """How many pages of this block hold keys of the pair."""
    s = c.s
    return jnp.minimum(pl.cdiv(c.pairs.length[pair] - block * s.keys, s.page), s.keys // s.page)


def next_block(c: Call, pair, block):
    """Have one more block copied, and wait for this one, the next of all -> the slot that it lies in."""
    s, r = c.s, c.r
    _fetch(c)
    slot = r.cursor.arriving[0]
    r.cursor.arriving[0] = jnp.where(slot == SLOTS - 1, 0, slot + 1)
    count, left = _pages_of(c, pair, block), c.pairs.length[pair] - block * s.keys

    def wait(tokens) -> None:
        for memory in [r.kv.at[slot, :, tokens]] + (
            [r.kv_scales.at[slot, :, :, tokens]] if s.form.scaled else []
        ):
            pltpu.make_async_copy(memory, memory, r.arrived.at[slot]).wait()

    pl.when(count == s.keys // s.page)(lambda: wait(slice(None)))

    @pl.when(count < s.keys // s.page)
    def _():
        lax.fori_loop(0, count, lambda *_: wait(pl.ds(0, s.page)), None)

    pl.when(left < s.keys)(lambda: _clear(c, slot, left))
    return slot


def _clear(c: Call, slot, left) -> None:
    """Zero the block's tokens from `left` on, since 0 * NaN must not reach the sums."""
    s, r = c.s, c.r

    def clear(i, _):
        tokens = pl.ds(pl.multiple_of(i * s.page, s.page), s.page)
        if not s.form.packed:  # their codes are finite, whatever they are
            at = i * s.page + lax.broadcasted_iota(jnp.int32, (1, s.page, s.width), 1)
            kept = r.kv[slot, :, tokens]
            kept = kept.astype(jnp.float32) if s.form.scaled else kept
            r.kv[slot, :, tokens] = jnp.where(at < left, kept, jnp.zeros((), kept.dtype)).astype(r.kv.dtype)
        if s.form.scaled:
            at = i * s.page + lax.broadcasted_iota(jnp.int32, (2, s.kv_heads, s.page), 2)
            r.kv_scales[slot, :, :, tokens] = jnp.where(at < left, r.kv_scales[slot, :, :, tokens], 0.0)

    lax.fori_loop(left // s.page, s.keys // s.page, clear, None)


def dot(x: Array, y: Array, contract: int) -> Array:
    """Rows of `x` times dimension `contract` of `y`, which may have fewer bits, summed in float32."""
    precision = None
    if x.dtype == jnp.float32:
        precision, y = lax.Precision.HIGHEST, y.astype(jnp.float32)
    return lax.dot_general(
        x, y, (((1,), (contract,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def codes(packed: Array, *, high: bool) -> Array:
    """What the low or high nibbles of bytes, which are the keys' or the values', stand for beside their scales."""
    wide = packed.astype(jnp.int32)
    return ((wide << (24 if high else 28)) >> 28).astype(jnp.float32) + np.float32(0.5)


def ended(top: Array, weight: Array, sink: Array | None) -> tuple[Array, Array]:
    """(what its sums are multiplied by, its log-sum-exp) of a softmax in base 2 at its end, with the sinks.

    Rows that saw no key have summed masked ones, and get zeros.
    """
    seen, peak = top > MASKED, top
    weight = jnp.where(seen, weight, 0.0)
    if sink is not None:
        peak = jnp.maximum(top, sink)
        weight = weight * jnp.exp2(top - peak) + jnp.exp2(sink - peak)
    share = jnp.where(seen, jnp.exp2(top - peak) / jnp.maximum(weight, 1e-30), 0.0)
    lse = (peak + jnp.log2(jnp.maximum(weight, 1e-30))) * np.float32(1 / LOG2E)
    return share, jnp.where(peak > MASKED, lse, MASKED)


def inner_scale(form: Form) -> np.float32:
    """What products of queries and keys are multiplied by before `bent`."""
    return np.float32(form.scale * LOG2E if form.soft_cap is None else form.scale / form.soft_cap)


def bent(form: Form, scores: Array) -> Array:
    """Scaled scores -> scores in base 2."""
    return scores if form.soft_cap is None else np.float32(form.soft_cap * LOG2E) * jnp.tanh(scores)
