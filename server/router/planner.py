"""How many workers are for prompts and how many for answers, as the mix of the two changes. No clock, no network.

A move changes only where new requests go: what runs on a worker goes on, so none is dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass

WORTH = 0.9  # a move must bring the busier side to this part of its load, or two sides would swap for ever


@dataclass(frozen=True)
class Demand:
    """What comes in, in seconds of one worker's time a second: 2.5 keeps two and a half workers busy."""

    prompts: float
    answers: float


def busiest(demand: Demand, prefill: int, decode: int) -> float:
    """The load of the busier side's workers; 1 is all that they can do."""
    if (demand.prompts and not prefill) or (demand.answers and not decode):
        return float("inf")
    return max(demand.prompts / max(prefill, 1), demand.answers / max(decode, 1))


def next_move(
    roles: Mapping[str, str], requests: Mapping[str, int], demand: Demand
) -> tuple[str, str] | None:
    """(worker, its new role) of the one move that helps, or None.

    One worker at a time moves, the one with the fewest requests, and each side keeps one.

    Args:
        roles: of the workers that can be moved, prefill or decode.
        requests: that each has.
    """
    sides = {role: [worker for worker in roles if roles[worker] == role] for role in ("prefill", "decode")}
    prefill, decode = len(sides["prefill"]), len(sides["decode"])
    now = busiest(demand, prefill, decode)
    for giving, taking, change in (("prefill", "decode", -1), ("decode", "prefill", 1)):
        if len(sides[giving]) < 2:
            continue
        if busiest(demand, prefill + change, decode - change) < WORTH * now:
            return min(sides[giving], key=lambda worker: requests.get(worker, 0)), taking
    return None
