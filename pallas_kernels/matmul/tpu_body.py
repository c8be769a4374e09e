"""The device side of matmul and grouped_matmul: a tile of rows times a tile of a stored weight."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.formats import Format
from pallas_kernels.matmul import tpu_weights
from pallas_kernels.matmul.tpu_weights import LANES, Stored

OUTPUTS = 256  # as many as the matrix unit has columns are summed at once
DEPTH = 256  # and as many columns at a time where groups are scaled after the product


class Static(NamedTuple):
    """What is known of one call when it is compiled."""

    format: Any  # Format, or None for a plain weight
    rows: int
    outputs: int  # rows of the weight in a tile
    width: int  # code columns of a tile
    chunk: int  # code columns multiplied at once
    native_e4m3: (
        bool  # E4M3 as checkpoints have it; otherwise the matrix unit knows the one with a bias of 11
    )
    resident: bool  # all rows are in VMEM whole, not only those and their columns of a tile
    late: bool  # scales of groups and blocks multiply sums, not weights
    turned: bool  # scales of groups and of blocks come with F last

    @property
    def operand(self) -> Any:
        """What of the weight the matrix unit is fed; rows are BF16 beside any of them."""
        return tpu_weights.operand(self.format, self.native_e4m3, self.late)

    @property
    def direct(self) -> bool:
        """Whether the stored weight is an operand as it is."""
        return self.format is None or (self.operand == jnp.float8_e4m3fn and self.format.codes == "e4m3")

    @property
    def prepared(self) -> bool:
        """Whether operands are made in VMEM, ahead: BF16 ones, which take many instructions."""
        return not self.direct and self.operand == jnp.bfloat16

    @property
    def packed(self) -> int:
        """Columns of the rows for each column of codes."""
        return 2 if self.format is not None and self.format.packed else 1


class Refs(NamedTuple):
    """Where everything lies; None what the format has not."""

    x: Any  # [rows, columns] or, resident, all of them
    w: Stored
    columns: Any  # [1, outputs] float32: a factor for every output, or [1, 1] in SMEM for all
    out: Any  # [rows, outputs]
    sums: Any  # [rows, outputs] float32
    wide: tuple  # two buffers [outputs / 2, columns of a chunk] int32, pairs of operands that are prepared


class Place(NamedTuple):
    """Where one step of the grid works."""

    f: Any  # which tile of the outputs
    column: Any  # its first code column, counted from the start of the whole row
    row: Any  # its first row in `Refs.x`


def refs_of(s: Static, refs: list) -> Refs:
    """The references of one call, which come in the order of `inputs`, the output and `scratch`."""
    left = iter(refs)
    take = lambda there: next(left) if there else None  # noqa: E731
    format, groups = s.format, tpu_weights.grouped(s.format)
    x, codes = next(left), next(left)
    scales = take(groups or blocked(format))
    zeros = take(format is not None and format.zeros)
    columns = take(format is not None and (not format.block[1] or format.per_tensor))
    out, sums = next(left), next(left)
    steps = take(groups)
    offsets = take(zeros is not None)
    return Refs(x, Stored(codes, scales, zeros, steps, offsets), columns, out, sums, tuple(left))


def blocked(format: Format | None) -> bool:
    """Whether blocks of 128 x 128 share a scale."""
    return format is not None and format.block == (LANES, LANES)


def scratch(s: Static, groups: int) -> list:
    """The sums; where columns are grouped, the scales (and zero points); operands."""
    words = pltpu.VMEM((groups, s.outputs), jnp.float32)
    if not s.late:
        words = pltpu.VMEM((s.outputs // 2, groups), jnp.int32)
    count = tpu_weights.grouped(s.format) + (s.format is not None and s.format.zeros)
    wide = pltpu.VMEM((s.outputs // 2, s.packed * s.chunk), jnp.int32)
    return [
        pltpu.VMEM((s.rows, s.outputs), jnp.float32),
        *[words] * count,
        *[wide] * (2 if s.prepared else 0),
    ]


def multiply(s: Static, r: Refs, f, d, last_d: int, row, store: Callable[[Array], None]) -> None:
    """One step of the grid: tile `f` of the outputs, `d` of the columns, rows from `row` on.

    The finished tile is handed to `store`.
    """

    @pl.when(d == 0)
    def _():
        r.sums[...] = jnp.zeros_like(r.sums)
        if tpu_weights.grouped(s.format):
            tpu_weights.prepare(s.format, r.w, s.turned, s.late)

    _all_chunks(s, r, Place(f, d * s.width, row))

    @pl.when(d == last_d)
    def _():
        sums = r.sums[...]
        if r.columns is not None:
            sums = sums * (r.columns[0, 0] if s.format.per_tensor else r.columns[...])
        scale = 1.0 if blocked(s.format) else tpu_weights.factor(s.format, s.native_e4m3, s.late)
        store((sums * scale if scale != 1.0 else sums).astype(r.out.dtype))


def _all_chunks(s: Static, r: Refs, place: Place) -> None:
    """Unpack each chunk of columns while the one before it is multiplied."""
    count = s.width // s.chunk
    at = lambda i: pl.multiple_of(i * s.chunk, s.chunk)  # noqa: E731

    if not r.wide:

        def straight(i, _):
            _accumulate(s, r, place, at(i), lambda *tile: _operand(s, r, place, at(i), *tile))

        lax.fori_loop(0, count, straight, None)
        return
    even, odd = r.wide
    _unpack(s, r, place, at(0), even)

    def pair(i, _):
        _unpack(s, r, place, at(2 * i + 1), odd)
        _accumulate(s, r, place, at(2 * i), lambda *tile: _made(even, *tile))
        _unpack(s, r, place, at(jnp.minimum(2 * i + 2, count - 1)), even)
        _accumulate(s, r, place, at(2 * i + 1), lambda *tile: _made(odd, *tile))

    lax.fori_loop(0, count // 2, pair, None)
    if count % 2:
        _accumulate(s, r, place, at(count - 1), lambda *tile: _made(even, *tile))


def _accumulate(s: Static, r: Refs, place: Place, at, operand: Callable[[slice, slice], Array]) -> None:
    """Add the products of code columns at:at+chunk; `operand` gives these outputs and columns of that chunk."""
    total = s.chunk * s.packed
    size = (LANES if blocked(s.format) else DEPTH) if s.late else total
    first = (place.column + at if s.resident else at) * s.packed
    for i in range(0, total, size):
        rows = r.x[pl.ds(place.row, s.rows), pl.ds(first + i, size)]
        product = _scaled(s, r, place, (place.column + at) * s.packed + i, rows) if s.late else _plain
        for output in range(0, s.outputs, OUTPUTS):
            outputs = slice(output, output + OUTPUTS)
            r.sums[:, outputs] += product(rows, operand(outputs, slice(i, i + size)), outputs)


def _made(words, outputs: slice, columns: slice) -> Array:
    """These outputs and columns of prepared operands, which lie as pairs of outputs in a word."""
    return pltpu.bitcast(words[outputs.start // 2 : outputs.stop // 2, columns], jnp.bfloat16)


def _operand(s: Static, r: Refs, place: Place, at, outputs: slice, columns: slice) -> Array:
    """These columns, counted from code column `at` on, as the matrix unit takes them."""
    codes = range(columns.start // s.packed, columns.stop // s.packed, LANES)
    if s.direct:
        return r.w.codes[outputs, pl.ds(at + columns.start, columns.stop - columns.start)]
    parts = [
        part
        for i in codes
        for part in tpu_weights.operands(
            s.format, r.w, outputs, at + i, place.column + at + i, s.native_e4m3, s.late
        )
    ]
    return jnp.concatenate(parts, axis=1)


def _plain(x: Array, w: Array, _outputs: slice) -> Array:
    return _dot(x, w)


def _scaled(s: Static, r: Refs, place: Place, column, rows: Array) -> Callable[[Array, Array, slice], Array]:
    """The product of these columns, from `column` of the whole row on, with sums multiplied by their scales.

    Rows meet groups one at a time: as many copies of them as there are groups, each zero but in its own.
    """
    if blocked(s.format):
        scales = _block_scales(s, r, place.f, column)

        def product(x: Array, w: Array, outputs: slice) -> Array:
            mine = scales[outputs.start // LANES : outputs.stop // LANES]
            return _dot(x, w) * jnp.concatenate([jnp.full((1, LANES), scale) for scale in mine], axis=1)

        return product
    count, group = DEPTH // s.format.block[1], column // s.format.block[1]
    copies = _one_group_each(rows, count)
    if s.format.codes == "int4":  # codes are multiplied as they are, zero points taken off the sums
        unit = 1 / tpu_weights.factor(s.format, s.native_e4m3, s.late)
        ones = jnp.sum(copies.astype(jnp.float32), axis=1, keepdims=True) * unit

    def sums(_: Array, w: Array, outputs: slice) -> Array:
        found, total = _dot(copies, w), jnp.zeros((s.rows, w.shape[0]), jnp.float32)
        for i in range(count):
            mine, here = slice(i * s.rows, (i + 1) * s.rows), (pl.ds(group + i, 1), outputs)
            part = found[mine]
            if s.format.codes == "int4":
                part = part - ones[mine] * (8.0 if r.w.offsets is None else r.w.offsets[here])
            total = total + part * r.w.steps[here]
        return total

    return sums


def _one_group_each(rows: Array, count: int) -> Array:
    """[count * rows, DEPTH]: the rows once for each group of these columns, zero outside it."""
    words = pltpu.bitcast(rows, jnp.int32)
    group = lax.broadcasted_iota(jnp.int32, words.shape, 1) % LANES // (LANES // count)
    copies = [jnp.where(group == i, words, 0) for i in range(count)]
    return pltpu.bitcast(jnp.concatenate(copies), rows.dtype)


def _unpack(s: Static, r: Refs, place: Place, at, to) -> None:
    """Operands of code columns at:at+chunk into `to`, a few registers at a time."""
    early = blocked(s.format) and not s.late
    for i in range(0, s.chunk, LANES):
        scales = _block_scales(s, r, place.f, place.column + at + i) if early else []
        for row in range(0, s.outputs, LANES):
            rows = slice(row, row + LANES)
            parts = tpu_weights.operands(
                s.format, r.w, rows, at + i, place.column + at + i, s.native_e4m3, s.late
            )
            for plane, part in enumerate(parts):
                if early:
                    part = (part.astype(jnp.float32) * scales[row // LANES]).astype(jnp.bfloat16)
                first = s.packed * i + plane * LANES
                to[row // 2 : (row + LANES) // 2, first : first + LANES] = pltpu.bitcast(part, jnp.int32)


def _block_scales(s: Static, r: Refs, f, column) -> list[Array]:
    """The scales of the tile's blocks that hold this column of the whole row, from the first output on."""
    blocks, column = -(-s.outputs // LANES), column // LANES
    scale = tpu_weights.factor(s.format, s.native_e4m3, s.late)
    last = r.w.scales.shape[1 if s.turned else 0] - 1
    rows = [jnp.minimum(f * blocks + i, last) for i in range(blocks)]
    return [(r.w.scales[column, row] if s.turned else r.w.scales[row, column]) * scale for row in rows]


def _dot(x: Array, w: Array) -> Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def arranged(x: Array, s: Static) -> Array:
    """The rows with columns in the order of operands: where two codes share a byte, 128 even ones, then 128 odd."""
    t, d = x.shape
    return x.reshape(t, d // DEPTH, LANES, 2).swapaxes(2, 3).reshape(t, d) if s.packed == 2 else x


def padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def tile_bytes(s: Static, rows_bytes: int, groups: int) -> int:
    """VMEM that one call with `rows_bytes` of rows takes: blocks twice, for the next one is fetched meanwhile."""
    code = 2 if s.format is None else 1
    blocks = rows_bytes + s.outputs * s.width * code + s.rows * s.outputs * 2
    scales = s.outputs * groups * (8 if s.late else 6) * (2 if s.format is not None and s.format.zeros else 1)
    operands = 4 * s.packed * s.outputs * s.chunk if s.prepared else 0
    return 2 * blocks + scales + operands + 2 * s.rows * s.outputs * 4


def compiler_params(vmem_bytes: int) -> pltpu.CompilerParams:
    """Tiles of the outputs may be shared out over cores; the rest of the grid is in order."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_bytes * 7 // 8
    )
