"""mla_attention's definition equals attention by hand, and its TPU kernel equals the definition."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.chip import CHIPS, ambient
from pallas_kernels.mla_attention import cases, mla_attention, reference, tpu
from pallas_kernels.mla_attention.cases import Case
from pallas_kernels.mla_attention.layout import packed, page_shape, put, quantized, unpacked
from pallas_kernels.op import Unfit

FP8 = jnp.float8_e4m3fn


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
    pages, table, scales = args[2], np.asarray(args[3]), options.get("scales")
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


@settings(max_examples=12, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 40)), min_size=1, max_size=4),
    cache=st.sampled_from([None, FP8]),
    layers=st.sampled_from([None, 2]),
    padding=st.integers(0, 2),
    keys=st.sampled_from([8, 512]),
    rows=st.sampled_from([2, 32]),
    seed=st.integers(0, 2**16),
)
def test_any_mix_of_rows_equals_attention_by_hand(sequences, cache, layers, padding, keys, rows, seed):
    new = tuple(count for count, _ in sequences)
    lens = tuple(count + old if count else 0 for count, old in sequences)
    if sum(new) + padding in (0, len(new)):
        padding += len(new) + 1  # as many rows as sequences would promise one row each
    case = Case(2, new, lens, page=4, latent=128, layers=layers, padding=padding)
    args, options = case.call(jnp.float32, cache, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "KEYS_AT_ONCE", keys)
        patch.setattr(reference, "ROWS_AT_ONCE", rows)
        check_by_hand(case, mla_attention(*args, **options), args, options)


def test_one_row_a_sequence_may_leave_sequences_out():
    case = Case(2, (1, 0, 1, 1), (9, 0, 1, 30), page=4, latent=128)
    (q_latent, q_rope, pages, table, _, lens), options = case.call(jnp.float32)
    rows = np.array([0, 0, 1, 2])
    got = mla_attention(
        q_latent[rows], q_rope[rows], pages, table, jnp.array([0, 1, 1, 2, 3], jnp.int32), lens, **options
    )
    plain = (q_latent, q_rope, pages, table, jnp.array([0, 1, 1, 2, 3], jnp.int32), lens)
    check_by_hand(case, tuple(x[np.array([0, 2, 3])] for x in got), plain, options)


def test_parts_of_a_context_combine_to_the_whole():
    case = Case(2, (3,), (40,), page=4, latent=128, padding=1)
    (q_latent, q_rope, pages, table, starts, lens), options = case.call(jnp.float32)
    whole = mla_attention(q_latent, q_rope, pages, table, starts, lens, **options)
    parts = [
        mla_attention(
            q_latent, q_rope, pages, table[:, begin // 4 :], starts, jnp.array([end - begin], jnp.int32),
            first=jnp.array([37 - begin], jnp.int32), **options,
        )
        for begin, end in ((0, 16), (16, 40))
    ]  # fmt: skip
    got = reference.combine(*(jnp.stack(x) for x in zip(*parts, strict=True)))
    for x, y in zip(got, whole, strict=True):
        np.testing.assert_allclose(x[:3], y[:3], rtol=1e-5, atol=1e-5)


def test_a_part_without_keys_weighs_nothing():
    out = jnp.stack([jnp.ones((1, 2, 128)), jnp.zeros((1, 2, 128))])
    got, lse = reference.combine(out, jnp.stack([jnp.full((1, 2), 3.0), jnp.full((1, 2), reference.NOTHING)]))
    np.testing.assert_array_equal(got, out[0])
    np.testing.assert_array_equal(lse, 3.0)


def test_pages_waste_no_lane():
    latent, rope = np.arange(3 * 8 * 256.0).reshape(3, 8, 256), np.arange(3 * 8 * 64.0).reshape(3, 8, 64)
    pages = packed(jnp.asarray(latent), jnp.asarray(rope))
    assert pages.shape[1:] == page_shape(256, 8) and pages[0].size == 8 * (256 + 64)
    for got, want in zip(unpacked(pages), (latent, rope), strict=True):
        np.testing.assert_array_equal(got, want)


def test_eight_bits_keep_each_token_to_its_own_scale_and_have_no_negative_zero():
    values = np.random.default_rng(0).normal(size=(5, 576)) * 10.0 ** np.arange(-2, 3)[:, None]
    values[:, :2], values[4] = (-1e-9, 0), 0
    small, scales = quantized(jnp.asarray(values, jnp.float32))
    got = np.asarray(small, np.float32) * np.asarray(scales)[:, None]
    np.testing.assert_allclose(
        got, values, rtol=2**-4, atol=1e-4 * np.abs(values).max(axis=1, initial=1e-9).max()
    )
    assert not np.signbit(np.asarray(small, np.float32)[:, :2]).any()


def test_tokens_are_put_in_their_places_without_a_copy():
    rng = np.random.default_rng(0)
    latent, rope = (jnp.asarray(rng.normal(size=(5, width)), jnp.float32) for width in (256, 64))
    places = jnp.array([0, 7, 11, 16, 17])
    pages = jnp.zeros((64, *page_shape(256, 8)))
    write = jax.jit(put, donate_argnums=0)
    assert (
        write.lower(pages, latent, rope, places).compile().memory_analysis().temp_size_in_bytes < pages.nbytes
    )
    got = [x.reshape(-1, x.shape[-1]) for x in unpacked(write(pages, latent, rope, places))]
    for all_tokens, want in zip(got, (latent, rope), strict=True):
        np.testing.assert_array_equal(all_tokens[places], want)
        assert int(jnp.count_nonzero(all_tokens)) == want.size


def check_kernel(case: Case, dtype, cache, tolerance: float, **blocks) -> None:
    args, options = case.call(dtype, cache)
    with pltpu.force_tpu_interpret_mode():
        got = jax.jit(partial(mla_attention.using("tpu"), **options, **blocks))(*args)
    want = jax.jit(partial(mla_attention.reference, **options))(*args)
    np.testing.assert_allclose(case.defined(got), case.defined(want), rtol=tolerance, atol=tolerance)
    assert all(bool(jnp.isfinite(x).all()) for x in got)


@pytest.mark.parametrize("name", cases.TINY)
def test_kernel_equals_its_definition(name):
    blocks = {"rows": 4, "tokens": 2, "keys": 128, "piece": 128}
    check_kernel(cases.TINY[name], jnp.float32, None, 3e-5, blocks=blocks)


@pytest.mark.parametrize("cache", [None, FP8])
def test_kernel_equals_its_definition_in_few_bits(cache):
    case = Case(16, new=(1, 1, 0, 1), lens=(600, 1, 0, 70), page=256, latent=128, padding=1)
    check_kernel(case, jnp.bfloat16, cache, 2e-2)


def test_two_cores_share_a_long_context(monkeypatch):
    monkeypatch.setattr(tpu.chip, "ambient", lambda: CHIPS["v5p"])
    case = Case(16, new=(1,), lens=(1000,), page=64, latent=128)
    check_kernel(case, jnp.float32, None, 3e-5, blocks={"rows": 1, "tokens": 1, "keys": 256, "piece": 128})


@pytest.mark.parametrize(
    "change, cache, words",
    [
        ({"heads": 12}, None, "12 heads"),
        ({"heads": 256}, None, "256 heads"),
        ({"page": 40}, None, "page size 40"),
        ({"page": 64}, FP8, "page size 64"),
        ({"lens": (1 << 23,) * 2}, None, "scalar memory"),
    ],
)
def test_refuses_what_does_not_fit(change, cache, words):
    case = Case(**{"heads": 16, "new": (1, 1), "lens": (40, 40), "page": 64} | change)
    args, options = case.shapes(jnp.bfloat16, cache)
    with pytest.raises(Unfit, match=words):
        jax.eval_shape(partial(mla_attention.using("tpu"), **options), *args)


def test_refuses_types_it_cannot_multiply():
    args, options = cases.TINY["decode"].shapes(jnp.bfloat16, FP8)
    with pytest.raises(Unfit, match="needs `scales`"):
        jax.eval_shape(partial(mla_attention.using("tpu"), scale=options["scale"]), *args)
    args, options = cases.TINY["decode"].shapes(jnp.bfloat16, jnp.float32)
    with pytest.raises(Unfit, match="the cache is float32"):
        jax.eval_shape(partial(mla_attention.using("tpu"), **options), *args)


COMPILED = [
    ("deepseek-v3 decode 64 x 4096", None, "v5e"),
    ("deepseek-v3 decode 16 x 32768", FP8, "v5p"),
    ("deepseek-v3 mixed", FP8, "v6e"),
    ("deepseek-v3 prefill 8192", None, "tpu7x"),
    ("deepseek-v2-lite decode", FP8, "tpu7x"),
]


@pytest.mark.compile
@pytest.mark.parametrize("name, cache, chip", COMPILED)
def test_kernel_compiles_for_chips_that_are_not_here(tpu_compiler, name, cache, chip):
    """Within VMEM, and without a copy of the cache, which takes no more memory than its values."""
    chip = CHIPS[chip]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices
    mesh = Mesh(np.array(devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    args, options = cases.REAL[name].shapes(jnp.bfloat16, cache)
    scale, place = options.pop("scale"), NamedSharding(mesh, PartitionSpec())
    args, options = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (args, options)
    )
    step = jax.jit(partial(mla_attention.using("tpu"), scale=scale))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert ambient() is chip
        compiled = step.trace(*args, **options).lower(lowering_platforms=("tpu",)).compile()
    memory, pages = compiled.memory_analysis(), args[2]
    assert "tpu_custom_call" in compiled.as_text()
    shape = re.escape("[" + ",".join(map(str, pages.shape)) + "]")
    assert not re.search(rf"= \w+{shape}\S* copy\(", compiled.as_text())
    values = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((args, options)))
    queries = sum(x.size * x.dtype.itemsize for x in args[:2])
    assert memory.argument_size_in_bytes < values + queries  # queries of 64 values do lie in 128
    assert memory.temp_size_in_bytes < 2 * queries + (1 << 20)
