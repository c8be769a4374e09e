"""Linear layers over weights as checkpoints store them: [out, in], in full precision or in low bits."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxserve.layers.over_layers import InStack
from pallas_kernels.formats import QTensor
from sharding.kernels import matmul

Weight = Float[Array, "out in"] | QTensor | InStack


def linear(
    x: Float[Array, "rows in"], w: Weight, bias: Float[Array, "out"] | None = None
) -> Float[Array, "rows out"]:
    """`x @ w.T + bias` in the dtype of `x`, summed in float32."""
    sums = _product(x, w)
    if bias is not None:
        sums = sums.astype(jnp.float32) + bias.astype(jnp.float32)[None]
    return sums.astype(x.dtype)


def linear_f32(x: Float[Array, "rows in"], w: Weight) -> Float[Array, "rows out"]:
    """`x @ w.T` left in float32, as logits are wanted."""
    return _product(x.astype(jnp.float32) if isinstance(w, QTensor | InStack) else x, w)


def _product(x: Array, w: Weight) -> Array:
    """In float32, or for low bits in the dtype of `x`."""
    if isinstance(w, InStack):
        return matmul(x, w.stack, layer=w.layer)
    if isinstance(w, QTensor):
        return matmul(x, w)
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
