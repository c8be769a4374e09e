"""Schedulers of groups of devices that compute sequences of their own, behind the face of one."""

from collections.abc import Sequence as Listed
from dataclasses import dataclass

from jaxserve.scheduler import Plan, Scheduler
from jaxserve.sequence import Sequence
from kv import KVCache


@dataclass(frozen=True)
class Caches:
    """The pages of all groups, counted together."""

    each: Listed[KVCache]

    @property
    def usage(self) -> float:
        """Fraction of the pages that leases hold, 0 to 1."""
        return sum(cache.usage for cache in self.each) / len(self.each)

    @property
    def prefix_queries(self) -> int:
        return sum(cache.prefix_queries for cache in self.each)

    @property
    def prefix_hits(self) -> int:
        return sum(cache.prefix_hits for cache in self.each)

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that a group can hold, when it is alone."""
        return min(cache.capacity_tokens for cache in self.each)

    def pages_for(self, length: int) -> int:
        return self.each[0].pages_for(length)


class GroupedScheduler:
    """Gives each new sequence to a group, where it stays, and puts the groups' plans together to one step."""

    def __init__(self, groups: Listed[Scheduler], context: int = 1):
        """`context` neighbouring groups compute a long prompt together."""
        self.context = context
        self._spread_last = False  # whether the step before was one prompt alone
        self.groups, self.cache = groups, Caches([group.cache for group in groups])
        self.max_num_seqs = sum(group.max_num_seqs for group in groups)

    @property
    def running(self) -> list[Sequence]:
        return [seq for group in self.groups for seq in group.running]

    @property
    def waiting(self) -> list[Sequence]:
        return [seq for group in self.groups for seq in group.waiting]

    @property
    def preemptions(self) -> int:
        return sum(group.preemptions for group in self.groups)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence where its leader is, else with the group that has least to do for it."""
        seq.group = seq.leader.group if seq.leader else self._least_to_do(seq)
        self.groups[seq.group].add(seq)

    def received(self, seq: Sequence, token: int) -> bool:
        """See `Scheduler.received`."""
        return self.groups[seq.group].received(seq, token)

    def finish(self, seq: Sequence) -> None:
        """See `Scheduler.finish`."""
        self.groups[seq.group].finish(seq)

    def schedule(self) -> Plan:
        """One step of all groups, those of each in a row; or in every other step a long prompt by several groups."""
        plans = [] if self._spread_last or self.context == 1 else self._whole_prompts()
        self._spread_last = bool(plans)
        plans = plans or [group.schedule() for group in self.groups]
        return Plan(
            [chunk for plan in plans for chunk in plan.chunks],
            [seq for plan in plans for seq in plan.admitted],
            [seq for plan in plans for seq in plan.preempted],
        )

    def renewed(self) -> "GroupedScheduler":
        """The same before any sequence."""
        return GroupedScheduler([group.renewed() for group in self.groups], self.context)

    def _whole_prompts(self) -> list[Plan]:
        """A long prompt for each set of groups that has one waiting."""
        found = []
        for first in range(0, len(self.groups), self.context):
            for group in self.groups[first : first + self.context]:
                if plan := group.schedule_whole():
                    found.append(plan)
                    break
        return found

    def _least_to_do(self, seq: Sequence) -> int:
        """The group with the fewest tokens to compute and to attend, less what it has cached of this sequence."""

        def load(number: int) -> int:
            group = self.groups[number]
            others = sum(other.length for other in (*group.running, *group.waiting))
            return others - 2 * group.cached(seq)

        return min(range(len(self.groups)), key=load)
