"""A context attended in parts, one after the other or on several devices, gives what the whole gives."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import chip, context_parts
from pallas_kernels.mla_attention import cases as mla_cases
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.paged_attention import cases as paged_cases
from pallas_kernels.paged_attention import paged_attention

PAGE, PAGES = 4, 12
ROWS = (5, 1)  # of two sequences, and two of nobody
paged = jax.jit(paged_attention.reference, static_argnames="scale")
latent = jax.jit(mla_attention.reference, static_argnames="scale")


def of_part(table, first, lens, begin: int, end: int):
    """(page table, first, kv_lens) of the keys on pages begin:end, in arrays of the same shapes."""
    moved = np.zeros_like(table)
    moved[:, : end - begin] = table[:, begin:end]
    return moved, first - np.int32(begin * PAGE), np.clip(lens - begin * PAGE, 0, (end - begin) * PAGE)


def in_parts(attend, arguments, cuts, sinks=None, **options):
    """Parts between neighbouring `cuts`, combined; the sinks are in the second one."""
    *q, pages, table, starts, lens = arguments
    first, found = lens - np.diff(starts), []
    for i, (begin, end) in enumerate(pairwise(cuts)):
        its_table, its_first, its_lens = of_part(table, first, lens, begin, end)
        if sinks is not None:
            options["sinks"] = sinks if i == 1 else np.full_like(sinks, context_parts.NOTHING)
        found.append(attend(*q, pages, its_table, starts, its_lens, first=its_first, **options))
    return context_parts.combine(*(jnp.stack(x) for x in zip(*found, strict=True)))


lengths = st.tuples(st.integers(ROWS[0], PAGE * PAGES), st.integers(ROWS[1], PAGE * PAGES))
middles = st.tuples(st.integers(0, PAGES), st.integers(0, PAGES)).map(lambda x: [0, *sorted(x), PAGES])


def arrays(case, seed):
    (*q, pages, table, starts, lens), options = case.call(jnp.float32, seed)
    table, starts, lens = (np.asarray(x) for x in (table, starts, lens))
    table = np.pad(table, ((0, 0), (0, PAGES - table.shape[1])))
    values = np.asarray(pages)
    pages = np.pad(values, [(0, 1 + 2 * PAGES - len(values)), *[(0, 0)] * (values.ndim - 1)])
    return (*q, pages, table, starts, lens), options


def assert_equal(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x[: sum(ROWS)], y[: sum(ROWS)], rtol=2e-5, atol=2e-5)


@settings(max_examples=25)
@given(lengths, middles, st.sampled_from([0, 3, 20]), st.integers(0, 2**16))
def test_parts_of_keys_and_values_combine_to_the_whole(lens, cuts, window, seed):
    case = paged_cases.Case((4, 2, 8), ROWS, lens, page=PAGE, padding=2, tree=True, sinks=True)
    arguments, options = arrays(case, seed)
    options = options | {"window": np.int32(window)}
    assert_equal(in_parts(paged, arguments, cuts, **options), paged(*arguments, **options))


@settings(max_examples=25)
@given(lengths, middles, st.integers(0, 2**16))
def test_parts_of_latents_combine_to_the_whole(lens, cuts, seed):
    case = mla_cases.Case(2, ROWS, lens, page=PAGE, latent=128, padding=2, tree=True)
    arguments, options = arrays(case, seed)
    assert_equal(in_parts(latent, arguments, cuts, **options), latent(*arguments, **options))


@pytest.mark.supports("parallel", "a context in parts over chips, put together by log-sum-exps")
def test_each_of_four_devices_has_a_part_of_a_context_and_all_have_the_result():
    case = paged_cases.Case((4, 2, 8), (1, 1), (45, 7), page=PAGE)
    (q, pages, table, starts, lens), options = case.call(jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(AxisType.Auto,))
    parts = context_parts.cut(4, table, lens - 1, lens, PAGE)

    def one(table, first, lens):
        found = paged_attention(q, pages, table, starts, lens, first=first, scale=options["scale"])
        return context_parts.combine(*jax.lax.all_gather(found, "x"))

    over = jax.shard_map(one, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    want = paged_attention(q, pages, table, starts, lens, scale=options["scale"])
    for x, y in zip(jax.jit(over)(*parts), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_a_part_without_keys_weighs_nothing():
    out = jnp.stack([jnp.ones((1, 2, 128)), jnp.zeros((1, 2, 128))])
    lses = jnp.stack([jnp.full((1, 2), 3.0), jnp.full((1, 2), context_parts.NOTHING)])
    got, lse = context_parts.combine(out, lses)
    np.testing.assert_array_equal(got, out[0])
    np.testing.assert_array_equal(lse, 3.0)


def test_sinks_added_afterwards_are_those_in_the_softmax():
    case = paged_cases.Case((4, 2, 8), (3,), (30,), page=PAGE, padding=1, sinks=True)
    args, options = case.call(jnp.float32)
    want = paged_attention(*args, **options)
    out, lse = paged_attention(*args, **options | {"sinks": None})
    for x, y in zip(context_parts.with_sinks(out, lse, options["sinks"]), want, strict=True):
        np.testing.assert_allclose(x[:3], y[:3], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "name, sequences, context, parts",
    [("v5p", 1, 131072, 2), ("v5p", 3, 131072, 2), ("v5p", 4, 131072, 1), ("v5p", 1, 4096, 1), ("v6e", 1, 131072, 1)],
)  # fmt: skip
def test_contexts_are_cut_where_a_core_would_be_idle(monkeypatch, name, sequences, context, parts):
    monkeypatch.setattr(chip, "ambient", lambda: chip.CHIPS[name])
    assert context_parts.for_cores(sequences, context, keys=2048) == parts
