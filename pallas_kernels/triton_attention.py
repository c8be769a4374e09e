"""Attention block by block, as both GPU attention kernels do it: softmax in base 2, and contexts cut into parts."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import chip

LOG2_E = math.log2(math.e)
MASKED = -1e30
SHORTEST_PART = 256  # keys: with fewer, putting the parts together costs more than it brings


class State(NamedTuple):
    """Attention over the keys so far: divide `sums` by `weight` to get the output."""

    top: Array  # [rows]: largest score
    weight: Array  # [rows]: sum of 2^(score - top)
    sums: Array  # [rows, columns]: sum of 2^(score - top) * value


def nothing_seen(rows: int, columns: int) -> State:
    return State(
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, columns), jnp.float32),
    )


def with_block(
    state: State, scores: Array, seen: Array | None, values: Array, scales: Array | None = None
) -> State:
    """`state` after one more block: scores [rows, keys], where they count (None: everywhere), values [keys, columns].

    `scales` [keys] multiply the values.
    """
    if seen is not None:
        scores = jnp.where(seen, scores, MASKED)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1))
    shrink, weights = jnp.exp2(state.top - top), jnp.exp2(scores - top[:, None])
    if seen is not None:
        weights = jnp.where(seen, weights, 0.0)
    weight = state.weight * shrink + jnp.sum(weights, axis=1)
    if scales is not None:
        weights *= scales[None]
    sums = state.sums * shrink[:, None] + product(weights.astype(values.dtype), values, 0)
    return State(top, weight, sums)


def output(state: State) -> Array:
    """[rows, columns] float32; zeros where nothing was seen."""
    return state.sums / jnp.maximum(state.weight, 1e-30)[:, None]


def log_sum_exp(state: State) -> Array:
    """In base e."""
    found = (state.top + jnp.log2(jnp.maximum(state.weight, 1e-30))) * (1 / LOG2_E)
    return jnp.where(state.weight > 0, found, MASKED)


def product(x: Array, y: Array, over: int) -> Array:
    """Rows of `x` with the rows (`over` 1) or columns (0) of `y`, summed in float32; float32 is not cut to TF32."""
    return lax.dot_general(
        x, y, (((1,), (over,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def parts(programs: int, context: int) -> int:
    """Into how many parts to cut each context, so that every processor of the chip has two programs."""
    return max(1, min(2 * chip.ambient_gpu().processors // programs, context // SHORTEST_PART))


def share(low, high, parts: int, part):
    """The blocks from `low` to `high` that one part has."""
    if parts == 1:
        return low, high
    each = pl.cdiv(jnp.maximum(high - low, 0), parts)
    low += part * each
    return low, jnp.minimum(low + each, high)
