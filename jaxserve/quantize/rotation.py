"""Rotations of the residual stream and of the heads' values, folded into the weights: outliers are spread.

QuaRot (arXiv:2404.00456) takes Hadamard matrices; SpinQuant (arXiv:2405.16406) learns them, here to minimise the
rounding error of the weights, by Cayley steps. Those of blocks as small as a format's (micro-rotations,
arXiv:2509.23202) spread outliers only among weights that share a scale.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.errors import ConfigError
from jaxserve.models import ModelConfig
from jaxserve.quantize.rounding import best_scales, nearest, steps_of
from pallas_kernels.formats import Format

Tree = dict[str, Any]
INTO = {
    "attn_in": ("q", "k", "v"),
    "mlp_in": ("gate", "up"),
}  # a norm, and the layers that read what it gives
OUT_OF = {"o": "o_bias", "down": "down_bias"}  # layers that write to the residual stream, and their biases
CAYLEY_STEP = 0.5


def check_rotatable(c: ModelConfig, method: str) -> None:
    """ConfigError for a model whose residual stream cannot be rotated offline."""
    if c.norms != "pre" or c.latent is not None or c.mixture is not None:
        raise ConfigError(
            f"{method} rotates the residual stream, which needs norms before each block, grouped-query attention and a "
            f"dense feed-forward; {c.name} is otherwise: use gptq or rtn"
        )


def hadamard(n: int) -> np.ndarray:
    """An orthogonal matrix [n, n] of equal magnitudes: n is 1, 12, 20, 44, ... times powers of 2 and each other."""
    if n == 1:
        return np.ones((1, 1))
    for order in (12, 20, 44):
        if n % order == 0 and _has_hadamard(n // order):
            return np.kron(_paley(order - 1), hadamard(n // order))
    if n % 2:
        raise ConfigError(f"no Hadamard matrix of order {n} is known here")
    return np.kron(np.array([[1, 1], [1, -1]]) / np.sqrt(2), hadamard(n // 2))


def _has_hadamard(n: int) -> bool:
    try:
        hadamard(n)
    except ConfigError:
        return False
    return True


def _paley(q: int) -> np.ndarray:
    """Paley's first construction, of order q + 1 for a prime q = 3 mod 4."""
    squares = {i * i % q for i in range(1, q)}
    character = np.array([0 if i == 0 else 1 if i in squares else -1 for i in range(q)])
    core = character[(np.arange(q)[:, None] - np.arange(q)[None]) % q]
    skew = np.block([[np.zeros((1, 1)), np.ones((1, q))], [-np.ones((q, 1)), core]])
    return (np.eye(q + 1) + skew) / np.sqrt(q + 1)


def random_rotation(n: int, seed: int = 0) -> np.ndarray:
    """A Hadamard matrix with random signs; a random orthogonal one where there is none of this order."""
    rng = np.random.default_rng(seed)
    if _has_hadamard(n):
        return rng.choice([-1.0, 1.0], n)[:, None] * hadamard(n)
    return np.linalg.qr(rng.standard_normal((n, n)))[0]


def block_rotation(n: int, block: int) -> np.ndarray:
    """Hadamard matrices of a format's block along the diagonal; the order of the last is what is left."""
    out = np.zeros((n, n))
    for start in range(0, n, block):
        size = min(block, n - start)
        out[start : start + size, start : start + size] = random_rotation(size)
    return out


def without_norms(c: ModelConfig, layer: Tree) -> Tree:
    """The layer with its norms' weights multiplied into what reads them; the norms that remain only normalise."""
    layer = dict(layer)
    for norm, readers in INTO.items():
        scale = layer[norm] + np.float32(c.norm_offset)
        for name in readers:
            layer[name] = layer[name] * scale
        layer[norm] = np.full_like(layer[norm], 1 - c.norm_offset)
    return layer


def rotated(c: ModelConfig, layer: Tree, rotation: np.ndarray, heads: np.ndarray) -> Tree:
    """A layer without norms in the stream x R, and its values v H [head_dim, head_dim] in each head."""
    layer = dict(layer)
    r, h = rotation.astype(np.float64), heads.astype(np.float64)
    for names in INTO.values():
        for name in names:
            layer[name] = _f32(layer[name] @ r)
    v, o = layer["v"].reshape(c.kv_heads, c.head_dim, -1), layer["o"].reshape(-1, c.heads, c.head_dim)
    layer["v"] = _f32(np.einsum("hi,khd->kid", h, v)).reshape(layer["v"].shape)
    layer["o"] = _f32(np.einsum("dnh,hi->dni", o, h)).reshape(layer["o"].shape)
    if "v_bias" in layer:
        layer["v_bias"] = _f32(layer["v_bias"].reshape(c.kv_heads, c.head_dim) @ h).reshape(-1)
    for name, bias in OUT_OF.items():
        layer[name] = _f32(r.T @ layer[name])
        if bias in layer:
            layer[bias] = _f32(layer[bias] @ r)
    return layer


def rotated_outer(c: ModelConfig, outer: Tree, rotation: np.ndarray) -> Tree:
    """Embedding, last norm and output layer in the stream x R; the output layer is then a matrix of its own."""
    head = outer["embed" if c.tied else "head"] * (outer["norm"] + np.float32(c.norm_offset))
    return {
        "embed": _f32(outer["embed"] @ rotation),
        "head": _f32(head @ rotation),
        "norm": np.full_like(outer["norm"], 1 - c.norm_offset),
    }


def learned_rotation(layers: Sequence[Tree], start: np.ndarray, format: Format, steps: int) -> np.ndarray:
    """`start` after `steps` of descent along the orthogonal matrices on the rounding error of these layers' weights.

    A step is Cayley's: R <- (1 + A/2)^-1 (1 - A/2) R with A skew, so that R stays a rotation (arXiv:2405.16406, 3.2).
    """
    read = [layer[name] for layer in layers for names in INTO.values() for name in names]
    write = [layer[name].T for layer in layers for name in OUT_OF]
    reads, writes = (jnp.asarray(np.concatenate(w), jnp.float32) for w in (read, write))
    r = best = jnp.asarray(start, jnp.float32)
    least, size = np.inf, CAYLEY_STEP
    for _ in range(steps):
        error, skew = _descent(r, reads, writes, format)
        if float(error) < least:
            best, least = r, float(error)
        else:
            size /= 2
            error, skew = _descent(best, reads, writes, format)
        r = _cayley(best, skew, size)
    if float(_descent(r, reads, writes, format)[0]) < least:
        best = r
    left, _, right = np.linalg.svd(np.asarray(best, np.float64))
    return left @ right  # the rotation nearest to what float32 left of it


@partial(jax.jit, static_argnames="format")
def _descent(r: Array, reads: Array, writes: Array, format: Format) -> tuple[Array, Array]:
    """(the relative squared rounding error, the skew direction of its steepest rise at R).

    Rounding has no gradient of its own; with rounded values held fixed the error's is that of a square.
    """
    total = jnp.sum(jnp.square(reads)) + jnp.sum(jnp.square(writes))
    # Rows of `writes` are columns of the stored matrices, so blocks run along the other axis there.
    error, gradient = jnp.float32(0), jnp.zeros_like(r)
    for w, across in ((reads, False), (writes, True)):
        turned = jnp.matmul(w, r, precision="highest")
        off = _off(turned.T, format).T if across else _off(turned, format)
        error += jnp.sum(jnp.square(off)) / total
        gradient += 2 * jnp.matmul(w.T, off, precision="highest") / total
    rise = jnp.matmul(gradient, r.T, precision="highest")
    return error, (rise - rise.T) / jnp.maximum(jnp.linalg.norm(rise - rise.T), jnp.float32(1e-12))


def _off(w: Array, format: Format) -> Array:
    scales, whole = best_scales(w, format)
    return w - nearest(w, steps_of(scales, whole, format, w.shape), format.codes)


@jax.jit
def _cayley(r: Array, skew: Array, size: Any) -> Array:
    half, one = skew * (size / 2), jnp.eye(len(r), dtype=r.dtype)
    return jnp.linalg.solve(one + half, (one - half) @ r)


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)
