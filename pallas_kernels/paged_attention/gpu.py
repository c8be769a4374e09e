"""paged_attention on GPU, in Triton: a program for every (tile of rows, kv head, part of the context).

A row is one token and one of the G query heads that share a kv head, so that all heads of a group meet the keys in
one product. A tile is up to `rows` rows of one sequence: all of it when it decodes, a piece of a chunk otherwise.
Each program walks over its keys in blocks, which it gathers through the page table. Where there are too few tiles
for the chip, contexts are cut into parts, put together at the end by their log-sum-exp.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import context_parts, guesses
from pallas_kernels import triton_attention as attention
from pallas_kernels.hadamard import turned
from pallas_kernels.int4_rows import PACKED
from pallas_kernels.op import Unfit
from pallas_kernels.pages import plain_and_scales
from pallas_kernels.row_tiles import Tiles, row_tiles
from pallas_kernels.triton_attention import LOG2_E, MASKED, State
from pallas_kernels.triton_limits import check_addresses, layer_index, load

MOST_ROWS = 128


class Static(NamedTuple):
    """What is known when one call is compiled."""

    rows: int  # of a tile
    keys: int  # of a block
    parts: int  # of every context
    columns: int  # the head size, rounded up to a power of two
    scale: float  # of scores in base 2
    soft_cap: float | None
    windowed: bool
    warps: int
    stages: int


class Scalars(NamedTuple):
    """The integers that say what a program works on."""

    tiles: Tiles
    shift: Array  # [B + 1]: row t of this step stands at position t + shift; nobody's rows come last
    length: Array  # [B + 1]
    first_new: Array  # [B + 1]: position of the first of this step's tokens
    table: Array  # [B, P]
    layer: Array  # [1]
    window: Array  # [1]


class Options(NamedTuple):
    """What a call may have; None where it does not."""

    scales: Array | None  # [L, pages, 2, K, page]
    sinks: Array | None  # [N]
    tree: Array | None  # [T]


def paged_attention(
    q, pages, page_table, q_starts, kv_lens, *,
    scale, first=None, layer=None, window=None, soft_cap=None, sinks=None, tree=None,
):  # fmt: skip
    """See `reference.paged_attention`. Heads of up to 256, a multiple of 16; pages of any size."""
    values, scales = plain_and_scales(pages if layer is not None else jax.tree.map(lambda x: x[None], pages))
    _check(q, values, scales)
    packed = values.dtype == PACKED
    q = turned(q) if packed else q
    (t, n, _), k, b = q.shape, values.shape[2], kv_lens.shape[0]
    g = n // k
    s = _static(q, k, b)._replace(scale=scale * LOG2_E, soft_cap=soft_cap, windowed=window is not None)
    starts = jnp.arange(b + 1, dtype=jnp.int32) if t == b else q_starts
    if t == b and g <= s.rows:
        at = jnp.arange(b, dtype=jnp.int32)
        tiles = Tiles(at, at * g, at * g + g)
    else:
        tiles = row_tiles(starts * g, t * g, s.rows)
    s = s._replace(parts=attention.parts(tiles.owner.shape[0] * k, page_table.shape[1] * values.shape[4]))
    first = kv_lens - starts[1:] + starts[:-1] if first is None else first
    nobody = jnp.zeros(1, jnp.int32)
    seen = jnp.int32(0) if window is None else jnp.asarray(window, jnp.int32)
    scalars = Scalars(
        tiles,
        jnp.append(first - starts[:-1], nobody),
        jnp.append(kv_lens, nobody),
        jnp.append(first, nobody),
        page_table,
        layer_index(layer),
        jnp.where(seen > 0, seen, np.int32(1 << 30)).reshape(1),
    )
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    # Where every sequence has one row, it is the only guess.
    out, lse = _launch(s, scalars, Options(scales, sinks, None if t == b else tree), q, values)
    return turned(out) if packed else out, lse


def _check(q, values, scales) -> None:
    """Refuse what the tensor cores or the addresses do not fit."""
    h = q.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise Unfit(f"queries are {q.dtype}; use bfloat16, float16 or float32")
    if scales is None and q.dtype != values.dtype:
        raise Unfit(
            f"queries are {q.dtype} and the cache, which has no scales, is {values.dtype}; use one type"
        )
    if h % 16 or h > 256:
        raise Unfit(f"head size {h}: use a multiple of 16 up to 256")
    check_addresses(pages=values)


def _static(q, k: int, b: int) -> Static:
    """Tiles as tall as the sequences bring rows; blocks and stages that fit the shared memory."""
    t, n, h = q.shape
    columns = pl.next_power_of_2(h)
    tensor_cores = q.dtype != jnp.float32
    tallest = MOST_ROWS if tensor_cores and columns <= 128 else MOST_ROWS // 2
    rows = max(16, min(tallest, pl.next_power_of_2(pl.cdiv(t, b) * (n // k))))
    keys = 64 if tensor_cores and columns <= 128 else 32
    warps, stages = 8 if rows == MOST_ROWS else 4, 4 if tensor_cores else 2
    return Static(rows, keys, 1, columns, 1.0, None, False, warps, stages)


def _launch(s: Static, scalars: Scalars, options: Options, q, values) -> tuple[Array, Array]:
    (t, n, h), k = q.shape, values.shape[2]
    out, lse = pl.pallas_call(
        functools.partial(_body, s, n // k),
        grid=(scalars.tiles.owner.shape[0], k, s.parts),
        out_shape=(
            jax.ShapeDtypeStruct((s.parts, t, n, h), q.dtype if s.parts == 1 else jnp.float32),
            jax.ShapeDtypeStruct((s.parts, t, n), jnp.float32),
        ),
        compiler_params=triton.CompilerParams(num_warps=s.warps, num_stages=s.stages),
        name="paged_attention",
    )(scalars, options, q, values)
    out, lse = (out[0], lse[0]) if s.parts == 1 else context_parts.combine(out, lse)
    return out.astype(q.dtype), lse


class _Tile(NamedTuple):
    """The rows of one program."""

    q: Array  # [rows, columns]
    position: Array  # [rows]
    length: Array  # keys that some row sees
    sequence: Array
    window: Array
    tree: Array | None  # [rows]
    first_new: Array


def _body(s: Static, g: int, scalars: Scalars, options: Options, q, values, out, lse) -> None:
    i, k, part = (pl.program_id(axis) for axis in range(3))
    first, end, sequence = scalars.tiles.first[i], scalars.tiles.end[i], scalars.tiles.owner[i]
    row = first + lax.iota(jnp.int32, s.rows)
    token, head, mine = lax.div(row, g), k * g + lax.rem(row, g), row < end
    column = lax.iota(jnp.int32, s.columns)
    here = mine[:, None] & (column < q.shape[-1])[None]
    shift = scalars.shift[sequence]
    lowest = lax.div(first, g) + shift
    length = jnp.minimum(scalars.length[sequence], lax.div(end - 1, g) + shift + 1)
    tile = _Tile(
        load(q.at[token[:, None], head[:, None], column[None]], here),
        token + shift,
        jnp.where(end > first, length, 0),
        sequence,
        scalars.window[0],
        None if options.tree is None else load(options.tree.at[token], mine),
        scalars.first_new[sequence],
    )
    state = attention.nothing_seen(s.rows, s.columns)
    if options.sinks is not None:
        once = mine & (part == 0)
        sink = load(options.sinks.at[head], mine) * LOG2_E
        state = State(jnp.where(once, sink, MASKED), jnp.where(once, 1.0, 0.0), state.sums)
    high = pl.cdiv(tile.length, s.keys)
    low = lax.div(jnp.maximum(lowest - tile.window + 1, 0), s.keys) if s.windowed else jnp.int32(0)
    low, high = attention.share(low, high, s.parts, part)
    step = functools.partial(_block, s, scalars, options, values, k, tile)
    # Blocks that all rows see whole need no masks.
    whole = lax.div(jnp.minimum(tile.length, lowest + 1 if tile.tree is None else tile.first_new), s.keys)
    edge = low if s.windowed else jnp.clip(whole, low, jnp.maximum(low, high))
    state = lax.fori_loop(low, edge, functools.partial(step, False), state)
    state = lax.fori_loop(edge, high, functools.partial(step, True), state)
    result = attention.output(state).astype(out.dtype)
    triton.store(out.at[part, token[:, None], head[:, None], column[None]], result, mask=here)
    triton.store(lse.at[part, token, head], attention.log_sum_exp(state), mask=mine)


def _block(
    s: Static, scalars: Scalars, options: Options, pages, k, tile: _Tile, masked: bool, i, state: State
):
    """`state` after one more block of keys."""
    packed, page, dtype = pages.dtype == PACKED, pages.shape[-2], tile.q.dtype
    h = pages.shape[-1] // (1 if packed else 2)
    at = i * s.keys + lax.iota(jnp.int32, s.keys)
    column = lax.iota(jnp.int32, s.columns)
    written = at < tile.length if masked else None
    ids, offset = load(scalars.table.at[tile.sequence, lax.div(at, page)], written), lax.rem(at, page)
    here = None if h == s.columns else (column < h)[None]
    if written is not None:
        here = written[:, None] if here is None else written[:, None] & here
    where = (scalars.layer[0], ids[:, None], k, offset[:, None])
    keys = load(pages.at[(*where, column[None])], here)
    if packed:
        keys, values = (((keys.astype(jnp.int32) << up) >> 28).astype(jnp.float32) + 0.5 for up in (28, 24))
    else:
        values = load(pages.at[(*where, h + column[None])], here)
    keys, values = keys.astype(dtype), values.astype(dtype)
    scores = attention.product(tile.q, keys, 1) * s.scale
    scale_of_values = None
    if options.scales is not None:
        scores *= load(options.scales.at[scalars.layer[0], ids, 0, k, offset], written)[None]
        scale_of_values = load(options.scales.at[scalars.layer[0], ids, 1, k, offset], written)
    if s.soft_cap is not None:
        scores = _capped(scores, s.soft_cap * LOG2_E)
    seen = None if written is None else _seen(s, tile, at[None]) & written[None]
    return attention.with_block(state, scores, seen, values, scale_of_values)


def _seen(s: Static, tile: _Tile, at: Array) -> Array:
    """[rows, keys]: whether the row may see the key at each position."""
    position = tile.position[:, None]
    seen = at <= position
    if s.windowed:
        seen &= at > position - tile.window
    if tile.tree is not None:
        seen &= guesses.on_branch(tile.tree[:, None], at, position, tile.first_new)
    return seen


def _capped(scores: Array, cap: float) -> Array:
    """cap * tanh(scores / cap), by the exponential that the chip has."""
    return cap - 2 * cap / (1 + jnp.exp2(scores * (2 * LOG2_E / cap)))
