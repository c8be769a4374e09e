"""Every TPU kernel equals its op's definition, refuses what it cannot do, and compiles for each generation."""

import inspect
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

from pallas_kernels import context_parts
from pallas_kernels.chip import CHIPS, ambient
from pallas_kernels.op import Op, Unfit
from pallas_kernels.page_write import page_write
from pallas_kernels.paged_attention import cases, paged_attention
from tests.pallas_kernels.every_op import by_format, every_op, format_of

DTYPES = {"bfloat16": 1e-2, "float32": 3e-5}
EIGHT = {
    "v5e": "v5e:2x4",
    "v5p": "v5p:2x2x2",
    "v6e": "v6e:2x4",
    "tpu7x": "tpu7x:2x2x1",
}  # devices of a mesh axis


def tiny():
    for op, known in every_op("tpu"):
        for name, case in known.TINY.items():
            row = pytest.mark.supports("TPU kernels, interpreted", f"{op.name} {format_of(case)}")
            for dtype in getattr(known, "DTYPES", DTYPES):
                yield pytest.param(op, case, dtype, id=f"{op.name}-{name}-{dtype}", marks=row)


def real():
    """Each case for two generations in turn, one that is alone with its format for all, so that formats meet all."""
    chips = list(CHIPS)
    for op, known in every_op("tpu"):
        for format, named in by_format(known.REAL).items():
            for i, (name, case) in enumerate(named):
                for chip in chips if len(named) == 1 else (chips[i % 2], chips[i % 2 + 2]):
                    row = pytest.mark.supports("TPU kernels, compiled", f"{op.name} {format} {chip}")
                    yield pytest.param(op, case, CHIPS[chip], id=f"{op.name}-{name}-{chip}", marks=row)


def placed(case, devices, fn):
    """(a mesh for the case, `fn` over it): one device, or as many as the case spreads its arrays over."""
    if not hasattr(case, "over"):
        return Mesh(np.array(devices[:1]), ("x",), axis_types=(AxisType.Auto,)), fn
    mesh = Mesh(np.array(devices[: case.devices]), (case.axis,), axis_types=(AxisType.Auto,))
    return mesh, case.over(mesh, fn)


def check(op: Op, case, dtype: str, **blocks) -> None:
    """With the race detector on where devices write into each other's memory."""
    args, kwargs = case.call(jnp.dtype(dtype))
    _, kernel = placed(case, jax.devices(), partial(op.using("tpu"), **kwargs, **blocks))
    _, definition = placed(case, jax.devices(), partial(op.reference, **kwargs))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=hasattr(case, "over"))):
        got = jax.block_until_ready(jax.jit(kernel)(*args))
    want = jax.jit(definition)(*args)
    assert hasattr(case, "over") or all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(got))
    np.testing.assert_allclose(case.defined(got), case.defined(want), rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("op, case, dtype", list(tiny()))
def test_kernel_equals_its_definition(op, case, dtype):
    check(op, case, dtype)


@settings(max_examples=4, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 200)), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 2, 64), (6, 2, 128), (4, 1, 256)]),
    page=st.sampled_from([8, 32]),
    window=st.sampled_from([None, 1, 50]),
    sinks=st.booleans(),
    padding=st.integers(0, 3),
    later=st.sampled_from([0, 9, -9]),
)
def test_attention_equals_its_definition_on_any_mix(sequences, heads, page, window, sinks, padding, later):
    new = tuple(count for count, _ in sequences)
    lens = tuple(count + old if count else 0 for count, old in sequences)
    if sum(new) + padding == len(new) and max(new) > 1:
        padding += 1  # as many rows as sequences promises one row each
    if not sum(new) + padding:
        padding = len(new)
    case = cases.Case(heads, new, lens, page=page, window=window, sinks=sinks, padding=padding, later=later)
    check(paged_attention, case, "float32", blocks={"rows": 16, "keys": 128})


@pytest.mark.parametrize("options", [{"sinks": True}, {"window": 300}], ids=str)
def test_two_cores_share_a_long_context(monkeypatch, options):
    """The second of the sequences has nothing for the second core to see."""
    monkeypatch.setattr(context_parts.chip, "ambient", lambda: CHIPS["v5p"])
    case = cases.Case((4, 2, 128), new=(1, 1), lens=(1000, 70), page=64, **options)
    check(paged_attention, case, "float32", blocks={"rows": 16, "keys": 256})


@pytest.mark.parametrize(
    "change, words",
    [
        ({"heads": (4, 2, 80)}, "head size 80"),
        ({"page": 8}, "page size 8"),
        ({"page": 48}, "page size 48"),
        ({"lens": (1 << 21,) * 2}, "scalar memory"),
    ],
)
def test_attention_refuses_what_does_not_fit(change, words):
    case = cases.Case(**{"heads": (4, 2, 128), "new": (1, 1), "lens": (40, 40), "page": 16} | change)
    args, kwargs = case.shapes(jnp.bfloat16)
    with pytest.raises(Unfit, match=words):
        jax.eval_shape(partial(paged_attention.using("tpu"), **kwargs), *args)


def test_mixed_types_and_narrow_caches_are_refused():
    (q, pages, *rest), kwargs = cases.TINY["decode"].shapes(jnp.bfloat16)
    q = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    with pytest.raises(Unfit, match="queries are float32 and the cache is bfloat16"):
        jax.eval_shape(partial(paged_attention.using("tpu"), scale=kwargs["scale"]), q, pages, *rest)
    narrow = jax.ShapeDtypeStruct((4, 2, 16, 96), jnp.bfloat16)
    rows, places = jax.ShapeDtypeStruct((3, 2, 96), jnp.bfloat16), np.arange(3, dtype=np.int32)
    with pytest.raises(Unfit, match="96 values"):
        jax.eval_shape(page_write.using("tpu"), narrow, rows, places)


@pytest.mark.compile
@pytest.mark.parametrize("op, case, chip", list(real()))
def test_kernel_compiles_for_chips_that_are_not_here(tpu_compiler, op, case, chip):
    """Within VMEM, in place, and without a copy of the cache."""
    several = hasattr(case, "over")
    topology = EIGHT[chip.name] if several else chip.topology
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    args, kwargs = case.shapes(jnp.bfloat16)
    # Over several devices, what is not divided among them is a constant.
    arrays = {name: kwargs.pop(name) for name in ("layer", "sinks", "tree") if name in kwargs and not several}
    mesh, kernel = placed(case, devices, lambda *a, **k: op.using("tpu")(*a, **k, **kwargs))
    place = NamedSharding(mesh, PartitionSpec(case.axis if several else None))
    args, arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place if x.shape else None), (args, arrays)
    )
    step = jax.jit(kernel, donate_argnums=0 if op is page_write else ())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert ambient() is chip
        compiled = step.trace(*args, **arrays).lower(lowering_platforms=("tpu",)).compile()
    names = list(inspect.signature(op.reference).parameters)
    pages = args[names.index("pages") if "pages" in names else 1]
    text = compiled.as_text() or ""
    assert "tpu_custom_call" in text
    kept = jax.tree.leaves(pages)
    for leaf in (leaf for leaf in kept if leaf.size > 1 << 20):
        shape = re.escape("[" + ",".join(map(str, leaf.shape)) + "]")
        assert not re.search(rf"= \w+{shape}\S* copy\(", text)
    rest = sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves((args, arrays)) if all(x is not y for y in kept)
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * rest + (1 << 20)
