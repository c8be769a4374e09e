"""page_write on GPU, in Triton: one program copies one row into its place; the cache stays where it is.

XLA rounds and quantises the rows before, in one pass over them with what computed them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.int4_rows import PACKED
from pallas_kernels.op import Unfit
from pallas_kernels.pages import LANES, ROPE, ScaledPages, is_latent, plain_and_scales, quantise_rows
from pallas_kernels.triton_limits import check_addresses, layer_index

ONE_WARP = 2048  # bytes that a warp copies: four 16-byte accesses of each of its threads


def page_write(pages, rows, places, *, layer=None):
    """See `reference.page_write`. Refused: a cache beyond Triton's offsets, rope keys that are not 64 wide."""
    values, scales = plain_and_scales(pages)
    check_addresses(pages=values)
    latents = is_latent(rows)
    if latents and values.dtype == PACKED:
        raise Unfit("latents in 4 bits: use float8_e4m3fn, float8_e5m2 or int8")
    if latents and values.shape[-1] != LANES:
        raise Unfit(f"rope keys of {values.shape[-1] // 2} values: {ROPE} are what pages are made for")
    if scales is None:
        kept = (rows.astype(values.dtype),)
    else:
        codes, found = quantise_rows(rows, values.dtype)
        kept = (codes, found if latents else jnp.swapaxes(found, 1, 2))
    into = (values,) if scales is None else (values, scales)
    out = _launch(_body_of_latents if latents else _body_of_heads, kept, into, places, layer)
    return out[0] if scales is None else ScaledPages(*out)


def _launch(
    body, kept: tuple[Array, ...], into: tuple[Array, ...], places: Array, layer
) -> tuple[Array, ...]:
    """`into` with what is kept of each row written by `body`, in place."""
    stacked = [x if layer is not None else x[None] for x in into]
    count = len(into)
    warps = pl.next_power_of_2(kept[0].nbytes // max(1, kept[0].shape[0]) // ONE_WARP)
    out = pl.pallas_call(
        functools.partial(body, count),
        grid=(places.shape[0],),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stacked],
        input_output_aliases={2 + count + i: i for i in range(count)},
        compiler_params=triton.CompilerParams(num_warps=max(1, min(8, warps))),
        name="page_write",
    )(layer_index(layer), places, *kept, *stacked)
    return tuple(x.reshape(y.shape) for x, y in zip(out, into, strict=True))


def _body_of_heads(count: int, layer, places, *refs) -> None:
    """Row [K, 2H], and scales [2, K] where there are any."""
    rows, values = refs[0], refs[2 * count]
    (_, k, width), page = rows.shape, values.shape[-2]
    t = pl.program_id(0)
    place = places[t]
    where, offset = lax.div(place, page), lax.rem(place, page)
    head, column = _index(k, 0), _index(width, 1)
    here = (head < k) & (column < width)
    row = triton.load(rows.at[t, head, column], mask=here)
    triton.store(values.at[layer[0], where, head, offset, column], row, mask=here)
    if count > 1:
        half, head = _index(2, 0), _index(k, 1)
        here = (half < 2) & (head < k)
        found = triton.load(refs[1].at[t, half, head], mask=here)
        triton.store(refs[-1].at[layer[0], where, half, head, offset], found, mask=here)


def _body_of_latents(count: int, layer, places, *refs) -> None:
    """Row [C + 64] in the slabs of its parity, and its scale where there is one."""
    rows, values = refs[0], refs[2 * count]
    slabs, half = rows.shape[1] // LANES, values.shape[-2]
    t = pl.program_id(0)
    place = places[t]
    where, offset = lax.div(place, 2 * half), lax.div(lax.rem(place, 2 * half), 2)
    odd = lax.rem(place, 2)
    slab, lane = _index(slabs, 0), _index(LANES, 1)
    here = (slab < slabs) & (lane < LANES)
    latent = triton.load(rows.at[t, slab * LANES + lane], mask=here)
    triton.store(values.at[layer[0], where, odd * slabs + slab, offset, lane], latent, mask=here)
    lane = lax.iota(jnp.int32, ROPE)
    rope = rows[t, slabs * LANES + lane]
    values[layer[0], where, 2 * slabs, offset, odd * ROPE + lane] = rope
    if count > 1:
        refs[-1][layer[0], where, odd, offset] = refs[1][t]


def _index(size: int, axis: int) -> Array:
    """0, 1, ... up to the next power of two, along one axis of two."""
    shape = [1, 1]
    shape[axis] = pl.next_power_of_2(size)
    return lax.broadcasted_iota(jnp.int32, shape, axis)
