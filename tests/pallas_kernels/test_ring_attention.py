"""A ring of devices gives what one device gives, whatever the sequences, and all devices have the same work."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh

from pallas_kernels.op import Unfit
from pallas_kernels.ring_attention import ring_attention, tpu, tpu_body, zigzag
from pallas_kernels.ring_attention.cases import Case
from pallas_kernels.ring_attention.layout import NOWHERE, PLACES, lowest
from pallas_kernels.ring_attention.reference import cost

X = 4


def over_ring(case: Case, args, kwargs, implementation: str = "reference"):
    mesh = Mesh(np.array(jax.devices()[: case.devices]), (case.axis,), axis_types=(AxisType.Auto,))
    return jax.jit(case.over(mesh, partial(ring_attention.using(implementation), **kwargs)))(*args)


def on_one_device(args, scale, latent, window, soft_cap, sinks, **_):
    """Softmax over the whole context, written out; token by token through their places."""
    q, kv, q_places, kv_places, _ = (np.asarray(x, np.float64 if x.ndim > 1 else None) for x in args)
    n, k, h = q.shape[1], kv.shape[1], q.shape[2]
    keys = np.repeat(kv[..., :h], n // k, axis=1)
    values = np.repeat(kv[..., h:] if latent is None else kv[..., :latent], n // k, axis=1)
    same = kv_places[None] // PLACES == q_places[:, None] // PLACES
    seen = same & (kv_places[None] <= q_places[:, None]) & (kv_places[None] != NOWHERE)
    if window:
        seen &= kv_places[None] > q_places[:, None] - window
    scores = np.einsum("tnh,snh->tns", q, keys) * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(seen[:, None], scores, -np.inf)[q_places != NOWHERE]
    extra = 0 if sinks is None else np.exp(np.asarray(sinks, np.float64))
    lse = np.log(np.sum(np.exp(scores), axis=-1) + extra)
    out = np.einsum("tns,snv->tnv", np.exp(scores - lse[..., None]), values)
    return np.concatenate([out, lse[..., None]], axis=-1)


@pytest.mark.supports("parallel", "ring attention: one sequence over chips, grouped-query and latent")
@pytest.mark.parametrize(
    "case",
    [
        Case(X, (4, 2, 8), new=(61,), multiple=4),
        Case(X, (4, 4, 8), new=(3, 40, 16), multiple=1),
        Case(X, (4, 1, 12), new=(40,), latent=8, multiple=8),
        Case(2, (2, 1, 8), new=(9, 30), context=(50, 0), multiple=4),
        Case(1, (2, 1, 8), new=(20,), multiple=4),
        Case(X, (4, 2, 8), new=(61, 9), multiple=4, window=7, soft_cap=2.0, sinks=True),
        Case(2, (4, 2, 8), new=(9, 30), context=(50, 0), multiple=4, window=20, sinks=True),
    ],
    ids=[
        "grouped",
        "three sequences",
        "latent",
        "on contexts",
        "ring of one",
        "window, soft cap, sinks",
        "window on contexts",
    ],
)
def test_a_ring_gives_what_one_device_gives(case):
    args, kwargs = case.call(jnp.float32)
    got = case.defined(over_ring(case, args, kwargs))
    want = on_one_device(args, **kwargs)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_small_tiles_on_tpu_with_some_of_nobody():
    """Tiles of one head's 128 tokens; the second sequence leaves whole tiles empty. Races raise."""
    case = Case(2, (2, 1, 128), new=(520, 5))
    args, kwargs = case.call(jnp.float32)
    blocks = {"rows": 128, "keys": 128, "at_once": 128}
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        got = jax.block_until_ready(over_ring(case, args, kwargs | {"blocks": blocks}, "tpu"))
    want = over_ring(case, args, kwargs)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)


def test_the_race_detector_sees_keys_that_arrive_where_others_are_read(monkeypatch, caplog):
    """It compares devices within one call; between calls the interpreter lets all devices wait for each other."""

    def into_the_same_slot(s, r):
        where, slot = {s.axis_name: 1 - r.scalars[0]}, r.slots.at[r.scalars[1]]
        return pltpu.make_async_remote_copy(slot, slot, r.sent, r.arrived, device_id=where)

    monkeypatch.setattr(tpu_body, "_copy", into_the_same_slot)
    case = Case(2, (1, 1, 128), new=(300,))
    args, kwargs = case.call(jnp.float32)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, on_race="warn")):
        jax.block_until_ready(over_ring(case, args, kwargs, "tpu"))
    assert "RACE DETECTED" in caplog.text
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("window", [0, 1, 128, 200, 600])
def test_blocks_of_keys_that_no_query_sees_are_passed_over(window):
    """A traced window, as of layers that are scanned; the definition multiplies as few blocks."""
    (q, kv, q_places, kv_places, starts), _ = Case(2, (2, 1, 128), new=(1500, 300)).shapes(jnp.bfloat16)
    blocks = {"rows": 256, "keys": 128, "at_once": 128}
    static, _ = tpu.sizes(q, kv, scale=1.0, axis_name="ring", latent=None, blocks=blocks)
    lows = np.asarray(jax.jit(lowest)(q_places, starts, np.int32(window)))
    codes, count = tpu._pairs(static, jnp.stack([q_places, lows], axis=1), jnp.asarray(kv_places))
    same = kv_places[None] // PLACES == q_places[:, None] // PLACES
    seen = same & (kv_places[None] <= q_places[:, None]) & (kv_places[None] != NOWHERE)
    seen &= (window == 0) | (kv_places[None] > q_places[:, None] - window)
    tiles = seen.reshape(len(q_places) // static.tokens, static.tokens, static.blocks, static.keys)
    visited = np.zeros(tiles.shape[0] * static.blocks, bool)
    visited[np.asarray(codes)[: int(count)] // 2] = True
    np.testing.assert_array_equal(visited.reshape(-1, static.blocks), tiles.any(axis=(1, 3)))
    whole = np.asarray(codes)[: int(count)] % 2 == 0
    assert tiles.all(axis=(1, 3)).reshape(-1)[np.asarray(codes)[: int(count)][whole] // 2].all()


@given(
    heads=st.tuples(st.integers(1, 24), st.integers(1, 3)),
    slabs=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    rows=st.sampled_from([128, 256, 1024, 2048]),
)
def test_tiles_and_blocks_cover_everything_once(heads, slabs, rows):
    (g, k), (t, s) = heads, slabs
    q = jax.ShapeDtypeStruct((128 * t, g * k, 128), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((128 * s, k, 256), jnp.bfloat16)
    blocks = {"rows": rows, "keys": 512, "at_once": 256}
    static, parts = tpu.sizes(q, kv, scale=1.0, axis_name="ring", latent=None, blocks=blocks)
    assert parts * static.heads == g * k and g % static.heads == 0
    assert (128 * t) % static.tokens == 0 and static.tokens * static.heads <= max(rows, 128)
    assert static.blocks * static.keys == 128 * s and static.keys <= 512
    assert (static.heads * static.tokens) % static.at_once == 0 and static.at_once <= 256


@pytest.mark.parametrize(
    "change, words",
    [
        ({"heads": (4, 2, 96)}, "head size 96"),
        ({"multiple": 32, "new": (20,)}, "64 queries and 64 keys"),
        ({"heads": (4, 1, 192), "latent": 96}, "latents of 96"),
    ],
)
def test_the_kernel_refuses_what_does_not_fit(change, words):
    case = dataclasses.replace(Case(1, (4, 2, 128), new=(200,)), **change)
    args, kwargs = case.shapes(jnp.bfloat16)
    with pytest.raises(Unfit, match=words):
        mesh = Mesh(np.array(jax.devices()[:1]), (case.axis,), axis_types=(AxisType.Auto,))
        jax.eval_shape(case.over(mesh, partial(ring_attention.using("tpu"), **kwargs)), *args)


def test_rows_of_nobody_are_zeros():
    case = Case(X, (2, 1, 8), new=(9,), multiple=4)
    args, kwargs = case.call(jnp.float32)
    out, lse = over_ring(case, args, kwargs)
    nobody = np.asarray(args[2]) == NOWHERE
    assert nobody.any()
    assert not np.asarray(out)[nobody].any() and (np.asarray(lse)[nobody] < -1e29).all()


@given(
    new=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    devices=st.integers(1, 8),
    multiple=st.sampled_from([1, 8, 128]),
)
def test_every_token_is_in_one_place(new, devices, multiple):
    layout = zigzag(new, devices, multiple=multiple)
    rows = layout.rows[layout.rows != NOWHERE]
    np.testing.assert_array_equal(np.sort(rows), np.arange(sum(new)))
    want = [b * PLACES + p for b, count in enumerate(new) for p in range(count)]
    np.testing.assert_array_equal(np.sort(layout.places[layout.places != NOWHERE]), want)
    assert (layout.places[layout.rows != NOWHERE] >= layout.starts[layout.rows != NOWHERE]).all()
    assert layout.rows.shape == (devices, sum(2 * -(-c // (2 * devices * multiple)) * multiple for c in new))


@settings(max_examples=30)
@given(stripes=st.lists(st.integers(1, 5), min_size=1, max_size=3), devices=st.integers(2, 6))
def test_all_devices_have_the_same_work_at_every_step(stripes, devices):
    """But for the diagonal: where a device meets its own keys, half of two stripes is seen."""
    layout = zigzag([2 * devices * s for s in stripes], devices, multiple=1)

    def seen(d, source):
        q, starts, k = layout.places[d][:, None], layout.starts[d][:, None], layout.places[source][None]
        return int(((starts <= k) & (k <= q)).sum())

    for step in range(devices):
        assert len({seen(d, (d - step) % devices) for d in range(devices)}) == 1


def test_too_many_sequences_are_refused():
    with pytest.raises(ValueError, match="at most 127"):
        zigzag([1] * 128, 2)


def test_the_cost_counts_what_is_seen():
    case = Case(2, (3, 1, 8), new=(12,), context=(4,), multiple=1)
    args, kwargs = case.call(jnp.float32)
    flops, nbytes = cost(*args, **kwargs, devices=2)
    assert flops == 2 * 3 * 16 * sum(range(5, 17))
    assert cost(*args, **kwargs | {"window": 7}, devices=2)[0] == 2 * 3 * 16 * (5 + 6 + 7 * 10)
    assert nbytes == 2 * 16 * 16 * 4 + 2 * 12 * 3 * 8 * 4 + 12 * 3 * 4
