"""The definition of grouped_matmul."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.formats import QTensor, dequantise

FEW_ROWS, MOST_ROWS = 16, 128  # of a tile


def grouped_matmul(
    x: Float[Array, "T D"],
    w: QTensor | Float[Array, "*L E F D"],
    group_sizes: Int[Array, "E"],
    *,
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "T F"]:
    """Row t times the matrix of its group, `x[t] @ w[e].T`, summed in float32.

    Rows are sorted by group: the first `group_sizes[0]` are group 0's, and so on. A group may be empty, and rows
    after the last group give zeros. Weights as in `matmul`; with `layer`, `w` is the stack of all layers'.

    Tile by tile, only of groups that have rows: on CPU `lax.ragged_dot` multiplies every row with every matrix.
    """
    if layer is not None:
        w = jax.tree.map(lambda leaf: leaf[layer], w)
    (t, _), (e, f, _) = x.shape, w.shape
    rows = _tile_rows(t / e)
    tiles = (group_sizes + rows - 1) // rows
    ends, tile_ends = jnp.cumsum(group_sizes), jnp.cumsum(tiles)
    padded = jnp.pad(x, ((0, rows), (0, 0)))

    def tile(i, sums):
        group = jnp.searchsorted(tile_ends, i, side="right").astype(jnp.int32)
        within = i - (tile_ends[group] - tiles[group])
        first = ends[group] - group_sizes[group] + within * rows
        weight = jax.tree.map(lambda leaf: leaf[group], w)
        values = dequantise(weight, x.dtype) if isinstance(weight, QTensor) else weight
        x_rows = lax.dynamic_slice_in_dim(padded, first, rows)
        product = jnp.einsum("td,fd->tf", x_rows, values, preferred_element_type=jnp.float32)
        # Rows past the group's end belong to groups that come later and write their own.
        return lax.dynamic_update_slice_in_dim(sums, product, first, 0)

    sums = lax.fori_loop(0, tile_ends[-1], tile, jnp.zeros((t + rows, f), jnp.float32))
    return jnp.where(jnp.arange(t)[:, None] < ends[-1], sums[:t], 0).astype(x.dtype)


def _tile_rows(share: float) -> int:
    """A power of two below a group's share of rows; twice that where reading weights is what takes time."""
    rows = max(min(2 * share, FEW_ROWS), min(share, MOST_ROWS))
    return 2 ** max(int(rows).bit_length() - 1, 0)


def cost(x: Any, w: Any, group_sizes: Any, *, layer: Any = None) -> tuple[int, int]:
    """(floating-point operations, bytes to and from HBM) of one call with these sizes.

    The weight of every group that has rows is read once, as it is stored.
    """
    e, f, d = w.shape[-3:]
    sizes = np.asarray(group_sizes)
    rows, read = int(sizes.sum()), int((sizes > 0).sum())
    weight = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(w)) * read // e
    if layer is not None:
        weight //= w.shape[0]
    return 2 * rows * d * f, weight + rows * (d + f) * x.dtype.itemsize
