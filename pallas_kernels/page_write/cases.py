"""Named calls of page_write: tiny ones to compare values, real models' to compile and to measure."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """Sequences that get `new` rows each, from position `old` on."""

    heads: tuple[int, int]  # kv heads, values of a head and token
    new: tuple[int, ...]
    old: tuple[int, ...]
    page: int = 16
    layers: int | None = None
    padding: int = 0  # rows that go to page 0

    def call(self, dtype, seed: int = 0) -> tuple[tuple, dict[str, Any]]:
        rng = np.random.default_rng(seed)
        (pages, rows, places), options = self.shapes(dtype)
        if self.layers:
            options["layer"] = jnp.asarray(options["layer"])
        pages, rows = (jnp.asarray(rng.normal(size=x.shape), dtype) for x in (pages, rows))
        return (pages, rows, jnp.asarray(places)), options

    def shapes(self, dtype) -> tuple[tuple, dict[str, Any]]:
        k, width = self.heads
        counts = [-(-(old + new) // self.page) for old, new in zip(self.old, self.new, strict=True)]
        order = np.random.default_rng(1).permutation(np.arange(1, 1 + sum(counts))).astype(np.int32)
        places, used = [], 0
        for old, new, count in zip(self.old, self.new, counts, strict=True):
            at = np.arange(old, old + new, dtype=np.int32)
            places.append(order[used + at // self.page] * np.int32(self.page) + at % self.page)
            used += count
        places.append(np.zeros(self.padding, np.int32))
        stack = (self.layers,) if self.layers else ()
        return (
            jax.ShapeDtypeStruct((*stack, 1 + used, k, self.page, width), dtype),
            jax.ShapeDtypeStruct((sum(self.new) + self.padding, k, width), dtype),
            np.concatenate(places).astype(np.int32),
        ), ({"layer": np.int32(self.layers - 1)} if self.layers else {})

    def defined(self, out) -> np.ndarray:
        """All pages but page 0, which takes the padding."""
        return np.asarray(out, np.float32)[..., 1:, :, :, :]


TINY = {
    "decode": Case((2, 128), new=(1, 1, 1), old=(0, 17, 31), padding=2),
    "chunk": Case((3, 128), new=(21, 1, 5), old=(9, 40, 0), layers=2),
}

REAL = {
    "llama-70b decode": Case((8, 256), new=(1,) * 64, old=(4095,) * 64, page=128, layers=2),
    "llama-70b prefill": Case((8, 256), new=(8192,), old=(0,), page=128, layers=2),
    "smollm2 decode": Case((3, 128), new=(1,) * 32, old=(999,) * 32, page=16, layers=2),
}
