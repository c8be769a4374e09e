"""page_write on TPU: the cache stays where it is; groups of rows are fetched, changed and put back.

The smallest piece of a page that a copy can move is one tile: 16 rows of bfloat16, 8 of float32, 32 of 8 bits;
128 tokens of scales, which lie along lanes. Rows that follow one another and fall into one such piece are a run; runs
are handled with their copies overlapping.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chip
from pallas_kernels.int4_rows import PACKED
from pallas_kernels.op import Unfit
from pallas_kernels.page_write import tpu_merge
from pallas_kernels.pages import (
    LANES,
    ROPE,
    ScaledPages,
    is_latent,
    latent_of,
    plain_and_scales,
    quantise_rows,
)

SLOTS = 8  # runs in flight: enough to hide the latency of reading and of writing 64 KB
AHEAD = SLOTS // 2


class Static(NamedTuple):
    """What is the same for every run of one launch."""

    page: int  # tokens
    unit: int  # tokens of the piece of a page that is fetched and put back
    before: int  # rows that lie before the first one; then those of a run are fetched from its piece's first token on
    cut: Callable  # (pages, layer, page, number of the piece) -> the piece
    merge: Callable  # (new, old, run) -> None: puts the new rows into the piece


def page_write(pages, rows, places, *, layer=None):
    """See `reference.page_write`. Heads that keep 128 values or a multiple; pages of 16 tokens (float32: 8) or more."""
    values, scales = plain_and_scales(pages if layer is not None else jax.tree.map(lambda x: x[None], pages))
    per_row = 2 if is_latent(rows) else 1
    page = values.shape[-2] * per_row
    _check(values, scales, plain_and_scales(rows)[0], page, per_row)
    found: Any = None
    if scales is not None:
        rows, found = quantise_rows(rows, values.dtype)
    layer = jnp.asarray(0 if layer is None else layer, jnp.int32)
    values_out = _write_values(values, rows.astype(values.dtype), places, layer, per_row)
    if scales is None:
        return values_out.reshape(pages.shape)
    scales_out = _write_scales(scales, found, places, layer, page, per_row)
    return ScaledPages(values_out.reshape(pages.values.shape), scales_out.reshape(pages.scales.shape))


def _check(values, scales, rows, page: int, per_row: int) -> None:
    """Refuse what the tiles of the chip do not fit."""
    unit, width = 32 // values.dtype.itemsize * per_row, values.shape[-1]
    known = (jnp.bfloat16, jnp.float32) if scales is None else (jnp.float8_e4m3fn, jnp.int8, PACKED)
    if values.dtype == PACKED and per_row == 2:
        raise Unfit("latents in 4 bits: use float8_e4m3fn")
    if values.dtype not in known or width % LANES or page % unit:
        raise Unfit(
            f"pages of {page} tokens, {width} values of {values.dtype} each: the chip moves {unit} tokens of a "
            f"multiple of 128 bfloat16 or float32 values at once (float8_e4m3fn, int8 or packed ones with scales)"
        )
    if per_row == 2 and rows.shape[1] != latent_of(values) + ROPE:
        raise Unfit(
            f"rows of {rows.shape[1]} values for pages of {latent_of(values)} latent and {ROPE} rope values"
        )
    if scales is not None and page % (LANES * per_row):
        raise Unfit(f"pages of {page} tokens with scales: use a multiple of {LANES * per_row}")
    if 8 * rows.shape[0] > chip.ambient().smem_bytes // 2:
        raise Unfit(f"the places of {rows.shape[0]} rows fill the scalar memory; write in chunks")


def _write_values(pages: Array, rows: Array, places: Array, layer: Array, per_row: int) -> Array:
    """`pages` [L, pages, slabs, rows, W] with the rows in their places."""
    slabs, size, width = pages.shape[2:]
    group = 32 // pages.dtype.itemsize
    if per_row == 2:  # as if each token filled the whole row; the kernel takes its half
        latent, rope = rows[:, : latent_of(pages)], rows[:, latent_of(pages) :]
        rows = jnp.concatenate([latent, latent, rope, rope], axis=1).reshape(-1, slabs, width)
    if pages.dtype.itemsize == 1:
        rows = lax.bitcast_convert_type(rows, jnp.int8)
    s = Static(
        size * per_row,
        group * per_row,
        0,
        lambda pages, layer, page, i: pages.at[
            layer, page, :, pl.ds(pl.multiple_of(i * group, group), group)
        ],
        functools.partial(tpu_merge.values, group, per_row),
    )
    return _launch(s, pages, rows, places, layer, (slabs, group, width), "page_write")


def _write_scales(pages: Array, found: Array, places: Array, layer: Array, page: int, per_row: int) -> Array:
    """`pages` [L, pages, ..., X, page / per_row] with the scales of the rows in their places, one lane a token."""
    shape, unit = pages.shape, LANES * per_row
    pages = pages.reshape(*shape[:2], -1, *shape[-2:])
    if (
        per_row == 2
    ):  # row n holds its own scale and the next one's: those of an even token and of its odd neighbour
        found = jnp.pad(found, (unit, unit + 1), constant_values=1.0)
        found = jnp.stack([found[:-1], found[1:]], axis=1)
    else:
        found = jnp.pad(jnp.swapaxes(found, 1, 2).reshape(found.shape[0], -1), ((unit, unit), (0, 0)))
    if found.shape[1] > LANES:
        raise Unfit(f"scales of {pages.shape[-2]} heads: at most {LANES // 2}")
    rows = jnp.pad(found, ((0, 0), (0, LANES - found.shape[1])))[:, None]
    s = Static(
        page,
        unit,
        unit,
        lambda pages, layer, page, i: pages.at[
            layer, page, :, :, pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        ],
        functools.partial(tpu_merge.scales, unit, per_row),
    )
    out = _launch(s, pages, rows, places, layer, (*pages.shape[2:4], LANES), "page_write_scales")
    return out.reshape(shape)


def _launch(s: Static, pages: Array, rows: Array, places: Array, layer: Array, piece, name: str) -> Array:
    """One run for every piece of a page that rows fall into."""
    t, groups = places.shape[0], places // s.unit
    if not s.before:
        rows = jnp.pad(rows, ((0, s.unit), (0, 0), (0, 0)))
    opens = jnp.append(np.bool_(True), groups[1:] != groups[:-1])
    starts = jnp.nonzero(opens, size=t + 1, fill_value=t)[0].astype(jnp.int32)
    scalars = (jnp.stack([layer, jnp.sum(opens, dtype=jnp.int32)]), starts, places)
    return pl.pallas_call(
        functools.partial(_body, s),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((SLOTS, s.unit, *rows.shape[1:]), rows.dtype),
                pltpu.VMEM((SLOTS, *piece), pages.dtype),
                *[pltpu.SemaphoreType.DMA((SLOTS,))] * 3,
            ],
        ),
        input_output_aliases={len(scalars) + 1: 0},
        name=name,
    )(*scalars, rows, pages)


class _Run(NamedTuple):
    """Where one run's rows come from and go to."""

    first: Any  # place of the first row
    count: Any
    places: Any  # [T] of all rows
    start: Any
    new: Callable  # -> the copy of the rows into VMEM
    old: Callable  # -> the copy of the piece into VMEM
    back: Callable  # -> the copy of the piece into the cache


def _body(s: Static, options, starts, places, rows, _, pages, new, old, got_new, got_old, put) -> None:
    runs = options[1]

    def run(i) -> _Run:
        # A run that goes on for longer than a piece can hold writes padding, whose content does not matter.
        start, slot = starts[i], lax.rem(i, SLOTS)
        first = places[start]
        begin = start + s.before - lax.rem(first, s.unit) if s.before else start
        piece = s.cut(pages, options[0], first // s.page, lax.rem(first, s.page) // s.unit)
        return _Run(
            first,
            jnp.minimum(starts[i + 1] - start, s.unit),
            places,
            start,
            lambda: pltpu.make_async_copy(rows.at[pl.ds(begin, s.unit)], new.at[slot], got_new.at[slot]),
            lambda: pltpu.make_async_copy(piece, old.at[slot], got_old.at[slot]),
            lambda: pltpu.make_async_copy(old.at[slot], piece, put.at[slot]),
        )

    def ask(i, _=None) -> None:
        @pl.when(i < runs)
        def _():
            @pl.when(i >= SLOTS)
            def _():
                run(i - SLOTS).back().wait()

            one = run(i)
            one.new().start()
            one.old().start()

    def write(i, _) -> None:
        ask(i + AHEAD)
        one = run(i)
        one.new().wait()
        one.old().wait()
        s.merge(new.at[lax.rem(i, SLOTS)], old.at[lax.rem(i, SLOTS)], one)
        one.back().start()

    lax.fori_loop(0, AHEAD, ask, None)
    lax.fori_loop(0, runs, write, None)
    lax.fori_loop(jnp.maximum(runs - SLOTS, 0), runs, lambda i, _: run(i).back().wait(), None)
