"""Named calls of mla_attention: tiny ones to compare values, real models' to compile and to measure."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import ROPE, ScaledPages, latent_page, packed, plain_and_scales


@dataclass(frozen=True)
class Case:
    """Sequences of `lens` keys of which `new` are this step's, for one layer of a model."""

    heads: int
    new: tuple[int, ...]
    lens: tuple[int, ...]
    page: int = 512
    latent: int = 512
    layers: int | None = None  # the cache is a stack of so many layers
    padding: int = 0  # rows at the end that are nobody's
    later: int = 0  # keys that are elsewhere, between these and the rows' own
    tree: bool = False  # guesses that branch
    cache: str | None = None  # type of the pages; None: that of the queries

    def call(self, dtype, seed: int = 0) -> tuple[tuple, dict[str, Any]]:
        """(positional, keyword) arguments with random values; places of the cache that nobody wrote hold NaN."""
        rng = np.random.default_rng(seed)
        (q_latent, q_rope, pages, table, starts, lens), options = self.shapes(dtype)
        pages, scales = plain_and_scales(pages)
        tokens = (*pages.shape[:-3], self.page)
        written = np.zeros(tokens, bool)
        for row, length in zip(table, self.lens, strict=True):
            for s in range(length):
                written[..., row[s // self.page], s % self.page] = True
        values = rng.normal(size=(*tokens, self.latent + ROPE)).astype(np.float32)
        values[~written] = np.nan
        values = jnp.asarray(values).astype(pages.dtype)
        if pages.dtype.itemsize == 1:
            values = jnp.where(values == 0, jnp.zeros_like(values), values)
        if self.layers:
            options["layer"] = jnp.asarray(options["layer"])
        if self.later:
            options["first"] = jnp.asarray(lens - np.diff(starts) + np.int32(self.later))
        if self.tree:
            options["tree"] = jnp.asarray(rng.integers(0, 2**31, size=q_rope.shape[0]), jnp.int32)
        q = [jnp.asarray(rng.normal(size=x.shape), dtype) for x in (q_latent, q_rope)]
        pages = packed(values[..., : self.latent], values[..., self.latent :])
        if scales is not None:
            scales = np.where(written, rng.uniform(0.5, 2.0, size=tokens), np.nan).astype(np.float32)
            scales = np.swapaxes(scales.reshape(*scales.shape[:-1], -1, 2), -2, -1)
            pages = ScaledPages(pages, jnp.asarray(scales))
        return (*q, pages, *map(jnp.asarray, (table, starts, lens))), options

    def shapes(self, dtype) -> tuple[tuple, dict[str, Any]]:
        """The same without values: lengths and page tables as numbers, the rest as shapes."""
        counts = [-(-length // self.page) for length in self.lens]
        order = np.random.default_rng(1).permutation(np.arange(1, 1 + sum(counts)))
        table = np.zeros((len(self.lens), max(1, *counts, 1)), np.int32)
        for b, end in enumerate(np.cumsum(counts)):
            table[b, : counts[b]] = order[end - counts[b] : end]
        stack, cache = ((self.layers,) if self.layers else ()), jnp.dtype(self.cache or dtype)
        shape = (*stack, 1 + sum(counts), *latent_page(self.latent, self.page))
        pages = jax.ShapeDtypeStruct(shape, cache)
        if cache.itemsize == 1:
            scales = jax.ShapeDtypeStruct((*shape[:-3], 2, self.page // 2), jnp.float32)
            pages = ScaledPages(pages, scales)
        options: dict[str, Any] = {"scale": (128 + ROPE) ** -0.5}
        if self.layers:
            options["layer"] = np.int32(self.layers - 1)
        t = sum(self.new) + self.padding
        if self.tree:
            options["tree"] = jax.ShapeDtypeStruct((t,), jnp.int32)
        return (
            jax.ShapeDtypeStruct((t, self.heads, self.latent), dtype),
            jax.ShapeDtypeStruct((t, self.heads, ROPE), dtype),
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


FP8 = "float8_e4m3fn"
DTYPES = (
    "bfloat16",
)  # of queries; float32 is compared in more ways in tests/pallas_kernels/test_mla_attention.py

TINY = {
    "decode": Case(16, new=(1, 1, 0, 1), lens=(300, 1, 0, 70), page=64, latent=128, padding=1),
    "decode, FP8": Case(16, new=(1, 0, 1), lens=(300, 0, 70), page=256, latent=128, padding=1, cache=FP8),
    "chunk": Case(16, new=(19,), lens=(150,), page=64, latent=256, layers=2, padding=3),
    "mixed": Case(32, new=(1, 9, 3, 0, 1), lens=(20, 30, 130, 0, 5), page=32, latent=128, padding=4),
    "tree": Case(16, new=(6, 1, 35, 0), lens=(30, 9, 300, 0), page=64, latent=128, padding=2, tree=True),
    "early part": Case(16, new=(3, 1), lens=(64, 100), page=64, latent=128, padding=1, later=99),
}

_DECODE = {"64 x 4096": (64, 4096), "128 x 4096": (128, 4096), "16 x 32768": (16, 32768)}

REAL = {
    f"deepseek-v3 decode {name}{', FP8' if cache else ''}": Case(
        128, new=(1,) * batch, lens=(context,) * batch, layers=2, cache=cache
    )
    for name, (batch, context) in _DECODE.items()
    for cache in (None, FP8)
} | {
    "deepseek-v3 prefill 8192": Case(128, new=(8192,), lens=(8192,), layers=2),
    "deepseek-v3 prefill 8192, FP8": Case(128, new=(8192,), lens=(8192,), layers=2, cache=FP8),
    "deepseek-v3 chunk of 2048 on 32768": Case(128, new=(2048,), lens=(34816,), layers=2),
    "deepseek-v3 mixed": Case(128, new=(1,) * 30 + (500, 1000), lens=(2048,) * 30 + (500, 8192), layers=2),
    "deepseek-v3 tree": Case(128, new=(16,) * 16, lens=(4096,) * 16, layers=2, tree=True),
    "deepseek-v3 tree, FP8": Case(128, new=(16,) * 16, lens=(4096,) * 16, layers=2, tree=True, cache=FP8),
    "deepseek-v3 verify": Case(128, new=(4,) * 16, lens=(4096,) * 16, layers=2),
    "deepseek-v2-lite decode": Case(16, new=(1,) * 32, lens=(2048,) * 32, page=256, layers=2),
    "deepseek-v2-lite decode, FP8": Case(16, new=(1,) * 32, lens=(2048,) * 32, page=256, layers=2, cache=FP8),
}
