"""The definition of paged_attention, fast enough in XLA to serve a small model on a CPU."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels import context_parts, guesses
from pallas_kernels.hadamard import turned
from pallas_kernels.int4_rows import PACKED, two_of
from pallas_kernels.pages import ScaledPages, plain_and_scales

KEYS_AT_ONCE = 128  # keys of one block: few that no row sees, and scores that stay in a core's cache
KEYS_OF_ONE_ROW = 64  # the same for sequences of one row: what is gathered stays in a core's own cache
ROWS_AT_ONCE = 128  # query rows of one block where sequences bring many
NOTHING = context_parts.NOTHING


class Form(NamedTuple):
    """What is the same for every block of one call."""

    pages: Array  # [pages, K, page, 2H]
    scales: Array | None  # [pages, 2, K, page]
    scale: float
    window: Array | None  # []: keys a query sees, itself included
    soft_cap: float | None


class Rows(NamedTuple):
    """Where the query rows of one block stand, each [B, R]."""

    position: Array
    tree: Array | None  # which of the sequence's new tokens the row sees
    first_new: Array  # position of the sequence's first new token


class Partial(NamedTuple):
    """Attention over the keys so far: divide `sums` by `weight` to get the output."""

    top: Array  # [B, K, R]: largest score
    weight: Array  # [B, K, R]: sum of exp(score - top)
    sums: Array  # [B, K, R, H]: sum of exp(score - top) * value


def paged_attention(
    q: Float[Array, "T N H"],
    pages: Float[Array, "*L pages K page 2*H"] | ScaledPages,
    page_table: Int[Array, "B P"],
    q_starts: Int[Array, "B+1"],
    kv_lens: Int[Array, "B"],
    *,
    scale: float,
    first: Int[Array, "B"] | None = None,
    layer: Int[Array, ""] | None = None,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    tree: Int[Array, "T"] | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Causal attention of every sequence's newest tokens over all its keys and values, and the scores' log-sum-exp.

    Rows q_starts[b]:q_starts[b+1] of `q` are the last tokens of sequence b, whose `kv_lens[b]` keys
    and values (these tokens' own included) lie in the pages that row b of `page_table` names, side by side on the
    last axis. Query head n uses kv head n // (N / K). `T == B` promises at most one row a
    sequence, sequence b's at row b. With `layer`, `pages` is the stack of all layers' pages, [L, pages, K, page, 2H].

    A query at position p sees positions p - window < s <= p (`window` None or <= 0: all up to p). `soft_cap` bends the
    scores to cap * tanh(score / cap) (Gemma 2). `sinks` adds one more score a head to the softmax, without
    a value (gpt-oss). `tree` is for guesses that branch: row t does not see the sequence's new token i < 32 unless it
    is itself, or comes before and bit i of tree[t] is set. A cache in low bits is `ScaledPages(values, scales)`: scales
    [pages, 2, K, page] float32 multiply the tokens' keys and values (`pallas_kernels.pages`); in 4 bits pages are
    [pages, K, page, H].

    `first[b]` is where sequence b's first row stands among these keys: kv_lens minus its rows, unless the keys are an
    early part of a longer context. Parts of a context, attended apart, are put together by `context_parts.combine`.
    Sinks are in the log-sum-exp: they belong to one of the parts. A row that sees nothing weighs nothing. Scores and
    sums are float32; rows of no sequence come back as anything finite.
    """
    values, scales = plain_and_scales(pages)
    if layer is not None:
        page_table, values = page_table + layer * values.shape[1], values.reshape(-1, *values.shape[2:])
        scales = None if scales is None else scales.reshape(-1, *scales.shape[2:])
    (t, n, h), (b, k) = q.shape, (kv_lens.shape[0], values.shape[1])
    q = turned(q) if values.dtype == PACKED else q
    full = None if window is None else jnp.where(jnp.asarray(window) > 0, window, np.int32(2**30))
    form = Form(values, scales, scale, full, soft_cap)
    sinks_KG = None if sinks is None else sinks.astype(jnp.float32).reshape(k, n // k)
    q_TKGH = q.reshape(t, k, n // k, h)
    if first is None:
        first = kv_lens - (1 if t == b else q_starts[1:] - q_starts[:-1])
    if t == b:
        found = _attend(form, q_TKGH[:, None], _one_row(first), page_table, kv_lens, sinks_KG)
        out, lse = (x[:, 0] for x in found)
    else:
        out, lse = _ragged(form, q_TKGH, tree, q_starts, first, page_table, kv_lens, sinks_KG)
    out = out.reshape(t, n, h)
    return (turned(out) if values.dtype == PACKED else out).astype(q.dtype), lse.reshape(t, n)


def _one_row(first: Array) -> Rows:
    return Rows(first[:, None], None, first[:, None])


def _ragged(form, q_TKGH, tree, q_starts, first_new, page_table, kv_lens, sinks):
    """Sequences of many rows block by block, one after the other; those of one row all together."""
    t, b = q_TKGH.shape[0], kv_lens.shape[0]
    new, rows = q_starts[1:] - q_starts[:-1], min(t, ROWS_AT_ONCE)
    padded = jnp.pad(q_TKGH, ((0, rows), (0, 0), (0, 0), (0, 0)))
    trees = None if tree is None else jnp.pad(tree, (0, rows))

    def block(s, i, outs):
        first, old = q_starts[s] + i * rows, first_new[s]
        positions = old + i * rows + jnp.arange(rows, dtype=jnp.int32)
        seen = None if trees is None else lax.dynamic_slice_in_dim(trees, first, rows)[None]
        got = _attend(
            form,
            lax.dynamic_slice_in_dim(padded, first, rows)[None],
            Rows(positions[None], seen, jnp.full_like(positions, old)[None]),
            lax.dynamic_slice_in_dim(page_table, s, 1),
            jnp.minimum(kv_lens[s], old + (i + 1) * rows)[None],
            sinks,
        )
        # Rows past the sequence's end spill into the next one, which comes later and writes its own.
        return tuple(
            lax.dynamic_update_slice_in_dim(o, g[0], first, 0) for o, g in zip(outs, got, strict=True)
        )

    def sequence(s, outs):
        blocks = jnp.where(new[s] > 1, (new[s] + rows - 1) // rows, 0)
        return lax.fori_loop(0, blocks, partial(block, s), outs)

    outs = jnp.zeros(padded.shape, jnp.float32), jnp.full(padded.shape[:-1], NOTHING, jnp.float32)
    outs = lax.fori_loop(0, b, sequence, outs)
    at = jnp.where(new == 1, q_starts[:-1], t)
    lens = jnp.where(new == 1, kv_lens, 0)
    ones = _attend(form, padded[at][:, None], _one_row(first_new), page_table, lens, sinks)
    return tuple(o.at[at].set(one[:, 0])[:t] for o, one in zip(outs, ones, strict=True))


def _attend(form, q_BRKGH, rows: Rows, page_table, kv_lens, sinks):
    """R rows of each sequence -> [B, R, K, G, H] and log-sum-exps [B, R, K, G], float32."""
    b, r, k, g, h = q_BRKGH.shape
    page = form.pages.shape[2]
    first = rows.position[:, 0]
    wanted = KEYS_OF_ONE_ROW if r == 1 else KEYS_AT_ONCE
    pages_at_once = min(page_table.shape[1], max(1, wanted // page))
    q_BKRH = (q_BRKGH.transpose(0, 2, 3, 1, 4)).reshape(b, k, g * r, h)
    rows = jax.tree.map(lambda x: jnp.tile(x, (1, g)), rows)
    step = partial(_block, form, q_BKRH, rows, kv_lens, page_table, pages_at_once)
    state = Partial(
        jnp.full((b, k, g * r), NOTHING, jnp.float32),
        jnp.zeros((b, k, g * r), jnp.float32),
        jnp.zeros((b, k, g * r, h), jnp.float32),
    )
    if pages_at_once == page_table.shape[1]:
        state = step(0, state)
    else:
        keys = pages_at_once * page
        start = 0 if form.window is None else jnp.maximum(jnp.min(first) - form.window + 1, 0) // keys
        state = lax.fori_loop(start, (jnp.max(kv_lens) + keys - 1) // keys, step, state)
    top, weight, sums = state
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[None, :, :, None], (b, k, g, r)).reshape(b, k, g * r)
        peak = jnp.maximum(top, sink)
        shrink = jnp.exp(top - peak)
        weight, sums, top = weight * shrink + jnp.exp(sink - peak), sums * shrink[..., None], peak
    out = sums / jnp.maximum(weight, 1e-30)[..., None]
    lse = context_parts.log_sum_exp(top, weight).reshape(b, k, g, r)
    return out.reshape(b, k, g, r, h).transpose(0, 3, 1, 2, 4), lse.transpose(0, 3, 1, 2)


def _block(form, q_BKRH, rows: Rows, kv_lens, page_table, pages_at_once, i, state):
    """`state` after one more block of keys: pages i * pages_at_once onwards of every sequence."""
    (b, k, _, h), page = q_BKRH.shape, form.pages.shape[2]
    count = page_table.shape[1]
    # The last block may reach past the table: it starts earlier then, and what was seen before is masked.
    begin = jnp.minimum(i * pages_at_once, count - pages_at_once)
    keys = pages_at_once * page
    ids = lax.dynamic_slice_in_dim(page_table, begin, pages_at_once, axis=1)
    of_head = ids[:, None, :] * k + jnp.arange(k, dtype=jnp.int32)[None, :, None]
    flat = form.pages.reshape(-1, *form.pages.shape[2:])
    if flat.dtype == PACKED:
        k_BKSH, v_BKSH = two_of(flat[of_head])
    else:  # two gathers: cutting one in halves afterwards is a copy more
        k_BKSH, v_BKSH = flat[of_head, :, :h], flat[of_head, :, h:]
    k_BKSH, v_BKSH = (x.reshape(b, k, keys, h).astype(q_BKRH.dtype) for x in (k_BKSH, v_BKSH))
    at = begin * page + jnp.arange(keys, dtype=jnp.int32)
    written = (at[None] < kv_lens[:, None]) & (at >= i * keys)[None, :]
    # A page may still hold what another request left there, NaN included: 0 * NaN must not reach the sum.
    v_BKSH = jnp.where(written[:, None, :, None], v_BKSH, jnp.zeros((), v_BKSH.dtype))
    scores = jnp.einsum("bkrh,bksh->bkrs", q_BKRH, k_BKSH, preferred_element_type=jnp.float32) * form.scale
    v_scale = None
    if form.scales is not None:
        scales = jnp.where(
            written[:, None, None], form.scales[ids].transpose(0, 2, 3, 1, 4).reshape(b, 2, k, keys), 0.0
        )
        scores, v_scale = scores * scales[:, 0, :, None], scales[:, 1, :, None]
    if form.soft_cap is not None:
        scores = form.soft_cap * jnp.tanh(scores / form.soft_cap)
    seen = written[:, None, :] & _seen(rows, at, form.window)
    scores = jnp.where(seen[:, None], scores, NOTHING)
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
    shrink = jnp.exp(state.top - top)
    weights = jnp.where(seen[:, None], jnp.exp(scores - top[..., None]), 0.0)
    weight = state.weight * shrink + jnp.sum(weights, -1)
    if v_scale is not None:
        weights = weights * v_scale
    sums = jnp.einsum(
        "bkrs,bksh->bkrh", weights.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32
    )
    return Partial(top, weight, state.sums * shrink[..., None] + sums)


def _seen(rows: Rows, at, window):
    """[B, R, S]: whether the row may see the key at each position `at` [S]."""
    position, at = rows.position[..., None], at[None, None]
    seen = at <= position
    if window is not None:
        seen &= at > position - window
    if rows.tree is not None:
        seen &= guesses.on_branch(rows.tree[..., None], at, position, rows.first_new[..., None])
    return seen


def cost(
    q: Array,
    pages: Array | ScaledPages,
    page_table: Array,
    q_starts: Array,
    kv_lens: Array,
    *,
    first: Array | None = None,
    window: int | None = None,
    **_,
) -> tuple[int, int]:
    """(floating-point operations, bytes to and from HBM) of one call with these lengths.

    Every key and value that some row sees is read once; scores that no row sees are not computed.
    """
    values, scales = plain_and_scales(pages)
    (_, n, h), (k, _, w) = q.shape, values.shape[-3:]
    token = k * (w * values.dtype.itemsize + (0 if scales is None else 8))
    new, lens = np.diff(np.asarray(q_starts)), np.asarray(kv_lens)
    start = lens - new if first is None else np.asarray(first)
    position = np.concatenate([np.arange(f, f + r) for f, r in zip(start, new, strict=True)])
    most = window if window is not None and window > 0 else 1 << 30
    pairs = _overlap(position - most + 1, position + 1, np.repeat(lens, new))
    span = _overlap(start - most + 1, start + new, np.where(new > 0, lens, 0))
    rows = int(np.sum(new)) * n * (2 * h * q.dtype.itemsize + 4)
    return 4 * pairs * n * h, span * token + rows


def _overlap(low: np.ndarray, high: np.ndarray, length: np.ndarray) -> int:
    """How many of 0 <= x < length are in low <= x < high, all together."""
    return int(np.sum(np.maximum(np.minimum(high, length) - np.maximum(low, 0), 0)))
