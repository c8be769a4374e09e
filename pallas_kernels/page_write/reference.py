"""The definition of page_write."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.pages import ScaledPages, ScaledRows, is_latent, plain_and_scales, quantise_rows


def page_write(
    pages: Array | ScaledPages,
    rows: Float[Array, "T K W"] | Float[Array, "T W"] | ScaledRows,
    places: Int[Array, "T"],
    *,
    layer: Int[Array, ""] | None = None,
) -> Array | ScaledPages:
    """`pages` with row t at `places[t]` = page * page_size + offset within the page.

    Rows [T, K, 2H] are keys and values side by side, for pages [*L, pages, K, page_size, 2H]. Rows [T, C + 64] are
    latents followed by rope keys, for pages [*L, pages, 2 * C/128 + 1, page_size/2, 128] in which two tokens share a
    row (`pallas_kernels.pages`). `ScaledPages` take the rows in low bits, with a scale for every token's key and value
    of a head, or for every latent with its rope key; `ScaledRows`, which have these already, are kept as they are.

    Donate `pages`, and nothing is copied. Rows of one page come one after the other, as their places do. Places may
    repeat only where the content does not matter (padding goes to page 0). With `layer`, `pages` is the stack of
    all layers' pages, and this layer's are written.
    """
    values, scales = plain_and_scales(pages)
    put = _put_latents if is_latent(rows) else _put_heads
    if scales is None:
        assert not isinstance(rows, ScaledRows)
        return put(values, None, rows.astype(values.dtype), None, places, layer)[0]
    small, found = quantise_rows(rows, values.dtype, values.shape[-1] // 2)
    if jnp.issubdtype(values.dtype, jnp.integer):
        return ScaledPages(*put(values, scales, small, found, places, layer))
    # As bytes: XLA on a CPU scatters 8-bit floats by way of 32 bits. It does copy the bytes once.
    codes, small = (lax.bitcast_convert_type(x, jnp.uint8) for x in (values, small))
    codes, scales = put(codes, scales, small, found, places, layer)
    return ScaledPages(lax.bitcast_convert_type(codes, values.dtype), scales)


def _put_heads(values, scales, rows, found, places, layer) -> tuple[Array, Any]:
    """Rows [T, K, 2H] and scales [T, K, 2] in their places."""
    size = values.shape[-2]
    page, at = places // size, places % size
    stack = () if layer is None else (layer,)
    values = values.at[(*stack, page, slice(None), at)].set(rows, mode="promise_in_bounds")
    if scales is not None:
        found = jnp.swapaxes(found, 1, 2)
        scales = scales.at[(*stack, page, slice(None), slice(None), at)].set(found, mode="promise_in_bounds")
    return values, scales


def _put_latents(values, scales, rows, found, places, layer) -> tuple[Array, Any]:
    """Rows [T, C + 64] and scales [T] or [T, G] in their places."""
    half, lanes = values.shape[-2:]
    slabs, rope = rows.shape[-1] // lanes, lanes // 2
    page, row, odd = places // (2 * half), places % (2 * half) // 2, places % 2
    stack = () if layer is None else (layer,)
    slab = odd[:, None] * slabs + jnp.arange(slabs, dtype=places.dtype)[None]
    lane = odd[:, None] * rope + jnp.arange(rope, dtype=places.dtype)[None]
    latent = rows[:, : slabs * lanes].reshape(-1, slabs, lanes)
    values = values.at[(*stack, page[:, None], slab, row[:, None])].set(latent)
    values = values.at[(*stack, page[:, None], 2 * slabs, row[:, None], lane)].set(rows[:, slabs * lanes :])
    if scales is not None:
        found = found.reshape(len(found), -1)
        count = found.shape[1]
        kind = odd[:, None] * count + jnp.arange(count, dtype=places.dtype)[None]
        scales = scales.at[(*stack, page[:, None], kind, row[:, None])].set(found)
    return values, scales


def cost(pages: Array | ScaledPages, rows: Array, places: Array, **_) -> tuple[int, int]:
    """(floating-point operations, bytes to and from HBM) of one call."""
    values, scales = plain_and_scales(pages)
    tokens, latents = rows.shape[0], len(rows.shape) == 2
    page = values.shape[-2] * (2 if latents else 1)
    token = math.prod(values.shape[-3:]) // page * values.dtype.itemsize
    if scales is not None:
        token += 4 * (scales.shape[-2] // 2 if latents else 2 * rows.shape[1])
    return 0, rows.nbytes + tokens * token + places.nbytes
