"""The scheduler: which sequences compute how many of their tokens in the next step.

No arrays, clock or devices. `schedule` may be called while the step before is unread: the device runs steps
in order, so what a launched step writes counts as computed, and what is given back may be given out again.
"""

from bisect import insort
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from jaxserve.sequence import Sequence
from kv import KVCache


class Chunk(NamedTuple):
    """Compute tokens start..start+count-1 of a sequence."""

    seq: Sequence
    start: int
    count: int
    samples: bool  # the chunk ends at the sequence's end, so its last row gives the next token


@dataclass(slots=True)
class Plan:
    """One step: what it computes, who entered (and has a new slot) and who had to leave for others."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Decoding sequences first, each step; what is left of the token budget goes to prompts.

    A prompt is admitted with the pages of all its tokens at once, so only decoding can run out of pages. Then
    the last in rank gives its own back and waits, to be computed again (except what the prefix cache still
    has of it). The first in rank never gives way, so it always finishes. Rank is arrival, or with the policy
    "priority" the priority and then arrival.
    """

    def __init__(
        self,
        cache: KVCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "fcfs",
        longest_whole: int = 0,
    ):
        """Prompts over the token budget and up to `longest_whole` tokens wait for a `schedule_whole`."""
        assert policy in ("fcfs", "priority"), policy
        assert 1 <= max_num_seqs <= max_num_batched_tokens, "not every running sequence could get a token"
        self.cache, self.policy, self.longest_whole = cache, policy, longest_whole
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.running: list[Sequence] = []  # both lists are kept in rank order
        self.waiting: list[Sequence] = []
        self.preemptions = 0
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._arrivals = 0
        self._refused: tuple[Sequence, int] | None = None  # who found no room last, and how much there was

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence; one that can never fit must have been refused before (`KVCache.fits`)."""
        assert self.cache.fits(seq.max_len - 1), f"max_len={seq.max_len} > {self.cache.capacity_tokens}"
        seq.arrival = self._arrivals
        self._arrivals += 1
        insort(self.waiting, seq, key=self._rank)

    def received(self, seq: Sequence, token: int) -> bool:
        """A sample was read: append it. False, and nothing appended, if the sequence has ended meanwhile."""
        seq.in_flight -= 1
        if not seq.done:
            seq.tokens.append(token)
        return not seq.done

    def finish(self, seq: Sequence) -> None:
        """The sequence has ended, in whatever state it is: pages and slot come back. Twice does no harm."""
        if seq.done:
            return
        seq.done = True
        if seq.slot is None:
            self.waiting.remove(seq)
        else:
            self._leave(seq)

    abort = finish

    def schedule(self) -> Plan:
        """Decide on a step and count its tokens as computed; empty when all depends on unread samples."""
        plan = Plan()
        for seq in self.running:
            self._share(seq)
        if self.policy == "priority":
            self._overtake(plan)
        prefilling = self._decode(plan)
        self._prefill(prefilling, self.max_num_batched_tokens - len(plan.chunks), plan)
        return plan

    def schedule_whole(self) -> Plan | None:
        """A step of all of one prompt, if the next in turn waits for that and there is room."""
        for seq in self.running:
            self._share(seq)
        head, plan = next((seq for seq in self.waiting if self._unblocked(seq)), None), Plan()
        if head is None or not self._waits_for_whole(head) or not self._admit(head, plan):
            return None
        self._take(head, head.owed, plan)
        return plan

    def cached(self, seq: Sequence) -> int:
        """How many of a waiting sequence's tokens would be found in the cache now."""
        lease = self.cache.match(seq.tokens, seq.salt, keys=seq.keys, skip=seq.skip_prefix)
        found = lease.length
        self.cache.release(lease)
        return found

    def renewed(self) -> "Scheduler":
        """The same before any sequence, with an empty cache."""
        return Scheduler(
            self.cache.renewed(),
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.policy,
            self.longest_whole,
        )

    def _rank(self, seq: Sequence) -> tuple[int, int]:
        return (seq.priority if self.policy == "priority" else 0, seq.arrival)

    def _decode(self, plan: Plan) -> list[Sequence]:
        """Give a token to all running sequences that owe just one, in rank order; return those owing more."""
        prefilling = []
        grow, take = self.cache.grow, self._take
        for seq in self.running.copy():
            if seq.slot is None:  # gave its pages back for one before it
                continue
            assert seq.lease is not None
            owed = seq.owed
            if owed > 1:
                prefilling.append(seq)
            elif owed and (grow(seq.lease, seq.computed + 1) or self._push_out(seq, plan)):
                take(seq, 1, plan)
        return prefilling

    def _push_out(self, seq: Sequence, plan: Plan) -> bool:
        """Make a page free for `seq` at the cost of the last in rank; False if that is `seq` itself."""
        assert seq.lease is not None
        while not self.cache.grow(seq.lease, seq.computed + 1):
            last = self.running[-1]
            self._preempt(last, plan)
            if last is seq:
                return False
        return True

    def _prefill(self, prefilling: list[Sequence], budget: int, plan: Plan) -> None:
        """Spend `budget` on prompts in rank order; one that it cannot finish leaves half to shorter ones."""
        if not prefilling and budget and (admitted := self._admit_next(plan)):
            prefilling = [admitted]
        if prefilling and prefilling[0].owed > budget:
            budget -= self._let_pass(prefilling, budget // 2, plan)
        for seq in prefilling:
            if budget:
                budget -= self._take(seq, min(seq.owed, budget), plan)
        while budget and (seq := self._admit_next(plan)):
            budget -= self._take(seq, min(seq.owed, budget), plan)

    def _let_pass(self, prefilling: list[Sequence], spare: int, plan: Plan) -> int:
        """Spend up to `spare` tokens on prompts shorter than the rest of the first one, the shortest first.

        Of those already running, the ones served are taken off `prefilling`. A preempted sequence is not
        passed: the room is its own. Returns the tokens spent.
        """
        first, left = prefilling[0], spare
        full = bool(plan.preempted) or any(seq.num_cached is not None for seq in self.waiting[:1])
        shorter = [
            seq
            for seq in (*prefilling[1:], *islice(self.waiting, self.max_num_seqs))
            if seq.owed < first.owed and self._rank(seq)[0] <= self._rank(first)[0] and self._ready(seq)
        ]
        for seq in sorted(shorter, key=lambda seq: seq.owed):
            if not left:
                break
            if seq.slot is not None:
                prefilling.remove(seq)
            elif full or not self._admit(seq, plan):
                full = True
                continue
            left -= self._take(seq, min(seq.owed, left), plan)
        return spare - left

    def _take(self, seq: Sequence, count: int, plan: Plan) -> int:
        start = seq.computed
        seq.computed += count
        samples = seq.computed == len(seq.tokens) + seq.in_flight
        if samples:
            seq.in_flight += 1
        plan.chunks.append(Chunk(seq, start, count, samples))
        return count

    def _ready(self, seq: Sequence) -> bool:
        """Whether nothing but room is missing, and any step will do."""
        return self._unblocked(seq) and not self._waits_for_whole(seq)

    def _waits_for_whole(self, seq: Sequence) -> bool:
        """One whose beginning is cached does not: the rest of it goes in chunks."""
        return self.max_num_batched_tokens < seq.owed <= self.longest_whole and not self.cached(seq)

    def _unblocked(self, seq: Sequence) -> bool:
        """Whether all its samples are read, and the prompt cached that it is to share."""
        leader = seq.leader
        return not seq.in_flight and (leader is None or leader.done or leader.checked >= leader.prompt_len)

    def _admit_next(self, plan: Plan) -> Sequence | None:
        """Admit the first waiting sequence; if it lacks room nobody passes it, lest it wait for ever.

        Nobody enters a step for which another had to leave, or that one might come straight back.
        """
        if plan.preempted or not self._slots:
            return None
        for seq in self.waiting:
            if self._ready(seq):
                return seq if self._admit(seq, plan) else None
            refused = self._refused and self._refused[0] is seq and self._unblocked(seq)
            if seq.in_flight or refused:
                return None
        return None

    def _admit(self, seq: Sequence, plan: Plan) -> bool:
        """Give the sequence a slot and all its pages; or change nothing and say no.

        One page more for it and for each that is running must be left, so that it need not leave at once.
        """
        room = self.cache.available - len(self.running)
        if not self._slots or (self._refused and self._refused[0] is seq and room <= self._refused[1]):
            return False
        lease = self.cache.match(seq.tokens, seq.salt, keys=seq.keys, skip=seq.skip_prefix)
        length = min(seq.length + self.cache.page_size, seq.max_len - 1)  # the last token is never computed
        if self.cache.pages_for(length) - len(lease.pages) > self.cache.available - len(self.running):
            self.cache.release(lease)
            self._refused = (seq, room)
            return False
        grown = self.cache.grow(lease, seq.length)
        assert grown, "alone, every sequence fits"
        self._refused = None
        seq.lease, seq.slot = lease, self._slots.pop()
        seq.computed = seq.checked = lease.length
        if seq.num_cached is None:
            seq.num_cached = lease.length
        self.waiting.remove(seq)
        insort(self.running, seq, key=self._rank)
        plan.admitted.append(seq)
        return True

    def _overtake(self, plan: Plan) -> None:
        """Let waiting sequences take the place of running ones of strictly lower priority."""
        while self.waiting and self.running and self._ready(head := self.waiting[0]):
            below = [seq for seq in self.running if seq.priority > head.priority]
            gain = sum(len(seq.lease.pages) for seq in below if seq.lease)
            if not below or self.cache.available + gain < self.cache.pages_for(head.length):
                return
            while not self._admit(head, plan):
                if not self.running or self.running[-1].priority <= head.priority:
                    return
                self._preempt(self.running[-1], plan)

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        """Take pages and slot away; the sequence waits, keeps its tokens and is computed again later."""
        self._leave(seq)
        seq.computed = 0
        insort(self.waiting, seq, key=self._rank)
        self.preemptions += 1
        plan.preempted.append(seq)

    def _share(self, seq: Sequence) -> None:
        """Let others find what of the sequence is computed and in order."""
        assert seq.lease is not None
        self.cache.commit(seq.lease, seq.tokens, min(seq.checked, seq.computed))

    def _leave(self, seq: Sequence) -> None:
        self._share(seq)
        assert seq.lease is not None and seq.slot is not None
        self.cache.release(seq.lease)
        self.running.remove(seq)
        self._slots.append(seq.slot)
        seq.lease, seq.slot = None, None
