"""A long prompt on all devices of the context axis: each has some of its rows, and its cache is where it will go on.

Device d of C holds stripes d and 2C - 1 - d of 2C, so that all have the same to attend. Keys go round a ring.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Shaped

from pallas_kernels import ring_attention as ring
from sharding.kernels import divided, everywhere
from sharding.mesh import CONTEXT, TENSOR


def spread_attention(
    q: Float[Array, "T N H"],
    kv: Float[Array, "T K W"],
    positions: Int[Array, "T"],
    count: Int[Array, ""],
    *,
    scale: float,
    latent: int | None = None,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "T N V"]:
    """Causal attention of the first `count` rows here over the rows of all devices; see `ring_attention`."""
    row = jnp.arange(len(q), dtype=jnp.int32)
    places = jnp.where(row < count, positions, -1)
    heads, kv_heads = P(None, divided(TENSOR)), P() if latent else P(None, divided(TENSOR[:1]))
    out, _ = everywhere(
        ring.ring_attention, divided(TENSOR), (heads, kv_heads, P(), P(), P()), (heads, heads),
        {"sinks": P(divided(TENSOR))}, q, kv, places, places, jnp.zeros_like(places),
        scale=scale, axis_name=CONTEXT, latent=latent, window=window, soft_cap=soft_cap, sinks=sinks,
    )  # fmt: skip
    return out


def local_positions(rows: int) -> Int[Array, "T"]:
    """Where in the prompt each of this device's rows is."""
    devices, me, half = lax.axis_size(CONTEXT), lax.axis_index(CONTEXT), rows // 2
    row = jnp.arange(rows, dtype=jnp.int32)
    stripe = jnp.where(row < half, me, 2 * devices - 1 - me)
    return stripe * half + row % half


def all_rows(rows: Shaped[Array, "T *row"]) -> Shaped[Array, "X *row"]:
    """The rows of all devices, in order of their positions."""
    stripes = lax.all_gather(rows.reshape(2, -1, *rows.shape[1:]), CONTEXT)
    in_order = jnp.concatenate([stripes[:, 0], stripes[::-1, 1]])
    return in_order.reshape(-1, *rows.shape[1:])


def from_whoever_has(row: Float[Array, "B D"], here: Array) -> Float[Array, "B D"]:
    """The one of these that a device has, on all of them."""
    return lax.psum(jnp.where(here, row, jnp.zeros((), row.dtype)), CONTEXT)


def stripes(length: int, devices: int, rows: int) -> list[np.ndarray]:
    """The positions below `length` that each device holds, in the order of its rows, of which it has `rows`."""
    half = rows // 2
    held = [
        np.r_[d * half : (d + 1) * half, (2 * devices - 1 - d) * half : (2 * devices - d) * half]
        for d in range(devices)
    ]
    return [positions[positions < length] for positions in held]
