"""From stored codes in VMEM to operands of the matrix unit.

Two codes of a byte are the even and the odd column of a pair: instead of interleaving them, the kernels multiply
the low nibbles by the even columns of the rows and the high ones by the odd, which come 128 and 128 beside each other.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.formats import Format

LANES, SUBLANES = 128, 8  # of a register
CODES = {"e4m3": 2.0**4, "e2m1": 2.0**14, "int4": 2.0**-4, "int8": 1.0}  # and the factor of their encodings


class Stored(NamedTuple):
    """A tile [F, D] of a weight as it lies in VMEM; None what the format has not."""

    codes: Any  # [F, D] or, of two codes a byte, [F, D / 2]
    scales: Any  # [F / 128, D / 128] of the whole weight in SMEM, or [F, groups of the row]; or these turned
    zeros: Any
    steps: Any  # scales: late [groups, F] float32, else [F / 2, groups] int32, pairs of BF16
    offsets: Any  # the same of zero points


def operand(format: Format | None, native_e4m3: bool, late: bool) -> Any:
    """What the matrix unit is fed, given whether scales of groups and blocks wait for the sums."""
    if format is None or format.codes == "int8" or (format.block[1] and not late):
        return jnp.bfloat16
    if format.codes == "e2m1":
        return jnp.float8_e5m2
    return jnp.float8_e4m3fn if native_e4m3 else jnp.float8_e4m3b11fnuz


def factor(format: Format | None, native_e4m3: bool, late: bool) -> float:
    """What products with `operands` are to be multiplied by: the scale of the encodings they pass through."""
    if format is None:
        return 1.0
    if format.codes == "int4" and late:
        return 2.0**9 if native_e4m3 else 2.0**13
    return 1.0 if format.codes == "e4m3" and native_e4m3 else CODES[format.codes]


def grouped(format: Format | None) -> bool:
    """Whether columns of a row are in groups with a scale each."""
    return format is not None and format.block[0] == 1 and format.block[1] > 0


def prepare(format: Format, w: Stored, turned: bool, late: bool) -> None:
    """Scales and zero points of groups as `Stored` says, once for all columns."""

    def words(x):
        return pltpu.bitcast(x.T if turned else x, jnp.int32)

    if late:
        for values, to in ((w.scales, w.steps), (w.zeros, w.offsets)):
            if values is not None:
                wide = _steps(format, values) if values is w.scales else values[...].astype(jnp.int32)
                to[...] = (wide if turned else wide.T).astype(jnp.float32)
        return
    w.steps[...] = words(_steps(format, w.scales).astype(jnp.bfloat16))
    if w.zeros is not None:
        sixteenths = (w.zeros[...].astype(jnp.int32) - 8).astype(jnp.float32) * 16
        w.offsets[...] = words(sixteenths.astype(jnp.bfloat16))


def _steps(format: Format, scales) -> Array:
    """Scales in float32."""
    if format.scale != jnp.uint8:
        return scales[...].astype(jnp.float32)
    byte = scales[...].astype(jnp.int32)
    return pltpu.bitcast(jnp.where(byte == 255, 0x7FC00000, byte << 23), jnp.float32)


def operands(
    format: Format, w: Stored, rows, column, group_column, native_e4m3: bool, late: bool
) -> list[Array]:
    """These rows and 128 code columns from `column` on as `operand` says, [plane][rows, 128]; `group_column` is the
    same column counted from the start of the whole row. Unless `late`, scales of groups are applied.
    """
    codes = w.codes[rows, pl.ds(column, LANES)]
    if format.codes == "e4m3":
        return [_from_e4m3(codes, native_e4m3).astype(operand(format, native_e4m3, late))]
    if format.codes == "int8":
        return [codes.astype(jnp.bfloat16)]
    if late:
        return _from_e2m1(codes) if format.codes == "e2m1" else _from_uint4(codes, native_e4m3)
    parts = _from_int4(codes) if format.codes == "int4" else _from_e2m1(codes)
    parts = [part.astype(jnp.bfloat16) for part in parts]
    pairs = slice(rows.start // 2, rows.stop // 2)
    if w.offsets is not None:
        offset = _spread(w.offsets, pairs, group_column, format.block[1] // 2)
        parts = [part - offset for part in parts]
    step = _spread(w.steps, pairs, group_column, format.block[1] // 2)
    return [part * step for part in parts]


def _from_e4m3(codes: Array, native: bool) -> Array:
    """The chips before TPU7x read E4M3 with a bias of 11 and 0x80 as NaN: 1/16 of the value, once -0 is made 0."""
    if native:
        return codes
    words = pltpu.bitcast(codes, jnp.int32)
    sign_matters = (words & 0x7F7F7F7F) + 0x7F7F7F7F
    words = words & (sign_matters | 0x7F7F7F7F)
    return pltpu.bitcast(words, jnp.float8_e4m3b11fnuz)


def _from_int4(codes: Array) -> list[Array]:
    """16 * (code - 8): the code, its top bit flipped, is a two's complement number in a byte's upper half."""
    words = pltpu.bitcast(codes, jnp.int32) ^ _all(0x88)
    return [pltpu.bitcast(half & _all(0xF0), jnp.int8) for half in (words << 4, words)]


def _from_uint4(codes: Array, native_e4m3: bool) -> list[Array]:
    """The code times 2^-9, or 2^-13: E4M3's first sixteen numbers are equally far apart."""
    words, dtype = (
        pltpu.bitcast(codes, jnp.int32),
        jnp.float8_e4m3fn if native_e4m3 else jnp.float8_e4m3b11fnuz,
    )
    return [pltpu.bitcast(half & _all(0x0F), dtype) for half in (words, words >> 4)]


def _from_e2m1(codes: Array) -> list[Array]:
    """The values times 2^-14: E2M1's bits are those of E5M2 with less exponent and mantissa."""
    words = pltpu.bitcast(codes, jnp.int32)
    low = ((words & 0x08080808) << 4) | ((words & 0x07070707) << 1)
    high = (words & _all(0x80)) | ((words >> 3) & 0x0E0E0E0E)
    return [pltpu.bitcast(half, jnp.float8_e5m2) for half in (low, high)]


def _all(byte: int) -> np.int32:
    return np.array([byte] * 4, np.uint8).view(np.int32)[0]


def _spread(words, pairs: slice, column, group: int) -> Array:
    """BF16 [rows, 128]: for each of 128 code columns from `column` the value of its group of `group`."""
    begin = column // group
    found = words[pairs, pl.ds(pl.multiple_of(begin // LANES * LANES, LANES), LANES)]
    lane = lax.broadcasted_iota(jnp.int32, found.shape, 1) // group + begin % LANES
    return pltpu.bitcast(jnp.take_along_axis(found, lane, axis=1), jnp.bfloat16)
