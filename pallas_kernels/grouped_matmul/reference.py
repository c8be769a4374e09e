"""The definition of grouped_matmul."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.formats import QTensor, dequantise


def grouped_matmul(
    x: Float[Array, "T D"],
    w: QTensor | Float[Array, "*L E F D"],
    group_sizes: Int[Array, "E"],
    *,
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "T F"]:
    """Row t times the matrix of its group, `x[t] @ w[e].T`, summed in float32.

    Rows are sorted by group: the first `group_sizes[0]` are group 0's, and so on. A group may be empty, and rows
    after the last group give zeros. Weights as in `matmul`; with `layer`, `w` is the stack of all layers'.
    """
    if layer is not None:
        w = jax.tree.map(lambda leaf: leaf[layer], w)
    values = dequantise(w, x.dtype) if isinstance(w, QTensor) else w
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
    )
    sums = lax.ragged_dot_general(x, values, group_sizes, numbers, preferred_element_type=jnp.float32)
    return sums.astype(x.dtype)


def cost(x: Any, w: Any, group_sizes: Any, *, layer: Any = None) -> tuple[int, int]:
    """(floating-point operations, bytes to and from HBM) of one call with these sizes.

    The weight of every group that has rows is read once, as it is stored.
    """
    e, f, d = w.shape[-3:]
    sizes = np.asarray(group_sizes)
    rows, read = int(sizes.sum()), int((sizes > 0).sum())
    weight = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(w)) * read // e
    if layer is not None:
        weight //= w.shape[0]
    return 2 * rows * d * f, weight + rows * (d + f) * x.dtype.itemsize
