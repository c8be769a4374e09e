"""A checkpoint of quantised weights as one of plain ones: plain names and shapes, values dequantised when read."""

import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights.arrays import aligned_empty
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.schemes import quantised_weights, settings_of, without_settings
from jaxserve.weights.schemes.weight import Weight
from pallas_kernels.formats import QTensor, dequantise

log = logging.getLogger(__name__)
# Scales of activations and of cached keys and values, which are kept at full precision here.
UNUSED = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)
CHUNK = 1 << 18  # weights dequantised at a time: the temporaries stay in the processor's cache


class QuantizedCheckpoint:
    """`stored` through the eyes of its scheme; tensors that are not part of a quantised weight stay as they are."""

    def __init__(self, stored: Checkpoint, settings: Any):
        self.stored, self.path, self.format = stored, stored.path, stored.format
        self.config = without_settings(stored.config)
        self.scheme, self._weights = quantised_weights(stored, settings)
        parts = {name: weight for weight, w in self._weights.items() for name in w.parts.values()}
        codes = {next(iter(w.parts.values())) for w in self._weights.values()}
        self._names = [
            parts.get(name, name)
            for name in stored.names()
            if name in codes or (name not in parts and not name.endswith(UNUSED))
        ]
        self._pool = ThreadPoolExecutor(os.cpu_count(), "dequantize")

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights[name].shape if name in self._weights else self.stored.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name in self._weights else self.stored.dtype(name)

    def nbytes(self, name: str) -> int:
        return sum(self.stored.nbytes(part) for part in self._parts(name))

    def file(self, name: str) -> str:
        return self.stored.file(self._parts(name)[0])

    def read(self, name: str) -> np.ndarray:
        weight = self._weights.get(name)
        if weight is None:
            return self.stored.read(name)
        parts = {end: self.stored.read(part) for end, part in weight.parts.items()}
        values = self._unpack(weight, parts)
        if isinstance(values, QTensor):
            values = in_parallel(values, self._pool)
        if weight.columns:
            values = weight.columns(values, parts)
        return values.swapaxes(-1, -2) if weight.swapped else values

    def packs(self, name: str, swapped: bool) -> bool:
        """Whether `packed` gives it; `swapped` says that it is wanted [out, in] of a tensor shaped [in, out]."""
        weight = self._weights.get(name)
        return weight is not None and weight.low_bit and not weight.columns and weight.swapped == swapped

    def packed(self, name: str) -> QTensor | None:
        """The weight [..., out, in] as it is stored, on the host; None for what has no such form."""
        weight = self._weights.get(name)
        if weight is None or weight.columns or not weight.low_bit:
            return None
        values = self._unpack(weight, {end: self.stored.read(part) for end, part in weight.parts.items()})
        assert isinstance(values, QTensor), name
        return values

    def release(self, name: str) -> None:
        for part in self._parts(name):
            self.stored.release(part)

    def _unpack(self, weight: Weight, parts: dict[str, np.ndarray]) -> QTensor | np.ndarray:
        try:
            return weight.unpack(parts)
        except (ValueError, KeyError) as why:
            tensor = next(iter(weight.parts.values()))
            raise CheckpointError(
                "a quantised weight is malformed",
                tensor=tensor,
                file=self.stored.file(tensor),
                found=str(why),
            ) from why

    def _parts(self, name: str) -> list[str]:
        return list(self._weights[name].parts.values()) if name in self._weights else [name]


def plain(stored: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or the plain view of one whose config says that it is quantised."""
    settings = settings_of(stored.config)
    return stored if settings is None else QuantizedCheckpoint(stored, settings)


def in_parallel(w: QTensor, pool: ThreadPoolExecutor) -> np.ndarray:
    """What `w` stands for in float32, rows by rows on the threads of `pool`."""
    *stack, f, d = w.shape
    out = aligned_empty(w.shape, np.dtype(np.float32))
    rows = w.format.block[0] or f
    step = max(rows, CHUNK // d // rows * rows)

    def part(index: tuple[int, ...], start: int) -> None:
        one = jax.tree.map(lambda leaf: leaf[index], w)
        cut = slice(start, start + step)
        scales = one.scales[start // rows : -(-cut.stop // rows)]
        zeros = None if one.zeros is None else one.zeros[start // rows : -(-cut.stop // rows)]
        out[(*index, cut)] = dequantise(
            QTensor(one.codes[cut], scales, zeros, one.tensor_scale, format=w.format)
        )

    places = [(index, start) for index in np.ndindex(*stack) for start in range(0, f, step)]
    list(pool.map(lambda place: part(*place), places))
    return out
