"""Placements hold every expert, keep to their slots, even out skewed loads, and are the same each time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.balance import Placement, place, place_within, settled


def zipf(experts: int, power: float, seed: int) -> np.ndarray:
    """Rows of each expert when the router's taste follows Zipf's law, in random order."""
    loads = np.random.default_rng(seed).permutation((1.0 + np.arange(experts)) ** -power)
    return np.floor(loads / loads.sum() * 1e6)


SHAPES = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))


@given(shape=SHAPES, groups=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_every_expert_has_a_place_and_every_slot_an_expert(shape, groups, data):
    hosts, each, share, spare = shape
    devices, experts = hosts * each, 8 * share
    slots = -(-experts // devices) + spare
    loads = np.array(data.draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)))
    found = place(loads, devices, slots, hosts=hosts, groups=groups)
    copies = found.copies(experts)
    assert found.slots.shape == (devices, slots) and (copies >= 1).all()
    np.testing.assert_array_equal(found.slots, place(loads, devices, slots, hosts=hosts, groups=groups).slots)
    assert found.device_loads(loads).sum() == pytest.approx(loads.sum())
    table, count = found.table(experts)
    for e in range(experts):
        own = table[e, : count[e]]
        assert len(set(own)) == count[e] and (found.slots.ravel()[own] == e).all()
        assert set(table[e]) == set(own)
    if groups % hosts == 0 and hosts > 1 and experts // hosts <= each * slots:
        homes = [set(np.flatnonzero((found.slots == e).any(axis=1)) // each) for e in range(experts)]
        assert all(len(home) == 1 for home in homes)
        for group in np.split(np.array([min(home) for home in homes]), groups):
            assert len(set(group)) == 1


@settings(max_examples=20)
@given(
    power=st.floats(0.3, 1.4),
    seed=st.integers(0, 999),
    shape=st.sampled_from([(8, 64), (16, 128), (32, 256)]),
)
def test_zipf_loads_are_even_with_a_quarter_of_the_slots_spare(power, seed, shape):
    devices, experts = shape
    loads = zipf(experts, power, seed)
    plain = Placement(np.arange(experts).reshape(devices, -1))
    found = place(loads, devices, experts // devices * 5 // 4)
    assert found.imbalance(loads) <= min(1.15, plain.imbalance(loads))
    assert found.imbalance(loads) == pytest.approx(found.device_loads(loads).max() / (loads.sum() / devices))


@given(power=st.floats(0.0, 2.0), seed=st.integers(0, 99), bound=st.sampled_from([1.02, 1.15, 1.5]))
@settings(max_examples=15)
def test_no_more_slots_than_the_bound_needs(power, seed, bound):
    loads = zipf(32, power, seed)
    found = place_within(loads, 8, bound)
    assert found.imbalance(loads) <= bound + 1e-9
    slots = found.slots.shape[1]
    assert slots == 4 or place(loads, 8, slots - 1).imbalance(loads) > bound


@settings(max_examples=20)
@given(seed=st.integers(0, 999), power=st.floats(0.5, 1.3), hosts=st.sampled_from([1, 2]))
def test_hot_experts_are_on_as_many_devices_as_they_have_copies(seed, power, hosts):
    loads = zipf(64, power, seed)
    found = place(loads, 8, 10, hosts=hosts, groups=8)
    assert all(len(set(own)) == len(own) for own in found.slots)
    assert np.argmax(found.copies(64)) == np.argmax(loads) or hosts > 1 or found.copies(64).max() == 1


def test_whole_groups_on_a_host_cost_balance_only_within_reason():
    loads = zipf(256, 0.8, 3)
    near, anywhere = (place(loads, 32, 9, hosts=h, groups=8).imbalance(loads) for h in (4, 1))
    assert anywhere <= 1.05 and anywhere <= near <= 1.6


@settings(max_examples=30)
@given(a=st.integers(0, 99), b=st.integers(0, 99), hosts=st.sampled_from([1, 2]))
def test_what_can_stay_stays(a, b, hosts):
    old, new = (place(zipf(64, 1.0, seed), 8, 10, hosts=hosts, groups=8) for seed in (a, b))
    found, moves = settled(new, old, hosts=hosts)
    assert sorted(map(sorted, found.slots.tolist())) == sorted(map(sorted, new.slots.tolist()))
    assert moves == (found.slots != old.slots).sum() <= (new.slots != old.slots).sum()
    again, none = settled(found, found, hosts=hosts)
    assert none == 0
    np.testing.assert_array_equal(again.slots, found.slots)


def test_too_few_slots_are_refused_with_what_would_do():
    with pytest.raises(ValueError, match=r"8 devices of 3 slots hold 24 experts, not 32; use 4 slots"):
        place(np.ones(32), 8, 3)
    with pytest.raises(ValueError, match="3 hosts must divide 8 devices"):
        place(np.ones(32), 8, 4, hosts=3)
