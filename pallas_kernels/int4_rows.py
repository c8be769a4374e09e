"""Rows of the cache in 4 bits: two INT4 codes a byte, as two's complement.

A code c stands for (c + 1/2) * scale: sixteen steps, the same on both sides of zero. Of a head the low nibbles are
the key's and the high ones the value's; both are `turned` first, for one scale has to do for all of a head. Of a
latent they are its first and its second half, padded to whole slabs of 2 R bytes; each R values of it have a scale of
their own. Its rope key keeps 8 bits.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.hadamard import turned

PACKED = jnp.uint8


def quantise_heads(sides: Array) -> tuple[Array, Array]:
    """Keys and values [T, K, 2, H] as (bytes [T, K, H], float32 scales [T, K, 2])."""
    small, scales = _in_16_steps(turned(sides.astype(jnp.float32)))
    return _bytes(small[:, :, 0], small[:, :, 1]), scales


def heads_of(codes: Array, scales: Array) -> Array:
    """The inverse, float32."""
    return turned(jnp.stack(two_of(codes), axis=2) * scales[..., None])


def quantise_latents(latent: Array, rope: Array) -> tuple[Array, Array]:
    """Latents [T, C] and rope keys [T, R] as (bytes [T, `latent_bytes` + R], float32 scales [T, C / R + 1])."""
    (t, width), lanes = latent.shape, rope.shape[1]
    small, scales = _in_16_steps(latent.reshape(t, -1, lanes))
    kept = latent_bytes(width, lanes)
    small = jnp.pad(small.reshape(t, width), ((0, 0), (0, 2 * kept - width)))
    rope = rope.astype(jnp.float32)
    scale = jnp.max(jnp.abs(rope), axis=1, keepdims=True) / 127
    key = jnp.round(rope / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
    codes = _bytes(small[:, :kept], small[:, kept:]), lax.bitcast_convert_type(key, PACKED)
    return jnp.concatenate(codes, axis=1), jnp.concatenate([scales, scale], axis=1)


def latents_of(codes: Array, rope: Array, scales: Array, width: int) -> tuple[Array, Array]:
    """The inverse, float32: latents [..., width] and rope keys of bytes [..., B], [..., R] and scales [..., G]."""
    steps = jnp.concatenate(two_of(codes), axis=-1)[..., :width]
    groups = steps.reshape(*steps.shape[:-1], -1, rope.shape[-1]) * scales[..., :-1, None]
    key = lax.bitcast_convert_type(rope, jnp.int8).astype(jnp.float32) * scales[..., -1:]
    return groups.reshape(steps.shape), key


def latent_bytes(width: int, rope: int) -> int:
    """Bytes that a latent takes."""
    return -(-width // (4 * rope)) * 2 * rope


def two_of(codes: Array) -> tuple[Array, Array]:
    """What (the low, the high) nibbles of bytes stand for beside their scale, float32."""
    codes = lax.bitcast_convert_type(codes, jnp.int8)
    low, high = (codes << jnp.int8(4)) >> jnp.int8(4), codes >> jnp.int8(4)
    return low.astype(jnp.float32) + 0.5, high.astype(jnp.float32) + 0.5


def _in_16_steps(values: Array) -> tuple[Array, Array]:
    """[..., W] as (int8 codes of -8 to 7, float32 scales [...]); zeros alone have a scale of 0."""
    values = values.astype(jnp.float32)
    scales = jnp.max(jnp.abs(values), axis=-1) / 7.5
    steps = jnp.where(scales > 0, scales, 1.0)[..., None]
    return jnp.clip(jnp.floor(values / steps), -8, 7).astype(jnp.int8), scales


def _bytes(low: Array, high: Array) -> Array:
    low, high = (lax.bitcast_convert_type(x, PACKED) for x in (low, high))
    return (low & PACKED(15)) | (high << PACKED(4))
