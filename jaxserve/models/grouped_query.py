"""Grouped-query attention of a layer: its weights, its cache and what it computes."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxserve.batch import Batch
from jaxserve.layers.linear import linear
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import rotate
from jaxserve.models.config import ModelConfig
from pallas_kernels.pages import as_kept, plain_and_scales
from sharding.context import all_rows, spread_attention
from sharding.kernels import page_write, paged_attention
from sharding.params import Param

Tree = dict[str, Any]
CACHE_AXES = ("kv_heads", None, None)
SCALES_AXES = (None, "kv_heads", None)


def params(c: ModelConfig, at: str) -> Tree:
    """The weights of a layer whose attention's names begin with `at`."""
    d, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    tree = {
        "q": Param((q, d), ("heads", None), at + "q_proj.weight"),
        "k": Param((kv, d), ("kv_heads", None), at + "k_proj.weight"),
        "v": Param((kv, d), ("kv_heads", None), at + "v_proj.weight"),
        "o": Param((d, q), (None, "heads"), at + "o_proj.weight"),
    }
    if c.qk_norm == "head":
        tree["q_norm"] = Param((c.head_dim,), (None,), at + "q_norm.weight")
        tree["k_norm"] = Param((c.head_dim,), (None,), at + "k_norm.weight")
    if c.qk_norm == "all":
        tree["q_norm"] = Param((q,), ("heads",), at + "q_norm.weight")
        tree["k_norm"] = Param((kv,), ("kv_heads",), at + "k_norm.weight")
    if c.qkv_bias:
        tree["q_bias"] = Param((q,), ("heads",), at + "q_proj.bias")
        tree["k_bias"] = Param((kv,), ("kv_heads",), at + "k_proj.bias")
        tree["v_bias"] = Param((kv,), ("kv_heads",), at + "v_proj.bias")
    if c.o_bias:
        tree["o_bias"] = Param((d,), (None,), at + "o_proj.bias")
    if c.sinks:
        tree["sinks"] = Param((c.heads,), ("heads",), at + "sinks")
    return tree


def cache_shape(c: ModelConfig, page_size: int, packed: bool) -> tuple[int, int, int]:
    """One layer's page: keys and values side by side, or in the same bytes."""
    return (c.kv_heads, page_size, c.head_dim if packed else 2 * c.head_dim)


def cache_scales_shape(c: ModelConfig, page_size: int, packed: bool) -> tuple[int, int, int]:
    """Scales of one layer's page in low bits: a token's keys' and values', of each head."""
    return (2, c.kv_heads, page_size)


def page_size(pages: Any) -> int:
    """Tokens of one page."""
    return plain_and_scales(pages)[0].shape[-2]


def attention(
    c: ModelConfig, w: Tree, x: Array, pages: Any, batch: Batch, window: Any, turn: Array
) -> tuple[Array, Any]:
    """(its output [T, D], the pages with these tokens' keys and values). `window` 0 sees everything."""
    q, k = linear(x, w["q"], w.get("q_bias")), linear(x, w["k"], w.get("k_bias"))
    v = linear(x, w["v"], w.get("v_bias"))
    if c.qk_norm == "all":
        q, k = _norm(c, q, w["q_norm"]), _norm(c, k, w["k_norm"])
    q_TNH = q.reshape(-1, c.heads, c.head_dim)
    k_TKH, v_TKH = k.reshape(-1, c.kv_heads, c.head_dim), v.reshape(-1, c.kv_heads, c.head_dim)
    if c.qk_norm == "head":
        q_TNH, k_TKH = _norm(c, q_TNH, w["q_norm"]), _norm(c, k_TKH, w["k_norm"])
    q_TNH, k_TKH = rotate(q_TNH, turn), rotate(k_TKH, turn)
    if c.query_growth:
        beta, length = c.query_growth
        growth_T = 1 + beta * jnp.log1p(jnp.floor(batch.positions.astype(jnp.float32) / length))
        q_TNH = q_TNH * growth_T.astype(q_TNH.dtype)[:, None, None]
    kv_TKW = jnp.concatenate([k_TKH, v_TKH], axis=-1)
    form = {
        "scale": c.attention_scale,
        "window": None if isinstance(window, int) and window == 0 else window,
        "soft_cap": c.attention_soft_cap,
        "sinks": w.get("sinks"),
    }
    if batch.spread:
        pages = page_write(pages, all_rows(kv_TKW), batch.places)
        kept_TKW = as_kept(pages, kv_TKW)
        out_TNH = spread_attention(q_TNH, kept_TKW, batch.positions, batch.q_starts[1], **form)
        return _out(c, w, out_TNH), pages
    pages = page_write(pages, kv_TKW, batch.places)
    out_TNH, _ = paged_attention(q_TNH, pages, batch.page_table, batch.q_starts, batch.kv_lens, **form)
    return _out(c, w, out_TNH), pages


def _out(c: ModelConfig, w: Tree, out_TNH: Array) -> Array:
    return linear(out_TNH.reshape(-1, c.heads * c.head_dim), w["o"], w.get("o_bias"))


def _norm(c: ModelConfig, x: Array, weight: Array) -> Array:
    return rms_norm(x, weight, c.norm_eps, c.norm_offset)
