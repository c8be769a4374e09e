"""A rotation of heads that spreads what is large in one value over many, so that few bits hold all of them."""

import jax.numpy as jnp
import numpy as np
from jax import Array


def turned(x: Array) -> Array:
    """`x` [..., H] times a Hadamard matrix (Sylvester's), or several along the diagonal if H is no power of two.

    It is orthogonal, so products of turned queries with turned keys are those of the queries with the keys; and it is
    its own inverse (QuaRot, arXiv:2404.00456).
    """
    width = x.shape[-1]
    order = width & -width
    signs = np.ones((1, 1))
    while len(signs) < order:
        signs = np.block([[signs, signs], [signs, -signs]])
    blocks = x.reshape(*x.shape[:-1], -1, order)
    sums = jnp.einsum(
        "...i,ij->...j", blocks, jnp.asarray(signs, x.dtype), preferred_element_type=jnp.float32
    )
    return (sums * np.float32(order**-0.5)).astype(x.dtype).reshape(x.shape)
