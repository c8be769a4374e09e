"""Named calls of paged_attention: tiny ones to compare values, real models' to compile and to measure."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.int4_rows import PACKED
from pallas_kernels.pages import ScaledPages, plain_and_scales


@dataclass(frozen=True)
class Case:
    """Sequences of `lens` keys of which `new` are this step's, for one layer of a model."""

    heads: tuple[int, int, int]  # query heads, kv heads, head size
    new: tuple[int, ...]
    lens: tuple[int, ...]
    page: int = 16
    layers: int | None = None  # the cache is a stack of so many layers
    padding: int = 0  # rows at the end that are nobody's
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    later: int = 0  # keys that are elsewhere, between these and the rows' own
    tree: bool = False  # guesses that branch
    cache: str | None = None  # type of the pages; None: that of the queries

    def call(self, dtype, seed: int = 0) -> tuple[tuple, dict[str, Any]]:
        """(positional, keyword) arguments with random values; places of the cache that nobody wrote hold NaN."""
        rng = np.random.default_rng(seed)
        (q, pages, table, starts, lens), options = self.shapes(dtype)
        pages, scales = plain_and_scales(pages)
        values = rng.normal(size=pages.shape).astype(np.float32)
        unwritten = np.ones(pages.shape[-5:-3] if self.layers else pages.shape[:1], bool)[..., None]
        unwritten = np.repeat(unwritten, self.page, axis=-1)
        for row, length in zip(table, self.lens, strict=True):
            for s in range(length):
                unwritten[..., row[s // self.page], s % self.page] = False
        values[np.broadcast_to(unwritten[..., None, :, None], values.shape)] = np.nan
        values[..., 0, :, :, :] = np.nan
        size = {INT8: 50, INT4: 4}.get(str(pages.dtype), 1)
        if pages.dtype == PACKED:
            values = rng.integers(0, 256, size=pages.shape)
        values = jnp.asarray(values * size if pages.dtype == jnp.int8 else values).astype(pages.dtype)
        if scales is not None:
            values = ScaledPages(
                jnp.where(values == 0, jnp.zeros_like(values), values),
                _scales(rng, scales.shape, unwritten, size),
            )
        if self.layers:
            options["layer"] = jnp.asarray(options["layer"])
        if self.later:
            options["first"] = jnp.asarray(lens - np.diff(starts) + np.int32(self.later))
        if self.sinks:
            options["sinks"] = jnp.asarray(rng.normal(size=self.heads[0]), jnp.float32)
        if self.tree:
            options["tree"] = jnp.asarray(rng.integers(0, 2**31, size=q.shape[0]), jnp.int32)
        q = jnp.asarray(rng.normal(size=q.shape), dtype)
        return (q, values, *map(jnp.asarray, (table, starts, lens))), options

    def shapes(self, dtype) -> tuple[tuple, dict[str, Any]]:
        """The same without values: lengths and page tables as numbers, the rest as shapes."""
        n, k, h = self.heads
        counts = [-(-length // self.page) for length in self.lens]
        order = np.random.default_rng(1).permutation(np.arange(1, 1 + sum(counts)))
        table = np.zeros((len(self.lens), max(1, *counts)), np.int32)
        for b, end in enumerate(np.cumsum(counts)):
            table[b, : counts[b]] = order[end - counts[b] : end]
        stack = (self.layers,) if self.layers else ()
        options: dict[str, Any] = {"scale": h**-0.5, "window": self.window, "soft_cap": self.soft_cap}
        if self.layers:
            options["layer"] = np.int32(self.layers - 1)
        if self.sinks:
            options["sinks"] = jax.ShapeDtypeStruct((n,), jnp.float32)
        t = sum(self.new) + self.padding
        if self.tree:
            options["tree"] = jax.ShapeDtypeStruct((t,), jnp.int32)
        width = h if self.cache == INT4 else 2 * h
        pages = jax.ShapeDtypeStruct((*stack, 1 + sum(counts), k, self.page, width), self.cache or dtype)
        if self.cache:
            scales = jax.ShapeDtypeStruct((*pages.shape[:-3], 2, k, self.page), jnp.float32)
            pages = ScaledPages(pages, scales)
        return (
            jax.ShapeDtypeStruct((t, n, h), dtype),
            pages,
            table,
            np.concatenate([[0], np.cumsum(self.new)]).astype(np.int32),
            np.array(self.lens, np.int32),
        ), options

    def defined(self, out) -> np.ndarray:
        """Results and log-sum-exps, side by side, of the rows that are some sequence's."""
        rows = np.flatnonzero(self.new) if len(out[0]) == len(self.lens) else np.arange(sum(self.new))
        out, lse = (np.asarray(x, np.float32)[rows] for x in out)
        return np.concatenate([out, lse[..., None]], axis=-1)


def _scales(rng, shape, unwritten, size: int) -> jax.Array:
    """Scales of tokens that make values of this size about one; NaN for those that nobody wrote."""
    scales = (rng.uniform(0.5, 1.5, size=shape) / size).astype(np.float32)
    return jnp.asarray(np.where(unwritten[..., None, None, :], np.nan, scales))


FP8, INT8, INT4 = "float8_e4m3fn", "int8", jnp.dtype(PACKED).name

TINY = {
    "decode": Case((4, 2, 64), new=(1, 1, 0, 1), lens=(150, 1, 0, 37), window=40, sinks=True, padding=1),
    "chunk": Case((4, 2, 128), new=(23,), lens=(150,), layers=2, padding=9, soft_cap=5.0),
    "mixed": Case((6, 2, 64), new=(1, 18, 3, 0, 1), lens=(20, 30, 130, 0, 5), window=100, padding=4),
    "early part": Case((4, 2, 64), new=(3, 1), lens=(64, 100), window=150, padding=1, later=99),
    "decode, FP8": Case(
        (6, 2, 64), new=(1, 1, 0), lens=(150, 1, 0), page=128, layers=2, sinks=True, cache=FP8
    ),
    "mixed, INT4": Case(
        (4, 2, 128), new=(1, 18, 0, 3), lens=(150, 140, 0, 3), page=128, layers=2, padding=2, cache=INT4
    ),
    "tree, INT8": Case(
        (4, 2, 64),
        new=(7, 1, 12, 0),
        lens=(30, 9, 140, 0),
        page=128,
        padding=2,
        tree=True,
        sinks=True,
        cache=INT8,
    ),
}

REAL = {
    "llama-70b decode": Case((64, 8, 128), new=(1,) * 64, lens=(4096,) * 64, page=128, layers=2),
    "llama-70b decode, pages of 16": Case((64, 8, 128), new=(1,) * 64, lens=(4096,) * 64, page=16, layers=2),
    "llama-70b decode 4 x 131072": Case((64, 8, 128), new=(1,) * 4, lens=(131072,) * 4, page=128, layers=2),
    "llama-70b decode 1 x 131072": Case((64, 8, 128), new=(1,), lens=(131072,), page=128, layers=2),
    "llama-70b decode, FP8": Case(
        (64, 8, 128), new=(1,) * 64, lens=(4096,) * 64, page=128, layers=2, cache=FP8
    ),
    "llama-70b decode, INT8": Case(
        (64, 8, 128), new=(1,) * 64, lens=(4096,) * 64, page=128, layers=2, cache=INT8
    ),
    "llama-70b decode, INT4": Case(
        (64, 8, 128), new=(1,) * 64, lens=(4096,) * 64, page=128, layers=2, cache=INT4
    ),
    "llama-70b prefill": Case((64, 8, 128), new=(8192,), lens=(8192,), page=128, layers=2),
    "llama-8b mixed": Case(
        (32, 8, 128), new=(1,) * 62 + (962, 1024), lens=(2048,) * 62 + (962, 8192), page=64, layers=2
    ),
    "llama-8b prefill, FP8": Case((32, 8, 128), new=(4096,), lens=(4096,), page=128, layers=2, cache=FP8),
    "llama-8b prefill, INT4": Case((32, 8, 128), new=(4096,), lens=(4096,), page=128, layers=2, cache=INT4),
    "llama-8b tree": Case((32, 8, 128), new=(16,) * 16, lens=(4096,) * 16, page=64, layers=2, tree=True),
    "llama-8b verify": Case((32, 8, 128), new=(4,) * 32, lens=(4096,) * 32, page=64, layers=2),
    "smollm2 decode": Case((9, 3, 64), new=(1,) * 32, lens=(1000,) * 32, page=16, layers=2),
    "qwen2.5-7b chunk": Case((28, 4, 128), new=(2048,), lens=(4000,), page=32, layers=2),
    "gpt-oss decode": Case(
        (64, 8, 64), new=(1,) * 64, lens=(4096,) * 64, page=64, layers=2, window=128, sinks=True
    ),
    "gemma2-9b prefill": Case(
        (16, 8, 256), new=(4096,), lens=(4096,), page=32, layers=2, window=4096, soft_cap=50.0
    ),
}
