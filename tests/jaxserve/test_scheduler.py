"""Every sequence finishes with its own tokens, whatever the traffic; nobody is starved, no page is lost."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Sequence
from kv import KVCache
from tests.jaxserve.scheduled import Engine, engine, expected, sequence


@dataclass
class Arrival:
    step: int
    prompt: list[int]
    new: int
    priority: int
    salt: str
    skip_prefix: bool
    choices: int
    abort_at: int | None


PROMPTS = st.builds(
    lambda head, tail: [0, 1, 2, 1] * head + tail,
    st.integers(0, 4),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        prompt=PROMPTS,
        new=st.integers(1, 12),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "x"]),
        skip_prefix=st.booleans(),
        choices=st.integers(1, 3),
        abort_at=st.none() | st.integers(0, 40),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=300, deadline=None)
@given(
    arrivals=ARRIVALS,
    page_size=st.integers(1, 4),
    spare=st.integers(0, 12),
    seqs=st.integers(1, 5),
    budget=st.integers(0, 20),
    policy=st.sampled_from(["fcfs", "priority"]),
    depth=st.integers(0, 2),
    stops=st.booleans(),
    caching=st.booleans(),
)
def test_every_sequence_finishes_with_its_own_tokens_and_every_page_comes_home(
    arrivals, page_size, spare, seqs, budget, policy, depth, stops, caching
):
    largest = max(len(a.prompt) + a.new for a in arrivals)
    cache = KVCache(1 + -(-largest // page_size) + spare, page_size, caching)
    world = Engine(Scheduler(cache, seqs, seqs + budget, policy), depth, stops)
    born: list[tuple[Arrival, Sequence]] = []
    for step in range(41):
        for a in arrivals:
            if a.step == step:
                leader = None
                for index in range(a.choices):
                    seq = sequence(
                        a.prompt, a.new, priority=a.priority, salt=a.salt,
                        skip_prefix=a.skip_prefix, index=index, leader=leader,
                    )  # fmt: skip
                    leader = leader or seq
                    world.scheduler.add(seq)
                    born.append((a, seq))
        for a, seq in born:
            if a.abort_at == step:
                world.scheduler.abort(seq)
        world.check_pages()
        world.step()
    world.drain(limit=3 * sum(seq.max_len for _, seq in born) + 10)
    for a, seq in born:
        whole = expected(a.prompt, seq.max_len, stops)
        assert seq.tokens == (whole if a.abort_at is None else whole[: len(seq.tokens)])
        assert seq.in_flight == 0 and seq.done
    assert cache.used == 0 and cache.free + cache.cached == cache.num_pages - 1


@pytest.mark.parametrize("depth", [0, 1])
def test_sequences_that_outgrow_the_cache_together_take_turns_without_thrashing(depth):
    world = engine(pages=12, page_size=4, seqs=4, budget=16, depth=depth)
    family = [sequence([i, i, i, i], new=40) for i in range(4)]
    for seq in family:
        world.scheduler.add(seq)
    steps = world.drain(limit=4 * 44 + 20)
    assert world.scheduler.preemptions <= 8
    assert steps < 4 * 44 and all(len(seq.tokens) == 44 for seq in family)


@pytest.mark.parametrize("depth", [0, 1])
def test_beside_a_huge_prefill_short_prompts_get_in_and_decodes_go_on(depth):
    world = engine(pages=10_000, page_size=16, seqs=32, budget=512, depth=depth)
    decoding = [sequence([i], new=2000) for i in range(8)]
    for seq in decoding:
        world.scheduler.add(seq)
    world.step()
    huge = sequence([7] * 131_072, new=1)
    world.scheduler.add(huge)
    world._launch = lambda plan: world.unread.append(plan.chunks)
    world.texts = {seq: [0] * 131_073 for seq in [*decoding, huge]}
    for _ in range(10):
        short, medium = sequence([8] * 100, new=1), sequence([9] * 600, new=1)
        for seq in (short, medium):
            world.texts[seq] = [0] * 1000
            world.scheduler.add(seq)
        for step in range(5):
            before = huge.computed
            plan = world.step()
            assert {c.seq for c in plan.chunks} >= {*decoding}
            assert huge.computed - before >= (512 - 8) // 2
            assert step < 1 or short.computed == 100
        assert medium.computed == 600


def test_equal_prompts_are_finished_one_after_the_other():
    world = engine(seqs=4, budget=40)
    first, second = sequence([1] * 60), sequence([2] * 60)
    world.scheduler.add(first)
    world.scheduler.add(second)
    assert [(c.seq, c.count) for c in world.step().chunks] == [(first, 40)]
    assert [(c.seq, c.count) for c in world.step().chunks] == [(first, 20), (second, 20)]


def test_a_shorter_prompt_inside_is_served_though_one_outside_finds_no_room():
    world = engine(pages=40, page_size=4, seqs=2, budget=40)
    long, inside, outside = sequence([1] * 90), sequence([2] * 50), sequence([0] * 8)
    for newcomers in ([long, inside], [outside]):
        for seq in newcomers:
            world.scheduler.add(seq)
        assert [(c.seq, c.count) for c in world.step().chunks] == [(inside, 20), (long, 20)]


def test_a_short_prompt_does_not_pass_a_higher_priority():
    world = engine(seqs=4, budget=40, policy="priority")
    for seq in (long := sequence([1] * 60), sequence([2] * 8, priority=1)):
        world.scheduler.add(seq)
    assert [(c.seq, c.count) for c in world.step().chunks] == [(long, 40)]


@pytest.mark.parametrize("prompt, enters", [(20, True), (24, False)])
def test_who_enters_leaves_a_page_for_itself_and_for_each_that_runs(prompt, enters):
    world = engine(pages=10, page_size=4)
    running, newcomer = sequence([1] * 8, new=9), sequence([2] * prompt, new=9)
    world.scheduler.add(running)
    world.step()
    world.scheduler.add(newcomer)
    assert (newcomer in world.step().admitted) == enters


def test_a_long_prompt_that_waits_for_room_is_not_overtaken_for_ever():
    world = engine(pages=20, page_size=4, seqs=8, budget=64)
    world.scheduler.add(sequence([1] * 40, new=8))
    world.step()
    long = sequence([2] * 60, new=4)
    world.scheduler.add(long)
    for i in range(12):
        world.scheduler.add(sequence([i] * 8, new=8))
        world.step()
        if long.computed:
            return
    raise AssertionError("the long prompt never got in")


def test_a_prompt_that_can_never_fit_is_known_at_once_and_blocks_nobody():
    world = engine(pages=4, page_size=4)
    assert not world.scheduler.cache.fits(17)
    with pytest.raises(AssertionError, match="max_len=21 > 16"):
        world.scheduler.add(sequence(17))
    world.scheduler.add(sequence(8))
    assert world.drain(limit=10) == 4


def test_the_last_token_is_not_computed():
    world = engine()
    seq = sequence(5, new=2)
    world.scheduler.add(seq)
    assert [(c.start, c.count, c.samples) for c in world.step().chunks] == [(0, 5, True)]
    assert [(c.start, c.count, c.samples) for c in world.step().chunks] == [(5, 1, True)]
    assert seq.done and world.step().chunks == []


def test_the_other_choices_wait_for_the_first_ones_prompt_and_share_it():
    world = engine(page_size=4, budget=16)
    first = sequence(20, new=6)
    others = [sequence(20, new=6, leader=first, index=i) for i in (1, 2)]
    late = sequence([2] * 3, new=1)
    for seq in (first, *others, late):
        world.scheduler.add(seq)
    assert [world.step().admitted for _ in range(3)] == [[first, late], [], others]
    assert [seq.num_cached for seq in (first, *others)] == [0, 16, 16]


def test_only_what_was_read_and_in_order_is_shared():
    scheduler = engine(budget=8).scheduler
    broken = sequence(16)
    scheduler.add(broken)
    scheduler.schedule()
    broken.checked = 8
    scheduler.schedule()
    assert scheduler.cache.match(broken.tokens).length == 8
    scheduler.finish(broken)  # its second step is not in order
    assert scheduler.cache.match(broken.tokens).length == 8


def test_what_was_in_order_before_a_preemption_must_be_so_again():
    scheduler = engine(pages=10, page_size=4, seqs=1, budget=8, policy="priority").scheduler
    low, high = sequence([1] * 32, priority=1), sequence([2] * 39, new=1)
    scheduler.add(low)
    for end in (8, 16):
        scheduler.schedule()
        low.checked = end
    scheduler.add(high)
    assert scheduler.schedule().preempted == [low]  # and all its pages are evicted
    scheduler.finish(high)
    scheduler.schedule()
    assert (low.computed, low.checked) == (8, 0)
    low.checked = 16  # a step from before, read late
    scheduler.schedule()
    assert scheduler.cache.match(low.tokens).length == 8


def test_a_prompt_that_must_be_computed_skips_the_cache():
    world = engine()
    world.scheduler.add(sequence(20))
    world.drain(limit=10)
    again, whole = sequence(20), sequence(20, skip_prefix=True)
    world.scheduler.add(again)
    world.scheduler.add(whole)
    plan = world.step()
    assert [(c.start, c.count) for c in plan.chunks] == [(16, 4), (0, 20)]
