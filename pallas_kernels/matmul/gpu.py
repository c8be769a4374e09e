"""matmul on GPU, in Triton: a program for every (tile of rows, tile of outputs, part of the columns).

The weight is the left operand, so that many of its rows and few of `x` fill a tensor core instruction; it comes as
it is stored and is unpacked in registers. With few rows the columns are cut into parts, summed at the end, until
every processor of the chip has work.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import chip
from pallas_kernels.formats import Format
from pallas_kernels.matmul import gpu_body
from pallas_kernels.matmul.gpu_body import Static, Weight
from pallas_kernels.triton_limits import layer_index

MOST_ROWS = 128
FEW_ROWS = 64  # of a tile: stored bytes are what counts then, and smaller tiles make more programs


def matmul(x, w, *, layer=None):
    """See `reference.matmul`. Rows of bfloat16 or float16; scales of blocks, of groups in a row, or of rows."""
    stack = w if layer is not None else jax.tree.map(lambda leaf: leaf[None], w)
    weight = gpu_body.taken_apart(x, stack)
    (t, _), f, format = x.shape, w.shape[-2], getattr(w, "format", None)
    s = static(t, format)
    tiles = pl.cdiv(t, s.rows), pl.cdiv(f, s.outputs)
    parts = _parts(t, weight, s, tiles[0] * tiles[1])
    out = pl.pallas_call(
        functools.partial(_body, s, parts),
        grid=(*tiles, parts),
        out_shape=jax.ShapeDtypeStruct((parts, t, f), x.dtype if parts == 1 else jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=s.warps, num_stages=s.stages),
        name="matmul_" + (str(x.dtype) if format is None else format.name),
    )(layer_index(layer), gpu_body.planes(x, s), weight)
    return out[0] if parts == 1 else jnp.sum(out, axis=0).astype(x.dtype)


def static(rows: int, format: Format | None) -> Static:
    """Tiles for products of so many rows: no more of them than there are, and steps of enough codes."""
    rows = max(16, min(MOST_ROWS, pl.next_power_of_2(rows)))
    few = rows <= FEW_ROWS
    width = 64 if format is None or (format.packed and not few) else 128
    if format is not None and not format.packed and format.block[1]:
        width = min(width, format.block[1])
    return Static(format, rows, 64 if few else 128, width, warps=4 if few else 8, stages=4 if few else 3)


def _parts(t: int, w: Weight, s: Static, programs: int) -> int:
    """Into how many parts to cut the columns: two programs a processor, unless sums cost more than a quarter."""
    width = w.codes.shape[-1]
    most = min(pl.cdiv(width, s.width) // 8, width * w.codes.dtype.itemsize // (32 * t))
    return max(1, min(2 * chip.ambient_gpu().processors // programs, most))


def _body(s: Static, parts: int, layer, x, w: Weight, out) -> None:
    rows, outputs, part = (pl.program_id(axis) for axis in range(3))
    steps = pl.cdiv(w.codes.shape[-1], s.width)
    share = pl.cdiv(steps, parts)
    tile = gpu_body.Tile(layer[0], outputs * s.outputs, rows * s.rows, jnp.int32(x.shape[1]))
    low = part * share
    found = gpu_body.product(s, tile, x, w, low, lax.min(low + share, jnp.int32(steps)))
    gpu_body.store(s, tile, part, out, w, found)
