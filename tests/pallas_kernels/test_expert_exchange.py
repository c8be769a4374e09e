"""Rows reach their experts and come home, whatever the counts, and a token does not depend on the mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.expert_exchange import cases, combine, expert_exchange, fp8_rows, tpu
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.op import Unfit

X, GROUPS, T, ROW = 4, 2, 6, (3,)


def mesh_of(**sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes), (AxisType.Auto,) * len(sizes))


def spread(fn, axes=("expert",)):
    """`fn` over all devices, jitted; arguments and results are all devices' one after the other."""
    mesh = mesh_of(**{axes[0]: X}) if len(axes) == 1 else mesh_of(**dict.fromkeys(axes, 2))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False))


def there_and_back(axes, max_rows, rows, counts):
    arrived, received = expert_exchange(rows, counts, axis_name=axes, max_rows=max_rows)
    home, again = expert_exchange(arrived, received, axis_name=axes, max_rows=rows.shape[0], back=True)
    return arrived, received, home, again


ROUND_TRIP = spread(partial(there_and_back, "expert", X * T))
SHORT = spread(partial(there_and_back, "expert", T))


def pieces(rows, counts):
    """What should arrive at each device, piece by piece, from the words of the definition."""
    sent = {}
    for s in range(X):
        ends = np.cumsum(counts[s].reshape(-1)).reshape(X, GROUPS)
        for d in range(X):
            for g in range(GROUPS):
                sent[s, d, g] = rows[s, ends[d, g] - counts[s, d, g] : ends[d, g]]
    return [np.concatenate([sent[s, d, g] for g in range(GROUPS) for s in range(X)]) for d in range(X)]


def check_round_trip(run, counts):
    rows = np.random.default_rng(0).normal(size=(X, T, *ROW)).astype(np.float32)
    results = run(rows.reshape(-1, *ROW), counts.reshape(-1, GROUPS))
    arrived, received, home, again = (np.asarray(x).reshape(X, -1, *x.shape[1:]) for x in results)
    for d, want in enumerate(pieces(rows, counts)):
        np.testing.assert_array_equal(arrived[d, : len(want)], want[: arrived.shape[1]])
        np.testing.assert_array_equal(received[d], counts[:, d])
        used = counts[d].sum()
        if max(counts.sum(axis=(0, 2))) <= arrived.shape[1]:
            np.testing.assert_array_equal(home[d, :used], rows[d, :used])
    np.testing.assert_array_equal(again, counts)


@st.composite
def any_counts(draw):
    """[X, X, GROUPS], each source's at most T."""
    owners = draw(st.lists(st.lists(st.integers(0, X * GROUPS - 1), max_size=T), min_size=X, max_size=X))
    return np.stack([np.bincount(o, minlength=X * GROUPS) for o in map(np.int64, owners)]).astype(np.int32)


@settings(max_examples=40)
@given(any_counts())
def test_any_counts_arrive_in_order_and_come_home(counts):
    check_round_trip(ROUND_TRIP, counts.reshape(X, X, GROUPS))


@pytest.mark.parametrize("owner", [0, 3, 7])
def test_all_rows_of_all_devices_may_be_for_one_group(owner):
    counts = np.zeros((X, X * GROUPS), np.int32)
    counts[:, owner] = T
    check_round_trip(ROUND_TRIP, counts.reshape(X, X, GROUPS))


def test_rows_without_room_are_dropped_and_the_counts_tell():
    counts = np.zeros((X, X * GROUPS), np.int32)
    counts[:, 1] = T
    check_round_trip(SHORT, counts.reshape(X, X, GROUPS))


def test_experts_may_be_spread_over_two_mesh_axes():
    counts = np.random.default_rng(1).multinomial(T, [1 / 8] * 8, size=X).astype(np.int32)
    run = spread(partial(there_and_back, ("a", "b"), X * T), axes=("a", "b"))
    check_round_trip(run, counts.reshape(X, X, GROUPS))


def test_counts_that_do_not_fit_the_mesh_are_refused():
    with pytest.raises(ValueError, match="one row a device"):
        SHORT(np.zeros((X * T, *ROW), np.float32), np.zeros((X * 3, GROUPS), np.int32))


EXPERTS, CHOSEN, D, F = 8, 3, 16, 8


def experts_layer(x, chosen, weights, w):
    """A mixture of experts over the mesh axis: x and chosen are this device's tokens, w its experts."""
    t, devices = x.shape[0], jax.lax.axis_size("expert")
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    counts = jnp.bincount(flat, length=EXPERTS).astype(jnp.int32).reshape(devices, -1)
    exchange = partial(expert_exchange, axis_name="expert")
    rows, received = exchange(x[order // CHOSEN], counts, max_rows=devices * t * CHOSEN)
    results = grouped_matmul(rows, w, jnp.sum(received, axis=0, dtype=jnp.int32))
    home, _ = exchange(results, received, max_rows=t * CHOSEN, back=True)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    return combine(home, places.reshape(t, CHOSEN).astype(jnp.int32), weights)


@pytest.mark.supports("parallel", "experts over chips: tokens do not depend on the mesh")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_does_not_depend_on_the_mesh(dtype):
    """Products of small whole numbers are exact in any order; of their weighted sums, a compiler may fuse the last."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.integers(-2, 3, size=(12, D)), dtype)
    chosen = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(12)]).astype(np.int32)
    weights = rng.uniform(size=(12, CHOSEN)).astype(np.float32)
    w = jnp.asarray(rng.integers(-2, 3, size=(EXPERTS, F, D)), dtype)
    by_hand = np.zeros((12, F), np.float32)
    for t in range(12):
        for j, e in enumerate(chosen[t]):
            by_hand[t] += weights[t, j] * np.asarray((w[e] @ x[t]).astype(dtype), np.float32)
    answers = []
    for devices in (1, 2, 4):
        axis = P("expert")
        layer = jax.shard_map(
            experts_layer, mesh=mesh_of(expert=devices), in_specs=(axis,) * 4, out_specs=axis, check_vma=False
        )
        answers.append(np.asarray(jax.jit(layer)(x, chosen, weights, w), np.float32))
    np.testing.assert_allclose(answers[0], by_hand, rtol=2e-2, atol=2e-2)
    for answer in answers[1:]:
        np.testing.assert_allclose(answer, answers[0], rtol=1e-6, atol=4e-6)


def test_a_weight_of_zero_leaves_its_row_out():
    rows = jnp.array([[1.0, 2.0], [jnp.nan, jnp.nan]])
    out = combine(rows, jnp.array([[0, 1]], jnp.int32), jnp.array([[2.0, 0.0]]))
    np.testing.assert_array_equal(out, [[2.0, 4.0]])


def test_fp8_rows_keep_three_bits_and_their_range():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5, 256)) * np.array([[1e-6], [1.0], [3e4], [0.0], [7.0]])
    rows = jnp.asarray(rows, jnp.float32)
    lines = fp8_rows.packed(rows)
    assert lines.shape == (5, 3, 128) and lines.dtype == jnp.uint8
    back = np.asarray(fp8_rows.unpacked(lines, jnp.float32))
    largest = np.abs(rows).max(axis=1, keepdims=True)
    assert (np.abs(back - rows) <= np.maximum(np.abs(rows) * 2.0**-4, largest * 2.0**-9 / 448)).all()


def test_the_race_detector_sees_two_devices_write_one_place(monkeypatch, caplog):
    """What the walk over kernels relies on."""
    right = tpu.routes

    def all_to_the_first_place(*args):
        route, received = right(*args)
        return route._replace(place=jnp.zeros_like(route.place)), received

    monkeypatch.setattr(tpu, "routes", all_to_the_first_place)
    case = cases.TINY["there"]
    args, kwargs = case.call(jnp.float32)
    kernel = case.over(mesh_of(expert=4), partial(tpu.expert_exchange, **kwargs))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, on_race="warn")):
        jax.block_until_ready(jax.jit(kernel)(*args))
    assert "RACE DETECTED" in caplog.text
    pltpu.reset_tpu_interpret_mode_state()


def test_rows_that_are_not_whole_lines_are_refused():
    with pytest.raises(Unfit, match="pad the row"):
        tpu.expert_exchange(jnp.zeros((4, 96)), jnp.zeros((1, 1), jnp.int32), axis_name="x", max_rows=4)


def test_xlas_own_collective_lowers_for_gpus():
    """CPUs cannot run it; what it is given are the offsets that the other forms use."""
    case = cases.TINY["there"]
    args, kwargs = case.call(jnp.float32)
    call = jax.jit(case.over(mesh_of(expert=4), partial(expert_exchange.using("gpu"), **kwargs)))
    text = call.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "ragged_all_to_all" in text
