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
LATE_ROWS = 128  # so few rows are cheaper to scale, exactly, after the product than the weight before it


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
    halves: bool  # rows come as two E4M3 each, so that E4M3 weights need not become BF16
    turned: bool  # scales of groups and of blocks come with F last

    @property
    def operand(self) -> Any:
        """What the matrix unit is fed."""
        if not self.halves:
            return jnp.bfloat16
        return jnp.float8_e4m3fn if self.native_e4m3 else jnp.float8_e4m3b11fnuz

    @property
    def direct(self) -> bool:
        """Whether the stored weight is an operand as it is."""
        return self.format is None or (self.halves and self.native_e4m3)


class Refs(NamedTuple):
    """Where everything lies; None what the format has not."""

    x: Any  # [planes, rows, width] or, resident, all of them
    w: Stored
    columns: Any  # [1, outputs] float32: a factor for every output, or [1, 1] in SMEM for all
    factors: Any  # [rows, 1] float32: a factor for every row
    out: Any  # [rows, outputs]
    sums: Any  # [rows, outputs] float32
    wide: tuple  # two buffers of operands [planes, outputs, chunk], where codes are not operands themselves


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
    factors = take(s.halves)
    out, sums = next(left), next(left)
    steps = take(groups)
    offsets = take(zeros is not None)
    return Refs(x, Stored(codes, scales, zeros, steps, offsets), columns, factors, out, sums, tuple(left))


def blocked(format: Format | None) -> bool:
    """Whether blocks of 128 x 128 share a scale."""
    return format is not None and format.block == (LANES, LANES)


def scratch(s: Static, groups: int) -> list:
    """The sums; where columns are grouped, the scales (and zero points) in BF16, two rows in one word; operands."""
    words = pltpu.VMEM((s.outputs // 2, groups), jnp.int32)
    count = tpu_weights.grouped(s.format) + (s.format is not None and s.format.zeros)
    planes = 2 if s.format is not None and s.format.packed else 1
    wide = pltpu.VMEM((planes, s.outputs, s.chunk), s.operand)
    return [pltpu.VMEM((s.rows, s.outputs), jnp.float32), *[words] * count, *[wide] * (0 if s.direct else 2)]


def multiply(s: Static, r: Refs, f, d, last_d: int, row, store: Callable[[Array], None]) -> None:
    """One step of the grid: tile `f` of the outputs, `d` of the columns, rows from `row` on.

    The finished tile is handed to `store`.
    """

    @pl.when(d == 0)
    def _():
        r.sums[...] = jnp.zeros_like(r.sums)
        if tpu_weights.grouped(s.format):
            tpu_weights.prepare(s.format, r.w, s.turned)

    _all_chunks(s, r, Place(f, d * s.width, row))

    @pl.when(d == last_d)
    def _():
        sums = r.sums[...]
        if r.columns is not None:
            sums = sums * (r.columns[0, 0] if s.format.per_tensor else r.columns[...])
        if r.factors is not None:
            sums = sums * r.factors[...]
        scale = 1.0 if blocked(s.format) else tpu_weights.factor(s.format, s.native_e4m3)
        store((sums * scale if scale != 1.0 else sums).astype(r.out.dtype))


def _all_chunks(s: Static, r: Refs, place: Place) -> None:
    """Unpack each chunk of columns while the one before it is multiplied."""
    count = s.width // s.chunk
    at = lambda i: pl.multiple_of(i * s.chunk, s.chunk)  # noqa: E731

    if s.direct:

        def straight(i, _):
            _accumulate(s, r, place, at(i), r.w.codes, at(i))

        lax.fori_loop(0, count, straight, None)
        return
    even, odd = r.wide
    _unpack(s, r, place, at(0), even)

    def pair(i, _):
        _unpack(s, r, place, at(2 * i + 1), odd)
        _accumulate(s, r, place, at(2 * i), even, 0)
        _unpack(s, r, place, at(jnp.minimum(2 * i + 2, count - 1)), even)
        _accumulate(s, r, place, at(2 * i + 1), odd, 0)

    lax.fori_loop(0, count // 2, pair, None)
    if count % 2:
        _accumulate(s, r, place, at(count - 1), even, 0)


def _accumulate(s: Static, r: Refs, place: Place, at, w, w_at) -> None:
    """Add the products of code columns at:at+chunk, whose operands are the columns of `w` from `w_at` on."""
    late = blocked(s.format) and s.rows <= LATE_ROWS
    size = LANES if late else s.chunk
    rows = pl.ds(place.row, s.rows)
    first = place.column + at if s.resident else at
    for output in range(0, s.outputs, OUTPUTS):
        outputs, total = slice(output, output + OUTPUTS), r.sums[:, output : output + OUTPUTS]
        for i in range(0, s.chunk, size):
            found = _product(s, r, rows, pl.ds(first + i, size), w, outputs, pl.ds(w_at + i, size))
            if late:
                scales = _block_scales(s, r, place.f, place.column + at + i)
                scales = scales[output // LANES :][: OUTPUTS // LANES]
                found = found * jnp.concatenate([jnp.full((1, LANES), scale) for scale in scales], axis=1)
            total = total + found
        r.sums[:, outputs] = total


def _product(s: Static, r: Refs, rows, columns, w, outputs: slice, w_columns) -> Array:
    """[rows, outputs] float32: these columns of the rows times these of the operands."""
    if s.halves:
        part = w[outputs, w_columns] if s.direct else w[0, outputs, w_columns]
        both = _dot(r.x[:, rows, columns].reshape(2 * s.rows, -1), part)
        return both[: s.rows] + both[s.rows :]
    if s.direct:
        return _dot(r.x[0, rows, columns], w[outputs, w_columns])
    planes = range(r.x.shape[0])
    parts = [_dot(r.x[plane, rows, columns], w[plane, outputs, w_columns]) for plane in planes]
    return sum(parts[1:], start=parts[0])


def _unpack(s: Static, r: Refs, place: Place, at, to) -> None:
    """Operands of code columns at:at+chunk into `to`, a few registers at a time."""
    early = blocked(s.format) and s.rows > LATE_ROWS
    for i in range(0, s.chunk, LANES):
        scales = _block_scales(s, r, place.f, place.column + at + i) if early else []
        for row in range(0, s.outputs, LANES):
            rows = slice(row, row + LANES)
            parts = tpu_weights.operands(
                s.format, r.w, rows, at + i, place.column + at + i, s.native_e4m3, s.operand
            )
            for plane, part in enumerate(parts):
                if early:
                    part = (part.astype(jnp.float32) * scales[row // LANES]).astype(jnp.bfloat16)
                to[plane, rows, i : i + LANES] = part


def _block_scales(s: Static, r: Refs, f, column) -> list[Array]:
    """The scales of the tile's blocks that hold this column of the whole row, from the first output on."""
    blocks, column = -(-s.outputs // LANES), column // LANES
    scale = tpu_weights.factor(s.format, s.native_e4m3)
    last = r.w.scales.shape[1 if s.turned else 0] - 1
    rows = [jnp.minimum(f * blocks + i, last) for i in range(blocks)]
    return [(r.w.scales[column, row] if s.turned else r.w.scales[row, column]) * scale for row in rows]


def _dot(x: Array, w: Array) -> Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def planes(x: Array, s: Static) -> tuple[Array, Array | None]:
    """The rows as [planes, T, width], and [T, 1] float32 to multiply the result by.

    Even and odd columns are planes where two codes share a byte. The halves of `halved` are planes, too.
    """
    if s.halves:
        return halved(x, s.operand)
    return (
        jnp.stack([x[:, 0::2], x[:, 1::2]]) if s.format is not None and s.format.packed else x[None]
    ), None


def halved(x: Array, dtype: Any) -> tuple[Array, Array]:
    """BF16 as the sum of two E4M3 (the upper and the lower four bits of eight) times a power of two a row.

    Exact for values down to 2^-9 of the largest in the row (E4M3 ends there); below, what is lost is less than
    2^-17 of the largest.
    """
    room = 8 if dtype == jnp.float8_e4m3fn else 4  # the largest becomes one from 2^(room - 1) up to 2^room
    wide = x.astype(jnp.float32)
    exponent = jnp.clip(jnp.frexp(jnp.max(jnp.abs(wide), axis=1, keepdims=True))[1], -110, 120)
    wide = wide * jnp.ldexp(jnp.float32(1), room - exponent)
    upper = wide.astype(dtype)
    lower = (wide - upper.astype(jnp.float32)).astype(dtype)
    return jnp.stack([upper, lower]), jnp.ldexp(jnp.float32(1), exponent - room)


def padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def tile_bytes(s: Static, rows_bytes: int, groups: int) -> int:
    """VMEM that one call with `rows_bytes` of rows takes: blocks twice, for the next one is fetched meanwhile."""
    planes = 2 if s.format is not None and s.format.packed else 1
    code = 2 if s.format is None else 1
    blocks = rows_bytes + s.outputs * s.width * code + s.rows * s.outputs * 2
    words = 2 * s.outputs * groups * (2 if s.format is not None and s.format.zeros else 1)
    unpacked = planes * s.outputs * s.chunk * 4
    return 2 * blocks + 2 * words + unpacked + 2 * s.rows * s.outputs * 4


def compiler_params(vmem_bytes: int) -> pltpu.CompilerParams:
    """Tiles of the outputs may be shared out over cores; the rest of the grid is in order."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_bytes * 7 // 8
    )
