"""mla_attention's definition equals attention by hand, and its TPU kernel equals the definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chip import CHIPS
from pallas_kernels.int4_rows import PACKED, latent_bytes
from pallas_kernels.mla_attention import cases, mla_attention, reference, tpu
from pallas_kernels.mla_attention.cases import Case
from pallas_kernels.op import Unfit
from pallas_kernels.page_write import page_write
from pallas_kernels.pages import (
    ScaledPages,
    as_kept,
    latent_page,
    packed,
    plain_and_scales,
    quantise,
    unpacked,
)

FP8 = cases.FP8


def by_hand(q, keys, latent, first, scale):
    """(results, log-sum-exps) of one sequence's last rows, in float64: q [T, N, D], keys [S, D]."""
    out, lse = np.zeros((*q.shape[:2], latent)), np.zeros(q.shape[:2])
    for t, n in np.ndindex(*lse.shape):
        seen = keys[: first + t + 1].astype(np.float64)
        scores = seen @ q[t, n] * scale
        lse[t, n] = np.log(np.sum(np.exp(scores)))
        out[t, n] = np.exp(scores - lse[t, n]) @ seen[:, :latent]
    return out, lse


def stored(case: Case, args, options) -> list[np.ndarray]:
    """The keys of each sequence as float32, [S, C + 64]."""
    (pages, scales), table = plain_and_scales(args[2]), np.asarray(args[3])
    if case.layers:
        pages, scales = (None if x is None else x[options["layer"]] for x in (pages, scales))
    tokens = np.concatenate([np.asarray(x, np.float32) for x in unpacked(pages)], axis=-1)
    if scales is not None:
        tokens = tokens * np.swapaxes(np.asarray(scales), -2, -1).reshape(len(tokens), -1, 1)
    return [
        tokens[row].reshape(-1, tokens.shape[-1])[:length]
        for row, length in zip(table, case.lens, strict=True)
    ]


def check_by_hand(case: Case, got, args, options) -> None:
    starts, q = np.asarray(args[4]), np.concatenate([np.asarray(x, np.float32) for x in args[:2]], axis=-1)
    out, lse = (np.asarray(x) for x in got)
    for b, keys in enumerate(stored(case, args, options)):
        rows = slice(starts[b], starts[b + 1])
        if case.new[b]:
            first = case.lens[b] - case.new[b]
            want, want_lse = by_hand(q[rows], keys, case.latent, first, options["scale"])
            np.testing.assert_allclose(out[rows], want, rtol=3e-5, atol=3e-5)
            np.testing.assert_allclose(lse[rows], want_lse, rtol=3e-5, atol=3e-5)
    assert np.isfinite(out).all() and np.isfinite(lse).all()


ROOM = (32, 5, 12)  # rows, sequences and pages that every mix is padded to, so that few programs are compiled


@pytest.mark.parametrize("keys, rows, cache, layers", [(8, 2, None, 2), (512, 32, FP8, None)])
def test_any_mix_of_rows_equals_attention_by_hand(monkeypatch, keys, rows, cache, layers):
    monkeypatch.setattr(reference, "KEYS_AT_ONCE", keys)
    monkeypatch.setattr(reference, "ROWS_AT_ONCE", rows)
    scale = cases.TINY["decode"].shapes(jnp.float32)[1]["scale"]
    attend = jax.jit(partial(reference.mla_attention, scale=scale))

    @settings(max_examples=15)
    @given(
        sequences=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 40)), min_size=1, max_size=4),
        seed=st.integers(0, 2**16),
    )
    def any_mix(sequences, seed):
        new = tuple(count for count, _ in sequences)
        lens = tuple(count + old if count else 0 for count, old in sequences)
        case = Case(2, new, lens, page=4, latent=128, layers=layers, cache=cache)
        args, options = case.call(jnp.float32, seed)
        got = attend(*padded(args, stacked=layers is not None), layer=options.get("layer"))
        check_by_hand(case, got, args, options)

    any_mix()


def padded(args, stacked: bool):
    q_latent, q_rope, pages, table, starts, lens = (jax.tree.map(np.asarray, x) for x in args)
    rows, sequences, count = ROOM
    pages = jax.tree.map(lambda x: _grown(x, 1 + (sequences - 1) * count, axis=int(stacked)), pages)
    starts = np.append(starts, [starts[-1]] * (sequences + 1 - len(starts))).astype(np.int32)
    table = _grown(_grown(table, count, axis=1), sequences)
    return _grown(q_latent, rows), _grown(q_rope, rows), pages, table, starts, _grown(lens, sequences)


def _grown(array: np.ndarray, size: int, axis: int = 0) -> np.ndarray:
    shape = list(array.shape)
    shape[axis] = size - shape[axis]
    return np.concatenate([array, np.zeros(shape, array.dtype)], axis=axis)


def test_one_row_a_sequence_may_leave_sequences_out():
    case = Case(2, (1, 0, 1, 1), (9, 0, 1, 30), page=4, latent=128)
    plain, options = case.call(jnp.float32)
    rows = np.array([0, 0, 1, 2])
    got = mla_attention(plain[0][rows], plain[1][rows], *plain[2:], **options)
    check_by_hand(case, tuple(x[np.array([0, 2, 3])] for x in got), plain, options)


@settings(max_examples=15)
@given(
    parents=st.lists(st.integers(-1, 6), min_size=1, max_size=7),
    old=st.integers(0, 30),
    seed=st.integers(0, 2**16),
)
def test_each_guess_of_a_tree_is_what_its_path_alone_gives(parents, old, seed):
    """Token i continues token parents[i], or the context; other sequences, without a tree, are in the same step."""
    paths = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if 0 <= parent < i else []), i])
    count = len(parents)
    case = Case(2, (1, count, 2), (9, old + count, 12), page=4, latent=128)
    args, options = case.call(jnp.float32, seed)
    bits = [0, *(sum(1 << i for i in path[:-1]) for path in paths), 0, 1]
    tree = _grown(np.array(bits, np.int32), ROOM[0])
    got = _guessing(*padded(args, stacked=False), tree=tree, scale=options["scale"])
    out, lse = (np.asarray(x) for x in got)
    q, keys = np.concatenate(args[:2], axis=-1), stored(case, args, options)
    for t, path in enumerate(paths, start=1):
        seen = keys[1][[*range(old), *(old + i for i in path)]]
        want, want_lse = by_hand(q[t : t + 1], seen, 128, len(seen) - 1, options["scale"])
        np.testing.assert_allclose(out[t : t + 1], want, rtol=3e-5, atol=3e-5)
        np.testing.assert_allclose(lse[t : t + 1], want_lse, rtol=3e-5, atol=3e-5)
    chain, _ = by_hand(q[count + 1 :], keys[2], 128, 10, options["scale"])
    np.testing.assert_allclose(out[count + 1 : count + 3], chain, rtol=3e-5, atol=3e-5)


_guessing = jax.jit(mla_attention.reference, static_argnames="scale")


def test_pages_waste_no_lane():
    latent, rope = np.arange(3 * 8 * 256.0).reshape(3, 8, 256), np.arange(3 * 8 * 64.0).reshape(3, 8, 64)
    pages = packed(jnp.asarray(latent), jnp.asarray(rope))
    assert pages.shape[1:] == latent_page(256, 8) and pages[0].size == 8 * (256 + 64)
    for got, want in zip(unpacked(pages), (latent, rope), strict=True):
        np.testing.assert_array_equal(got, want)


def test_eight_bits_keep_each_token_to_its_own_scale_and_have_no_negative_zero():
    values = np.random.default_rng(0).normal(size=(5, 576)) * 10.0 ** np.arange(-2, 3)[:, None]
    values[:, :2], values[4] = (-1e-9, 0), 0
    small, scales = quantise(jnp.asarray(values, jnp.float32), FP8)
    got = np.asarray(small, np.float32) * np.asarray(scales)[:, None]
    np.testing.assert_allclose(
        got, values, rtol=2**-4, atol=1e-4 * np.abs(values).max(axis=1, initial=1e-9).max()
    )
    assert not np.signbit(np.asarray(small, np.float32)[:, :2]).any()


@pytest.mark.parametrize("cache", [jnp.float32, FP8])
def test_tokens_are_written_in_their_places(cache):
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(5, 320)), jnp.float32)
    places = jnp.array([0, 7, 11, 16, 17])
    pages = jnp.zeros((2, 64, *latent_page(256, 8)), cache)
    if cache == FP8:
        pages = ScaledPages(pages, jnp.zeros((2, 64, 2, 4)))
    write = jax.jit(page_write, donate_argnums=0).lower(pages, rows, places, layer=jnp.int32(1)).compile()
    if cache != FP8:  # 8-bit floats are copied on a CPU, which lacks them
        assert write.memory_analysis().temp_size_in_bytes < jax.tree.leaves(pages)[0].nbytes
    values, scales = plain_and_scales(write(pages, rows, places, layer=jnp.int32(1)))
    got = np.concatenate([np.asarray(x, np.float32).reshape(2, 512, -1) for x in unpacked(values)], axis=-1)
    if scales is not None:
        got *= np.swapaxes(np.asarray(scales), -2, -1).reshape(2, 512, 1)
    np.testing.assert_allclose(got[1, places], rows, rtol=0 if scales is None else 2**-4, atol=1e-2)
    assert np.count_nonzero(got) == np.count_nonzero(got[1, places])


@pytest.mark.parametrize("latent", [256, 128])
def test_latents_in_four_bits_keep_each_part_to_its_own_scale_and_their_rope_keys_in_eight(latent):
    """Parts of a latent far apart in size are written, read and attended as `as_kept` says; 128 fill half a slab."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(11, latent + 64)).astype(np.float32)
    rows *= np.repeat(10.0 ** np.arange(latent // 64 + 1), 64).astype(np.float32)
    groups = latent // 64 + 1
    shape = latent_page(latent_bytes(latent, 64), 8)
    pages = ScaledPages(jnp.zeros((4, *shape), PACKED), jnp.full((4, 2 * groups, 4), np.nan))
    kept = np.asarray(as_kept(pages, jnp.asarray(rows)))
    wrong = np.abs(kept - rows).reshape(11, groups, 64).max(-1) / np.abs(rows).reshape(11, groups, 64).max(-1)
    assert 1 / 30 < wrong[:, :-1].max() < 1 / 14 and wrong[:, -1].max() < 1 / 250
    pages = page_write(pages, jnp.asarray(rows), jnp.array([8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26]))
    q = rng.normal(size=(3, 2, latent + 64)).astype(np.float32) / 10.0 ** np.arange(groups).repeat(64)
    q = jnp.asarray(q, jnp.float32)
    table, starts, lens = jnp.array([[1, 3]]), jnp.array([0, 3]), jnp.array([11])
    got, _ = mla_attention(q[..., :latent], q[..., latent:], pages, table, starts, lens, scale=0.1)
    scores = np.einsum("tnd,sd->tns", q, kept) * 0.1
    scores = np.where(np.arange(11)[None, None] <= 8 + np.arange(3)[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("tns,sc->tnc", weights / weights.sum(-1, keepdims=True), kept[:, :latent])
    size = np.repeat(10.0 ** np.arange(groups - 1), 64)
    np.testing.assert_allclose(np.asarray(got) / size, want / size, rtol=1e-3, atol=1e-3)


def check_kernel(case: Case, dtype, tolerance: float, **blocks) -> None:
    args, options = case.call(dtype)
    with pltpu.force_tpu_interpret_mode():
        got = jax.jit(partial(mla_attention.using("tpu"), **options, **blocks))(*args)
    want = jax.jit(partial(mla_attention.reference, **options))(*args)
    np.testing.assert_allclose(case.defined(got), case.defined(want), rtol=tolerance, atol=tolerance)
    assert all(bool(jnp.isfinite(x).all()) for x in got)


@pytest.mark.parametrize("name", cases.TINY)
def test_kernel_equals_its_definition(name):
    blocks = {"rows": 4, "tokens": 2, "keys": 128, "piece": 128}
    check_kernel(cases.TINY[name], jnp.float32, 3e-5, blocks=blocks)


def test_two_cores_share_a_long_context(monkeypatch):
    monkeypatch.setattr(tpu.chip, "ambient", lambda: CHIPS["v5p"])
    case = Case(16, new=(1,), lens=(1000,), page=64, latent=128)
    check_kernel(case, jnp.float32, 3e-5, blocks={"rows": 1, "tokens": 1, "keys": 256, "piece": 128})


@pytest.mark.parametrize(
    "change, cache, words",
    [
        ({"heads": 12}, None, "12 heads"),
        ({"heads": 256}, None, "256 heads"),
        ({"page": 40}, None, "page size 40"),
        ({"page": 64}, FP8, "page size 64"),
        ({"lens": (1 << 23,) * 2}, None, "scalar memory"),
        ({"new": (1 << 17, 1), "lens": (1 << 17, 1), "page": 1 << 17, "tree": True}, None, "scalar memory"),
    ],
)
def test_refuses_what_does_not_fit(change, cache, words):
    case = Case(**{"heads": 16, "new": (1, 1), "lens": (40, 40), "page": 64, "cache": cache} | change)
    args, options = case.shapes(jnp.bfloat16)
    with pytest.raises(Unfit, match=words):
        jax.eval_shape(partial(mla_attention.using("tpu"), **options), *args)


def test_refuses_types_it_cannot_multiply():
    (*q, pages, table, starts, lens), options = cases.TINY["decode, FP8"].shapes(jnp.bfloat16)
    attend = partial(mla_attention.using("tpu"), **options)
    with pytest.raises(Unfit, match="needs scales"):
        jax.eval_shape(attend, *q, pages.values, table, starts, lens)
    wide = jax.ShapeDtypeStruct(pages.values.shape, jnp.float32)
    with pytest.raises(Unfit, match="the cache is float32"):
        jax.eval_shape(attend, *q, wide, table, starts, lens)
