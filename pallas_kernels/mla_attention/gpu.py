"""mla_attention on GPU, in Triton: a program for every (tile of rows, part of the context).

A row is one token and one head; the rows of a sequence, token by token, are cut into tiles. Each program walks over
the latents of its sequence in blocks: keys and, but for the rope, values, read once for both products. A block is
the even tokens of consecutive rows of a page and then the odd ones, as they lie there.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import context_parts, guesses
from pallas_kernels import triton_attention as attention
from pallas_kernels.int4_rows import PACKED
from pallas_kernels.op import Unfit
from pallas_kernels.pages import latent_of, plain_and_scales
from pallas_kernels.row_tiles import Tiles, row_tiles
from pallas_kernels.triton_attention import LOG2_E, State
from pallas_kernels.triton_limits import check_addresses, layer_index, load

MOST_ROWS = 64  # so that sums of 512 columns fit the registers of eight warps


class Static(NamedTuple):
    """What is known when one call is compiled."""

    rows: int  # of a tile
    keys: int  # of a block
    parts: int  # of every context
    scale: float  # of scores in base 2
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


class Options(NamedTuple):
    """What a call may have; None where it does not."""

    scales: Array | None  # [L, pages, 2, page/2]
    tree: Array | None  # [T]


def mla_attention(
    q_latent, q_rope, pages, page_table, q_starts, kv_lens, *,
    scale, first=None, layer=None, tree=None,
):  # fmt: skip
    """See `reference.mla_attention`. Latents of a power of two of values; caches in 8 bits with scales."""
    values, scales = plain_and_scales(pages if layer is not None else jax.tree.map(lambda x: x[None], pages))
    _check(q_latent, q_rope, values, scales)
    (t, n, _), b, page = q_latent.shape, kv_lens.shape[0], 2 * values.shape[-2]
    rows = max(16, min(MOST_ROWS, pl.next_power_of_2(pl.cdiv(t, b) * n)))
    new = q_starts[1:] - q_starts[:-1]
    first = kv_lens - new if first is None else first
    starts = q_starts
    if t == b:
        starts, first = jnp.arange(b + 1, dtype=jnp.int32), jnp.where(new > 0, first, -1)
    tiles = row_tiles(starts * n, t * n, rows, unit=n)
    parts = attention.parts(tiles.owner.shape[0], page_table.shape[1] * page)
    tensor_cores = q_latent.dtype != jnp.float32
    s = Static(rows, 32 if tensor_cores else 16, parts, scale * LOG2_E, 8 if rows == MOST_ROWS else 4, 3)
    nobody = jnp.zeros(1, jnp.int32)
    shift, length = jnp.append(first - starts[:-1], nobody), jnp.append(kv_lens, nobody)
    scalars = Scalars(tiles, shift, length, jnp.append(first, nobody), page_table, layer_index(layer))
    # Where every sequence has one row, it is the only guess.
    options = Options(scales, None if t == b else tree)
    out, sizes = _launch(s, scalars, options, q_latent, q_rope, values)
    out, sizes = (out[0], sizes[0]) if parts == 1 else context_parts.combine(out, sizes)
    return out.astype(q_latent.dtype), sizes


def _check(q_latent, q_rope, values, scales) -> None:
    """Refuse what the tensor cores or the addresses do not fit."""
    latent, lanes = latent_of(values), values.shape[-1]
    if q_latent.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise Unfit(f"queries are {q_latent.dtype}; use bfloat16, float16 or float32")
    if scales is None and values.dtype != q_latent.dtype:
        raise Unfit(f"queries are {q_latent.dtype} and latents without scales {values.dtype}; use one type")
    if latent & (latent - 1) or lanes & (lanes - 1) or latent > 512 or lanes < 32:
        raise Unfit(f"latents of {latent} values and {q_rope.shape[-1]} of rope: powers of two, 512 at most")
    if values.dtype == PACKED:
        raise Unfit("latents in 4 bits: use float8_e4m3fn, float8_e5m2 or int8")
    check_addresses(pages=values)


def _launch(s: Static, scalars: Scalars, options: Options, q_latent, q_rope, values):
    t, n, latent = q_latent.shape
    return pl.pallas_call(
        functools.partial(_body, s),
        grid=(scalars.tiles.owner.shape[0], s.parts),
        out_shape=(
            jax.ShapeDtypeStruct((s.parts, t, n, latent), q_latent.dtype if s.parts == 1 else jnp.float32),
            jax.ShapeDtypeStruct((s.parts, t, n), jnp.float32),
        ),
        compiler_params=triton.CompilerParams(num_warps=s.warps, num_stages=s.stages),
        name="mla_attention",
    )(scalars, options, q_latent, q_rope, values)


class _Tile(NamedTuple):
    """The rows of one program."""

    latent: Array  # [rows, C]
    rope: Array  # [rows, R]
    position: Array  # [rows]
    length: Array  # keys that some row sees
    sequence: Array
    tree: Array | None  # [rows]


def _body(s: Static, scalars: Scalars, options: Options, q_latent, q_rope, values, out, sizes) -> None:
    i, part = pl.program_id(0), pl.program_id(1)
    _, n, columns = q_latent.shape
    first, end, sequence = scalars.tiles.first[i], scalars.tiles.end[i], scalars.tiles.owner[i]
    row = first + lax.iota(jnp.int32, s.rows)
    token, head, mine = lax.div(row, n), lax.rem(row, n), row < end
    where, here = (token[:, None], head[:, None]), mine[:, None]
    column = lax.iota(jnp.int32, columns)[None]
    shift = scalars.shift[sequence]
    length = jnp.minimum(scalars.length[sequence], lax.div(end - 1, n) + shift + 1)
    tile = _Tile(
        load(q_latent.at[(*where, column)], here),
        load(q_rope.at[(*where, lax.iota(jnp.int32, q_rope.shape[-1])[None])], here),
        token + shift,
        jnp.where(end > first, length, 0),
        sequence,
        None if options.tree is None else load(options.tree.at[token], mine),
    )
    low, high = attention.share(jnp.int32(0), pl.cdiv(tile.length, s.keys), s.parts, part)
    step = functools.partial(_block, s, scalars, options.scales, values, tile)
    state = lax.fori_loop(low, high, step, attention.nothing_seen(s.rows, columns))
    result = attention.output(state).astype(out.dtype)
    triton.store(out.at[(part, *where, column)], result, mask=jnp.broadcast_to(here, result.shape))
    triton.store(sizes.at[part, token, head], attention.log_sum_exp(state), mask=mine)


def _block(s: Static, scalars: Scalars, scales, values, tile: _Tile, i, state: State) -> State:
    """`state` after one more block of keys."""
    half, lanes = values.shape[-2:]
    slabs, rope = (values.shape[-3] - 1) // 2, tile.rope.shape[-1]
    key = lax.iota(jnp.int32, s.keys)
    odd, row = lax.div(key, s.keys // 2), lax.rem(key, s.keys // 2)
    at = i * s.keys + 2 * row + odd
    written = at < tile.length
    page = load(scalars.table.at[tile.sequence, lax.div(at, 2 * half)], written)
    row = lax.rem(lax.div(at, 2), half)
    here = written[:, None]
    page, odd, row = page[:, None], odd[:, None], row[:, None]
    column = lax.iota(jnp.int32, tile.latent.shape[-1])[None]
    slab, lane = odd * slabs + lax.div(column, lanes), lax.rem(column, lanes)
    latent = load(values.at[scalars.layer[0], page, slab, row, lane], here).astype(tile.latent.dtype)
    lane = odd * rope + lax.iota(jnp.int32, rope)[None]
    ropes = load(values.at[scalars.layer[0], page, 2 * slabs, row, lane], here).astype(tile.rope.dtype)
    scores = (attention.product(tile.latent, latent, 1) + attention.product(tile.rope, ropes, 1)) * s.scale
    found = None
    if scales is not None:
        found = load(scales.at[scalars.layer[0], page[:, 0], odd[:, 0], row[:, 0]], written)
        scores *= found[None]
    position = tile.position[:, None]
    seen = (at[None] <= position) & written[None]
    if tile.tree is not None:
        seen &= guesses.on_branch(tile.tree[:, None], at[None], position, scalars.first_new[tile.sequence])
    return attention.with_block(state, scores, seen, latent, found)
