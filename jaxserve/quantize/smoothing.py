"""AWQ and SmoothQuant: columns of weights made larger where it helps, and what comes before them smaller by as much.

The product stays the same. AWQ (arXiv:2306.00978) protects the weights that large inputs meet; SmoothQuant
(arXiv:2211.10438) takes outliers out of activations that are quantised too.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.quantize.observe import Inputs
from jaxserve.quantize.rounding import best_scales, nearest, steps_of
from pallas_kernels.formats import Format

STRENGTHS = np.arange(0, 1, 0.2)  # of AWQ's scales: how much the inputs' size counts
MIGRATION = 0.5  # of SmoothQuant


def awq_scales(weights: Sequence[np.ndarray], inputs: Inputs, format: Format) -> np.ndarray:
    """[D] by which to multiply the columns of `weights` (of layers with the same input) for the least output error."""
    size = np.sqrt(np.maximum(np.diag(inputs.gram) / inputs.count, 1e-12))
    best, least = np.ones_like(size), np.inf
    for strength in STRENGTHS:
        scales = size**strength
        scales = (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
        error = sum(float(_rounding_error(w, scales, inputs.gram, format)) for w in weights)
        if error < least:
            best, least = scales, error
    return best


@partial(jax.jit, static_argnames="format")
def _rounding_error(w: Array, by: Array, gram: Array, format: Format) -> Array:
    """`output_error` of rounding with columns multiplied; with the plain scales of blocks, to be quick."""
    w = jnp.asarray(w)
    scales, whole = best_scales(w * by[None], format, searched=False)
    steps = steps_of(scales, whole, format, w.shape)
    difference = nearest(w * by[None], steps, format.codes) / by[None] - w
    return jnp.sum(jnp.matmul(difference, gram, precision="highest") * difference)


def smooth_scales(weights: Sequence[np.ndarray], inputs: Inputs, format: Format) -> np.ndarray:
    """[D]: the square root of how much larger an input's largest value is than its weights'."""
    largest = np.max([np.abs(w).max(axis=0) for w in weights], axis=0)
    ratio = np.maximum(inputs.largest, 1e-5) ** MIGRATION / np.maximum(largest, 1e-5) ** (1 - MIGRATION)
    return ratio.astype(np.float32)


def output_error(w: np.ndarray, other: np.ndarray, gram: np.ndarray) -> float:
    """The summed squared difference that `other` in place of `w` makes to the outputs: tr(E X^T X E^T)."""
    difference = jnp.asarray(other - w, jnp.float32)
    return float(
        jnp.sum(jnp.matmul(difference, jnp.asarray(gram, jnp.float32), precision="highest") * difference)
    )
