"""mla_attention on TPU: one kernel over a flat list of steps, each some query rows against one block of keys.

A tile is up to `rows` tokens of one sequence with all their heads; a step is `tokens` of them against a block of
`keys` latents. Latents are the stationary operand of the matrix unit for both products, query rows stream
through it. Every step multiplies the *next* step's scores while it exponentiates and sums its own, across
tiles too, so that neither the matrix unit nor the vector unit waits for the other; the kernel copies pages,
queries and results itself, some blocks ahead.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chip, context_parts, tuning
from pallas_kernels.mla_attention import tpu_body, tpu_walk
from pallas_kernels.mla_attention.tpu_walk import Static, Tiles
from pallas_kernels.op import Unfit
from pallas_kernels.pages import LANES, ROPE, latent_of, plain_and_scales

MOST_GUESSES = 8  # tokens of a step, where they are guesses of a tree


class Blocks(NamedTuple):
    """How the work is cut."""

    rows: int  # tokens of a tile, where sequences bring many
    tokens: int  # of them, multiplied at once
    keys: int  # fetched and multiplied at once
    piece: int  # keys whose weights are in registers at once


def mla_attention(
    q_latent, q_rope, pages, page_table, q_starts, kv_lens, *,
    scale, first=None, layer=None, tree=None, blocks=None,
):  # fmt: skip
    """See `reference.mla_attention`. At most 128 heads; `blocks` overrides the tuned sizes."""
    pages, scales = plain_and_scales(pages)
    if layer is None:
        pages, layer = pages[None], np.int32(0)
        scales = None if scales is None else scales[None]
    (t, _, _), b = q_latent.shape, kv_lens.shape[0]
    _check(q_latent, q_rope, pages, page_table.size + (0 if tree is None else t), scales)
    given, blocks = blocks, _blocks(q_latent, pages, page_table, b, blocks)
    new = q_starts[1:] - q_starts[:-1]
    first = kv_lens - new if first is None else first
    call = functools.partial(_launch, q_latent, q_rope, pages, layer, scales, scale)
    if t != b:
        many = jnp.where(new > 1, kv_lens, 0) if b > 1 else kv_lens
        if tree is not None:  # each token's bits are worked out apart
            blocks = blocks._replace(tokens=math.gcd(blocks.tokens, MOST_GUESSES))
        found = call(blocks, page_table, _tiles(t, blocks.rows, q_starts, first, many), tree=tree)
        if b == 1:
            return found
        ones = _one_row_tiles(jnp.where(new == 1, new, 0), first, kv_lens)
        row = jnp.minimum(q_starts[:-1], np.int32(t - 1))
        ones = ones._replace(row=row, first=row, count=jnp.where(new == 1, new, 0), shift=first - row)
        return call(_blocks(q_latent, pages, page_table, t, given), page_table, ones, into=found)
    page = 2 * pages.shape[-2]
    parts = context_parts.for_cores(b, page_table.shape[1] * page, blocks.keys)
    if parts == 1:
        return call(blocks, page_table, _one_row_tiles(new, first, kv_lens))
    page_table, first, kv_lens = context_parts.cut(parts, page_table, first, kv_lens, page)
    tiles, row = _one_row_tiles(jnp.tile(new, parts), first, kv_lens), jnp.arange(b, dtype=jnp.int32)
    tiles = tiles._replace(row=jnp.tile(row, parts), shift=first - jnp.tile(row, parts))
    outs, lses = call(blocks, page_table, tiles, copies=parts)
    return context_parts.combine(outs.reshape(parts, *q_latent.shape), lses.reshape(parts, b, -1))


def _check(q_latent, q_rope, pages, numbers: int, scales) -> None:
    """Refuse what the tiles of the chip do not fit, or the scalar memory: `numbers` of tables and trees."""
    (_, n, c), page = q_latent.shape, 2 * pages.shape[-2]
    if q_latent.dtype not in (jnp.bfloat16, jnp.float32) or pages.dtype not in (
        q_latent.dtype,
        jnp.float8_e4m3fn,
    ):
        raise Unfit(
            f"queries are {q_latent.dtype} and the cache is {pages.dtype}; use bfloat16 queries and a cache in "
            f"bfloat16 or float8_e4m3fn"
        )
    if n % 16 or n > LANES:
        raise Unfit(f"{n} heads: use a multiple of 16, at most {LANES}")
    if c != latent_of(pages) or q_rope.shape[-1] != ROPE:
        raise Unfit(f"queries of {c} + {q_rope.shape[-1]} for a cache of {latent_of(pages)} + {ROPE}")
    if (pages.dtype.itemsize == 1) != (scales is not None):
        raise Unfit(f"a cache in {pages.dtype} {'needs' if scales is None else 'takes no'} scales")
    unit = 64 // pages.dtype.itemsize if scales is None else 2 * LANES
    if page % unit:
        raise Unfit(f"page size {page} of {pages.dtype}: use a multiple of {unit}")
    if numbers * 4 > chip.ambient().smem_bytes // 2:
        raise Unfit(
            f"{numbers} numbers of pages and trees fill the scalar memory; use larger pages than {page}"
        )


def _blocks(q, pages, page_table, b: int, blocks: Mapping[str, int] | None) -> Blocks:
    """The given blocks, or the tuned ones of the nearest shape, or what the rule gives."""
    (t, n, _), page, here = q.shape, 2 * pages.shape[-2], chip.ambient()
    context, single = page_table.shape[1] * page, t == b
    key = {"rows": t // b, "context": context, "heads": n, "bytes": pages.dtype.itemsize}
    found = blocks or tuning.nearest("mla_attention", here, key) or _rule(n, single, here.name)
    rows = 1 if single else found["rows"]
    piece = min(found["piece"], -(-context // (2 * LANES)) * LANES)
    unit = math.lcm(page, 2 * piece)
    keys = unit * max(1, min(found["keys"], -(-context // unit) * unit) // unit)
    return Blocks(rows, min(found["tokens"], rows), keys, piece)


def _rule(heads: int, single: bool, chip_name: str) -> dict[str, int]:
    """Steps so long that filling and draining the matrix unit (256 x 256 on v6e and TPU7x) is a small part of them."""
    tokens = LANES // heads
    if single:
        return {"rows": 1, "tokens": 1, "keys": 4096 if chip_name in ("v6e", "tpu7x") else 2048, "piece": 512}
    if chip_name == "tpu7x":
        return {"rows": 8 * tokens, "tokens": 8 * tokens, "keys": 512, "piece": 256}
    return {
        "rows": 8 * tokens,
        "tokens": (4 if chip_name == "v6e" else 2) * tokens,
        "keys": 1024,
        "piece": 512,
    }


def _one_row_tiles(new: Array, first: Array, kv_lens: Array) -> Tiles:
    """Sequence b's one row is tile b."""
    b = jnp.arange(new.shape[0], dtype=jnp.int32)
    lens = jnp.where(new > 0, jnp.clip(first + 1, 0, kv_lens), 0)
    return Tiles(b, b, jnp.ones_like(b), b, first - b, first, lens, lens)


def _tiles(t: int, rows: int, q_starts: Array, first: Array, kv_lens: Array) -> Tiles:
    """Each sequence's rows in tiles of `rows`, and the rows of nobody as tiles without keys."""
    b = kv_lens.shape[0]
    starts = jnp.append(q_starts, np.int32(t))
    per = -(-(starts[1:] - starts[:-1]) // rows)
    ends = jnp.cumsum(per, dtype=jnp.int32)
    tile = jnp.arange(-(-t // rows) + b + 1, dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(ends, tile, side="right").astype(jnp.int32), b)
    row = starts[seq] + (tile - (ends[seq] - per[seq])) * rows
    count = jnp.clip(starts[seq + 1] - row, 0, rows)
    real = (seq < b) & (count > 0)
    seq = jnp.minimum(seq, b - 1)
    shift = first[seq] - q_starts[seq]
    length = jnp.where(real, jnp.clip(row + count + shift, 0, kv_lens[seq]), 0)
    return Tiles(row, row, count, seq, shift, first[seq], length, length)


def _finished(tiles: Tiles) -> Tiles:
    """`tiles` with the next one that has keys; one more at the end."""
    count = tiles.row.shape[0]
    needs = jnp.where(tiles.length > 0, jnp.arange(count, dtype=jnp.int32), count)
    from_here = lax.cummin(needs, reverse=True)
    tiles = tiles._replace(next=from_here)
    return Tiles(*(jnp.append(x, np.int32(count if i == len(tiles) - 1 else 0)) for i, x in enumerate(tiles)))


def _launch(
    q_latent,
    q_rope,
    pages,
    layer,
    scales,
    scale,
    blocks: Blocks,
    page_table,
    tiles: Tiles,
    copies=1,
    into=None,
    tree=None,
):
    """(out [copies * T, N, C], log-sum-exp [copies * T, N]); with `into`, those with only the tiles' rows replaced."""
    (t, n, c), page, here = q_latent.shape, 2 * pages.shape[-2], chip.ambient()
    cores = min(here.cores, tiles.row.shape[0])
    static = Static(
        rows=blocks.rows, tokens=blocks.tokens, keys=blocks.keys, piece=blocks.piece, page=page,
        table_width=page_table.shape[1], heads=n, latent=c, scale=scale, scaled=scales is not None,
        guessed=tree is not None,
        shrunk=1 / 16 if scales is not None and q_latent.dtype == jnp.bfloat16 and here.fp8 <= here.bf16 else 1.0,
    )  # fmt: skip
    tiles = _finished(tiles)
    scalars = (
        _shares(tiles, cores, blocks),
        jnp.reshape(layer, 1).astype(jnp.int32),
        page_table.reshape(-1),
        jnp.zeros(1, jnp.int32) if tree is None else tree,
        *tiles,
    )
    inputs = [q_latent, q_rope, pages] + ([] if scales is None else [scales])
    aliases = {}
    if into is not None:
        out, lse = into
        aliases = {len(scalars) + len(inputs) + i: i for i in range(2)}
        inputs += [out, jnp.pad(lse[:, None], ((0, 0), (0, 0), (0, LANES - n)))]
    out, lse = pl.pallas_call(
        functools.partial(tpu_body.body, static, len(scalars), len(inputs)),
        out_shape=(
            jax.ShapeDtypeStruct((copies * t, n, c), q_latent.dtype),
            jax.ShapeDtypeStruct((copies * t, 1, LANES), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * len(inputs),
            out_specs=(pl.BlockSpec(memory_space=pltpu.HBM),) * 2,
            scratch_shapes=tpu_walk.scratch(static, q_latent.dtype, pages.dtype),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=here.vmem_bytes * 7 // 8,
            disable_bounds_checks=True,  # they take a tenth of the cycles: every page is a copy
        ),
        input_output_aliases=aliases,
        name=f"mla_attention_{blocks.rows}",
    )(*scalars, *inputs)
    return out, lse[:, 0, :n]


def _shares(tiles: Tiles, cores: int, blocks: Blocks) -> Array:
    """The first tile of each core, and the end; about the same number of steps each."""
    count = tiles.row.shape[0] - 1
    if cores == 1:
        return jnp.array([0, count], jnp.int32)
    steps = pl.cdiv(tiles.length, blocks.keys) * pl.cdiv(tiles.count, blocks.tokens)
    before = jnp.cumsum(steps) - steps
    return jnp.stack(
        [np.int32(0), jnp.argmin(jnp.abs(2 * before - jnp.sum(steps))).astype(jnp.int32), np.int32(count)]
    )
