"""Tokens to the devices that have their experts, and the weighted sums of what those make of them back home.

Only rows that are for an expert travel, and no device gathers the tokens of others. `dispatch` sends them and returns a
handle, `combine` consumes it; between the two a compiler may put whatever does not depend on them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from pallas_kernels.expert_exchange import combine as weighted_sum
from pallas_kernels.expert_exchange import expert_exchange, fp8_rows
from pallas_kernels.formats import QTensor
from sharding.kernels import divided, mapped
from sharding.mesh import TENSOR, size
from sharding.rules import expert_axes, only, spec

WEIGHT_AXES: dict[str, tuple[str | None, ...]] = {
    "gate": ("experts", "ffn", None),
    "up": ("experts", "ffn", None),
    "down": ("experts", None, "ffn"),
    "gate_bias": ("experts", "ffn"),
    "up_bias": ("experts", "ffn"),
    "down_bias": ("experts", None),
}
ONE_ROUND = (
    4096  # rows that a device makes room for whatever the routing, before it rather takes several rounds
)
SPREAD = 6  # standard deviations above the mean that a round's share for a device is large enough for

Experts = Callable[
    [Array, Array, dict[str, Any]], Array
]  # (rows sorted by expert, rows of each, weights) -> rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Copies:
    """Where each expert is, if not all have one place in their order."""

    slots: Any  # i32 [E, most]: the slots with it, repeated to the end; device * slots of a device + which
    count: Any  # i32 [E]: how many


class Mixed(NamedTuple):
    """What became of a device's tokens, and where their choices went."""

    out: Array  # [T, D]: the weighted sum of what its experts make of each token
    dropped: Array  # int32 []: choices that were dropped
    sent: Array  # int32 [devices]: choices for the experts of each


@dataclass(frozen=True)
class Leaving:
    """Rows as they leave: sorted by the device and the expert that they are for."""

    order: Array  # [T * k]: which of the tokens' choices is where
    counts: Array  # [devices, experts of a device]
    places: Array  # [T, k]: where each choice is


@dataclass(frozen=True)
class Dispatched:
    """One round of rows on their way; give it to `combine` with what became of them."""

    rows: Array  # [max_rows, D] that arrived here, sorted by expert
    group_sizes: Array  # [experts of a device]
    received: Array  # [devices, experts of a device]: from whom
    home: Array  # [rows sent]: where each is among all that leave


def to_slots(ids: Int[Array, "T k"], copies: Copies, slots: int) -> Int[Array, "T k"]:
    """The slot, of all `slots`, for each choice of an expert; for that of no expert, slot `slots`, which is none.

    Rows take an expert's copies in turns, and each group of devices begins with another one.
    """
    mesh, (experts, _) = jax.sharding.get_abstract_mesh(), copies.slots.shape
    axes = tuple(axis for axis in expert_axes(mesh, slots) if axis in mesh.manual_axes)
    turn = jnp.arange(len(ids), dtype=jnp.int32) + (lax.axis_index(axes) if axes else 0)
    expert = jnp.minimum(ids, experts - 1)
    slot = copies.slots[expert, turn[:, None] % copies.count[expert]]
    return jnp.where(ids < experts, slot, slots)


def mixture(
    experts: Experts,
    x: Float[Array, "T D"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    w: dict[str, Any],
    count: int,
    *,
    capacity: float | None = None,
    fp8: bool = False,
) -> Mixed:
    """A mixture on any mesh: tokens to their experts, and back.

    Expert `count` is none. With `capacity`, devices take from each other at most so many times the rows that an even
    routing would give, and drop the rest; by default nothing is dropped, and uneven routing costs rounds instead.
    `fp8` sends rows in 8 bits; what comes back is not.
    """
    mesh, tensor = jax.sharding.get_abstract_mesh(), divided(TENSOR)
    axes = expert_axes(mesh, count)
    whole = tuple(axis for axis in tensor if axis in axes)
    inside = bool(tensor) and not whole  # each expert is divided: its devices' results are to be added

    def local(x, ids, weights, w):
        if inside and "down_bias" in w:
            first = lax.axis_index(tensor) == 0
            w = w | {"down_bias": jnp.where(first, w["down_bias"], jnp.zeros_like(w["down_bias"]))}
        out, *counts = _mixture(experts, x, ids, weights, w, count, axes, capacity, fp8)
        return Mixed(
            lax.psum(out, tensor) if inside else out, *(lax.psum(counts, whole) if whole else counts)
        )

    if not tensor:
        return local(x, ids, weights, w)
    pad = -len(x) % size(mesh, whole)
    padded = (
        jnp.pad(x, ((0, pad), (0, 0))),
        jnp.pad(ids, ((0, pad), (0, 0)), constant_values=count),
        jnp.pad(weights, ((0, pad), (0, 0))),
    )
    rows = P(whole or None)
    specs = {name: _weight_specs(mesh, name, part, count, tensor) for name, part in w.items()}
    out_specs: Any = Mixed(rows, P(), P())  # type: ignore[arg-type]
    mixed = mapped(local, tensor, (rows, rows, rows, specs), out_specs)(*padded, w)
    return mixed._replace(out=mixed.out[: len(x)])


def dispatch(
    rows: Float[Array, "R D"],
    leaving: Leaving,
    axes: tuple[str, ...],
    share: int,
    first: Any = 0,
    fp8: bool = False,
) -> Dispatched:
    """Send every device of `axes` its rows from the `first` on, `share` at most: rows [R, D] lie as `leaving` says."""
    devices, sent = len(leaving.counts), min(len(rows), len(leaving.counts) * share)
    ends = jnp.cumsum(leaving.counts, axis=1)
    inside = jnp.clip(ends, first, first + share) - jnp.clip(ends - leaving.counts, first, first + share)
    each, total = jnp.sum(inside, axis=1), jnp.sum(leaving.counts, axis=1)
    before, row = jnp.cumsum(each), jnp.arange(sent, dtype=jnp.int32)
    device = jnp.minimum(jnp.searchsorted(before, row, side="right", method="compare_all"), devices - 1)
    home = (jnp.cumsum(total) - total)[device] + first + row - (before - each)[device]
    home = jnp.where(row < before[-1], home, len(rows))
    send = rows.at[home].get(mode="clip")
    arrived, received = expert_exchange(
        fp8_rows.packed(send) if fp8 else send, inside, axis_name=axes, max_rows=devices * share
    )
    if fp8:
        arrived = fp8_rows.unpacked(arrived, rows.dtype)
    return Dispatched(arrived, jnp.sum(received, axis=0), received, home)


def combine(
    made: Float[Array, "X D"], sent: Dispatched, axes: tuple[str, ...], home: Float[Array, "R D"]
) -> Array:
    """`home` with what became of the dispatched rows, each where it left from."""
    back, _ = expert_exchange(made, sent.received, axis_name=axes, max_rows=len(sent.home), back=True)
    return home.at[sent.home].set(back, mode="drop", unique_indices=True)


def _mixture(experts: Experts, x, ids, weights, w, count, axes, capacity, fp8) -> Mixed:
    """`mixture` on one device, for its own tokens, with the experts that it has."""
    (t, k), devices = ids.shape, lax.axis_size(axes) if axes else 1
    leaving = _leaving(ids, count, devices)
    rows, nothing = x[leaving.order // k], jnp.zeros((), jnp.int32)
    going = jnp.sum(leaving.counts, axis=1)
    if not axes:
        return Mixed(
            weighted_sum(experts(rows, leaving.counts[0], w), leaving.places, weights), nothing, going
        )
    most = t * min(k, count // devices)  # that a device can have for another
    mean = t * k / devices
    if capacity is not None:
        share = min(most, math.ceil(mean * capacity))
        kept = _within(leaving, share)
        dropped = jnp.sum((ids < count) & ~kept, dtype=jnp.int32)
        weights = jnp.where(kept, weights, jnp.zeros((), weights.dtype))
    else:
        even = math.ceil(mean + SPREAD * math.sqrt(mean))
        share, dropped = most if devices * most <= ONE_ROUND else min(most, even), nothing

    def one_round(first: Any, home: Array) -> Array:
        sent = dispatch(rows, leaving, axes, share, first, fp8)
        return combine(experts(sent.rows, sent.group_sizes, w), sent, axes, home)

    home = jnp.zeros_like(rows)
    if share == most or capacity is not None:
        home = one_round(0, home)
    else:
        fullest = lax.pmax(jnp.max(jnp.sum(leaving.counts, axis=1)), axes)
        _, home = lax.while_loop(
            lambda state: state[0] < fullest,
            lambda state: (state[0] + share, one_round(*state)),
            (jnp.zeros_like(fullest), home),
        )
    return Mixed(weighted_sum(home, leaving.places, weights), dropped, going)


def _leaving(ids: Array, count: int, devices: int) -> Leaving:
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    places = (
        jnp.zeros_like(order).at[order].set(jnp.arange(len(flat), dtype=order.dtype), unique_indices=True)
    )
    counts = jnp.zeros(count, jnp.int32).at[flat].add(1, mode="drop")
    return Leaving(order, counts.reshape(devices, -1), places.reshape(ids.shape))


def _within(leaving: Leaving, share: int) -> Array:
    """[T, k]: whether a choice is among the first `share` rows for its device."""
    total = jnp.sum(leaving.counts, axis=1)
    ends = jnp.cumsum(total)
    device = jnp.searchsorted(ends, leaving.places.reshape(-1), side="right", method="compare_all")
    device = jnp.minimum(device, len(total) - 1)
    return (leaving.places.reshape(-1) - (ends - total)[device] < share).reshape(leaving.places.shape)


def _weight_specs(mesh: Any, name: str, weight: Any, count: int, axes: tuple[str, ...]) -> Any:
    """How a weight of experts, packed or not and in a stack of layers or not, is divided over these axes alone."""
    logical = WEIGHT_AXES[name]
    whole = tuple(only(spec(mesh, (count, *[1] * (len(logical) - 1)), logical), axes))

    def of(part: Any) -> Any:
        stack = len(part.shape) - len(logical)
        return jax.tree.map(lambda x: P(*[None] * stack, *whole[: x.ndim - stack]) if x.ndim else P(), part)

    return jax.tree.map(of, weight, is_leaf=lambda x: isinstance(x, QTensor))
