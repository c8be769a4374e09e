"""grouped_matmul on GPU, in Triton: `matmul` for a flat list of tiles of rows of one group each.

Groups without rows are in no tile, so their weights are not read. Rows after the last group are tiles that
multiply nothing and become zeros.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.matmul import gpu as one
from pallas_kernels.matmul import gpu_body
from pallas_kernels.matmul.gpu_body import Static, Weight
from pallas_kernels.row_tiles import Tiles, row_tiles
from pallas_kernels.triton_limits import layer_index


def grouped_matmul(x, w, group_sizes, *, layer=None):
    """See `reference.grouped_matmul`. What is refused is what `matmul` refuses."""
    t, (e, f, _), format = x.shape[0], w.shape[-3:], getattr(w, "format", None)
    flat = w if layer is None else jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), w)
    weight = gpu_body.taken_apart(x, flat)
    s = one.static(pl.cdiv(t, e), format)
    starts = jnp.cumsum(jnp.append(jnp.zeros(1, group_sizes.dtype), group_sizes), dtype=jnp.int32)
    tiles = row_tiles(starts, t, s.rows)
    out = pl.pallas_call(
        functools.partial(_body, s, e),
        grid=(pl.cdiv(f, s.outputs), tiles.owner.shape[0]),
        out_shape=jax.ShapeDtypeStruct((1, t, f), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=s.warps, num_stages=s.stages),
        name="grouped_matmul_" + (str(x.dtype) if format is None else format.name),
    )(tiles, layer_index(layer) * e, gpu_body.planes(x, s), weight)
    return out[0]


def _body(s: Static, groups: int, tiles: Tiles, first, x, w: Weight, out) -> None:
    outputs, i = pl.program_id(0), pl.program_id(1)
    owner, row, end = tiles.owner[i], tiles.first[i], tiles.end[i]
    owned = (owner < groups) & (row < end)
    tile = gpu_body.Tile(first[0] + jnp.minimum(owner, groups - 1), outputs * s.outputs, row, end)
    steps = jnp.where(owned, jnp.int32(pl.cdiv(w.codes.shape[-1], s.width)), jnp.int32(0))
    gpu_body.store(s, tile, 0, out, w, gpu_body.product(s, tile, x, w, jnp.int32(0), steps))
