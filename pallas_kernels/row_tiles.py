"""Rows of many owners, cut into tiles of one owner each: what the GPU kernels' programs are numbered by."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Tiles(NamedTuple):
    """For each tile, whose rows it holds and which: first <= row < end. The last tiles may hold none."""

    owner: Array
    first: Array
    end: Array


def row_tiles(starts: Array, total: int, size: int, unit: int = 1) -> Tiles:
    """Tiles of at most `size` rows; owner x has rows starts[x]:starts[x + 1], multiples of `unit`.

    Rows from the last start to `total` are nobody's and have the number after the last owner's, so that every
    row is in one tile.
    """
    partial = 0 if unit % size == 0 else starts.shape[0]
    ends = jnp.append(starts[1:], jnp.int32(total))
    counts = (ends - starts + (size - 1)) // size
    before = jnp.cumsum(counts) - counts
    number = jnp.arange(total // size + partial, dtype=jnp.int32)
    # All against all: on a GPU this is one small kernel, and a binary search is a loop of several.
    owner = jnp.sum(number[:, None] >= before[None, 1:], axis=1, dtype=jnp.int32)
    first = jnp.minimum(starts[owner] + (number - before[owner]) * size, ends[owner])
    return Tiles(owner, first, jnp.minimum(first + size, ends[owner]))
