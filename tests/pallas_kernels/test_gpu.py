"""Every GPU kernel equals its op's definition in Pallas' interpreter, for any mix of rows, and refuses the rest."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import formats, triton_attention
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.matmul import cases as matmul_cases
from pallas_kernels.matmul import matmul
from pallas_kernels.mla_attention import cases as mla_cases
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.op import Unfit
from pallas_kernels.page_write import page_write
from pallas_kernels.paged_attention import cases as paged_cases
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.pages import packed
from pallas_kernels.row_tiles import row_tiles
from pallas_kernels.triton_limits import check_addresses
from tests.device import gpu as on_a_card
from tests.pallas_kernels.every_op import every_op, format_of


def tiny():
    """Named calls in bfloat16; float32, which shows that nothing else is rounded, is what any mix below is in."""
    for op, known in every_op("gpu"):
        for name, case in known.TINY.items():
            if not hasattr(case, "over"):
                row = pytest.mark.supports("GPU kernels, interpreted", f"{op.name} {format_of(case)}")
                yield pytest.param(op, case, id=f"{op.name}-{name}", marks=row)


def interpreted(op, **options):
    """The GPU kernel, jitted, in Pallas' plain interpreter, which `True` asks for in this context."""
    kernel = jax.jit(partial(op.using("gpu"), **options))

    def call(*args, **kwargs):
        with pltpu.force_tpu_interpret_mode(True):
            return jax.block_until_ready(kernel(*args, **kwargs))

    return call


def assert_equal(got, want, tolerance: float) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op, case", list(tiny()))
def test_kernel_equals_its_definition(op, case):
    args, kwargs = case.call(jnp.bfloat16)
    try:
        got = interpreted(op, **kwargs)(*args)
    except Unfit as why:
        pytest.skip(f"refused, the definition does it: {why}")
    want = jax.jit(partial(op.reference, **kwargs))(*args)
    assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in jax.tree.leaves(got))
    assert_equal(case.defined(got), case.defined(want), 1e-2)


@pytest.fixture
def parted(monkeypatch):
    """Contexts of any length are cut into parts."""
    monkeypatch.setattr(triton_attention, "SHORTEST_PART", 16)


ROWS, SEQUENCES, PAGES, PAGE = 24, 3, 5, 16  # what every mix is padded to
mixes = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, PAGES * PAGE - 8)), min_size=SEQUENCES, max_size=SEQUENCES
)


def mix(sequences, seed):
    """(page table, q_starts, kv_lens, which places of the cache are written) of sequences of (new, old) tokens."""
    new = np.array([count for count, _ in sequences], np.int32)
    lens = np.array([count + old if count else 0 for count, old in sequences], np.int32)
    order = np.random.default_rng(seed).permutation(np.arange(1, 1 + SEQUENCES * PAGES))
    table = order.reshape(SEQUENCES, PAGES).astype(np.int32)
    written = np.zeros((1 + SEQUENCES * PAGES, PAGE), bool)
    for row, length in zip(table, lens, strict=True):
        written[row] = np.arange(PAGES * PAGE).reshape(PAGES, PAGE) < length
    return (table, np.concatenate([[0], np.cumsum(new)]).astype(np.int32), lens), written


def test_paged_attention_equals_its_definition_on_any_mix_and_in_parts(parted):
    kernel = interpreted(paged_attention, scale=0.3)
    definition = jax.jit(partial(paged_attention.reference, scale=0.3))

    @settings(max_examples=25)
    @given(mixes, st.sampled_from([0, 1, 5, 40]), st.integers(-9, 40), st.integers(0, 2**16))
    def any_mix(sequences, window, before, seed):
        rng = np.random.default_rng(seed)
        scalars, written = mix(sequences, seed)
        q = rng.normal(size=(ROWS, 6, 32)).astype(np.float32)
        pages = rng.normal(size=(len(written), 2, PAGE, 64)).astype(np.float32)
        pages = np.where(written[:, None, :, None], pages, np.nan).astype(np.float32)
        options = {"window": np.int32(window), "sinks": rng.normal(size=6).astype(np.float32)}
        options["first"] = scalars[2] - np.diff(scalars[1]) + np.int32(before)
        got, want = (f(q, pages, *scalars, **options) for f in (kernel, definition))
        assert all(np.isfinite(x).all() for x in got)
        rows = scalars[1][-1]
        assert_equal([x[:rows] for x in got], [x[:rows] for x in want], 3e-5)

    any_mix()


def test_mla_attention_equals_its_definition_on_any_mix_and_in_parts(parted):
    kernel = interpreted(mla_attention, scale=0.1)
    definition = jax.jit(partial(mla_attention.reference, scale=0.1))

    @settings(max_examples=20)
    @given(mixes, st.integers(-9, 40), st.booleans(), st.integers(0, 2**16))
    def any_mix(sequences, before, branching, seed):
        rng = np.random.default_rng(seed)
        scalars, written = mix(sequences, seed)
        q = [rng.normal(size=(ROWS, 6, width)).astype(np.float32) for width in (128, 64)]
        values = rng.normal(size=(*written.shape, 192)).astype(np.float32)
        values = np.where(written[..., None], values, np.nan).astype(np.float32)
        pages = packed(jnp.asarray(values[..., :128]), jnp.asarray(values[..., 128:]))
        # Keys that begin `before` tokens earlier, as those of a part of a context do.
        first = scalars[2] - np.diff(scalars[1]) + np.int32(before)
        bits = rng.integers(0, 2**31, size=ROWS) if branching else np.full(ROWS, -1)
        options = {"first": first, "tree": bits.astype(np.int32)}
        got, want = (f(*q, pages, *scalars, **options) for f in (kernel, definition))
        rows = scalars[1][-1]
        assert_equal([x[:rows] for x in got], [x[:rows] for x in want], 3e-5)

    any_mix()


def test_grouped_matmul_equals_its_definition_for_any_sizes():
    case = matmul_cases.Case(1, 80, 256, formats.MXFP4)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(48, 256)), jnp.bfloat16)
    w = jax.tree.map(
        jnp.asarray, formats.quantise(np.random.default_rng(1).normal(size=(5, case.f, case.d)), case.format)
    )
    kernel, definition = interpreted(grouped_matmul), jax.jit(grouped_matmul.reference)

    @settings(max_examples=25)
    @given(st.lists(st.integers(0, 30), min_size=5, max_size=5))
    def any_sizes(sizes):
        kept = np.diff(np.minimum(np.cumsum([0, *sizes]), 48)).astype(np.int32)
        assert_equal(kernel(x, w, kept), definition(x, w, kept), 1e-2)

    any_sizes()


@pytest.mark.parametrize("format", [formats.FP8_BLOCK, formats.int4(64), formats.MXFP8], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matmul_of_few_rows_adds_up_parts_of_the_columns(format, dtype):
    (x, w), options = matmul_cases.Case(3, 72, 4096, format).call(jnp.dtype(dtype))
    assert_equal(interpreted(matmul, **options)(x, w), matmul.reference(x, w, **options), 1e-2)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=6, max_size=6),
    st.sampled_from([(4, 1), (16, 3), (16, 16), (16, 32)]),
)
def test_every_row_is_in_one_tile_of_its_owner(counts, cut):
    (size, unit), most = cut, 256
    starts = np.cumsum([0, *counts], dtype=np.int32) * np.int32(unit)
    tiles = jax.jit(row_tiles, static_argnums=(1, 2, 3))(starts, most * unit, size, unit)
    owners = np.full(most * unit, -1)
    for owner, first, end in zip(*map(np.asarray, tiles), strict=True):
        assert end - first <= size
        assert (owners[first:end] == -1).all()
        owners[first:end] = owner
    np.testing.assert_array_equal(
        owners, np.repeat(np.arange(7), [*np.diff(starts), most * unit - starts[-1]])
    )


REFUSED = {
    "float32 rows": (matmul, matmul_cases.Case(4, 64, 256, formats.FP8_BLOCK), "float32", "rows are float32"),
    "codes of 6 bits": (matmul, matmul_cases.Case(4, 64, 256, formats.MXFP6_E3M2), "bfloat16", "mxfp6_e3m2"),
    "a head of 72": (paged_attention, paged_cases.Case((4, 2, 72), (1,), (9,)), "bfloat16", "head size 72"),
    "latents of 384": (
        mla_attention,
        mla_cases.Case(16, (1,), (9,), latent=384),
        "bfloat16",
        "latents of 384",
    ),
}


@pytest.mark.parametrize("op, case, dtype, words", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_and_the_definition_does_it(op, case, dtype, words):
    args, kwargs = case.shapes(jnp.dtype(dtype))
    with pytest.raises(Unfit, match=words):
        jax.eval_shape(partial(op.using("gpu"), **kwargs), *args)
    jax.eval_shape(partial(op, **kwargs), *args)


def test_bytes_between_two_and_four_gib_are_refused():
    for rows, allowed in ((1 << 11, True), ((1 << 11) + 1, False), (1 << 12, False), ((1 << 12) + 1, True)):
        pages = jax.ShapeDtypeStruct((rows, 1 << 20), jnp.uint8)
        if allowed:
            check_addresses(pages=pages)
        else:
            with pytest.raises(Unfit, match="pages holds"):
                check_addresses(pages=pages)


def test_page_write_puts_rows_in_any_order():
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.normal(size=(2, 4, 3, 16, 96)), jnp.bfloat16)
    rows = jnp.asarray(rng.normal(size=(9, 3, 96)), jnp.bfloat16)
    places = jnp.asarray(rng.permutation(np.arange(16, 64))[:9].astype(np.int32))
    got, want = (
        f(pages, rows, places, layer=jnp.int32(1)) for f in (interpreted(page_write), page_write.reference)
    )
    assert_equal(got, want, 0)


def test_the_check_for_a_card_says_when_there_is_none():
    with pytest.raises(SystemExit, match="There is no GPU here"):
        on_a_card.main()
