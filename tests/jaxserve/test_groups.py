"""Groups of devices with sequences of their own: who gets what, and long prompts that several compute together."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.groups import GroupedScheduler
from jaxserve.scheduler import Plan, Scheduler
from jaxserve.sequence import Sequence
from kv import KVCache

BUDGET, PAGE = 8, 4


def grouped(groups: int, context: int = 1, pages: int = 40, slots: int = 3) -> GroupedScheduler:
    whole = context * BUDGET if context > 1 else 0
    made = [Scheduler(KVCache(pages, PAGE), slots, BUDGET, longest_whole=whole) for _ in range(groups)]
    return GroupedScheduler(made, context)


def sequence(tokens: list[int], new: int = 3, **fields) -> Sequence:
    return Sequence("r", list(tokens), len(tokens) + new, **fields)


def read(scheduler: GroupedScheduler, plan: Plan) -> None:
    """The step was computed: samples arrive, and who has all of its own ends."""
    for chunk in plan.chunks:
        chunk.seq.checked = chunk.start + chunk.count
        if chunk.samples and scheduler.received(chunk.seq, 7) and len(chunk.seq.tokens) == chunk.seq.max_len:
            scheduler.finish(chunk.seq)


def test_new_sequences_go_where_there_is_least_to_do():
    scheduler = grouped(3)
    seqs = [sequence([i] * n) for i, n in enumerate((20, 3, 4, 2))]
    for seq in seqs:
        scheduler.add(seq)
    assert [seq.group for seq in seqs] == [0, 1, 2, 1]
    assert {chunk.seq.group for chunk in scheduler.schedule().chunks} == {0, 1, 2}


def test_a_choice_joins_its_leader_and_a_known_beginning_its_pages():
    scheduler = grouped(2)
    first = sequence(range(12))
    scheduler.add(first)
    while not first.done:
        read(scheduler, scheduler.schedule())
    busy = sequence([9] * 6, new=8)
    scheduler.add(busy)
    again = sequence(range(12))
    choice = sequence(range(12), leader=again)
    scheduler.add(again)
    scheduler.add(choice)
    assert busy.group == again.group == choice.group == first.group == 0, "12 tokens of it are cached there"
    assert scheduler.renewed().groups[0].cache.cached == 0


def test_a_long_prompt_is_one_step_and_every_other_step_is_ordinary():
    scheduler = grouped(2, context=2)
    running, longs = sequence([1] * 4, new=9), [sequence([n] * 15) for n in (2, 3)]
    scheduler.add(running)
    read(scheduler, scheduler.schedule())
    for seq in longs:
        scheduler.add(seq)
    sizes = []
    for _ in range(5):
        plan = scheduler.schedule()
        sizes.append([(chunk.seq is running, chunk.count) for chunk in plan.chunks])
        read(scheduler, plan)
    assert sizes[0] == [(False, 15)] and sizes[2] == [(False, 15)]
    assert (True, 1) in sizes[1] and all(count == 1 for _, count in sizes[1])


def test_what_is_longer_still_or_partly_cached_goes_in_chunks():
    scheduler = grouped(2, context=2)
    for tokens in ([1] * 17, list(range(15))):
        first = sequence(tokens)
        scheduler.add(first)
        counts = []
        while not first.done:
            plan = scheduler.schedule()
            counts += [chunk.count for chunk in plan.chunks]
            read(scheduler, plan)
        assert max(counts) == (BUDGET if len(tokens) > 16 else 15)
    again = sequence([*range(12), 90, 91, 92, 93, 94, 95, 96, 97, 98, 99])
    scheduler.add(again)
    assert scheduler.schedule().chunks[0].count <= BUDGET and again.num_cached == 12


@settings(max_examples=60)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=12),
    context=st.sampled_from([1, 2, 4]),
    pages=st.integers(12, 40),
)
def test_every_sequence_finishes_and_every_page_comes_home(prompts, context, pages):
    scheduler = grouped(4, context, pages)
    seqs = [sequence([i % 5] * length, new) for i, (length, new) in enumerate(prompts)]
    for seq in seqs:
        scheduler.add(seq)
    for _ in range(2000):
        if all(seq.done for seq in seqs):
            break
        plan = scheduler.schedule()
        whole = [chunk for chunk in plan.chunks if chunk.count > BUDGET]
        for group in range(0, 4, context):
            mine = [chunk for chunk in plan.chunks if chunk.seq.group // context == group // context]
            assert not any(chunk in whole for chunk in mine) or len(mine) == 1, "one prompt, alone"
        assert not whole or len(whole) == len(plan.chunks)
        read(scheduler, plan)
    assert all(seq.done for seq in seqs)
    assert all(group.cache.used == 0 and not group.running for group in scheduler.groups)
