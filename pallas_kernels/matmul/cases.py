"""Named calls of matmul: tiny ones to compare values, real models' to compile and to measure."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from pallas_kernels.formats import Format

DTYPES = ("bfloat16",)  # of rows that the kernels take


@dataclass(frozen=True)
class Case:
    """`t` rows times a weight [f, d], stored in `format` (None: an array of the rows' dtype)."""

    t: int
    f: int
    d: int
    format: Format | None
    layers: int | None = None  # the weight is a stack of so many

    def call(self, dtype, seed: int = 0) -> tuple[tuple, dict[str, Any]]:
        """(positional, keyword) arguments with random values."""
        rng = np.random.default_rng(seed)
        stack = (self.layers,) if self.layers else ()
        w = (rng.normal(size=(*stack, self.f, self.d)) * self.d**-0.5).astype(np.float32)
        w *= np.exp2(rng.integers(-3, 1, (*stack, self.f, 1)).astype(np.float32))  # scales that differ
        stored = w.astype(dtype) if self.format is None else formats.quantise(w, self.format)
        x = jnp.asarray(rng.normal(size=(self.t, self.d)), dtype)
        return (x, jax.tree.map(jnp.asarray, stored)), self._layer(jnp.asarray)

    def defined(self, out):
        """What of a result the definition settles: all of it."""
        return out

    def shapes(self, dtype) -> tuple[tuple, dict[str, Any]]:
        """The same without values."""
        stack = (self.layers,) if self.layers else ()
        return (
            jax.ShapeDtypeStruct((self.t, self.d), dtype),
            weight_shape((*stack, self.f, self.d), self.format, dtype),
        ), self._layer(lambda layer: layer)

    def _layer(self, of) -> dict[str, Any]:
        return {"layer": of(np.int32(self.layers - 1))} if self.layers else {}


def weight_shape(shape: tuple[int, ...], format: Format | None, dtype) -> Any:
    """What a weight of this shape looks like in this format."""
    w = jax.ShapeDtypeStruct(shape, dtype)
    return w if format is None else jax.eval_shape(lambda w: formats.quantise(w, format), w)


FORMATS = (
    formats.FP8_BLOCK, formats.FP8_CHANNEL, formats.INT8_CHANNEL, formats.int4(128), formats.int4(32, zeros=True),
    formats.MXFP4, formats.NVFP4,
)  # fmt: skip

TINY = {
    **{f.name: Case(5, 144, 512, f, layers=2) for f in FORMATS},
    "fp8_block, more rows than columns": Case(5, 1152, 256, formats.FP8_BLOCK, layers=2),
    "nvfp4, 128 groups a row": Case(5, 144, 2048, formats.NVFP4, layers=2),
    "array, many rows": Case(300, 256, 384, None),
    "fp8_block, many rows": Case(300, 200, 384, formats.FP8_BLOCK),
    "mxfp4, many rows": Case(300, 200, 512, formats.MXFP4),
}

SHAPES = {  # (F, D)
    "deepseek-v3 down": (7168, 18432),
    "deepseek-v3 q_b": (24576, 1536),
    "deepseek-v3 kv_a": (576, 7168),
    "deepseek-v3 o": (7168, 16384),
    "llama-70b gate": (28672, 8192),
    "llama-70b qkv": (10240, 8192),
}

REAL = {
    f"{name} {t} {'bf16' if format is None else format.name}": Case(t, *SHAPES[name], format, layers=2)
    for name, t, format in (
        ("deepseek-v3 o", 64, formats.FP8_BLOCK),
        ("deepseek-v3 down", 128, formats.FP8_BLOCK),
        ("deepseek-v3 o", 64, formats.MXFP4),
        ("deepseek-v3 down", 128, formats.NVFP4),
        ("deepseek-v3 o", 16, formats.MXFP4),
        ("deepseek-v3 o", 16, formats.NVFP4),
        ("deepseek-v3 kv_a", 16, formats.FP8_BLOCK),
        ("deepseek-v3 q_b", 16, formats.FP8_CHANNEL),
        ("llama-70b gate", 16, formats.int4(128)),
        ("llama-70b qkv", 64, formats.int4(32, zeros=True)),
        ("llama-70b qkv", 128, formats.INT8_CHANNEL),
        ("llama-70b gate", 4096, None),
        ("deepseek-v3 o", 4096, formats.FP8_BLOCK),
        ("llama-70b gate", 4096, formats.MXFP4),
    )
}
