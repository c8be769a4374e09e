"""How a page of the cache holds its tokens: as they are or in low bits with scales; latents so that no lane is wasted.

Keys and values: [K, page, 2H], a token's key and value side by side; with scales [2, K, page], key's and value's.

Latents with their 64 rope values: [2 * C/128 + 1, page/2, 128]. Row i holds tokens 2i and 2i + 1. Slabs 0 .. C/128-1
are the latents of the even tokens, 128 columns each, the next C/128 those of the odd ones; the last slab holds
the rope keys, 64 values of the even token and then 64 of the odd. A plain [page, 576] array would lie in a TPU's
memory with 640 columns, and would be read so. Scales are [2, page/2], the even tokens' and the odd ones'.
Rope keys of another width R make it 2 R columns instead of 128; no released model has them.

In 4 bits (`int4_rows`) the bytes of a head are [K, page, H], those of latents as above with half as many slabs for
them. Scales of latents are [2 * G, page/2] then, all G of an even token and then all of the odd one.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels import int4_rows
from pallas_kernels.int4_rows import PACKED

LANES = 128
ROPE = 64
# What pages with scales hold, by the name of the cache's data type.
LOW_BITS = {
    "fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2, "int8": jnp.int8, "int4": PACKED,
}  # fmt: skip


class ScaledPages(NamedTuple):
    """Pages in low bits: the token is what is stored times its scale."""

    values: Any  # float8 or int8, shaped like pages that need no scales, or PACKED
    scales: Any  # float32, one for each token's key and value of a head, or for each latent and its rope


class ScaledRows(NamedTuple):
    """Rows of tokens as such pages keep them, not yet in their places."""

    values: Any  # [T, K, 2H] or [T, C + 64], of the pages' type; PACKED [T, K, H] or [T, C/2 + 64]
    scales: Any  # float32 [T, K, 2], or [T]; of PACKED latents [T, G]


def plain_and_scales(pages: Any) -> tuple[Any, Any]:
    """The stored values, and their scales or None; of pages or rows, or of their shapes."""
    return pages if isinstance(pages, ScaledPages | ScaledRows) else (pages, None)


def quantise(values: Array, dtype) -> tuple[Array, Array]:
    """[..., W] as (8-bit values, float32 scales [...]), one scale for the last axis; never -0.

    Kernels may read the bits as another kind of 8-bit float, in which -0 stands for NaN.
    """
    values, dtype = values.astype(jnp.float32), jnp.dtype(dtype)
    most = float(jnp.iinfo(dtype).max if dtype == jnp.int8 else jnp.finfo(dtype).max)
    largest = jnp.max(jnp.abs(values), axis=-1)
    scales = jnp.where(largest > 0, largest / most, 1.0)
    ratio = values / scales[..., None]
    small = (jnp.round(ratio) if dtype == jnp.int8 else ratio).astype(dtype)
    return jnp.where(small == 0, jnp.zeros_like(small), small), scales


def quantise_rows(rows: Array | ScaledRows, dtype, rope: int = ROPE) -> ScaledRows:
    """Rows [T, K, 2H] or [T, C + R] as pages of `dtype` keep them; those that are so already stay as they are."""
    if isinstance(rows, ScaledRows):
        return rows
    if rows.ndim == 2:
        if dtype == PACKED:
            return ScaledRows(*int4_rows.quantise_latents(rows[:, :-rope], rows[:, -rope:]))
        return ScaledRows(*quantise(rows, dtype))
    (t, k, w) = rows.shape
    sides = rows.reshape(t, k, 2, w // 2)
    if dtype == PACKED:
        return ScaledRows(*int4_rows.quantise_heads(sides))
    small, scales = quantise(sides, dtype)
    return ScaledRows(small.reshape(rows.shape), scales)


def is_latent(rows: Array | ScaledRows) -> bool:
    """Whether rows are latents with their rope keys: these have no heads."""
    return plain_and_scales(rows)[0].ndim == 2


def as_kept(pages: Any, rows: Array) -> Array:
    """The rows as these pages give them back once they were written."""
    values, scales = plain_and_scales(pages)
    if scales is None:
        return rows.astype(values.dtype).astype(rows.dtype)
    rope = values.shape[-1] // 2
    small, found = quantise_rows(rows, values.dtype, rope)
    if rows.ndim == 3:
        if small.dtype == PACKED:
            return int4_rows.heads_of(small, found).astype(rows.dtype).reshape(rows.shape)
        halves = small.astype(jnp.float32).reshape(*rows.shape[:2], 2, -1)  # a head's key, and its value
        return (halves * found[..., None]).astype(rows.dtype).reshape(rows.shape)
    if small.dtype == PACKED:
        parts = int4_rows.latents_of(small[:, :-rope], small[:, -rope:], found, rows.shape[1] - rope)
        return jnp.concatenate(parts, axis=1).astype(rows.dtype)
    return (small.astype(jnp.float32) * found[:, None]).astype(rows.dtype)


def of_tokens(scales: Array) -> Array:
    """Scales of pages of latents, [..., 2 * G, page/2], token by token: [..., page, G]."""
    *lead, count, half = scales.shape
    return jnp.moveaxis(scales.reshape(*lead, 2, count // 2, half), -1, -3).reshape(
        *lead, 2 * half, count // 2
    )


def latent_page(latent: int, page: int, rope: int = ROPE) -> tuple[int, int, int]:
    """The shape of one page of `page` tokens with `latent` + `rope` values each."""
    return 2 * (latent // (2 * rope)) + 1, page // 2, 2 * rope


def latent_of(pages: Any) -> int:
    """How many of a token's values are latent; of an array of pages or its shape."""
    return (pages.shape[-3] - 1) // 2 * pages.shape[-1]


def packed(latent: Array, rope: Array) -> Array:
    """[..., page, C] and [..., page, R] -> pages of latents."""
    (*lead, page, width), lanes = latent.shape, 2 * rope.shape[-1]
    slabs = latent.reshape(*lead, page // 2, 2 * (width // lanes), lanes)
    ropes = rope.reshape(*lead, page // 2, 1, lanes)
    return jnp.swapaxes(jnp.concatenate([slabs, ropes], axis=-2), -3, -2)


def unpacked(pages: Array) -> tuple[Array, Array]:
    """The inverse of `packed`."""
    *lead, _, half, lanes = pages.shape
    rows = jnp.swapaxes(pages, -3, -2)
    return (
        rows[..., :-1, :].reshape(*lead, 2 * half, latent_of(pages)),
        rows[..., -1, :].reshape(*lead, 2 * half, lanes // 2),
    )
