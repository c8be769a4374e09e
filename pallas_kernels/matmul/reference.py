"""The definition of matmul."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.formats import QTensor, dequantise


def matmul(
    x: Float[Array, "T D"],
    w: QTensor | Float[Array, "*L F D"],
    *,
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "T F"]:
    """`x @ w.T`, products summed in float32; the weight [F, D] lies as checkpoints have it, output rows first.

    A `QTensor` is taken for the values it stands for, rounded to the dtype of `x`. With `layer`, `w` is the
    stack of all layers' weights, [L, F, D]. The result has the dtype of `x`.
    """
    if layer is not None:
        w = jax.tree.map(lambda leaf: leaf[layer], w)
    values = dequantise(w, x.dtype) if isinstance(w, QTensor) else w
    sums = lax.dot_general(x, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return sums.astype(x.dtype)


def cost(x: Any, w: Any, *, layer: Any = None) -> tuple[int, int]:
    """(floating-point operations, bytes to and from HBM) of one call: the weight once, as it is stored."""
    (t, d), f = x.shape, w.shape[-2]
    weight = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(w))
    return 2 * t * d * f, weight // (w.shape[0] if layer is not None else 1) + t * (d + f) * x.dtype.itemsize
