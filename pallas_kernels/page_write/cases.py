"""Named calls of page_write: tiny ones to compare values, real models' to compile and to measure."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.int4_rows import PACKED
from pallas_kernels.pages import ROPE, ScaledPages, latent_page, plain_and_scales


@dataclass(frozen=True)
class Case:
    """Sequences that get `new` rows each, from position `old` on."""

    heads: tuple[int, int] | None  # kv heads, values of a head and token; None: latents
    new: tuple[int, ...]
    old: tuple[int, ...]
    page: int = 16
    layers: int | None = None
    padding: int = 0  # rows that go to page 0
    latent: int = 512
    cache: str | None = None  # type of the pages; None: that of the rows

    def call(self, dtype, seed: int = 0) -> tuple[tuple, dict[str, Any]]:
        rng = np.random.default_rng(seed)
        (pages, rows, places), options = self.shapes(dtype)
        if self.layers:
            options["layer"] = jnp.asarray(options["layer"])

        def some(x):
            if x.dtype == PACKED:
                return jnp.asarray(rng.integers(0, 256, size=x.shape), x.dtype)
            values = jnp.asarray(rng.normal(size=x.shape) * (50 if x.dtype == jnp.int8 else 1), x.dtype)
            return jnp.where(values == 0, jnp.zeros_like(values), values)

        pages, rows = jax.tree.map(some, (pages, rows))
        return (pages, rows, jnp.asarray(places)), options

    def shapes(self, dtype) -> tuple[tuple, dict[str, Any]]:
        counts = [-(-(old + new) // self.page) for old, new in zip(self.old, self.new, strict=True)]
        order = np.random.default_rng(1).permutation(np.arange(1, 1 + sum(counts))).astype(np.int32)
        places, used = [], 0
        for old, new, count in zip(self.old, self.new, counts, strict=True):
            at = np.arange(old, old + new, dtype=np.int32)
            places.append(order[used + at // self.page] * np.int32(self.page) + at % self.page)
            used += count
        places.append(np.zeros(self.padding, np.int32))
        stack = (*((self.layers,) if self.layers else ()), 1 + used)
        pages, row = self._page(), self.heads or (self.latent + ROPE,)
        kept = jax.ShapeDtypeStruct((*stack, *pages), self.cache or dtype)
        if self.cache:
            scales = (2, self.heads[0], self.page) if self.heads else (2, self.page // 2)
            kept = ScaledPages(kept, jax.ShapeDtypeStruct((*stack, *scales), jnp.float32))
        return (
            kept,
            jax.ShapeDtypeStruct((sum(self.new) + self.padding, *row), dtype),
            np.concatenate(places).astype(np.int32),
        ), ({"layer": np.int32(self.layers - 1)} if self.layers else {})

    def _page(self) -> tuple[int, int, int]:
        if self.heads is None:
            return latent_page(self.latent, self.page)
        return self.heads[0], self.page, self.heads[1] // (2 if self.cache == INT4 else 1)

    def defined(self, out) -> np.ndarray:
        """All pages but page 0, which takes the padding, and their scales."""
        values, scales = plain_and_scales(out)
        values = np.asarray(values, np.float32)[..., 1:, :, :, :]
        if scales is None:
            return values
        dims = 3 if self.heads else 2
        scales = np.asarray(scales)[..., 1:, *[slice(None)] * dims]
        return np.concatenate([values.reshape(-1), scales.reshape(-1)])


FP8, INT4 = "float8_e4m3fn", jnp.dtype(PACKED).name

TINY = {
    "decode": Case((2, 128), new=(1, 1, 1), old=(0, 17, 31), padding=2),
    "chunk": Case((3, 128), new=(21, 1, 5), old=(9, 40, 0), layers=2),
    "FP8": Case((3, 128), new=(1, 60, 130), old=(127, 100, 70), page=128, padding=1, cache=FP8),
    "INT8": Case((2, 128), new=(1, 30), old=(127, 0), page=128, layers=2, cache="int8"),
    "INT4": Case((2, 256), new=(1, 30, 3), old=(127, 0, 50), page=128, layers=2, padding=1, cache=INT4),
    "latents": Case(None, new=(1, 1, 40, 1), old=(0, 17, 33, 63), page=64, latent=128, layers=2, padding=2),
    "latents, FP8": Case(None, new=(1, 1, 70), old=(0, 255, 211), page=256, latent=256, padding=2, cache=FP8),
}

_MANY = (1,) * 64

REAL = {
    "llama-70b decode": Case((8, 256), new=_MANY, old=(4095,) * 64, page=128, layers=2),
    "llama-70b decode, FP8": Case((8, 256), new=_MANY, old=(4095,) * 64, page=128, layers=2, cache=FP8),
    "llama-70b decode, INT4": Case((8, 256), new=_MANY, old=(4095,) * 64, page=128, layers=2, cache=INT4),
    "llama-70b prefill": Case((8, 256), new=(8192,), old=(0,), page=128, layers=2),
    "llama-70b prefill, FP8": Case((8, 256), new=(8192,), old=(0,), page=128, layers=2, cache=FP8),
    "smollm2 decode": Case((3, 128), new=(1,) * 32, old=(999,) * 32, page=16, layers=2),
    "deepseek-v3 decode": Case(None, new=_MANY, old=(4095,) * 64, page=512, layers=2),
    "deepseek-v3 decode, FP8": Case(None, new=_MANY, old=(4095,) * 64, page=512, layers=2, cache=FP8),
    "deepseek-v3 prefill, FP8": Case(None, new=(8192,), old=(0,), page=512, layers=2, cache=FP8),
}
