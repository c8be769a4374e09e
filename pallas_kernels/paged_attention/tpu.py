"""paged_attention on TPU: one kernel over a flat list of (tile of query rows, sequence) pairs.

A tile is `rows` consecutive tokens of all sequences laid end to end, with all their heads; a pair is the part
of a tile that belongs to one sequence. For every pair the kernel walks over the sequence's keys in
blocks of pages, which it copies from HBM itself, always one block ahead, across pairs too. Softmax is
the online one, in base 2. Sequences with one new token are tiles of one row.
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
from pallas_kernels.hadamard import turned
from pallas_kernels.int4_rows import PACKED
from pallas_kernels.op import Unfit
from pallas_kernels.paged_attention import tpu_body, tpu_many
from pallas_kernels.paged_attention.tpu_walk import LANES, Form, Pairs, Static
from pallas_kernels.pages import plain_and_scales

BLOCK_BYTES = 2 << 20  # of keys and values fetched at once: long enough to hide the latency of the next copy
MOST_ROWS = 2048  # query rows of a head multiplied at once with a block of keys
MOST_SCORES = 1 << 20  # of one step, float32 in VMEM
MOST_QUERIES = 1 << 21  # values of a tile's queries: with all that goes with them they take some 30 MB
NARROW = ("v6e", "tpu7x")  # chips that take exponentials of bfloat16


class Blocks(NamedTuple):
    """How the work is cut."""

    rows: int  # tokens of a tile, where sequences bring many
    keys: int  # fetched at once
    many: int  # the same for tiles of many rows, whose scores must be small enough


def paged_attention(
    q,
    pages,
    page_table,
    q_starts,
    kv_lens,
    *,
    scale,
    first=None,
    layer=None,
    window=None,
    soft_cap=None,
    sinks=None,
    tree=None,
    blocks=None,
):
    """See `reference.paged_attention`. Heads of 64, 128, 192 or 256; pages of 16 tokens (float32: 8) or more."""
    if layer is None:
        pages, layer = jax.tree.map(lambda x: x[None], pages), np.int32(0)
    pages, scales = plain_and_scales(pages)
    t, b = q.shape[0], kv_lens.shape[0]
    _check(q, pages, scales, page_table)
    blocks = _blocks(q, pages, page_table, b, blocks)
    call = functools.partial(
        _launch, pages, scales, layer, window,
        form=Form(
            scale, soft_cap, window is not None, scales is not None, False, False, pages.dtype == PACKED
        ),
    )  # fmt: skip
    new = q_starts[1:] - q_starts[:-1]
    first = kv_lens - (1 if t == b else new) if first is None else first
    if t == b:
        return _one_row_each(call, q, page_table, first, kv_lens, window, sinks, blocks.keys, pages.shape[-2])
    many = jnp.where(new > 1, kv_lens, 0) if b > 1 else kv_lens
    pairs = _pairs(t, q_starts, first, many, window, blocks)
    outs = call(page_table, q, pairs, rows=blocks.rows, keys=blocks.many, sinks=sinks, tree=tree)
    if b == 1:
        return outs
    at = jnp.where(new == 1, q_starts[:-1], t)
    ones = _one_row_pairs(first, jnp.where(new == 1, kv_lens, 0), window, blocks.keys)
    found = call(page_table, q.at[at].get(mode="clip"), ones, rows=1, keys=blocks.keys, sinks=sinks)
    return tuple(x.at[at].set(y, mode="drop") for x, y in zip(outs, found, strict=True))


def _check(q, pages, scales, page_table) -> None:
    """Refuse what the tiles of the chip do not fit."""
    h, (page, width) = q.shape[-1], pages.shape[-2:]
    smallest = 32 // pages.dtype.itemsize if scales is None else LANES
    known = (q.dtype,) if scales is None else (jnp.float8_e4m3fn, jnp.int8, PACKED)
    if q.dtype not in (jnp.bfloat16, jnp.float32) or pages.dtype not in known:
        raise Unfit(
            f"queries are {q.dtype} and the cache is {pages.dtype}; both must be bfloat16 or both float32, or the "
            f"cache float8_e4m3fn or int8 with scales, or packed in 4 bits"
        )
    if width % LANES or h > 256:
        raise Unfit(
            f"head size {h}: keys and values of a token must fill whole rows of 128; use 64, 128, 192 or 256 (in 4 "
            f"bits, where they share their bytes, 128 or 256)"
        )
    if page % smallest or (page % LANES and LANES % page):
        raise Unfit(f"page size {page} of {pages.dtype}: use a power of two from {smallest}")
    if page_table.size * 4 > chip.ambient().smem_bytes // 2:
        raise Unfit(
            f"a page table of {page_table.shape} fills the scalar memory; use larger pages than {page}"
        )


def _blocks(q, pages, page_table, b: int, blocks: Mapping[str, int] | None) -> Blocks:
    """The given blocks, or the tuned ones of the nearest shape, or two megabytes of keys."""
    (t, n, h), (_, _, k, page, width), here = q.shape, pages.shape, chip.ambient()
    lanes = h if h % LANES == 0 else width
    row_bytes = k * width * pages.dtype.itemsize
    context = page_table.shape[1] * page
    key = {
        "rows": t // b,
        "context": context,
        "heads": n,
        "kv_heads": k,
        "width": width,
        "row_bytes": row_bytes,
    }
    found = blocks or tuning.nearest("paged_attention", here, key) or _rule(t // b, n * lanes, row_bytes)
    unit = math.lcm(page, tpu_many.UNIT)
    keys = min(found["keys"], -(-context // unit) * unit)
    fit = MOST_SCORES // _at_once(n // k * found["rows"])
    keys, many = (max(unit, x // unit * unit) for x in (keys, min(keys, fit)))
    return Blocks(found["rows"], keys, many)


def _rule(rows: int, query: int, row_bytes: int) -> dict[str, int]:
    """Short tiles where sequences bring a few rows (verification), else as tall as VMEM lets many heads be."""
    return {
        "rows": 16 if rows <= 16 else min(512, max(16, MOST_QUERIES // query & -16)),
        "keys": BLOCK_BYTES // row_bytes,
    }


def _at_once(height: int) -> int:
    """How many of a head's query rows are multiplied together: an equal share of all, in whole units."""
    units = -(-height // tpu_many.UNIT)
    if height < tpu_many.UNIT:
        return LANES if height <= LANES else tpu_many.UNIT
    return tpu_many.UNIT * max(i for i in range(1, MOST_ROWS // tpu_many.UNIT + 1) if units % i == 0)


def _one_row_each(call, q, page_table, first, kv_lens, window, sinks, keys: int, page: int):
    """One row of each sequence; few long contexts are cut into parts, each attended as a sequence of its own."""
    b = kv_lens.shape[0]
    parts = context_parts.for_cores(b, page_table.shape[1] * page, keys)
    if parts == 1:
        return call(
            page_table, q, _one_row_pairs(first, kv_lens, window, keys), rows=1, keys=keys, sinks=sinks
        )
    page_table, first, kv_lens = context_parts.cut(parts, page_table, first, kv_lens, page)
    pairs = _one_row_pairs(first, kv_lens, window, keys)
    outs, lses = call(page_table, jnp.tile(q, (parts, 1, 1)), pairs, rows=1, keys=keys)
    found = context_parts.combine(outs.reshape(parts, *q.shape), lses.reshape(parts, b, -1))
    return found if sinks is None else context_parts.with_sinks(*found, sinks)


def _one_row_pairs(first: Array, kv_lens: Array, window, keys: int) -> Pairs:
    """Sequence b's one row is tile b."""
    at = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    length = jnp.clip(first + 1, 0, kv_lens)
    return _finished(Pairs(at, at, at, at + 1, first - at, first, length, length, length), window, keys)


def _pairs(t: int, q_starts: Array, first_new: Array, kv_lens: Array, window, blocks: Blocks) -> Pairs:
    """Cut the T rows at every tile and at every sequence; sequences without keys are passed over."""
    b, tiles = kv_lens.shape[0], -(-t // blocks.rows)
    starts = jnp.arange(tiles, dtype=jnp.int32) * blocks.rows
    first = jnp.sort(jnp.concatenate([starts, q_starts]))
    end = jnp.append(first[1:], tiles * blocks.rows)
    seq = jnp.searchsorted(q_starts, first, side="right").astype(jnp.int32) - 1
    real = (seq < b) & (end > first)
    seq = jnp.minimum(seq, b - 1)
    old = first_new[seq]
    shift = old - q_starts[seq]
    length = jnp.where(real, jnp.clip(shift + end, 0, kv_lens[seq]), 0)
    tile = jnp.minimum(first // blocks.rows, tiles - 1)
    return _finished(Pairs(tile, seq, first, end, shift, old, length, length, length), window, blocks.many)


def _finished(pairs: Pairs, window, keys: int) -> Pairs:
    """`pairs` with the first block that each needs, and the next pair that needs any; one more at the end."""
    count = pairs.tile.shape[0]
    low = jnp.zeros_like(pairs.length)
    if window is not None:
        low = jnp.maximum(pairs.first + pairs.shift - _keys_seen(window) + 1, 0) // keys
        pairs = pairs._replace(length=jnp.where(low * keys < pairs.length, pairs.length, 0))
    needs = jnp.where(pairs.length > 0, jnp.arange(count, dtype=jnp.int32), count)
    from_here = lax.cummin(needs, reverse=True)
    pairs = pairs._replace(low=low, next=jnp.append(from_here[1:], np.int32(count)))
    return Pairs(*(jnp.append(x, np.int32(count if i == len(pairs) - 1 else 0)) for i, x in enumerate(pairs)))


def _keys_seen(window) -> Array:
    window = jnp.asarray(window, jnp.int32)
    return jnp.where(window > 0, window, np.int32(2**30))


def _launch(
    pages, scales, layer, window, page_table, q, pairs: Pairs, *,
    form: Form, rows: int, keys: int, sinks=None, tree=None,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of `q` in tiles of `rows` tokens -> [T, N, H], log-sum-exp [T, N]."""
    (t, n, h), (_, _, k, page, width) = q.shape, pages.shape
    if form.packed:
        q = turned(q)
    g, tiles, here = n // k, -(-t // rows), chip.ambient()
    q_tiles, height = _tiled(q, k, rows, width)
    static = Static(
        form._replace(sinks=sinks is not None, tree=tree is not None),
        rows, keys, page, page_table.shape[1], k, height, h, width,
        at_once=height if rows == 1 else _at_once(height),
        narrow=rows > 1 and q.dtype == jnp.bfloat16 and here.name in NARROW,
    )  # fmt: skip
    cores = min(here.cores, tiles)
    scalars = (
        _shares(pairs, cores, keys),
        jnp.stack([jnp.asarray(layer, jnp.int32), _keys_seen(0 if window is None else window)]),
        page_table.reshape(-1),
        *pairs,
    )
    of_tile = functools.partial(_tile_of, count=pairs.tile.shape[0] - 1)
    tile_spec = pl.BlockSpec((1, *q_tiles.shape[1:]), of_tile)
    inputs, specs = [q_tiles], [tile_spec]
    if sinks is not None:
        inputs.append(_tiled_sinks(sinks, k, rows, height))
        specs.append(pl.BlockSpec((k, height, LANES), lambda *_: (0, 0, 0)))
    if tree is not None:
        inputs.append(_tiled_tree(tree, g, rows, static))
        specs.append(pl.BlockSpec((1, *inputs[-1].shape[1:]), of_tile))
    memories = [pages] if scales is None else [pages, scales]
    lse = jax.ShapeDtypeStruct(tpu_body.lse_shape(static, tiles), jnp.float32)
    out, lse = pl.pallas_call(
        functools.partial(tpu_body.body, static, len(scalars)),
        out_shape=(jax.ShapeDtypeStruct(q_tiles.shape, q.dtype), lse),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, pairs.tile.shape[0] - 1),
            in_specs=[*specs, *[pl.BlockSpec(memory_space=pltpu.HBM)] * len(memories)],
            out_specs=(tile_spec, pl.BlockSpec((1, *lse.shape[1:]), of_tile)),
            scratch_shapes=tpu_body.scratch(static, q.dtype, pages.dtype),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=here.vmem_bytes * 7 // 8
        ),
        name=f"paged_attention_{rows}",
    )(*scalars, *inputs, *memories)
    lse = lse.reshape(tiles, k, -1, 1)
    found = _untiled(out, t, n, g, rows, h)
    return turned(found) if form.packed else found, _untiled(lse, t, n, g, rows, 1)[..., 0]


def _tile_of(core, step, shares, _options, _table, tile, *_, count: int):
    """The tile of this core's pair; past its last one, the same again, so that nothing is copied."""
    return tile[jnp.minimum(jnp.minimum(shares[core] + step, shares[core + 1] - 1), count - 1)], 0, 0, 0


def _shares(pairs: Pairs, cores: int, keys: int) -> Array:
    """The first pair of each core, and the end: whole tiles, at least one each, about the same number of blocks."""
    count = pairs.tile.shape[0] - 1
    if cores == 1:
        return jnp.array([0, count], jnp.int32)
    tile = pairs.tile[:count]
    blocks = jnp.where(pairs.length > 0, pl.cdiv(pairs.length, keys) - pairs.low, 0)[:count]
    before = jnp.cumsum(blocks) - blocks
    opens = jnp.append(np.bool_(False), tile[1:] != tile[:-1])
    distance = jnp.where(opens, jnp.abs(2 * before - jnp.sum(blocks)), np.int32(2**30))
    return jnp.stack([np.int32(0), jnp.argmin(distance).astype(jnp.int32), np.int32(count)])


def _tiled(q: Array, k: int, rows: int, width: int) -> tuple[Array, int]:
    """[tiles, K, G * rows, H], the rows of a tile head by head; heads that do not fill 128 lanes become [q | 0]."""
    t, n, h = q.shape
    g, tiles = n // k, -(-t // rows)
    q = jnp.pad(q, ((0, tiles * rows - t), (0, 0), (0, 0))).reshape(tiles, rows, k, g, h)
    q = q.transpose(0, 2, 3, 1, 4).reshape(tiles, k, g * rows, h)
    unit = 8 if rows == 1 else LANES if g * rows <= LANES else tpu_many.UNIT
    height = -(-g * rows // unit) * unit
    lanes = h if h % LANES == 0 else width
    return jnp.pad(q, ((0, 0), (0, 0), (0, height - g * rows), (0, lanes - h))), height


def _untiled(out: Array, t: int, n: int, g: int, rows: int, h: int) -> Array:
    tiles, k = out.shape[:2]
    out = out[:, :, : g * rows, -h:].reshape(tiles, k, g, rows, h)
    return out.transpose(0, 3, 1, 2, 4).reshape(tiles * rows, n, h)[:t]


def _tiled_sinks(sinks: Array, k: int, rows: int, height: int) -> Array:
    """[K, G * rows, 128] float32, in base 2 as the kernel's scores."""
    sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(k, -1) * math.log2(math.e), rows, axis=1)
    sinks = jnp.pad(sinks, ((0, 0), (0, height - sinks.shape[1])))
    return jnp.broadcast_to(sinks[..., None], (k, height, LANES))


def _tiled_tree(tree: Array, g: int, rows: int, s: Static) -> Array:
    """[tiles, 1, chunks, at_once]: each query row's bits."""
    tiles = -(-tree.shape[0] // rows)
    bits = jnp.pad(tree.astype(jnp.int32), (0, tiles * rows - tree.shape[0])).reshape(tiles, rows)
    bits = jnp.pad(jnp.tile(bits, (1, g)), ((0, 0), (0, s.height - g * rows)))
    return bits.reshape(tiles, 1, s.chunks, s.at_once)
