"""Cached tokens on their way from one pool to another: rows out of pages of one form, and into pages of another.

A row is what one token left in one layer: keys and values side by side [K, 2H], or a latent with its rope key [C + R].
Rows know nothing of pages, so the two pools may differ in page size, data type and in how they are divided.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.pages import unpacked
from sharding.kernels import page_write

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


@partial(jax.jit, static_argnames=("latent", "dtype"))
def take(pool: Any, places: Array, *, latent: bool, dtype: str) -> tuple[tuple[Array, ...], Array]:
    """(each layer's rows at `places`, uint32 [L, 2] checksums of them), in the data type in which they travel."""
    layers = pool if isinstance(pool, tuple) else tuple(pool[i] for i in range(len(pool)))
    rows = tuple(_rows_at(pages, places, latent).astype(dtype) for pages in layers)
    return rows, jnp.stack([checksum(layer) for layer in rows])


def put(pool: Any, rows: tuple[Array, ...], places: Array | np.ndarray) -> Any:
    """The pool with each layer's rows at `places`, in the pool's data type; donate it, and nothing is copied."""
    places = jnp.asarray(places)
    if isinstance(pool, tuple):
        return tuple(page_write(pages, layer, places) for pages, layer in zip(pool, rows, strict=True))
    for i, layer in enumerate(rows):
        pool = page_write(pool, layer, places, layer=jnp.int32(i))
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
    """The smaller one: what the receiver would drop need not travel, and what the sender lacks cannot."""
    return min(sender, receiver, key=lambda name: jnp.dtype(name).itemsize)


def row_shape(page_shape: tuple[int, ...], latent: bool) -> tuple[int, ...]:
    """What one token leaves in one layer's page of this shape."""
    if latent:
        slabs, _, lanes = page_shape
        return ((slabs - 1) // 2 * lanes + lanes // 2,)
    return (page_shape[0], page_shape[2])


def _rows_at(pages: Array, places: Array, latent: bool) -> Array:
    if latent:
        size = 2 * pages.shape[-2]
        values = jnp.concatenate(unpacked(pages[places // size]), axis=-1)
        return jnp.take_along_axis(values, (places % size)[:, None, None], axis=1)[:, 0]
    size = pages.shape[-2]
    return pages[places // size, :, places % size]
