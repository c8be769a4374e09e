"""The definition of mla_attention, in plain JAX."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels import context_parts, guesses
from pallas_kernels.int4_rows import PACKED, latents_of
from pallas_kernels.pages import ScaledPages, of_tokens, plain_and_scales, unpacked

KEYS_AT_ONCE = 512  # keys of one block: a cache of no more needs no loop
ROWS_AT_ONCE = 32  # tokens of one block when several sequences bring many
NOTHING = context_parts.NOTHING


class Form(NamedTuple):
    """What is the same for every block of one call."""

    pages: Array  # [pages, 2 * C/128 + 1, page/2, 128]
    scales: Array | None  # [pages, page, G]: G is 1, except in 4 bits
    scale: float
    latent: int  # values of a latent


class Rows(NamedTuple):
    """Where the query rows of one block stand, each [B, R]."""

    position: Array
    tree: Array | None  # which of the sequence's new tokens the row sees
    first_new: Array  # position of the sequence's first new token


class Partial(NamedTuple):
    """Attention over the keys so far: divide `sums` by `weight` to get the output."""

    top: Array  # [B, R]: largest score
    weight: Array  # [B, R]: sum of exp(score - top)
    sums: Array  # [B, R, C]: sum of exp(score - top) * latent


def mla_attention(
    q_latent: Float[Array, "T N C"],
    q_rope: Float[Array, "T N R"],
    pages: Float[Array, "*L pages slabs half lanes"] | ScaledPages,
    page_table: Int[Array, "B P"],
    q_starts: Int[Array, "B+1"],
    kv_lens: Int[Array, "B"],
    *,
    scale: float,
    first: Int[Array, "B"] | None = None,
    layer: Int[Array, ""] | None = None,
    tree: Int[Array, "T"] | None = None,
) -> tuple[Float[Array, "T N C"], Float[Array, "T N"]]:
    """Causal attention of every sequence's newest tokens over all its latents, and the log-sum-exp of the scores.

    Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with the up-projections absorbed: every head has the
    same key, [latent | rope], and the latent is the value too. score = scale * (q_latent . latent + q_rope . rope).
    Rows q_starts[b]:q_starts[b+1] are the last tokens of sequence b, whose `kv_lens[b]` latents lie in the pages that
    row b of `page_table` names. `T == B` promises at most one row a sequence, sequence b's at row b.

    A page of `page_size` tokens is [2 * C/128 + 1, page_size/2, 128]: row i of slabs 0 .. C/128-1 is the latent of
    token 2i, of the next C/128 slabs that of token 2i + 1, and of the last slab both rope keys, 64 values each.
    `page_write` puts rows [T, C + 64], the latent and then the (rotated) rope key, at places[t] = page * page_size +
    offset. A cache in low bits is `ScaledPages(values, scales)`: scales [pages, 2, page_size/2] float32 multiply the
    tokens, the even and the odd ones'. With `layer`, everything is the stack of all layers', [L, pages, ...].

    `first[b]` is where sequence b's first row stands among these keys: kv_lens minus its rows, unless
    the keys are an early part of a longer context. `tree` is for guesses that branch: row t does not see the sequence's
    new token i < 32 unless it is itself, or comes before and bit i of tree[t] is set. Scores and sums are float32.
    Parts of a context, attended apart, are put together by `context_parts.combine`. Rows of no sequence come
    back as anything finite.
    """
    values, scales = plain_and_scales(pages)
    if layer is not None:
        page_table, values = page_table + layer * values.shape[1], values.reshape(-1, *values.shape[2:])
        scales = None if scales is None else scales.reshape(-1, *scales.shape[2:])
    t, b = q_latent.shape[0], kv_lens.shape[0]
    form = Form(values, None if scales is None else of_tokens(scales), scale, q_latent.shape[-1])
    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    new = q_starts[1:] - q_starts[:-1]
    first = kv_lens - new if first is None else first
    if t == b:
        rows = _one_row(jnp.where(new > 0, first, -1))
        out, lse = (x[:, 0] for x in _attend(form, q[:, None], rows, page_table, kv_lens))
    elif b == 1:
        rows = _rows(first, first, t, None if tree is None else tree[None])
        out, lse = (x[0] for x in _attend(form, q[None], rows, page_table, kv_lens))
    else:
        out, lse = _ragged(form, q, tree, q_starts, first, page_table, kv_lens)
    return out.astype(q.dtype), lse


def _rows(begin: Array, first_new: Array, count: int, tree: Array | None) -> Rows:
    """`count` rows of each sequence from position `begin` [B] on."""
    positions = begin[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    return Rows(positions, tree, jnp.broadcast_to(first_new[:, None], positions.shape))


def _one_row(first: Array) -> Rows:
    return _rows(first, first, 1, None)


def _ragged(form, q, tree, q_starts, first, page_table, kv_lens):
    """Sequences of many rows block by block, one after the other; those of one row all together."""
    t, b = q.shape[0], kv_lens.shape[0]
    new, rows = q_starts[1:] - q_starts[:-1], min(t, ROWS_AT_ONCE)
    padded = jnp.pad(q, ((0, rows), (0, 0), (0, 0)))
    trees = None if tree is None else jnp.pad(tree, (0, rows))

    def block(s, i, outs):
        begin = q_starts[s] + i * rows
        bits = None if trees is None else lax.dynamic_slice_in_dim(trees, begin, rows)[None]
        got = _attend(
            form,
            lax.dynamic_slice_in_dim(padded, begin, rows)[None],
            _rows((first[s] + i * rows)[None], first[s][None], rows, bits),
            lax.dynamic_slice_in_dim(page_table, s, 1),
            jnp.minimum(kv_lens[s], first[s] + (i + 1) * rows)[None],
        )
        # Rows past the sequence's end spill into the next one, which comes later and writes its own.
        return tuple(
            lax.dynamic_update_slice_in_dim(o, g[0], begin, 0) for o, g in zip(outs, got, strict=True)
        )

    def sequence(s, outs):
        blocks = jnp.where(new[s] > 1, (new[s] + rows - 1) // rows, 0)
        return lax.fori_loop(0, blocks, partial(block, s), outs)

    n, c = q.shape[1], form.latent
    outs = jnp.zeros((t + rows, n, c), jnp.float32), jnp.full((t + rows, n), NOTHING, jnp.float32)
    outs = lax.fori_loop(0, b, sequence, outs)
    at = jnp.where(new == 1, q_starts[:-1], t)
    lens = jnp.where(new == 1, kv_lens, 0)
    ones = _attend(form, padded[at][:, None], _one_row(first), page_table, lens)
    return tuple(o.at[at].set(one[:, 0])[:t] for o, one in zip(outs, ones, strict=True))


def _attend(form, q_BRND, rows: Rows, page_table, kv_lens):
    """R rows of each sequence -> [B, R, N, C], [B, R, N], float32."""
    (b, r, n, _), c = q_BRND.shape, form.latent
    page = 2 * form.pages.shape[-2]
    at_once = min(page_table.shape[1], max(1, KEYS_AT_ONCE // page))
    rows = jax.tree.map(lambda x: jnp.repeat(x, n, axis=1), rows)
    q_BXD = q_BRND.reshape(b, r * n, -1)
    step = partial(_block, form, q_BXD, rows, kv_lens, page_table, at_once)
    state = Partial(
        jnp.full((b, r * n), NOTHING, jnp.float32),
        jnp.zeros((b, r * n), jnp.float32),
        jnp.zeros((b, r * n, c), jnp.float32),
    )
    if at_once == page_table.shape[1]:
        state = step(0, state)
    else:
        keys = at_once * page
        state = lax.fori_loop(0, (jnp.max(kv_lens) + keys - 1) // keys, step, state)
    top, weight, sums = state
    out = sums / jnp.maximum(weight, 1e-30)[..., None]
    return out.reshape(b, r, n, c), context_parts.log_sum_exp(top, weight).reshape(b, r, n)


def _block(form, q_BXD, rows: Rows, kv_lens, page_table, at_once, i, state):
    """`state` after one more block of keys: pages i * at_once onwards of every sequence."""
    b, count = page_table.shape
    page = 2 * form.pages.shape[-2]
    # The last block may reach past the table: it starts earlier then, and what was seen before is masked.
    begin = jnp.minimum(i * at_once, count - at_once)
    keys = at_once * page
    ids = lax.dynamic_slice_in_dim(page_table, begin, at_once, axis=1)
    at = begin * page + jnp.arange(keys, dtype=jnp.int32)
    written = (at[None] < kv_lens[:, None]) & (at >= i * keys)[None]
    latent, rope = unpacked(form.pages[ids])
    if form.pages.dtype == PACKED:
        latent, rope = latents_of(latent, rope, form.scales[ids], form.latent)
    latent, rope = (x.reshape(b, keys, -1).astype(q_BXD.dtype) for x in (latent, rope))
    # A page may still hold what another request left there, NaN included: 0 * NaN must not reach the sum.
    latent = jnp.where(written[..., None], latent, jnp.zeros((), latent.dtype))
    keys_BSD = jnp.concatenate([latent, rope], axis=-1)
    scores = jnp.einsum("bxd,bsd->bxs", q_BXD, keys_BSD, preferred_element_type=jnp.float32) * form.scale
    token_scale = None
    if form.scales is not None and form.pages.dtype != PACKED:
        token_scale = jnp.where(written, form.scales[ids].reshape(b, keys), 0.0)[:, None]
        scores = scores * token_scale
    position, key = rows.position[..., None], at[None, None]
    seen = written[:, None] & (key <= position)
    if rows.tree is not None:
        seen &= guesses.on_branch(rows.tree[..., None], key, position, rows.first_new[..., None])
    scores = jnp.where(seen, scores, NOTHING)
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
    shrink = jnp.exp(state.top - top)
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    weight = state.weight * shrink + jnp.sum(weights, -1)
    if token_scale is not None:
        weights = weights * token_scale
    sums = jnp.einsum(
        "bxs,bsc->bxc", weights.astype(latent.dtype), latent, preferred_element_type=jnp.float32
    )
    return Partial(top, weight, state.sums * shrink[..., None] + sums)


def cost(
    q_latent: Array, q_rope: Array, pages: Array | ScaledPages, page_table: Array, q_starts: Array, kv_lens: Array, *,
    first: Array | None = None, **_,
) -> tuple[int, int]:  # fmt: skip
    """(floating-point operations, bytes to and from HBM) of one call with these lengths.

    Every latent that some row sees is read once; scores that no row sees are not computed.
    """
    (_, n, c), rope = q_latent.shape, q_rope.shape[-1]
    values, scales = plain_and_scales(pages)
    new, lens = np.diff(np.asarray(q_starts)), np.asarray(kv_lens)
    start = lens - new if first is None else np.asarray(first)
    seen = [np.minimum(np.arange(f + 1, f + r + 1), s) for f, r, s in zip(start, new, lens, strict=True)]
    pairs = int(np.sum(np.concatenate(seen)))
    span = int(np.sum(np.where(new > 0, np.minimum(lens, start + new), 0)))
    slabs, _, lanes = values.shape[-3:]
    token = slabs * lanes // 2 * values.dtype.itemsize + (0 if scales is None else 2 * scales.shape[-2])
    rows = int(np.sum(new)) * n * ((2 * c + rope) * q_latent.dtype.itemsize + 4)
    return 2 * pairs * n * (2 * c + rope), span * token + rows
