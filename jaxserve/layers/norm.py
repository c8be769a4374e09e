"""Root-mean-square normalisation."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float


def rms_norm(
    x: Float[Array, "*rows width"], weight: Float[Array, "width"], eps: float, offset: float = 0.0
) -> Float[Array, "*rows width"]:
    """`x / rms(x) * (weight + offset)` over the last axis, in float32 (Zhang and Sennrich, 2019).

    Gemma stores its weights around zero: `offset` is 1 there.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32) + offset
    return (wide * scale * jnp.expand_dims(weight, tuple(range(x.ndim - 1)))).astype(x.dtype)
