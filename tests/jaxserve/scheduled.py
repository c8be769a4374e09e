"""The scheduler's other half: an engine whose device remembers which prefix was written where."""

from collections import deque
from dataclasses import dataclass, field

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
