"""grouped_matmul on TPU: one kernel over a flat list of (tile of rows, group) pairs.

Rows are cut at every tile and at every group; a pair multiplies its tile by its group's weight and keeps the rows
that are the group's. Groups without rows are in no pair, so their weights are not read. The weight is
handled as in `matmul`.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chip, tuning
from pallas_kernels.formats import Format, QTensor
from pallas_kernels.matmul import tpu as one
from pallas_kernels.matmul import tpu_body
from pallas_kernels.matmul.tpu_body import Static

SMALLEST_TILE, SMALL_TILE, BIG_TILE = 64, 128, 512  # rows of a tile, by how many an average group has

STREAM_BYTES = 8 << 20  # of codes in one tile: every tile starts the matrix unit anew


class Pairs(NamedTuple):
    """For each pair, which tile and weight, and which rows: [T / rows + E] each."""

    count: Array  # [1] how many pairs there are; the rest repeat the last
    tile: Array
    weight: Array
    first: Array
    end: Array
    owned: Array  # whether these rows are a group's; those after the last group are not, and become zeros
    opens: Array  # whether this is the first pair of its tile


def grouped_matmul(x, w, group_sizes, *, layer=None, blocks: Mapping[str, int] | None = None):
    """See `reference.grouped_matmul`. What is refused is what `matmul` refuses."""
    t, (e, f, d), here = x.shape[0], w.shape[-3:], chip.ambient()
    flat = w if layer is None else jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), w)
    one.check(x, flat)
    weight = one.taken_apart(flat)
    key = {"rows": t, "groups": e, "outputs": f, "columns": d, "bits": one.bits(weight.format)}
    blocks = blocks or tuning.nearest("grouped_matmul", here, key) or _rule(t, e, weight.format)
    s, groups = one.static(t, f, d, weight, here, blocks)
    pairs = _pairs(group_sizes, t, s.rows, jnp.asarray(0 if layer is None else layer, jnp.int32) * e)
    steps_d = weight.codes.shape[-1] // s.width
    specs, inputs = one.weight_specs(weight, s, groups, _weight_of(steps_d - 1))
    rows = tpu_body.arranged(x, s)
    return pl.pallas_call(
        functools.partial(_body, s, steps_d - 1),
        out_shape=jax.ShapeDtypeStruct((t, f), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(pairs),
            grid=(pl.cdiv(f, s.outputs), pairs.tile.shape[0], steps_d),
            in_specs=[one.rows_spec(rows, s, _rows_of(steps_d - 1)), *specs],
            out_specs=pl.BlockSpec((s.rows, s.outputs), lambda j, i, k, _, tile, *__: (tile[i], j)),
            scratch_shapes=tpu_body.scratch(s, groups),
        ),
        compiler_params=tpu_body.compiler_params(here.vmem_bytes),
        name="grouped_matmul_" + (w.format.name if isinstance(w, QTensor) else "bf16"),
    )(*pairs, rows, *inputs)


def _weight_of(last: int):
    """Which weight and columns step (i, k) takes; when nothing is multiplied, those that are there."""

    def which(i, k, *pairs):
        pairs = Pairs(*pairs)
        idle = (i >= pairs.count[0]) | (pairs.owned[i] == 0)
        return pairs.weight[i], jnp.where(idle, last, k)

    return which


def _rows_of(last: int):
    """The same of rows."""

    def which(i, k, *pairs):
        return Pairs(*pairs).tile[i], _weight_of(last)(i, k, *pairs)[1]

    return which


def _rule(t: int, e: int, format: Format | None) -> dict[str, int]:
    if t > 2 * SMALL_TILE * e:
        return one.MANY | {"rows": BIG_TILE}
    if format is None:
        return one.rule(SMALL_TILE, format) | {"rows": SMALL_TILE}
    # A group that lies in two tiles is unpacked twice: dear for packed codes, nothing for E4M3.
    tile = SMALL_TILE if format.packed or t > SMALLEST_TILE * e // 2 else SMALLEST_TILE
    return one.rule(tile, format, STREAM_BYTES) | {"rows": tile}


def _pairs(sizes: Array, t: int, rows: int, first_weight) -> Pairs:
    """Cut the T rows at every tile and at every group's end."""
    e, tiles = sizes.shape[0], pl.cdiv(t, rows)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = jnp.arange(tiles, dtype=jnp.int32) * rows
    first = jnp.sort(jnp.concatenate([starts, jnp.minimum(ends, tiles * rows)]))
    end = jnp.append(first[1:], np.int32(tiles * rows))
    real = end > first
    count = jnp.sum(real, dtype=jnp.int32)
    order = jnp.argsort(~real, stable=True)
    kept = order[jnp.minimum(jnp.arange(tiles + e, dtype=jnp.int32), count - 1)]
    first, end = first[kept], end[kept]
    group = jnp.searchsorted(ends, first, side="right").astype(jnp.int32)
    last = jnp.max(jnp.where(sizes > 0, jnp.arange(e, dtype=jnp.int32), 0))
    tile = first // rows
    opens = first == tile * rows
    columns = (tile, first_weight + jnp.minimum(group, last), first, end, group < e, opens)
    return Pairs(count[None], *(column.astype(jnp.int32) for column in columns))


def _body(s: Static, last: int, *refs) -> None:
    pairs = Pairs(*refs[: len(Pairs._fields)])
    r = tpu_body.refs_of(s, list(refs[len(Pairs._fields) :]))
    i = pl.program_id(1)
    row = pl.multiple_of(pairs.tile[i] * s.rows, s.rows) if s.resident else 0

    def store(product):
        rows = pairs.tile[i] * s.rows + lax.broadcasted_iota(jnp.int32, product.shape, 0)
        mine = (rows >= pairs.first[i]) & (rows < pairs.end[i])
        kept = jnp.where(pairs.opens[i] == 1, jnp.zeros_like(product), r.out[...])
        r.out[...] = jnp.where(mine, product, kept)

    @pl.when((i < pairs.count[0]) & (pairs.owned[i] == 1))
    def _():
        tpu_body.multiply(s, r, pl.program_id(0), pl.program_id(2), last, row, store)

    @pl.when((i < pairs.count[0]) & (pairs.owned[i] == 0) & (pairs.opens[i] == 1))
    def _():
        r.out[...] = jnp.zeros_like(r.out)
