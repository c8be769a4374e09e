"""Rows as 8-bit floats with their scale in a line of their own: half the bytes over the links."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt8

LANES = 128
LARGEST = float(jnp.finfo(jnp.float8_e4m3fn).max)


def packed(rows: Float[Array, "T D"]) -> UInt8[Array, "T lines 128"]:
    """Each row as D float8_e4m3fn values and, in the last line, the float32 scale that they are multiplied by."""
    values = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(values), axis=1, keepdims=True)
    scales = jnp.where(largest > 0, largest / LARGEST, 1.0)
    small = lax.bitcast_convert_type((values / scales).astype(jnp.float8_e4m3fn), jnp.uint8)
    lines = small.reshape(rows.shape[0], -1, LANES)
    scale_line = jnp.pad(lax.bitcast_convert_type(scales, jnp.uint8), ((0, 0), (0, 0), (0, LANES - 4)))
    return jnp.concatenate([lines, scale_line], axis=1)


def unpacked(lines: UInt8[Array, "T lines 128"], dtype) -> Float[Array, "T D"]:
    """The inverse of `packed`, up to the rounding of a value to 3 bits after the first."""
    scales = lax.bitcast_convert_type(lines[:, -1, :4], jnp.float32)[:, None]
    small = lax.bitcast_convert_type(lines[:, :-1], jnp.float8_e4m3fn).reshape(lines.shape[0], -1)
    return (small.astype(jnp.float32) * scales).astype(dtype)
