"""Who gives way to whom, and that whoever gives way or is aborted loses nothing and keeps nothing."""

import pytest

from tests.jaxserve.scheduled import STOP, engine, expected, sequence


def test_a_prompt_that_is_half_computed_gives_way_to_a_decoding_sequence():
    world = engine(pages=14, page_size=4, seqs=2, budget=5)
    old, young = sequence([1] * 5, new=40), sequence([2] * 30, new=2)
    world.scheduler.add(old)
    world.step()
    world.scheduler.add(young)
    world.scheduler.max_num_batched_tokens = 2
    while not (plan := world.step()).preempted:
        assert young.owed > 1
    assert plan.preempted == [young] and [c.seq for c in plan.chunks] == [old]
    world.drain(limit=100)


def test_nobody_passes_a_preempted_sequence():
    world = engine(pages=30, page_size=4, seqs=4, budget=4, policy="priority")
    high, low = sequence([1] * 60, new=9), sequence([2] * 60, new=9, priority=1)
    world.scheduler.add(low)
    world.step()
    world.scheduler.add(high)
    assert world.step().preempted == [low]
    high.priority = 1
    world.scheduler.add(sequence([0] * 4, priority=1))
    world.step()
    assert world.scheduler.running == [high]


def test_nobody_passes_a_preempted_sequence_whose_sample_is_unread():
    scheduler = engine(pages=30, page_size=4, seqs=2, policy="priority").scheduler
    low, high, small = (sequence(n, new=9, priority=p) for n, p in ((60, 1), (63, 0), (4, 1)))
    plans = []
    for seq in (low, high, small):
        scheduler.add(seq)
        plans.append(scheduler.schedule())
    assert [plan.admitted for plan in plans] == [[low], [high], []]
    assert plans[1].preempted == [low] and low.in_flight == 1


def test_a_preempted_sequence_gets_its_unread_sample_and_only_then_comes_back():
    world = engine(pages=6, page_size=4, seqs=2, depth=1)
    old, young = sequence([0] * 8, new=16), sequence([1] * 8, new=16)
    world.scheduler.add(old)
    world.scheduler.add(young)
    while not world.step().preempted:
        pass
    assert young.computed == 0 and young.slot is None and old.slot is not None
    world.drain(limit=60)
    assert young.tokens == expected([1] * 8, 24, stops=False)


def test_a_preempted_sequence_finds_its_own_pages_again():
    world = engine(pages=20, page_size=4, seqs=1, policy="priority")
    low, high = sequence([1] * 17, new=4, priority=1), sequence([2] * 4, new=2)
    world.scheduler.add(low)
    world.step()
    world.scheduler.add(high)
    assert world.step().preempted == [low]
    world.step()
    plan = world.step()
    assert plan.admitted == [low] and plan.chunks[0].start == 16
    assert low.num_cached == 0


STATES = ["waiting", "running", "in flight", "preempted", "finished"]


@pytest.mark.parametrize("state", STATES)
def test_an_abort_gives_everything_back_exactly_once(state):
    world = engine(pages=20, page_size=4, seqs=1, policy="priority", depth=1)
    seq = sequence(18, new=3, priority=1)
    world.scheduler.add(seq)
    if state == "in flight":
        world.step()
        world.step()
        assert seq.in_flight == 1
    elif state == "running":
        world.scheduler.max_num_batched_tokens = 8
        world.step()
    elif state == "preempted":
        world.step()
        world.scheduler.add(sequence(3, new=1))
        assert world.step().preempted == [seq]
    elif state == "finished":
        world.drain(limit=10)
    world.scheduler.abort(seq)
    world.scheduler.abort(seq)
    world.drain(limit=10)
    assert world.scheduler.cache.used == 0 and len(world.scheduler._slots) == 1
    assert seq.in_flight == 0


def test_a_sample_read_after_the_end_is_dropped():
    scheduler = engine().scheduler
    seq = sequence(5)
    scheduler.add(seq)
    scheduler.schedule()
    scheduler.schedule()
    assert scheduler.received(seq, STOP)
    scheduler.finish(seq)
    assert not scheduler.received(seq, 1)
    assert seq.tokens[5:] == [STOP]


def test_a_higher_priority_takes_the_slot_of_a_lower_one_but_not_of_its_equal():
    world = engine(seqs=1, policy="priority")
    low, equal, high = (sequence([p] * 6, new=9, priority=p) for p in (1, 1, 0))
    world.scheduler.add(low)
    world.step()
    world.scheduler.add(equal)
    assert world.step().preempted == []
    world.scheduler.add(high)
    plan = world.step()
    assert plan.preempted == [low] and plan.admitted == [high]
    assert world.scheduler.waiting == [low, equal]


def test_a_higher_priority_takes_the_pages_of_the_lowest_and_youngest_first():
    world = engine(pages=12, page_size=4, seqs=8, policy="priority")
    first, second, lowest = (sequence([i] * 11, new=1 + 8, priority=p) for i, p in enumerate((1, 1, 2)))
    for seq in (first, second, lowest):
        world.scheduler.add(seq)
    assert world.step().admitted == [first, second, lowest]
    for victim in (lowest, second):
        high = sequence([2] * 11, new=5)
        world.scheduler.add(high)
        plan = world.step()
        assert plan.preempted == [victim] and plan.admitted == [high]


def test_nobody_is_preempted_for_one_who_would_not_fit_even_so():
    world = engine(pages=12, page_size=4, policy="priority")
    equal, low = sequence([0] * 20, new=8), sequence([1] * 8, new=8, priority=1)
    world.scheduler.add(equal)
    world.scheduler.add(low)
    world.step()
    world.scheduler.add(sequence([2] * 36, new=4))
    assert world.step().preempted == []


def test_first_come_first_served_ignores_priorities():
    world = engine(seqs=1)
    first, second = sequence(4, priority=5), sequence(4, priority=0)
    world.scheduler.add(first)
    world.scheduler.add(second)
    assert world.step().admitted == [first]
    assert world.step().preempted == []
