"""grouped_matmul: its definition by hand, its price, and how the TPU kernel cuts rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import formats
from pallas_kernels.formats import dequantise
from pallas_kernels.grouped_matmul import cases, grouped_matmul, reference, tpu


@pytest.mark.parametrize(
    "format", [None, formats.FP8_BLOCK, formats.MXFP4], ids=["array", "fp8_block", "mxfp4"]
)
def test_the_definition_multiplies_each_group_by_its_own(format):
    case = cases.Case((3, 0, 5, 1), 40, 256, format, padding=4, layers=2)
    (x, w, sizes), options = case.call(jnp.float32)
    last = jax.tree.map(lambda leaf: np.asarray(leaf)[1], w)
    values = last if format is None else dequantise(last)
    want, start = np.zeros((13, 40)), 0
    for e, size in enumerate(case.sizes):
        want[start : start + size] = np.asarray(x)[start : start + size] @ values[e].T
        start += size
    np.testing.assert_allclose(grouped_matmul(x, w, sizes, **options), want, rtol=1e-4, atol=1e-5)


def test_the_price_counts_groups_with_rows():
    case = cases.Case((3, 0, 5), 128, 256, formats.FP8_BLOCK, padding=7, layers=2)
    args, options = case.shapes(jnp.bfloat16)
    weight = 128 * 256 + 2 * 4
    assert reference.cost(*args, **options) == (2 * 8 * 128 * 256, 2 * weight + 8 * (128 + 256) * 2)


@settings(max_examples=12)
@given(st.lists(st.integers(0, 50), min_size=6, max_size=6), st.integers(0, 40), st.sampled_from([16, 32]))
def test_every_row_is_in_one_pair_and_only_groups_with_rows_are_read(sizes, padding, rows):
    t = max(1, sum(sizes) + padding)
    pairs = tpu._pairs(jnp.asarray(sizes, jnp.int32), t, rows, jnp.int32(100))
    count = int(pairs.count[0])
    owners, opened = np.full(t, -2), []
    for tile, weight, first, end, owned, opens in zip(
        *(np.asarray(p)[:count] for p in pairs[1:]), strict=True
    ):
        assert tile * rows <= first < end <= (tile + 1) * rows
        assert (owners[first:end] == -2).all()
        owners[first:end] = weight - 100 if owned else -1
        opened += [tile] * opens
        if owned:
            assert sizes[weight - 100] > 0
    np.testing.assert_array_equal(owners, [*np.repeat(np.arange(6), sizes), *[-1] * (t - sum(sizes))])
    assert opened == list(range(-(-t // rows)))
    assert all((np.asarray(p)[count:] == np.asarray(p)[count - 1]).all() for p in pairs[1:])
