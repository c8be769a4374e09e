"""Experts copied to other devices are what they were, in their new slots, on every mesh and in every stack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.balance import Placement, place, settled
from sharding.experts import Copies, to_slots
from sharding.mesh import ModelSizes, Topology, size
from sharding.moves import Slots, dealt, sources
from sharding.rules import expert_axes, spec

E, F, D = 16, 4, 6
MODEL = ModelSizes("tiny", heads=8, kv_heads=8, ffn=F, vocab=64, experts=E)


@pytest.mark.parametrize("stacked", [False, True], ids=["layer", "stack"])
@pytest.mark.parametrize(
    "topology",
    [Topology(data=2, expert=4), Topology(expert=2, tensor=4), Topology(data=2, expert=2, tensor=2)],
    ids=str,
)
def test_a_layer_in_its_new_order(topology, stacked):
    mesh, rng = topology.mesh(MODEL), np.random.default_rng(0)
    ways = size(mesh, expert_axes(mesh, E))
    values = rng.standard_normal((3, E, F, D), np.float32)
    where = NamedSharding(mesh, P(None, *spec(mesh, (E, F, D), ("experts", "ffn", None))))
    stack = jax.device_put(values, where)
    leaf = stack if stacked else jax.device_put(values[1], NamedSharding(mesh, P(*where.spec[1:])))
    old = np.arange(E).reshape(ways, -1)
    new = rng.permutation(np.tile(np.arange(E // 2), 2)).reshape(ways, -1)  # half of them, twice
    order = sources(new, old)
    slots = Slots([leaf], stacked=stacked)
    rows, moved = dealt(slots.apart([leaf], 1), order.tolist())
    crossed = (order // old.shape[1] != np.arange(E) // old.shape[1]).sum()
    shares = 1 if stack.sharding.spec[2] else mesh.size // ways  # each device has all of an expert, or a part
    assert moved == crossed * F * D * 4 * (topology.data if shares == 1 else shares)
    (after,) = slots.together([leaf], rows, 1)
    assert after.sharding.is_equivalent_to(leaf.sharding, leaf.ndim) and leaf.is_deleted() == stacked
    expected = np.stack([values[0], values[1][new.ravel()], values[2]])
    np.testing.assert_array_equal(after, expected if stacked else expected[1])


def test_what_a_device_has_is_not_fetched_from_another():
    loads = np.random.default_rng(1).zipf(1.5, 32)
    old = place(np.ones(32), 8, 5)
    new, changed = settled(place(loads, 8, 5), old)
    order = sources(new.slots, old.slots)
    np.testing.assert_array_equal(old.slots.ravel()[order], new.slots.ravel())
    stays = new.slots.ravel() == old.slots.ravel()
    np.testing.assert_array_equal(order[stays], np.flatnonzero(stays))
    for slot in np.flatnonzero(~stays):
        device = slot // 5
        assert (order[slot] // 5 == device) == (new.slots.ravel()[slot] in old.slots[device])
    assert changed == (~stays).sum()


def test_rows_take_the_copies_of_an_expert_in_turns():
    placement = Placement(np.array([[0, 1, 2], [0, 3, 2], [0, 4, 5], [6, 7, 0]]))
    copies = Copies(*map(jnp.asarray, placement.table(8, 4)))
    ids = jnp.asarray(np.stack([np.zeros(40), np.full(40, 2), np.arange(40) % 9], axis=1), jnp.int32)
    with jax.sharding.use_abstract_mesh(Topology(expert=4).mesh(MODEL).abstract_mesh):
        slots = np.asarray(to_slots(ids, copies, 12))
    assert (slots[np.asarray(ids) == 8] == 12).all(), "no expert has no slot"
    real = np.asarray(ids) < 8
    np.testing.assert_array_equal(placement.slots.ravel()[slots[real]], np.asarray(ids)[real])
    assert np.bincount(slots[:, 0]).tolist() == [10, 0, 0, 10, 0, 0, 10, 0, 0, 0, 0, 10]
    assert np.bincount(slots[:, 1]).tolist() == [0, 0, 20, 0, 0, 20]
