"""Experts on their way to other devices: a layer's slots are dealt anew beside the ones that steps read.

Devices are copied from one by one and no program here has a collective, so that nothing waits for a device that has no
part in a move, and steps that run meanwhile do not care in which order a device comes to it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# Of each leaf, for each slot of a device: [devices with experts, ...], one of each device.
Rows = list[list[Array]]


def sources(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """For each slot of `new` [X, S], a slot of `old` with its expert: itself, of its device, or of the next one."""
    devices, each = old.shape
    flat = old.ravel()
    found = np.empty(new.size, np.int64)
    for slot, expert in enumerate(new.ravel()):
        at = np.flatnonzero(flat == expert)
        far = (at // each - slot // each) % devices
        found[slot] = at[np.lexsort((at != slot, far))[0]]
    return found


class Slots:
    """How leaves [slots, ...] of a layer, or [L, slots, ...] of a stack of layers, come apart and together again."""

    def __init__(self, leaves: Sequence[Array], *, stacked: bool):
        shardings = [leaf.sharding for leaf in leaves]
        assert all(isinstance(s, NamedSharding) for s in shardings)
        mesh = shardings[0].mesh  # type: ignore[attr-defined]
        whole = [s.spec for s in shardings]  # type: ignore[attr-defined]
        one = [P(*tuple(spec)[1:]) if stacked else spec for spec in whole]
        self._stacked = stacked
        how: dict[str, Any] = {"mesh": mesh, "check_vma": False}
        self._apart = jax.jit(jax.shard_map(self._split, in_specs=(whole, P()), out_specs=one, **how))
        put = jax.shard_map(_put_all, in_specs=(whole, one, P()), out_specs=whole, **how)
        self._put = jax.jit(put, donate_argnums=0)
        self._join = jax.jit(jax.shard_map(_join, in_specs=(one,), out_specs=whole, **how))

    def apart(self, leaves: list[Array], layer: int) -> Rows:
        """Every slot as an array of its own; `layer` is that of a stack."""
        return self._apart(leaves, np.int32(layer))

    def together(self, leaves: list[Array], rows: Rows, layer: int) -> list[Array]:
        """The leaves with these slots; a stack is given up, and changed in place."""
        return self._put(leaves, rows, np.int32(layer)) if self._stacked else self._join(rows)

    def _split(self, leaves: list[Array], layer: Array) -> Rows:
        return [self._slots(leaf, layer) for leaf in leaves]

    def _slots(self, leaf: Array, layer: Array) -> list[Array]:
        if self._stacked:
            leaf = lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False)
        return [leaf[slot : slot + 1] for slot in range(len(leaf))]


def _join(rows: Rows) -> list[Array]:
    return [jnp.concatenate(slots) for slots in rows]


def _put_all(stacks: list[Array], rows: Rows, layer: Array) -> list[Array]:
    return [_put(stack, slots, layer) for stack, slots in zip(stacks, rows, strict=True)]


def _put(stack: Array, slots: list[Array], layer: Array) -> Array:
    zero = np.int32(0)
    for number, slot in enumerate(slots):
        at = (layer, np.int32(number), *[zero] * (stack.ndim - 2))
        stack = lax.dynamic_update_slice(stack, slot[None], at)
    return stack


def dealt(rows: Rows, sources: Sequence[int]) -> tuple[Rows, int]:
    """(slot i as slot sources[i] was, bytes that went from device to device); call it on any thread.

    Where devices share an expert, or have copies of the same slots, each gets what it needs from one with its place.
    """
    moved, out = 0, []
    for slots in rows:
        each = len(slots)
        held = [{_place(shard): shard for shard in slot.addressable_shards} for slot in slots]
        made = []
        for number, slot in enumerate(slots):
            parts = []
            for (device, *place), shard in held[number].items():
                source = divmod(int(sources[device * each + number]), each)
                data = held[source[1]][source[0], *place].data
                if source[0] != device:
                    moved += data.nbytes
                    data = jax.device_put(data, shard.device)
                parts.append(data)
            made.append(jax.make_array_from_single_device_arrays(slot.shape, slot.sharding, parts))
        out.append(made)
    return out, moved


def _place(shard: Any) -> tuple[Any, ...]:
    """(which of the devices with experts, its copy, its part of each other axis)."""
    first, *others = shard.index
    return (first.start or 0, shard.replica_id, *((part.start, part.stop) for part in others))
