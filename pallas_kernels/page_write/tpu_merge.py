"""What page_write does in VMEM: new rows into a piece of a page, and new scales into theirs."""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pages import LANES, ROPE


def values(group: int, per_row: int, new, old, run) -> None:
    """Put the run's rows, `new` [unit, slabs, W], into `old` [slabs, group, W].

    With two tokens a row, the first half of the slabs but the last belongs to the even token, and half of the last.
    """
    slabs, _, width = old.shape
    at = lax.broadcasted_iota(jnp.int32, (group, width), 0)
    side = lax.broadcasted_iota(jnp.int32, (group, width), 1) // ROPE

    def row(slab: int, n, piece):
        place = run.places[run.start + n]
        here = at == lax.rem(place // per_row, group)
        if per_row == 2:
            mine = side if slab == slabs - 1 else jnp.full_like(side, slab // (slabs // 2))
            here &= mine == lax.rem(place, 2)
        return jnp.where(here, _wide(new[n, pl.ds(slab, 1)]), piece)

    for slab in range(slabs):
        piece = lax.fori_loop(0, run.count, lambda n, x, slab=slab: row(slab, n, x), _wide(old[slab]))
        old[slab] = _narrow(piece, old.dtype)


def scales(unit: int, per_row: int, new, old, run) -> None:
    """Put the run's scales, `new` [unit, 1, 128] from the piece's first token on, into `old` [A, X, 128]."""
    tokens = new[pl.ds(0, LANES, per_row), 0] if per_row > 1 else new[:, 0]
    found = tokens.T
    parts, x, _ = old.shape
    offset = lax.rem(run.first, unit)
    token = per_row * lax.broadcasted_iota(jnp.int32, (x, LANES), 1)
    if per_row > 1:
        token += lax.broadcasted_iota(jnp.int32, (x, LANES), 0)
    here = (token >= offset) & (token < offset + run.count)
    for i in range(parts):
        old[i] = jnp.where(here, found[i * x : (i + 1) * x], old[i])


def _wide(x: Array) -> Array:
    """In 32 bits, where one row can be chosen: numbers, or the bits of 8-bit floats."""
    if x.dtype.itemsize > 1:
        return x.astype(jnp.float32)
    return (x if x.dtype == jnp.int8 else pltpu.bitcast(x, jnp.int8)).astype(jnp.int32)


def _narrow(x: Array, dtype) -> Array:
    """The inverse of `_wide`."""
    if dtype.itemsize > 1:
        return x.astype(dtype)
    return x.astype(jnp.int8) if dtype == jnp.int8 else pltpu.bitcast(x.astype(jnp.int8), dtype)
