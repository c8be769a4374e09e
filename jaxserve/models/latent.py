"""Multi-head latent attention of a layer (DeepSeek-V2, arXiv:2405.04434): its weights, its cache, what it computes.

Of a token only its latent and one rotary key are kept. Queries are multiplied into the space of latents and attended
there (absorbed), or keys and values are made from the latents again (expanded): the same in exact arithmetic.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxserve.batch import Batch
from jaxserve.layers.expanded import expanded_attention
from jaxserve.layers.linear import linear
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import rotate
from jaxserve.models.config import ModelConfig
from jaxserve.models.sizes import Latent
from jaxserve.plan.cost import expanded_is_cheaper
from pallas_kernels import chip
from pallas_kernels.int4_rows import latent_bytes
from pallas_kernels.op import platform
from pallas_kernels.pages import as_kept, latent_page, plain_and_scales
from sharding.context import all_rows, spread_attention
from sharding.kernels import divided, everywhere, mla_attention, page_write
from sharding.mesh import TENSOR
from sharding.params import Cut, Param

Tree = dict[str, Any]
CACHE_AXES = (None, None, None)
SCALES_AXES = (None, None)


def params(c: ModelConfig, at: str) -> Tree:
    """The weights of a layer whose attention's names begin with `at`."""
    m, d, n = _sizes(c), c.hidden_size, c.heads
    made = m.nope_dim + m.value_dim
    query = n * (m.nope_dim + m.rope_dim)
    tree = {
        "kv_a": Param((m.rank + m.rope_dim, d), (None, None), at + "kv_a_proj_with_mqa.weight"),
        "kv_norm": Param((m.rank,), (None,), at + "kv_a_layernorm.weight"),
        "o": Param((d, n * m.value_dim), (None, "heads"), at + "o_proj.weight"),
    }
    for name, width, part in (
        ("k_up", m.nope_dim, slice(0, m.nope_dim)),
        ("v_up", m.value_dim, slice(m.nope_dim, made)),
    ):
        shape, axes = (n, width, m.rank), ("heads", None, None)
        tree[name] = Param(shape, axes, at + "kv_b_proj.weight", cut=Cut(1, made, part))
    if m.query_rank is None:
        tree["q"] = Param((query, d), ("heads", None), at + "q_proj.weight")
    else:
        tree["q_a"] = Param((m.query_rank, d), (None, None), at + "q_a_proj.weight")
        tree["q_norm"] = Param((m.query_rank,), (None,), at + "q_a_layernorm.weight")
        tree["q"] = Param((query, m.query_rank), ("heads", None), at + "q_b_proj.weight")
    if m.bias:
        tree["kv_a_bias"] = Param((m.rank + m.rope_dim,), (None,), at + "kv_a_proj_with_mqa.bias")
        tree["o_bias"] = Param((d,), (None,), at + "o_proj.bias")
    if m.bias and m.query_rank is not None:
        tree["q_a_bias"] = Param((m.query_rank,), (None,), at + "q_a_proj.bias")
    return tree


def cache_shape(c: ModelConfig, page_size: int, packed: bool) -> tuple[int, int, int]:
    """One layer's page: `rank` and `rope_dim` values a token, of whatever heads; see `pallas_kernels.pages`."""
    m = _sizes(c)
    return latent_page(latent_bytes(_kept(m), m.rope_dim) if packed else _kept(m), page_size, m.rope_dim)


def cache_scales_shape(c: ModelConfig, page_size: int, packed: bool) -> tuple[int, int]:
    """Scales of one layer's page in low bits: the even tokens' and the odd ones'."""
    m = _sizes(c)
    return (2 * (_kept(m) // m.rope_dim + 1) if packed else 2, page_size // 2)


def page_size(pages: Any) -> int:
    """Tokens of one page."""
    return 2 * plain_and_scales(pages)[0].shape[-2]


def attention(
    c: ModelConfig, w: Tree, x: Array, pages: Any, batch: Batch, window: Any, turn: Array
) -> tuple[Array, Any]:
    """(its output [T, D], the pages with these tokens' latents)."""
    m = _sizes(c)
    q_TNH = _queries(c, m, w, x, turn)
    kv = linear(x, w["kv_a"], w.get("kv_a_bias"))
    latent = _padded(m, rms_norm(kv[:, : m.rank], w["kv_norm"], m.norm_eps))
    key_TR = _turned(m, kv[:, None, m.rank :], turn)[:, 0]
    rows = jnp.concatenate([latent, key_TR], axis=-1)
    if batch.spread:
        pages = page_write(pages, all_rows(rows), batch.places)
        out_TNV = _spread(c, w, q_TNH, as_kept(pages, rows), batch)
        return linear(out_TNV.reshape(len(x), -1), w["o"], w.get("o_bias")), pages
    pages = page_write(pages, rows, batch.places)
    seqs, context = batch.page_table.shape[0], batch.page_table.shape[1] * page_size(pages)
    attend = expanded if expands(c, len(x), seqs, context, x.dtype.itemsize) else absorbed
    out_TNV = attend(c, w, q_TNH, pages, batch)
    return linear(out_TNV.reshape(len(x), -1), w["o"], w.get("o_bias")), pages


def expands(c: ModelConfig, tokens: int, seqs: int, context: int, itemsize: int) -> bool:
    """Whether a step of this size makes keys and values again: its size and the chip decide, once for the program."""
    m = _sizes(c)
    return tokens != seqs and expanded_is_cheaper(
        rank=m.rank, rope=m.rope_dim, made=m.nope_dim + m.value_dim, heads=c.heads, tokens=tokens, seqs=seqs,
        context=context, chip=chip.ambient() if platform() == "tpu" else None, itemsize=itemsize,
    )  # fmt: skip


def absorbed(c: ModelConfig, w: Tree, q: Array, pages: Any, batch: Batch) -> Array:
    """[T, N, V] of queries [T, N, nope + rope], attended among the latents."""
    return _absorbed(c, w, q, pages, batch.page_table, batch.q_starts, batch.kv_lens)


def _absorbed(c: ModelConfig, w: Tree, q: Array, pages: Any, page_table, q_starts, kv_lens) -> Array:
    m = _sizes(c)
    out_TNC, _ = mla_attention(
        _among_latents(m, w, q),
        q[..., m.nope_dim :],
        pages,
        page_table,
        q_starts,
        kv_lens,
        scale=c.attention_scale,
    )
    return _values(m, w, out_TNC)


def _spread(c: ModelConfig, w: Tree, q: Array, rows: Array, batch: Batch) -> Array:
    """The same for some rows of a prompt whose others are on the other devices of the context axis."""
    m = _sizes(c)
    queries = jnp.concatenate([_among_latents(m, w, q), q[..., m.nope_dim :]], axis=-1)
    out_TNC = spread_attention(
        queries, rows[:, None], batch.positions, batch.q_starts[1], scale=c.attention_scale, latent=_kept(m)
    )
    return _values(m, w, out_TNC)


def _among_latents(m: Latent, w: Tree, q: Array) -> Array:
    """[T, N, kept] of queries: what they are when multiplied into the space of latents."""
    q_TNC = jnp.einsum("tnh,nhc->tnc", q[..., : m.nope_dim], w["k_up"], preferred_element_type=jnp.float32)
    return _padded(m, q_TNC.astype(q.dtype))


def _values(m: Latent, w: Tree, out_TNC: Array) -> Array:
    """[T, N, V] of attended latents."""
    latents = out_TNC[..., : m.rank]
    values = jnp.einsum("tnc,nvc->tnv", latents, w["v_up"], preferred_element_type=jnp.float32)
    return values.astype(out_TNC.dtype)


def expanded(c: ModelConfig, w: Tree, q: Array, pages: Any, batch: Batch) -> Array:
    """The same with keys and values made again, of its heads on each device."""
    tensor = divided(TENSOR)
    heads = P(None, tensor)
    return everywhere(
        partial(_expanded, c), tensor, (heads, P(), P(), P(), P(), P(tensor), P(tensor)), heads, {},
        q, pages, batch.page_table, batch.q_starts, batch.kv_lens, w["k_up"], w["v_up"],
    )  # fmt: skip


def _expanded(c: ModelConfig, q: Array, pages: Any, page_table, q_starts, kv_lens, k_up, v_up) -> Array:
    """Sequences of one row, which gain nothing by it, are absorbed."""
    m, (b, t) = _sizes(c), (len(kv_lens), len(q))
    out = expanded_attention(
        q, pages, page_table, q_starts, kv_lens, _padded(m, k_up), _padded(m, v_up),
        scale=c.attention_scale, shortest=1 if b == 1 else 2,
    )  # fmt: skip
    if b == 1:
        return out
    single = q_starts[1:] - q_starts[:-1] == 1
    at = jnp.where(single, q_starts[:-1], t)
    ones = _absorbed(
        c, {"k_up": k_up, "v_up": v_up}, jnp.take(q, at, axis=0, mode="clip"), pages, page_table,
        jnp.arange(b + 1, dtype=jnp.int32), jnp.where(single, kv_lens, 0),
    )  # fmt: skip
    return out.at[at].set(ones, mode="drop")


def _queries(c: ModelConfig, m: Latent, w: Tree, x: Array, turn: Array) -> Array:
    """[T, N, nope + rope], the rotary part turned."""
    if m.query_rank is not None:
        x = rms_norm(linear(x, w["q_a"], w.get("q_a_bias")), w["q_norm"], m.norm_eps)
    q_TNH = linear(x, w["q"]).reshape(len(x), c.heads, m.nope_dim + m.rope_dim)
    return jnp.concatenate([q_TNH[..., : m.nope_dim], _turned(m, q_TNH[..., m.nope_dim :], turn)], axis=-1)


def _turned(m: Latent, x: Array, turn: Array) -> Array:
    """Rotated; interleaved pairs come out side by side, in queries and keys alike."""
    if m.interleaved:
        x = jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2).reshape(x.shape)
    return rotate(x, turn)


def _kept(m: Latent) -> int:
    """Values kept of a latent: `rank` in every released model; a page holds multiples of two rotary keys."""
    return -(-m.rank // (2 * m.rope_dim)) * 2 * m.rope_dim


def _padded(m: Latent, x: Array) -> Array:
    """`x` [..., rank] with zeros up to what is kept."""
    if _kept(m) == m.rank:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, _kept(m) - m.rank)])


def _sizes(c: ModelConfig) -> Latent:
    assert c.latent is not None
    return c.latent
