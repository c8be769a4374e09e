"""Experts divided over devices give what one device gives, whoever the router sends the tokens to."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxserve.layers.moe import experts
from sharding import experts as dividing
from sharding.mesh import ModelSizes, Topology
from sharding.rules import batch_axes, only, spec

E, T, K, D, F = 8, 6, 3, 8, 16  # T tokens of each group of devices
MODEL = ModelSizes("tiny", heads=8, kv_heads=8, ffn=F, vocab=64, experts=E)
RUN = partial(experts, clamp=(2.0, 1.0))


def weights_of_experts(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {
        "gate": (E, F, D),
        "up": (E, F, D),
        "down": (E, D, F),
        "gate_bias": (E, F),
        "up_bias": (E, F),
        "down_bias": (E, D),
    }
    return {name: jnp.asarray(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()}


def tokens(groups: int, ids: np.ndarray, seed: int = 1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((groups * T, D), np.float32)
    weights = rng.random((groups * T, K), np.float32) * (ids < E)
    return jnp.asarray(x), jnp.asarray(ids, jnp.int32), jnp.asarray(weights)


def by_definition(x, ids, weights, w) -> np.ndarray:
    """Every token alone, in numpy."""
    x, ids, weights = (np.asarray(a, np.float64) for a in (x, ids, weights))
    w = {name: np.asarray(part, np.float64) for name, part in w.items()}
    out = np.zeros(x.shape)
    for t, chosen in enumerate(ids.astype(int)):
        for e, weight in zip(chosen, weights[t], strict=True):
            if e < E:
                gate = np.minimum(w["gate"][e] @ x[t] + w["gate_bias"][e], 2)
                up = np.clip(w["up"][e] @ x[t] + w["up_bias"][e], -2, 2)
                fed = (up + 1) * gate / (1 + np.exp(-gate))
                out[t] += weight * (w["down"][e] @ fed + w["down_bias"][e])
    return out


def on_mesh(mesh, w, **options):
    """The mixture over the mesh, each group with its rows, as a step runs it."""
    groups = batch_axes(mesh)
    specs = {name: spec(mesh, part.shape, dividing.WEIGHT_AXES[name]) for name, part in w.items()}

    def of_group(x, ids, weights, w):
        out, dropped, sent = dividing.mixture(RUN, x, ids, weights, w, E, **options)
        return out, dropped[None], sent[None]

    def run(x, ids, weights, w):
        if not groups:
            return of_group(x, ids, weights, w)
        inside = {name: only(s, groups) for name, s in specs.items()}
        rows = P(groups)
        return jax.shard_map(
            of_group,
            in_specs=(rows, rows, rows, inside),
            out_specs=(rows, rows, rows),
            axis_names=set(groups),
            check_vma=False,
        )(x, ids, weights, w)

    placed = {name: jax.device_put(part, jax.NamedSharding(mesh, specs[name])) for name, part in w.items()}
    jitted = jax.jit(run)

    def call(x, ids, weights):
        with jax.set_mesh(mesh):
            return jitted(x, ids, weights, placed)

    def text(*args) -> str:
        with jax.set_mesh(mesh):
            return jitted.lower(*args, placed).compile().as_text() or ""

    call.text = text
    return call


def random_ids(groups: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(E)[:K] for _ in range(groups * T)])


TOPOLOGIES = [
    Topology(tensor=4),
    Topology(expert=8),
    Topology(data=2, expert=4),
    Topology(expert=1, tensor=8),
    Topology(expert=2, tensor=4),
    Topology(data=2, expert=2, tensor=2),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_the_mixture_on_a_mesh_is_that_of_one_device(topology):
    mesh, w = topology.mesh(MODEL), weights_of_experts()
    ids = random_ids(topology.groups, 2)
    ids[1], ids[-2:, 1:] = E, E  # padding, and tokens with fewer experts
    args = tokens(topology.groups, ids)
    out, dropped, sent = on_mesh(mesh, w)(*args)
    np.testing.assert_allclose(out, by_definition(*args, w), rtol=1e-4, atol=1e-4)
    assert not np.any(dropped)
    devices = topology.expert_devices(MODEL)
    chosen = np.bincount(ids[ids < E] * devices // E, minlength=devices)
    np.testing.assert_array_equal(np.sum(sent, axis=0), chosen)


EIGHT = Topology(expert=8).mesh(MODEL)
W = weights_of_experts()


@pytest.fixture(scope="module")
def in_rounds():
    """The mixture over eight devices where no device makes room for the worst case."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dividing, "ONE_ROUND", 0)
        patch.setattr(dividing, "SPREAD", 0)
        run = on_mesh(EIGHT, W)
        run(*tokens(8, random_ids(8, 0)))
        yield run


@settings(max_examples=12)
@given(favourite=st.integers(0, E - 1), share=st.floats(0, 1), seed=st.integers(0, 9))
def test_no_token_is_lost_however_uneven_the_routing(in_rounds, favourite, share, seed):
    """Any part of the tokens goes to the same expert, in as many rounds as it takes."""
    ids, rng = random_ids(8, seed), np.random.default_rng(seed)
    for row in ids:
        if favourite not in row and rng.random() < share:
            row[rng.integers(K)] = favourite
    args = tokens(8, ids)
    out, dropped, _ = in_rounds(*args)
    np.testing.assert_allclose(out, by_definition(*args, W), rtol=1e-4, atol=1e-4)
    assert not np.any(dropped)


def test_a_capacity_drops_what_is_over_it_and_counts_it():
    """Each device gives room for 3 rows to every other: T * K / 8 of an even routing, times 1.3."""
    ids = np.full((8 * T, K), E)
    ids[:T, 0] = 5  # all six tokens of the first group go to expert 5, one a token
    ids[T:, 0] = np.arange(7 * T) % E
    args = tokens(8, ids)
    out, dropped, _ = on_mesh(EIGHT, W, capacity=1.3)(*args)
    assert np.asarray(dropped).tolist() == [T - 3] + [0] * 7
    expected = by_definition(*args, W)
    expected[3:T] = 0
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def collectives(text: str, kind: str) -> list[str]:
    return [line for line in text.splitlines() if f" {kind}(" in line or f" {kind}-start(" in line]


def test_tokens_go_by_an_all_to_all_and_are_gathered_nowhere():
    text = on_mesh(EIGHT, W).text(*tokens(8, random_ids(8, 0)))
    assert any("f32" in line for line in collectives(text, "all-to-all"))
    gathered = collectives(text, "all-gather")
    assert gathered and all("s32" in line and "f32" not in line for line in gathered), (
        "only counts are gathered"
    )


def test_rows_travel_in_eight_bits_if_asked():
    """To the third digit: three bits after the first."""
    wide = 128
    rng = np.random.default_rng(0)
    shapes = {"gate": (E, F, wide), "up": (E, F, wide), "down": (E, wide, F)}
    w = {name: jnp.asarray(rng.standard_normal(shape, np.float32) / 8) for name, shape in shapes.items()}
    _, ids, weights = tokens(8, random_ids(8, 0))
    x = jnp.asarray(rng.standard_normal((8 * T, wide), np.float32))
    plain, small = on_mesh(EIGHT, w), on_mesh(EIGHT, w, fp8=True)
    exact, near = np.asarray(plain(x, ids, weights)[0]), np.asarray(small(x, ids, weights)[0])
    assert 0 < np.abs(near - exact).max() < 0.1 * np.abs(exact).max()
    sent = collectives(small.text(x, ids, weights), "all-to-all")
    assert any("u8[" in line for line in sent)
