"""paged_attention's reference equals attention written out for one row at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.hadamard import turned
from pallas_kernels.int4_rows import PACKED
from pallas_kernels.page_write import page_write
from pallas_kernels.paged_attention import paged_attention, reference
from pallas_kernels.pages import ScaledPages, as_kept


def by_hand(q, keys, values, scale, window, soft_cap, sinks):
    """(results, log-sum-exps) of the last rows of one sequence, in float64: q [T, N, H], keys [S, K, H]."""
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:2])
    first = len(keys) - len(q)
    for t, row in enumerate(q):
        for n, vector in enumerate(row):
            k = n // (q.shape[1] // keys.shape[1])
            low = max(0, first + t - window + 1) if window else 0
            scores = keys[low : first + t + 1, k] @ vector * scale
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores)
            total = weights.sum() + (np.exp(sinks[n]) if sinks is not None else 0)
            out[t, n] = weights @ values[low : first + t + 1, k] / total
            lse[t, n] = np.log(total)
    return out, lse


def laid_out(rng, new, old, page, heads=(4, 2, 8), width=None, poison=True):
    """Random sequences in a paged cache whose unused places hold NaN."""
    n, k, h = heads
    t = sum(new)
    lens = [a + b for a, b in zip(new, old, strict=True)]
    counts = [-(-length // page) for length in lens]
    width = width or max(counts)
    order = rng.permutation(np.arange(1, 1 + sum(counts)))
    table = np.zeros((len(new), width), np.int32)
    pages = np.full((1 + sum(counts), k, page, 2 * h), np.nan if poison else 0, np.float32)
    pages[0] = 0
    sequences, at = [], 0
    for b, length in enumerate(lens):
        table[b, : counts[b]] = order[at : at + counts[b]]
        at += counts[b]
        kv = rng.normal(size=(length, k, 2 * h)).astype(np.float32)
        for s in range(length):
            pages[table[b, s // page], :, s % page] = kv[s]
        sequences.append((kv[..., :h], kv[..., h:]))
    q = rng.normal(size=(t, n, h)).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return q, pages, table, starts, np.array(lens, np.int32), sequences


ROOM = (32, 5, 13)  # rows, sequences and pages that every mix is padded to, so that few programs are compiled


@pytest.mark.parametrize("blocks, soft_cap, sink", [((8, 2), None, False), ((512, 128), 3.0, True)])
def test_any_mix_of_rows_equals_attention_by_hand(monkeypatch, blocks, soft_cap, sink):
    keys, rows = blocks
    monkeypatch.setattr(reference, "KEYS_AT_ONCE", keys)
    monkeypatch.setattr(reference, "KEYS_OF_ONE_ROW", keys)
    monkeypatch.setattr(reference, "ROWS_AT_ONCE", rows)
    attend = jax.jit(partial(reference.paged_attention, scale=0.3, soft_cap=soft_cap))

    @settings(max_examples=40)
    @given(
        new=st.lists(st.integers(1, 8), min_size=1, max_size=4),
        old=st.lists(st.integers(0, 40), min_size=4, max_size=4),
        window=st.sampled_from([0, 1, 5, 16]),
        seed=st.integers(0, 2**16),
    )
    def any_mix(new, old, window, seed):
        rng = np.random.default_rng(seed)
        sinks = rng.normal(size=4).astype(np.float32) if sink else None
        q, pages, table, starts, lens, sequences = laid_out(rng, new, old[: len(new)], page=4, width=ROOM[2])
        padded = (
            _grown(q, ROOM[0]),
            _grown(pages, ROOM[1] * ROOM[2]),
            _grown(table, ROOM[1]),
            np.append(starts, [starts[-1]] * (ROOM[1] + 1 - len(starts))).astype(np.int32),
            _grown(lens, ROOM[1]),
        )
        got, got_lse = (np.asarray(x) for x in attend(*padded, window=np.int32(window), sinks=sinks))
        assert np.isfinite(got).all() and np.isfinite(got_lse).all()
        for b, (k, v) in enumerate(sequences):
            rows = slice(starts[b], starts[b + 1])
            want, lse = by_hand(q[rows], k, v, 0.3, window, soft_cap, sinks)
            np.testing.assert_allclose(got[rows], want, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(got_lse[rows], lse, rtol=2e-5, atol=2e-5)

    any_mix()


@pytest.mark.parametrize("new, old", [([1, 1, 1], [0, 9, 30]), ([7], [20])])
@pytest.mark.parametrize("window", [None, 6])
def test_one_row_each_and_one_sequence_equal_attention_by_hand(new, old, window):
    q, pages, table, starts, lens, sequences = laid_out(np.random.default_rng(1), new, old, page=4)
    got, _ = paged_attention(*map(jnp.asarray, (q, pages, table, starts, lens)), scale=0.3, window=window)
    for b, (k, v) in enumerate(sequences):
        want, _ = by_hand(q[starts[b] : starts[b + 1]], k, v, 0.3, window, None, None)
        np.testing.assert_allclose(got[starts[b] : starts[b + 1]], want, rtol=2e-5, atol=2e-5)


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])


def test_padding_rows_and_empty_sequences_change_nothing():
    rng = np.random.default_rng(0)
    q, pages, table, starts, lens, _ = laid_out(rng, [3, 1], [5, 7], page=4)
    plain, _ = paged_attention(*map(jnp.asarray, (q, pages, table, starts, lens)), scale=1.0)
    q = np.concatenate([q, np.ones((4, 4, 8), np.float32)])
    table = np.pad(table, ((0, 2), (0, 3)))
    starts, lens = np.append(starts, [4, 4]).astype(np.int32), np.append(lens, [0, 0]).astype(np.int32)
    padded, _ = paged_attention(*map(jnp.asarray, (q, pages, table, starts, lens)), scale=1.0)
    np.testing.assert_allclose(padded[:4], plain, rtol=1e-5, atol=1e-6)
    assert bool(jnp.isfinite(padded).all())


def test_page_write_puts_each_row_in_its_place_without_a_copy():
    pages = jnp.zeros((3, 2, 4, 6))
    rows = jnp.arange(2 * 2 * 6, dtype=jnp.float32).reshape(2, 2, 6)
    write = jax.jit(page_write, donate_argnums=0)
    compiled = write.lower(pages, rows, jnp.array([5, 11])).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages.nbytes
    got = write(pages, rows, jnp.array([5, 11]))
    np.testing.assert_array_equal(got[1, :, 1], rows[0])
    np.testing.assert_array_equal(got[2, :, 3], rows[1])
    assert float(jnp.abs(got).sum()) == float(rows.sum())


def test_each_guess_of_a_tree_sees_its_own_branch():
    parents = [None, 0, 0, 1, 2, 2]
    q, pages, table, starts, lens, sequences = laid_out(
        np.random.default_rng(0), [6, 1, 3], [9, 5, 20], page=4
    )
    branches = [[t] for t in range(6)]
    for t, parent in enumerate(parents):
        if parent is not None:
            branches[t] = branches[parent] + [t]
    bits = [sum(1 << i for i in branch[:-1]) for branch in branches]
    tree = jnp.array([*bits, 0, 0, 1, 3], jnp.int32)
    got, _ = paged_attention(*map(jnp.asarray, (q, pages, table, starts, lens)), scale=0.3, tree=tree)
    (k, v), (chain_k, chain_v) = sequences[0], sequences[2]
    for t, branch in enumerate(branches):
        seen = np.array([*range(9), *(9 + i for i in branch)])
        want, _ = by_hand(q[t : t + 1], k[seen], v[seen], 0.3, None, None, None)
        np.testing.assert_allclose(got[t : t + 1], want, rtol=2e-5, atol=2e-5)
    chain, _ = by_hand(q[7:], chain_k, chain_v, 0.3, None, None, None)
    np.testing.assert_allclose(got[7:], chain, rtol=2e-5, atol=2e-5)


def test_a_cache_in_four_bits_spreads_what_is_large_over_its_head():
    """One value of a head far larger than the others costs these no more than a step of all; twice `turned` is none."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(10, 2, 64)).astype(np.float32)
    rows[:, :, 5] *= 20  # of the keys
    np.testing.assert_allclose(turned(turned(jnp.asarray(rows))), rows, rtol=1e-5, atol=1e-5)
    pages = ScaledPages(jnp.zeros((5, 2, 4, 32), PACKED), jnp.zeros((5, 2, 2, 4)))
    stored = np.asarray(as_kept(pages, jnp.asarray(rows)))
    wrong = np.abs(stored - rows)
    step = np.abs(rows[:, :, :32]).max() / 7.5  # of codes that would not be turned
    assert wrong[:, :, :32].mean() < step / 6 and wrong[:, :, 32:].mean() < 0.2
    pages = page_write(pages, jnp.asarray(rows), jnp.arange(4, 14, dtype=jnp.int32))
    assert isinstance(pages, ScaledPages) and pages.values.nbytes == rows.size / 2 * 2
    q = rng.normal(size=(3, 4, 32)).astype(np.float32)
    table, starts, lens = jnp.array([[1, 2, 3]]), jnp.array([0, 3]), jnp.array([10])
    got, _ = paged_attention(jnp.asarray(q), pages, table, starts, lens, scale=0.1)
    want, _ = by_hand(q, stored[..., :32], stored[..., 32:], 0.1, None, None, None)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache, error", [("float8_e4m3fn", 2**-4), ("int8", 2**-6)])
def test_a_cache_in_eight_bits_keeps_keys_and_values_to_their_own_scales(cache, error):
    """Rows far apart in size are written in 8 bits, and attended as what was stored."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(10, 2, 16)).astype(np.float32) * np.repeat([1.0, 1e-3], 8).astype(np.float32)
    places = jnp.arange(4, 14, dtype=jnp.int32)
    empty = ScaledPages(jnp.zeros((5, 2, 4, 16), cache), jnp.zeros((5, 2, 2, 4)))
    pages = page_write(empty, jnp.asarray(rows), places)
    assert isinstance(pages, ScaledPages)
    scales = np.repeat(np.moveaxis(np.asarray(pages.scales), 1, -1), 8, axis=-1)
    stored = (np.asarray(pages.values, np.float32) * scales).swapaxes(1, 2).reshape(20, 2, 16)[4:14]
    largest = np.abs(rows.reshape(10, 2, 2, 8)).max(-1, keepdims=True)
    wrong = np.abs(stored - rows).reshape(10, 2, 2, 8) / largest
    assert wrong.max() < error
    q = rng.normal(size=(3, 4, 8)).astype(np.float32)
    table, starts, lens = jnp.array([[1, 2, 3]]), jnp.array([0, 3]), jnp.array([10])
    got, _ = paged_attention(jnp.asarray(q), pages, table, starts, lens, scale=0.3)
    want, _ = by_hand(q, stored[..., :8], stored[..., 8:], 0.3, None, None, None)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-8)
