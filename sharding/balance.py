"""Which device holds which experts, from how many rows each got: hot ones in copies, groups of experts on one host.

Plain numpy. Copies and packing as in DeepSeek's load balancer (DeepSeek-V3, arXiv:2412.19437, 3.4.1), and exchanges
between devices after that.
"""

import heapq
from dataclasses import dataclass

import numpy as np

MOST_EXCHANGES = 1000  # that `_exchange` makes: placements are found in bounded time


@dataclass(frozen=True)
class Placement:
    """The expert in each slot of each device, [devices, slots]; the same number of slots on all."""

    slots: np.ndarray

    def copies(self, experts: int) -> np.ndarray:
        """How many slots each expert has, [E]."""
        return np.bincount(self.slots.ravel(), minlength=experts)

    def table(self, experts: int, width: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(slots of each expert [E, `width`], how many [E]); slot = device * slots of a device + which.

        Rows are filled up by repeating them, so that any column is a copy; by default to the most copies there are.
        """
        count, flat = self.copies(experts), self.slots.ravel()
        order = np.argsort(flat, kind="stable")
        first = np.cumsum(count) - count
        which = np.arange(width or count.max())[None] % np.maximum(count, 1)[:, None]
        return order[first[:, None] + which].astype(np.int32), count.astype(np.int32)

    def device_loads(self, loads: np.ndarray) -> np.ndarray:
        """Rows that each device gets when an expert's rows are dealt evenly to its copies, [devices]."""
        loads = np.asarray(loads, np.float64)
        return (loads / np.maximum(self.copies(len(loads)), 1))[self.slots].sum(axis=1)

    def imbalance(self, loads: np.ndarray) -> float:
        """The busiest device's rows over the mean: the time of a step over that of a balanced one."""
        rows = self.device_loads(loads)
        return float(rows.max() / rows.mean()) if rows.any() else 1.0


def place(loads: np.ndarray, devices: int, slots: int, *, hosts: int = 1, groups: int = 1) -> Placement:
    """Experts with these loads on `devices` of `slots` places each; those left over become copies of hot experts.

    Where experts are routed in `groups` that `hosts` divide, whole groups are given to hosts first: rows of a token
    then go to few hosts. Equal arguments give equal placements. ValueError if not all experts find a place.
    """
    loads = np.asarray(loads, np.float64)
    if devices % hosts or len(loads) % groups:
        raise ValueError(f"{hosts} hosts must divide {devices} devices, {groups} groups {len(loads)} experts")
    if devices * slots < len(loads):
        raise ValueError(
            f"{devices} devices of {slots} slots hold {devices * slots} experts, not {len(loads)}; "
            f"use {-(-len(loads) // devices)} slots or more"
        )
    if groups % hosts or len(loads) // hosts > devices // hosts * slots:
        hosts, groups = 1, 1
    placed = []
    for experts in _experts_of_hosts(loads, hosts, groups):
        copies = _copies(loads[experts], devices // hosts * slots, devices // hosts)
        placed.append(experts[_pack(loads[experts], copies, devices // hosts, slots)])
    return Placement(np.concatenate(placed))


def place_within(
    loads: np.ndarray, devices: int, bound: float, *, hosts: int = 1, groups: int = 1
) -> Placement:
    """The placement with the fewest slots whose imbalance is at most `bound`; at most a copy of each everywhere."""
    fewest = -(-len(loads) // devices)
    for slots in range(fewest, len(loads)):
        found = place(loads, devices, slots, hosts=hosts, groups=groups)
        if found.imbalance(loads) <= bound:
            return found
    return place(loads, devices, max(fewest, len(loads)))


def settled(new: Placement, old: Placement, *, hosts: int = 1) -> tuple[Placement, int]:
    """(`new` with devices of a host and slots renamed so that what is there stays, how many slots then change)."""
    devices, experts = len(new.slots), int(new.slots.max()) + 1
    if old.slots.shape != new.slots.shape:
        raise ValueError(f"placements of {old.slots.shape} and {new.slots.shape} devices and slots")
    out, each = np.empty_like(new.slots), devices // hosts
    shared = _held(new, experts) @ _held(old, experts).T
    for start in range(0, devices, each):
        free = list(range(start, start + each))
        pairs = [(shared[a, b], -a, -b) for a in free for b in free]
        taken: set[int] = set()
        for _, a, b in sorted(pairs, reverse=True):
            if -a in taken or -b not in free:
                continue
            taken.add(-a)
            free.remove(-b)
            out[-b] = _kept_in_place(new.slots[-a], old.slots[-b])
    return Placement(out), int((out != old.slots).sum())


def _experts_of_hosts(loads: np.ndarray, hosts: int, groups: int) -> list[np.ndarray]:
    """The experts of each host, by whole groups, heaviest first to the host with the least that has room."""
    members = np.arange(len(loads)).reshape(groups, -1)
    sums = loads[members].sum(axis=1)
    chosen: list[list[int]] = [[] for _ in range(hosts)]
    weight = np.zeros(hosts)
    for group in np.argsort(-sums, kind="stable"):
        room = [h for h in range(hosts) if len(chosen[h]) < groups // hosts]
        host = min(room, key=lambda h: (weight[h], h))
        chosen[host].append(int(group))
        weight[host] += sums[group]
    return [np.sort(members[sorted(own)].ravel()) for own in chosen]


def _copies(loads: np.ndarray, places: int, most: int) -> np.ndarray:
    """How many copies each expert gets: one more each time for the one whose copies have most to do.

    More than `most`, one a device, would help nobody; only where all have as many do they get more.
    """
    copies = np.ones(len(loads), np.int64)
    heap = [(-load, e) for e, load in enumerate(loads)]
    heapq.heapify(heap)
    full: list[tuple[float, int]] = []
    for _ in range(places - len(loads)):
        while heap and copies[heap[0][1]] >= most:
            full.append(heapq.heappop(heap))
        if not heap:
            heap, full, most = full, [], places
            heapq.heapify(heap)
        _, e = heap[0]
        copies[e] += 1
        heapq.heapreplace(heap, (-loads[e] / copies[e], e))
    return copies


def _pack(loads: np.ndarray, copies: np.ndarray, devices: int, slots: int) -> np.ndarray:
    """[devices, slots]: the heaviest copy first, to the device with the least that has room and no copy of it."""
    share = loads / copies
    items = np.repeat(np.arange(len(loads)), copies)
    held: list[list[int]] = [[] for _ in range(devices)]
    weight = np.zeros(devices)
    # Copies of many come first among equals: they have the fewest devices to choose from.
    for e in items[np.lexsort((items, -copies[items], -share[items]))]:
        room = [d for d in range(devices) if len(held[d]) < slots]
        device = min(room, key=lambda d: (e in held[d], weight[d], d))
        held[device].append(int(e))
        weight[device] += share[e]
    placed = np.array(held)
    _exchange(share, placed, weight)
    return np.sort(placed, axis=1)


def _exchange(share: np.ndarray, held: np.ndarray, weight: np.ndarray) -> None:
    """Swap experts of the busiest device for lighter ones elsewhere, the best swap each time, while that helps."""
    for _ in range(MOST_EXCHANGES):
        busiest = int(np.argmax(weight))
        own, gap = held[busiest], weight[busiest] - weight
        # [other device, slot of the busiest, slot of the other]
        moved = share[own][None, :, None] - share[held][:, None, :]
        lower = np.minimum(moved, gap[:, None, None] - moved)  # by how much the larger of the two shrinks
        same = own[None, :, None] == held[:, None, :]
        lower[same.any(axis=2)[:, :, None] | same.any(axis=1)[:, None, :]] = 0  # neither has both already
        order = np.argsort(weight, kind="stable")
        other = order[np.argmax(lower.reshape(len(held), -1).max(axis=1)[order])]
        i, j = np.unravel_index(np.argmax(lower[other]), lower[other].shape)
        if lower[other, i, j] <= 1e-9 * max(weight[busiest], 1e-30):
            return
        weight[busiest] -= moved[other, i, j]
        weight[other] += moved[other, i, j]
        held[busiest, i], held[other, j] = held[other, j], held[busiest, i]


def _held(placement: Placement, experts: int) -> np.ndarray:
    """[devices, experts]: 1 where a device has a slot with the expert."""
    held = np.zeros((len(placement.slots), experts), np.float32)
    held[np.arange(len(held))[:, None], placement.slots] = 1
    return held


def _kept_in_place(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """`new` in an order in which what `old` has too is where it was."""
    left = list(new)
    out = np.full_like(new, -1)
    for i, e in enumerate(old):
        if e in left:
            out[i] = e
            left.remove(e)
    out[out < 0] = left
    return out
