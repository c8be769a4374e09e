"""The device side of matmul and grouped_matmul on GPU: one tile of outputs for one tile of rows.

Two codes of a byte are the even and the odd column of a pair: instead of interleaving them, the low nibbles meet
the even columns of the rows and the high ones the odd, which come as two planes.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import triton

from pallas_kernels.formats import Format, QTensor
from pallas_kernels.op import Unfit
from pallas_kernels.triton_limits import check_addresses, load

CODES = ("int4", "e2m1", "int8", "e4m3", "e5m2")
LONGEST_GROUP = 128  # columns of a row that share a scale; longer ones are blocks, whose scales multiply sums


class Weight(NamedTuple):
    """A stack of weights [X, F, D] as it is stored; None what the format has not."""

    codes: Any  # [X, F, D] or, of two codes a byte, [X, F, D / 2]
    scales: Any  # [X, F / rows, D / columns], of blocks or groups
    zeros: Any  # like `scales`
    factors: Any  # [X, F] or [X, 1]: scales of whole rows or of the whole weight


class Static(NamedTuple):
    """What is known when one call is compiled."""

    format: Format | None
    rows: int  # of `x`, in a tile
    outputs: int
    width: int  # codes of one step
    warps: int
    stages: int

    @property
    def planes(self) -> int:
        return 2 if self.format is not None and self.format.packed else 1


class Tile(NamedTuple):
    """What one program multiplies."""

    weight: Array  # number in the stack
    output: Array  # the first
    row: Array  # the first
    end: Array  # rows from here on are not this program's


def taken_apart(x, w) -> Weight:
    """The leaves of a stack of weights [X, F, D], once it is clear that the kernels can multiply them."""
    format = getattr(w, "format", None)
    if x.dtype not in (jnp.bfloat16, jnp.float16) or (format is None and w.dtype != x.dtype):
        kind = w.dtype if format is None else format.name
        raise Unfit(f"rows are {x.dtype} and the weight is {kind}; rows must be bfloat16 or float16")
    if not isinstance(w, QTensor):
        check_addresses(w=w)
        return Weight(w, None, None, None)
    check_addresses(codes=w.codes)
    columns = w.format.block[1]
    if w.format.codes not in CODES or (columns and columns & (columns - 1)):
        raise Unfit(f"{w.format.name}: codes of {CODES} in blocks of a power of two of columns")
    if not _grouped(w.format) and (w.format.packed or w.zeros is not None):
        raise Unfit(
            f"{w.format.name}: 4 bits and zero points only in groups of up to {LONGEST_GROUP} in a row"
        )
    if columns == 0:
        return Weight(w.codes, None, None, w.scales.reshape(len(w.codes), -1))
    whole = None if w.tensor_scale is None else w.tensor_scale.reshape(-1, 1)
    return Weight(w.codes, w.scales, w.zeros, whole)


def planes(x: Array, s: Static) -> Array:
    """[1, T, D], or [2, T, D / 2]: even and odd columns apart."""
    if s.planes == 1:
        return x[None]
    return jnp.moveaxis(x.reshape(x.shape[0], -1, 2), -1, 0)


def product(s: Static, tile: Tile, x, w: Weight, low, high) -> Array:
    """Outputs by rows [outputs, rows] float32 of the steps `low` to `high` over the columns."""
    _, f, width = w.codes.shape
    output = tile.output + lax.iota(jnp.int32, s.outputs)
    row = tile.row + lax.iota(jnp.int32, s.rows)
    outputs_there = None if f % s.outputs == 0 else output < f

    def step(i, sums):
        code = i * s.width + lax.iota(jnp.int32, s.width)
        columns_there = None if width % s.width == 0 else code < width
        stored = load(
            w.codes.at[tile.weight, output[:, None], code[None]], _both(outputs_there, columns_there)
        )
        there = _both(row < tile.end, columns_there)
        planes = [load(x.at[p, row[:, None], code[None]], there) for p in range(s.planes)]
        found = jnp.zeros((s.outputs, s.rows), jnp.float32)
        for operand, plane in zip(
            _operands(s, tile, w, stored, output, i, plane_type=x.dtype), planes, strict=True
        ):
            found += _dot(operand, plane)
        if _blocked(s.format):
            assert s.format is not None
            rows, columns = s.format.block
            at = w.scales.at[tile.weight, lax.div(output, rows), lax.div(i * s.width, columns)]
            found *= load(at, outputs_there).astype(jnp.float32)[:, None]
        return sums + found

    return lax.fori_loop(low, high, step, jnp.zeros((s.outputs, s.rows), jnp.float32))


def store(s: Static, tile: Tile, part, out, w: Weight, found) -> None:
    """`found`, with the scales that are left, into its place in `out` [parts, T, F]."""
    f = out.shape[-1]
    output = tile.output + lax.iota(jnp.int32, s.outputs)
    row = tile.row + lax.iota(jnp.int32, s.rows)
    if w.factors is not None and w.factors.shape[-1] == 1:
        found *= w.factors[tile.weight, 0].astype(jnp.float32)
    elif w.factors is not None:
        scale = load(w.factors.at[tile.weight, output], output < f)
        found *= scale.astype(jnp.float32)[:, None]
    here = (row < tile.end)[:, None] & (output < f)[None]
    triton.store(out.at[part, row[:, None], output[None]], found.T.astype(out.dtype), mask=here)


def _grouped(format: Format | None) -> bool:
    """Whether scales multiply codes: they are of few columns of one row."""
    return format is not None and format.block[0] == 1 and 0 < format.block[1] <= LONGEST_GROUP


def _blocked(format: Format | None) -> bool:
    """Whether scales multiply sums of one step."""
    return format is not None and format.block[1] > 0 and not _grouped(format)


def _operands(s: Static, tile: Tile, w: Weight, stored, output, i, plane_type) -> list[Array]:
    """What meets each plane of the rows: the weight [outputs, width] in their type."""
    format = s.format
    if format is None or not _grouped(format):
        return [stored.astype(plane_type)]
    group = format.block[1] // s.planes
    groups = s.width // group
    at = (tile.weight, output[:, None], (i * groups + lax.iota(jnp.int32, groups))[None])
    there = _both(output < w.codes.shape[1], at[-1][0] < w.scales.shape[-1])
    step = _scale(format, load(w.scales.at[at], there))[:, :, None]
    zero = 8.0 if format.codes == "int4" else None
    if w.zeros is not None:
        zero = load(w.zeros.at[at], there).astype(jnp.float32)[:, :, None]

    def operand(codes):
        values = _decoded(format, codes).reshape(s.outputs, groups, group)
        values = values if zero is None else values - zero
        return (values * step).astype(plane_type).reshape(s.outputs, s.width)

    if s.planes == 1:
        return [operand(stored)]
    pairs = stored.astype(jnp.int16)
    return [operand(pairs & np.int16(15)), operand(pairs >> np.int16(4))]


def _decoded(format: Format, codes: Array) -> Array:
    """Codes, those of 4 bits as int16, as float32; zero points not taken off.

    E2M1 is float16 times 2^-14, its one subnormal too, once sign, exponent and mantissa are in their places.
    """
    if format.codes != "e2m1":
        return codes.astype(jnp.float32)
    sign = (codes >> np.int16(3)) * np.int16(-(1 << 15))
    bits = sign | ((codes & np.int16(7)) << np.int16(9))
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 2.0**14


def _scale(format: Format, stored: Array) -> Array:
    """Scales as float32; E8M0 is an exponent, 0 a subnormal and 255 NaN."""
    if format.scale != jnp.uint8:
        return stored.astype(jnp.float32)
    byte = stored.astype(jnp.int32)
    bits = jnp.where(byte == 0, np.int32(1 << 22), byte << np.int32(23))
    return lax.bitcast_convert_type(jnp.where(byte == 255, np.int32(0x7FC00000), bits), jnp.float32)


def _dot(w: Array, x: Array) -> Array:
    return lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _both(rows: Array | None, columns: Array | None) -> Array | None:
    """Where both hold; None stands for everywhere."""
    if rows is None:
        return None if columns is None else columns[None]
    return rows[:, None] if columns is None else rows[:, None] & columns[None]
