"""The largest values of each row, by plain reductions: XLA's argmax and top_k over a vocabulary are slow on a CPU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

_CHUNK = 128


def highest(x: Float[Array, "B V"]) -> tuple[Float[Array, "B"], Int32[Array, "B"]]:
    """(largest value, its first index) of each row; a row with NaN has value NaN and the last index."""
    peak = jnp.max(x, axis=-1)
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return peak, jnp.min(jnp.where(x == peak[:, None], ids, x.shape[1] - 1), axis=-1)


def largest(x: Float[Array, "B V"], k: int) -> tuple[Float[Array, "B K"], Int32[Array, "B K"]]:
    """As lax.top_k, looking only into the k chunks of a row with the largest maxima, which hold the answer."""
    size, width = x.shape
    chunks = -(-width // _CHUNK)
    if chunks <= k:
        return jax.lax.top_k(x, k)
    x = jnp.pad(x, ((0, 0), (0, chunks * _CHUNK - width)), constant_values=-jnp.inf)
    x = x.reshape(size, chunks, _CHUNK)
    picked = jnp.sort(jax.lax.top_k(jnp.max(x, axis=-1), k)[1], axis=-1)  # in order, and so are ties
    x = jnp.take_along_axis(x, picked[:, :, None], axis=1).reshape(size, k * _CHUNK)
    values, at = jax.lax.top_k(x, k)
    return values, jnp.take_along_axis(picked, at // _CHUNK, axis=1) * _CHUNK + at % _CHUNK
