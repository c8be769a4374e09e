"""A weight on its way to the devices that share it: only what devices of this process hold is kept, each part once."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxserve.weights.arrays import aligned_empty, convert_into
from sharding.params import Param

Part = tuple[tuple[int, int], ...]  # (begin, end) on each axis


class Divided:
    """Filled tensor by tensor with `put`; `array` when all have come."""

    def __init__(self, param: Param, sharding: NamedSharding, dtype: np.dtype):
        self._shape, self._sharding, self._dtype = param.shape, sharding, dtype
        self._stack = param.shape[: len(param.shape) - len(param.part_shape)]  # axes that count tensors
        indices = sharding.addressable_devices_indices_map(param.shape)
        self._parts: dict[jax.Device, Part] = {
            device: tuple(s.indices(n)[:2] for s, n in zip(index or (), param.shape, strict=True))
            for device, index in indices.items()
        }
        self._buffers: dict[Part, np.ndarray] = {}

    def wants(self, row: int) -> bool:
        """Whether any device here holds some of the `row`-th tensor."""
        return any(self._place(part, row) is not None for part in self._parts.values())

    def put(self, row: int, tensor: np.ndarray) -> bool:
        """Take what devices here hold of the `row`-th tensor; False if the dtype cannot hold its values."""
        fits = True
        for part in set(self._parts.values()):
            place = self._place(part, row)
            if place is None:
                continue
            cut = tensor[tuple(slice(*ends) for ends in part[len(self._stack) :])]
            fits &= convert_into(self._buffer(part)[place], cut)
        return fits

    def array(self) -> jax.Array:
        """The whole weight, each device with its part."""
        placed = [jax.device_put(self._buffer(part), device) for device, part in self._parts.items()]
        array = jax.make_array_from_single_device_arrays(self._shape, self._sharding, placed)
        self._buffers.clear()
        return jax.block_until_ready(array)

    def _buffer(self, part: Part) -> np.ndarray:
        if part not in self._buffers:
            self._buffers[part] = aligned_empty(tuple(end - begin for begin, end in part), self._dtype)
        return self._buffers[part]

    def _place(self, part: Part, row: int) -> tuple[int, ...] | None:
        """Where in a part's stack a tensor goes."""
        place = []
        for n, (begin, end) in zip(reversed(self._stack), reversed(part[: len(self._stack)]), strict=True):
            row, at = divmod(row, n)
            if not begin <= at < end:
                return None
            place.append(at - begin)
        return tuple(reversed(place))
