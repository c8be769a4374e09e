"""Where every piece of rows lies before and after an exchange, worked out from the counts of all devices."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Routes(NamedTuple):
    """Source s's rows for group g of device d are `count` rows from `begin` on, and arrive from `place` on.

    [sources, devices, groups] int32 each, the same on every device. Rows past the end of the array they come from
    or go to are not counted.
    """

    begin: Array
    count: Array
    place: Array


def routes(counts: Array, axis_name, rows: int, max_rows: int, back: bool) -> tuple[Routes, Array]:
    """The routes of everybody's rows, and how many this device is sent by each device for each group [X, G]."""
    devices = lax.axis_size(axis_name)
    if counts.shape[0] != devices:
        raise ValueError(
            f"counts of shape {counts.shape} on {devices} devices of mesh axis {axis_name!r}: one row a device"
        )
    wanted = lax.all_gather(counts, axis_name)
    return from_counts(wanted, rows, max_rows, back), wanted[:, lax.axis_index(axis_name)]


def from_counts(wanted: Array, rows: int, max_rows: int, back: bool) -> Routes:
    """The routes that follow from all devices' counts, [sources, devices, groups]."""
    leaving, arriving = ((0, 2, 1), (1, 0, 2)) if back else ((0, 1, 2), (1, 2, 0))
    begin, place = _before(wanted, leaving), _before(wanted, arriving)
    room = jnp.minimum(rows - begin, max_rows - place)
    return Routes(begin, jnp.clip(wanted, 0, jnp.maximum(room, 0)), place)


def _before(counts: Array, order: tuple[int, int, int]) -> Array:
    """How many rows lie before each piece on its own device, the pieces lying in `order` (device first)."""
    ordered = counts.transpose(order)
    flat = ordered.reshape(ordered.shape[0], -1)
    before = jnp.cumsum(flat, axis=1, dtype=jnp.int32) - flat
    inverse = [order.index(axis) for axis in range(3)]
    return before.reshape(ordered.shape).transpose(inverse)
