"""GPTQ: round column by column, each time moving the error into the columns that are still to come (arXiv:2210.17323).

Columns go in order of how much their inputs matter, with scales fixed before ("static groups"), so that
groups stay consecutive and no index of them has to be stored.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxserve.quantize.rounding import best_scales, nearest, steps_of, with_scales
from pallas_kernels.formats import Format, QTensor

DAMPING = 0.01  # of the mean of the Gram matrix' diagonal, added to it
BLOCK = 128  # columns whose errors are moved far only together


def gptq(w: np.ndarray, gram: np.ndarray, format: Format) -> QTensor:
    """`w` [F, D] in `format`, for inputs of this Gram matrix X^T X [D, D]."""
    diagonal = np.diag(gram)
    scales, whole = best_scales(jnp.asarray(w, jnp.float32), format, jnp.asarray(diagonal, jnp.float32))
    steps = np.asarray(steps_of(scales, whole, format, w.shape))
    order = np.argsort(-diagonal, kind="stable")
    padding = -len(order) % BLOCK
    moved = _moves(gram[np.ix_(order, order)])
    columns = [np.pad(a[:, order], [(0, 0), (0, padding)]) for a in (np.asarray(w, np.float32), steps)]
    moved = np.pad(moved, [(0, padding), (0, padding)])
    moved[range(len(order), len(moved)), range(len(order), len(moved))] = 1
    rounded = np.asarray(_rounded(*map(jnp.asarray, columns), jnp.asarray(moved), format.codes))
    back = np.empty_like(w, np.float32)
    back[:, order] = rounded[:, : len(order)]
    return with_scales(back, scales, whole, format)


def _moves(gram: np.ndarray) -> np.ndarray:
    """The upper Cholesky factor of the inverse of the damped Gram matrix: row j says where error j goes."""
    gram = gram.astype(np.float64)
    dead = np.diag(gram) == 0
    gram[dead, dead] = 1
    gram[np.diag_indices_from(gram)] += DAMPING * np.mean(np.diag(gram))
    return np.linalg.cholesky(np.linalg.inv(gram)).T.astype(np.float32)


@partial(jax.jit, static_argnames="kind")
def _rounded(w: Array, steps: Array, moves: Array, kind: str) -> Array:
    """The rounded values; D is a multiple of BLOCK."""

    def block(i: Array, w: Array) -> Array:
        at = i * BLOCK
        part, step = (lax.dynamic_slice_in_dim(a, at, BLOCK, axis=1) for a in (w, steps))
        rows = lax.dynamic_slice_in_dim(moves, at, BLOCK, axis=0)
        near = lax.dynamic_slice_in_dim(rows, at, BLOCK, axis=1)

        def column(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            part, errors = carry
            value = lax.dynamic_index_in_dim(part, j, axis=1, keepdims=False)
            scale = lax.dynamic_index_in_dim(step, j, axis=1, keepdims=False)
            move = lax.dynamic_index_in_dim(near, j, axis=0, keepdims=False)
            rounded = nearest(value, scale, kind)
            error = (value - rounded) / move[j]
            later = jnp.where(jnp.arange(BLOCK) > j, move, jnp.float32(0))
            part = part - error[:, None] * later[None]
            part = lax.dynamic_update_index_in_dim(part, rounded, j, axis=1)
            return part, lax.dynamic_update_index_in_dim(errors, error, j, axis=1)

        part, errors = lax.fori_loop(0, BLOCK, column, (part, jnp.zeros_like(part)))
        beyond = jnp.where(jnp.arange(w.shape[1]) >= at + BLOCK, rows, jnp.float32(0))
        w = w - jnp.matmul(errors, beyond, precision="highest")
        return lax.dynamic_update_slice_in_dim(w, part, at, axis=1)

    return lax.fori_loop(0, w.shape[1] // BLOCK, block, w)
