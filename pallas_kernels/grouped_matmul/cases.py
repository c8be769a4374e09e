"""Named calls of grouped_matmul: tiny ones to compare values, real models' to compile and to measure."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from pallas_kernels.formats import Format
from pallas_kernels.matmul.cases import weight_shape

DTYPES = ("bfloat16",)  # of rows that the kernels take


@dataclass(frozen=True)
class Case:
    """Groups of `sizes` rows, each times its own [f, d]; `padding` rows at the end are nobody's."""

    sizes: tuple[int, ...]
    f: int
    d: int
    format: Format | None
    padding: int = 0
    layers: int | None = None

    def call(self, dtype, seed: int = 0) -> tuple[tuple, dict[str, Any]]:
        """(positional, keyword) arguments with random values."""
        rng = np.random.default_rng(seed)
        (x, _, sizes), options = self.shapes(dtype)
        stack = (self.layers,) if self.layers else ()
        w = (rng.normal(size=(*stack, len(self.sizes), self.f, self.d)) * self.d**-0.5).astype(np.float32)
        stored = w.astype(dtype) if self.format is None else formats.quantise(w, self.format)
        rows = jnp.asarray(rng.normal(size=x.shape), dtype)
        return (rows, jax.tree.map(jnp.asarray, stored), jnp.asarray(sizes)), jax.tree.map(
            jnp.asarray, options
        )

    def defined(self, out):
        """What of a result the definition settles: all of it."""
        return out

    def shapes(self, dtype) -> tuple[tuple, dict[str, Any]]:
        """The same without values, but for the sizes."""
        stack = (self.layers,) if self.layers else ()
        return (
            jax.ShapeDtypeStruct((sum(self.sizes) + self.padding, self.d), dtype),
            weight_shape((*stack, len(self.sizes), self.f, self.d), self.format, dtype),
            np.array(self.sizes, np.int32),
        ), ({"layer": np.int32(self.layers - 1)} if self.layers else {})


TINY = {
    "array": Case((3, 0, 40, 1, 0), 144, 256, None, padding=200),
    "fp8_block": Case((0, 150, 30), 200, 256, formats.FP8_BLOCK, layers=2),
    "mxfp4": Case((9, 0, 70), 144, 512, formats.MXFP4),
}

REAL = {
    "8 experts of 128 rows, fp8_channel": Case((128,) * 8, 4096, 7168, formats.FP8_CHANNEL, layers=2),
    "8 experts of 128 rows, bf16": Case((128,) * 8, 4096, 7168, None, layers=2),
    "8 experts, decode, fp8_block": Case(
        (16, 0, 9, 64, 1, 0, 20, 18), 4096, 7168, formats.FP8_BLOCK, layers=2
    ),
    "down, 8 experts, decode, mxfp4": Case((16, 0, 9, 64, 1, 0, 20, 18), 7168, 2048, formats.MXFP4, layers=2),
    "8 experts, prefill, nvfp4": Case(
        (512, 900, 100, 0, 1500, 300, 700, 84), 4096, 7168, formats.NVFP4, layers=2
    ),
}
