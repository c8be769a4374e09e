"""Every sequence finishes with its own tokens, whatever the traffic; nobody is starved, no page is lost."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduler import Chunk, Plan, Scheduler
from jaxserve.sequence import Sequence
from kv import KVCache

STOP = 3


def next_token(tokens: list[int]) -> int:
    """What the model of these tests says after `tokens`: 0, 1, 2 or STOP, from the whole prefix."""
    return (len(tokens) * 7 + sum(t * (i + 1) for i, t in enumerate(tokens))) % 13 % 4


def expected(prompt: list[int], max_len: int, stops: bool) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < max_len and not (stops and len(tokens) > len(prompt) and tokens[-1] == STOP):
        tokens.append(next_token(tokens))
    return tokens


@dataclass
class Engine:
    """Runs plans on a device that remembers what was written where; reads samples `depth` steps late."""

    scheduler: Scheduler
    depth: int = 0
    stops: bool = False  # STOP ends a sequence
    device: dict[tuple[int, int], int] = field(default_factory=dict)
    texts: dict[Sequence, list[int]] = field(default_factory=dict)  # with the samples not read yet
    unread: deque[list[Chunk]] = field(default_factory=deque)

    def step(self) -> Plan:
        decoding = [seq for seq in self.scheduler.running if seq.owed == 1]
        pages_suffice = self._pages_needed(decoding) <= self.scheduler.cache.available
        ranked = sorted(self.scheduler.running, key=self.scheduler._rank)
        best = min(self.scheduler.running + self.scheduler.waiting, key=self.scheduler._rank, default=None)
        plan = self.scheduler.schedule()
        served = [chunk.seq for chunk in plan.chunks]
        assert sum(chunk.count for chunk in plan.chunks) <= self.scheduler.max_num_batched_tokens
        assert len(set(served)) == len(served)
        assert not {*plan.preempted} & {*plan.admitted}
        sampling = {chunk.seq for chunk in plan.chunks if chunk.samples}
        assert all(seq.in_flight == (seq in sampling) for seq in plan.admitted), (
            "came back with unread samples"
        )
        assert all(seq in served or seq in plan.preempted for seq in decoding)
        if self.scheduler.policy == "fcfs":
            assert not (pages_suffice and plan.preempted)
            assert not ranked or ranked[0] not in plan.preempted
        assert best not in plan.preempted
        self._launch(plan)
        self.check_pages()
        if len(self.unread) > self.depth or not plan.chunks:
            self.read()
        return plan

    def _pages_needed(self, decoding: list[Sequence]) -> int:
        cache = self.scheduler.cache
        return sum(cache.pages_for(seq.computed + 1) - len(seq.lease.pages) for seq in decoding)

    def _launch(self, plan: Plan) -> None:
        cache = self.scheduler.cache
        for seq, start, count, samples in plan.chunks:
            text = self.texts.setdefault(seq, list(seq.tokens))
            assert text[: len(seq.tokens)] == seq.tokens
            assert (
                seq.slot is not None
                and start + count <= len(text)
                and samples == (start + count == len(text))
            )
            prefix = hash(seq.salt)
            for position in range(start + count):
                prefix = hash((prefix, text[position]))
                page, offset = divmod(position, cache.page_size)
                place = seq.lease.pages[page], offset
                if position >= start:
                    assert cache._pool.holders[place[0]] == 1, "writes a shared page"
                    self.device[place] = prefix
                assert self.device[place] == prefix, "reads what another sequence wrote"
            if samples:
                text.append(next_token(text))
        self.unread.append(plan.chunks)

    def read(self) -> None:
        for seq, start, count, samples in self.unread.popleft() if self.unread else ():
            token = self.texts[seq][len(seq.tokens)] if samples else None
            alive = not seq.done if token is None else self.scheduler.received(seq, token)
            if alive:
                seq.checked = max(seq.checked, start + count)
                if len(seq.tokens) == seq.max_len or (self.stops and token == STOP):
                    self.scheduler.finish(seq)

    def check_pages(self) -> None:
        scheduler, cache = self.scheduler, self.scheduler.cache
        held = [page for seq in scheduler.running for page in seq.lease.pages]
        assert cache.used == len(set(held))
        assert cache.free + cache.used + cache.cached == cache.num_pages - 1
        slots = [seq.slot for seq in scheduler.running]
        assert sorted(slots + scheduler._slots) == list(range(scheduler.max_num_seqs))
        assert all(seq.slot is None and seq.lease is None for seq in scheduler.waiting)

    def drain(self, limit: int) -> int:
        """Steps until nothing is left to do, at most `limit`."""
        for steps in range(limit):
            if not self.scheduler.running and not self.scheduler.waiting:
                while self.unread:
                    self.read()
                return steps
            self.step()
        raise AssertionError(f"not done after {limit} steps")


def engine(pages=1000, page_size=4, seqs=8, budget=64, policy="fcfs", depth=0) -> Engine:
    return Engine(Scheduler(KVCache(pages + 1, page_size), seqs, budget, policy), depth)


def sequence(prompt: int | list[int], new: int = 4, **fields) -> Sequence:
    tokens = [(i * i) % 3 for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Sequence("r", list(tokens), len(tokens) + new, **fields)


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
