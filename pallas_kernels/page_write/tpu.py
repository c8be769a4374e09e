"""page_write on TPU: the cache stays where it is; groups of rows are fetched, changed and put back.

The smallest piece of a page that a copy can move is one tile: 16 rows of bfloat16, 8 of float32. Rows that
follow one another and fall into one such group are a run; runs are handled with their copies overlapping.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chip
from pallas_kernels.op import Unfit
from pallas_kernels.pages import ScaledPages

SLOTS = 8  # runs in flight: enough to hide the latency of reading and of writing 64 KB
AHEAD = SLOTS // 2


def page_write(pages, rows, places, *, layer=None):
    """See `reference.page_write`. Heads that keep 128 values or a multiple; pages of 16 tokens (float32: 8) or more."""
    if rows.ndim == 2 or isinstance(pages, ScaledPages):
        raise Unfit("latents and pages with scales: not written by this kernel")
    stacked = pages if layer is not None else pages[None]
    (k, page, width), t = pages.shape[-3:], rows.shape[0]
    group = 32 // pages.dtype.itemsize
    if pages.dtype not in (jnp.bfloat16, jnp.float32) or width % 128 or page % group:
        raise Unfit(
            f"pages of {page} tokens, {width} values of {pages.dtype} each: the chip moves {group} tokens "
            f"of a multiple of 128 bfloat16 or float32 values at once"
        )
    if 8 * t > chip.ambient().smem_bytes // 2:
        raise Unfit(f"the places of {t} rows fill the scalar memory; write in chunks")
    rows = jnp.pad(rows.astype(pages.dtype), ((0, group), (0, 0), (0, 0)))
    groups = places // group
    opens = jnp.append(np.bool_(True), groups[1:] != groups[:-1])
    starts = jnp.nonzero(opens, size=t + 1, fill_value=t)[0].astype(jnp.int32)
    scalars = (
        jnp.stack([jnp.asarray(0 if layer is None else layer, jnp.int32), jnp.sum(opens, dtype=jnp.int32)]),
        starts,
        places,
    )
    out = pl.pallas_call(
        functools.partial(_body, page, group),
        out_shape=jax.ShapeDtypeStruct(stacked.shape, stacked.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((SLOTS, group, k, width), pages.dtype),
                pltpu.VMEM((SLOTS, k, group, width), pages.dtype),
                *[pltpu.SemaphoreType.DMA((SLOTS,))] * 3,
            ],
        ),
        input_output_aliases={len(scalars) + 1: 0},
        name="page_write",
    )(*scalars, rows, stacked)
    return out.reshape(pages.shape)


class _Run(NamedTuple):
    """Where one run's rows come from and go to."""

    start: Any
    count: Any
    new: Callable  # -> the copy of the rows into VMEM
    old: Callable  # -> the copy of the group into VMEM
    back: Callable  # -> the copy of the group into the cache


def _body(
    page: int, group: int, options, starts, places, rows, _, pages, new, old, got_new, got_old, put
) -> None:
    runs = options[1]

    def run(i) -> _Run:
        # A run that goes on for longer than a group can hold writes padding, whose content does not matter.
        start, slot = starts[i], lax.rem(i, SLOTS)
        first = places[start]
        at = pl.multiple_of(lax.rem(first, page) // group * group, group)
        cache = pages.at[options[0], first // page, :, pl.ds(at, group)]
        return _Run(
            start,
            jnp.minimum(starts[i + 1] - start, group),
            lambda: pltpu.make_async_copy(rows.at[pl.ds(start, group)], new.at[slot], got_new.at[slot]),
            lambda: pltpu.make_async_copy(cache, old.at[slot], got_old.at[slot]),
            lambda: pltpu.make_async_copy(old.at[slot], cache, put.at[slot]),
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
        _merge(new.at[lax.rem(i, SLOTS)], old.at[lax.rem(i, SLOTS)], places, one)
        one.back().start()

    lax.fori_loop(0, AHEAD, ask, None)
    lax.fori_loop(0, runs, write, None)
    lax.fori_loop(jnp.maximum(runs - SLOTS, 0), runs, lambda i, _: run(i).back().wait(), None)


def _merge(new, old, places, run: _Run) -> None:
    """Put the run's rows, `new` [group, K, W], into their places in `old` [K, group, W]."""
    k, group, width = old.shape
    at = lax.broadcasted_iota(jnp.int32, (group, width), 0)

    def row(n, heads):
        values = new[n].astype(jnp.float32)
        here = at == lax.rem(places[run.start + n], group)
        return tuple(jnp.where(here, values[i][None], head) for i, head in enumerate(heads))

    heads = lax.fori_loop(0, run.count, row, tuple(old[i].astype(jnp.float32) for i in range(k)))
    for i in range(k):
        old[i] = heads[i].astype(old.dtype)
