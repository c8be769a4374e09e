"""Linear layers over weights as checkpoints store them: [out, in]."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float


def linear(
    x: Float[Array, "rows in"], w: Float[Array, "out in"], bias: Float[Array, "out"] | None = None
) -> Float[Array, "rows out"]:
    """`x @ w.T + bias` in the dtype of `x`, summed in float32."""
    sums = linear_f32(x, w)
    if bias is not None:
        sums = sums + bias.astype(jnp.float32)[None]
    return sums.astype(x.dtype)


def linear_f32(x: Float[Array, "rows in"], w: Float[Array, "out in"]) -> Float[Array, "rows out"]:
    """`x @ w.T` left in float32, as logits are wanted."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
