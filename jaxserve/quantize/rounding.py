"""Rounding to nearest, with the scale of each block that gives the least squared error instead of the largest value's.

Shrinking a block's range clips its outliers and makes all other steps finer (as in OCTAV, arXiv:2206.06501, by search).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.elements import FP8, LARGEST, SMALL, TOP_EXPONENT, small_codes, values
from pallas_kernels.formats import E4M3_MAX, Format, QTensor, block_steps, encode_with

SHRINK = np.arange(
    1.08, 0.5, -0.03, dtype=np.float32
)  # INT4 reaches -8 but only 7: slightly wider may be better


def quantised(w: Any, format: Format, importance: Any = None) -> QTensor:
    """`w` [F, D] on the host in `format`; `importance` [D] weighs the squared errors of the columns."""
    w = np.asarray(w, np.float32)
    scales, whole = best_scales(jnp.asarray(w), format, importance)
    return with_scales(w, scales, whole, format)


def with_scales(w: np.ndarray, scales: Any, whole: Any, format: Format) -> QTensor:
    """`w` in `format` with scales that `best_scales` chose, on the host."""
    return encode_with(w, np.asarray(scales), None, None if whole is None else np.asarray(whole), format)


@partial(jax.jit, static_argnames=("format", "searched"))
def best_scales(
    w: Array, format: Format, importance: Array | None = None, *, searched: bool = True
) -> tuple[Array, Array | None]:
    """(the scales [F / rows, D / columns] of a symmetric format, its scale of the whole matrix or None).

    Not `searched`, they are those of the largest values.
    """
    blocks, weights = _blocks(w, format), None
    if importance is not None:
        weights = _blocks(importance.astype(jnp.float32)[None], format)[:1, :1]
    top = jnp.max(jnp.abs(blocks), axis=(1, 3), keepdims=True)
    whole = jnp.max(top) / np.float32(LARGEST[format.codes] * E4M3_MAX) if format.per_tensor else None

    def error(shrink: Array) -> tuple[Array, Array]:
        scales = _stored(top, shrink, whole, format)
        steps = block_steps(scales, None if whole is None else whole.reshape(1, 1), format)
        errors = jnp.square(nearest(blocks, steps, format.codes) - blocks)
        errors = errors if weights is None else errors * weights
        return jnp.sum(errors, axis=(1, 3), keepdims=True), scales

    def better(best, shrink):
        found = error(shrink)
        wins = found[0] < best[0]
        return jax.tree.map(lambda new, old: jnp.where(wins, new, old), found, best), None

    if not searched:
        return error(jnp.float32(1))[1][:, 0, :, 0], whole
    # Powers of two have only their neighbours to choose from.
    tried = np.array([1, 0.5, 2], np.float32) if format.scale == jnp.uint8 else SHRINK
    (_, scales), _ = jax.lax.scan(better, error(jnp.float32(1)), jnp.asarray(tried))
    return scales[:, 0, :, 0], whole


def nearest(x: Array, step: Array, kind: str) -> Array:
    """The nearest values of a symmetric format to `x`, whose steps are broadcast to it."""
    ratio = jnp.where(step > 0, x / jnp.where(step > 0, step, jnp.float32(1)), jnp.float32(0))
    if kind in FP8:
        return jnp.clip(ratio, -LARGEST[kind], LARGEST[kind]).astype(FP8[kind]).astype(jnp.float32) * step
    if kind in SMALL:
        return jnp.asarray(values(kind))[small_codes(jnp, ratio, kind).astype(jnp.int32)] * step
    low, high = {"int8": (-127, 127), "int4": (-8, 7)}[kind]
    return jnp.clip(jnp.rint(ratio), low, high) * step


def steps_of(scales: Array, whole: Array | None, format: Format, shape: tuple[int, ...]) -> Array:
    """The step of every element of a matrix [F, D]."""
    (f, d), (rows, columns) = shape, format.block
    steps = block_steps(scales, whole, format)
    steps = jnp.repeat(steps, rows or f, axis=0)[:f]
    return jnp.repeat(steps, columns or d, axis=1)[:, :d]


def _blocks(x: Array, format: Format) -> Array:
    """[F / rows, rows, D / columns, columns], with zeros where the edge cuts a block."""
    f, d = x.shape
    rows, columns = min(format.block[0] or f, f), format.block[1] or d
    x = jnp.pad(x, [(0, -f % rows), (0, -d % columns)])
    return x.reshape(-(-f // rows), rows, -(-d // columns), columns)


def _stored(top: Array, shrink: Array, whole: Array | None, format: Format) -> Array:
    """The scales for blocks of this largest value, shrunk, as the format keeps them."""
    if format.scale == jnp.uint8:
        exponent = ((top * shrink).view(jnp.int32) >> 23) - TOP_EXPONENT[format.codes]
        return jnp.clip(exponent, 0, 254).astype(jnp.uint8)
    scale = top * shrink / np.float32(LARGEST[format.codes])
    if whole is not None:
        by = jnp.where(whole > 0, whole, jnp.float32(1))
        scale = jnp.minimum(scale / by, jnp.float32(E4M3_MAX))
    return scale.astype(format.scale)
