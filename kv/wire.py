"""Cached tokens on their way from one pool to another: rows out of pages of one form, and into pages of another.

A row is what one token left in one layer: keys and values side by side [K, 2H], or a latent with its rope key [C + R].
Rows know nothing of pages, so the two pools may differ in page size, data type and in how they are divided.

Rows of a cache with scales travel as bytes: the codes of a head, or of a latent, and then its float32 scales. They
become the receiver's as they are. Plain rows for such a cache are quantised by who sends them, as `page_write` would.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.pages import (
    LOW_BITS,
    ROPE,
    ScaledPages,
    ScaledRows,
    of_tokens,
    plain_and_scales,
    quantise_rows,
    unpacked,
)  # fmt: skip
from sharding.kernels import page_write

PLAIN = ("float32", "bfloat16", "float16")  # data types of caches without scales
SIZES = (16, 64, 256)  # rows of a block: few programs, compiled once
MULTIPLIERS = (0x9E3779B1, 0x85EBCA77)  # odd, as in xxHash


def blocks(start: int, end: int, most: int = SIZES[-1]) -> list[tuple[int, int, int]]:
    """(first token, tokens, rows with the padding) of blocks of up to `most` in which tokens start..end-1 travel."""
    return [(at, min(most, end - at), _rows(min(most, end - at))) for at in range(start, end, most)]


def block_size(row_bytes: int, step_bytes: int) -> int:
    """Most rows of a block, of which each has `row_bytes` over all layers.

    A decoding step reads all weights, `step_bytes`. Taking in a block, which the same device does beside it, goes over
    the block's bytes some six times: on the network, to its place, for the checksum, into the pages. So that this
    lengthens a step by a tenth at most, a block has a sixtieth of the bytes; a long chunk is several blocks then.
    """
    return max((size for size in SIZES if size * row_bytes <= step_bytes // 60), default=SIZES[0])


def _rows(count: int) -> int:
    return next(size for size in SIZES if size >= count)


def places(
    pages: list[int], page_size: int, start: int, count: int, rows: int, offset: int = 0
) -> np.ndarray:
    """int32 [rows]: where tokens start.. are in a pool whose pages begin at `offset`; padding is in page 0."""
    at = np.arange(start, start + count)
    real = (np.asarray(pages)[at // page_size] + offset) * page_size + at % page_size
    return np.concatenate([real, np.arange(rows - count) % page_size]).astype(np.int32)


@partial(jax.jit, static_argnames=("layers", "latent", "dtype"))
def take(
    pool: Any,
    places: Array | np.ndarray,
    first: Array | np.int32 | int = 0,
    *,
    layers: int | None = None,
    latent: bool,
    dtype: str,
) -> tuple[tuple[Array, ...], Array]:
    """(each layer's rows at `places`, uint32 [L, 2] checksums of them), in the data type in which they travel.

    `pool` is a tuple of the pages of these layers, or the stack of those of more, of which `layers` from `first` on
    are meant: all if not said.
    """
    places = jnp.asarray(places)
    if type(pool) is tuple:  # `ScaledPages` are tuples of another type
        found = [_rows_at(pages, (), places, latent) for pages in pool]
    else:
        count = layers or jax.tree.leaves(pool)[0].shape[0]
        numbers = [jnp.full_like(places, first + i) for i in range(count)]
        found = [_rows_at(pool, (number,), places, latent) for number in numbers]
    rope = jax.tree.leaves(pool)[0].shape[-1] // 2  # of latents
    rows = tuple(_travelling(layer, dtype, rope) for layer in found)
    return rows, jnp.stack([checksum(layer) for layer in rows])


def put(
    pool: Any, rows: tuple[Array, ...], places: Array | np.ndarray, first: Array | np.int32 | int = 0
) -> Any:
    """The pool with each layer's rows at `places`, in the pool's data type; donate it, and nothing is copied.

    A tuple has the pages of these layers; in a stack they begin at layer `first`.
    """
    places = jnp.asarray(places)
    stacked = type(pool) is not tuple
    like = pool if stacked else pool[0]
    kept = [_codes_and_scales(layer, like) for layer in rows] if isinstance(like, ScaledPages) else rows
    if not stacked:
        return tuple(page_write(pages, layer, places) for pages, layer in zip(pool, kept, strict=True))
    for i, layer in enumerate(kept):
        pool = page_write(pool, layer, places, layer=jnp.int32(first + i))
    return pool


checksums = jax.jit(lambda rows: jnp.stack([checksum(layer) for layer in rows]))


def checksum(rows: Array) -> Array:
    """uint32 [2] of all bits and where they stand; the same however the array is divided over devices."""
    word = jnp.dtype(f"uint{8 * rows.dtype.itemsize}")
    bits = lax.bitcast_convert_type(rows, word).astype(jnp.uint32).ravel()
    at = lax.iota(jnp.uint32, bits.size)
    sums = [jnp.sum((bits + at) * (at * np.uint32(m) | np.uint32(1)), dtype=jnp.uint32) for m in MULTIPLIERS]
    return jnp.stack(sums)


def wire_dtype(sender: str, receiver: str) -> str:
    """The cache's data type in which rows travel; ValueError if those of `sender` cannot become those of `receiver`.

    Of plain types it is the smaller one: what the receiver would drop need not travel, and what the sender lacks
    cannot.
    """
    if receiver in LOW_BITS and sender in (receiver, *PLAIN):
        return receiver
    if sender in LOW_BITS:
        raise ValueError(
            f"rows of a cache of {sender} cannot become rows of {receiver}: what was rounded for one cache would go on "
            "in another, to tokens that neither worker alone would say; give both the same --kv-cache-dtype, or a "
            "plain one to the worker that computes prompts"
        )
    return min(sender, receiver, key=lambda name: jnp.dtype(name).itemsize)


def row_form(row: tuple[int, ...], dtype: str, rope: int = ROPE) -> jax.ShapeDtypeStruct:
    """How a row of this shape travels in the cache's data type `dtype`; `rope` is the width of a latent's rope key."""
    if dtype not in LOW_BITS:
        return jax.ShapeDtypeStruct(row, jnp.dtype(dtype))
    rows = jax.eval_shape(
        partial(_travelling, dtype=dtype, rope=rope), jax.ShapeDtypeStruct((1, *row), jnp.float32)
    )
    return jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)


def row_shape(page_shape: tuple[int, ...], latent: bool) -> tuple[int, ...]:
    """What one token leaves in one layer's page of this shape."""
    if latent:
        slabs, _, lanes = page_shape
        return ((slabs - 1) // 2 * lanes + lanes // 2,)
    return (page_shape[0], page_shape[2])


def _travelling(rows: Array | ScaledRows, dtype: str, rope: int) -> Array:
    """Rows in the form in which those of a cache of `dtype` travel."""
    if dtype not in LOW_BITS:
        assert not isinstance(rows, ScaledRows)
        return rows.astype(dtype)
    values, scales = quantise_rows(rows, LOW_BITS[dtype], rope)
    values = lax.bitcast_convert_type(values, jnp.uint8)
    scales = lax.bitcast_convert_type(scales, jnp.uint8).reshape(*values.shape[:-1], -1)
    return jnp.concatenate([values, scales], axis=-1)


def _codes_and_scales(rows: Array, pages: ScaledPages) -> ScaledRows:
    """The inverse, of bytes for such pages."""
    values, scales = pages
    count = scales.shape[-2] // 2 if rows.ndim == 2 else 2  # of a latent, or of a head
    width = rows.shape[-1] - 4 * count
    found = rows[..., width:].reshape(*rows.shape[:-1], count, 4)
    found = lax.bitcast_convert_type(found, jnp.float32)
    codes = lax.bitcast_convert_type(rows[..., :width], values.dtype)
    return ScaledRows(codes, found[..., 0] if count == 1 else found)


def _rows_at(
    pages: Array | ScaledPages, layer: tuple[Array, ...], places: Array, latent: bool
) -> Array | ScaledRows:
    """Rows of one layer's pages, or of layer `layer` [T] of a stack, which is gathered from without a slice of it."""
    values, scales = plain_and_scales(pages)
    size = (2 if latent else 1) * values.shape[-2]
    page, at = places // size, places % size
    if not latent:
        rows = values[*layer, page, :, at]
        return (
            rows if scales is None else ScaledRows(rows, jnp.swapaxes(scales[*layer, page, :, :, at], 1, 2))
        )
    rows = jnp.concatenate(unpacked(values[*layer, page]), axis=-1)
    rows = jnp.take_along_axis(rows, at[:, None, None], axis=1)[:, 0]
    if scales is None:
        return rows
    found = jnp.take_along_axis(of_tokens(scales[*layer, page]), at[:, None, None], axis=1)[:, 0]
    return ScaledRows(rows, found[:, 0] if found.shape[1] == 1 else found)
