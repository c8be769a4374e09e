"""The definition of expert_exchange, and the weighted sum of what comes back."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from pallas_kernels.expert_exchange.routes import routes


def expert_exchange(
    rows: Shaped[Array, "T *row"],
    counts: Int[Array, "X groups"],
    *,
    axis_name: str | tuple[str, ...],
    max_rows: int,
    back: bool = False,
) -> tuple[Shaped[Array, "max_rows *row"], Int[Array, "X groups"]]:
    """Rows to the devices of a mesh axis that own their group, and home again. For use under `shard_map`.

    Each of the X devices owns `groups` groups (experts). Going there, `rows` is sorted by device and then by group,
    and the next counts[d, g] rows are for group g of device d; rows after the last are nobody's. What arrives is sorted
    by group and then by the device it came from, ready for `grouped_matmul`. The second result, [X, groups], is how
    many rows each device sent for each of this device's groups: its sum over X is the group sizes.

    With `back`, rows that arrived in that order, and those counts, go to where they came from, into the order in which
    they left: `expert_exchange(results, received, max_rows=T, back=True)[0]` is row for row what became of `rows`.

    Any counts are right: none, or all rows of all devices for one group. `max_rows` bounds what a device receives;
    X * T is always enough. Where the counts that come back add up to more, the rows that found no room were dropped.
    Rows past the last that arrived are undefined, NaN included.

    A row is anything: [D], or [D / 128, 128], which is how a TPU's copies want it (a caller that makes its rows so
    saves a pass through memory each way).
    """
    devices, t = lax.axis_size(axis_name), rows.shape[0]
    route, received = routes(counts, axis_name, t, max_rows, back)
    me = lax.axis_index(axis_name)
    # The collective's parts are of equal size: as many rows for every device as any of them could get.
    part = min(t, max_rows)
    inside = jnp.cumsum(route.count, axis=2) - route.count  # of a part: where each piece begins
    leaving = jnp.arange(part, dtype=jnp.int32)
    piece = jax.vmap(_piece_of, (0, 0, None))(inside[me], route.count[me], leaving)
    at = jnp.take_along_axis(route.begin[me] - inside[me], piece, axis=1) + leaving[None]
    parts = lax.all_to_all(rows.at[at].get(mode="clip"), axis_name, 0, 0)
    arriving = jnp.arange(max_rows, dtype=jnp.int32)
    piece = _piece_of(route.place[:, me].reshape(-1), route.count[:, me].reshape(-1), arriving)
    source = jnp.arange(devices, dtype=jnp.int32)[:, None] * part
    at = (source + inside[:, me] - route.place[:, me]).reshape(-1)[piece] + arriving
    return parts.reshape(devices * part, *rows.shape[1:]).at[at].get(mode="clip"), received


def _piece_of(begins: Array, counts: Array, rows: Array) -> Array:
    """The number of the piece that each row is in: the last with rows of its own that begins at or before it."""
    begins = jnp.where(counts > 0, begins, np.int32(2**30))
    order = jnp.argsort(begins)
    return order[jnp.maximum(jnp.searchsorted(begins[order], rows, side="right") - 1, 0)]


def combine(
    rows: Float[Array, "X *row"], places: Int[Array, "T k"], weights: Float[Array, "T k"]
) -> Float[Array, "T *row"]:
    """Each token's sum of the rows at its `places` times their `weights`, in float32.

    The k terms are added in their own order, so a token does not depend on where its experts live.
    A weight of 0 leaves its row out, whatever that holds.
    """
    lead = (places.shape[0], *[1] * (rows.ndim - 1))
    total = jnp.zeros((places.shape[0], *rows.shape[1:]), jnp.float32)
    for j in range(places.shape[1]):
        weight = weights[:, j].astype(jnp.float32).reshape(lead)
        row = rows.at[places[:, j]].get(mode="clip").astype(jnp.float32)
        total += jnp.where(weight == 0, 0.0, weight * row)
    return total.astype(rows.dtype)


def cost(rows: Any, counts: Any, **_) -> tuple[int, int]:
    """(floating-point operations, bytes to and from HBM) of one device that receives as many rows as it sends."""
    row = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    return 0, 2 * int(np.sum(np.asarray(counts))) * row


def link_bytes(rows: Any, counts: Any, me: int) -> int:
    """Bytes that device `me` sends over the links between chips: all rows but its own."""
    sent = np.asarray(counts).sum(axis=1)
    return int(sent.sum() - sent[me]) * math.prod(rows.shape[1:]) * rows.dtype.itemsize
