"""Giving workers other roles as the mix of prompts and answers changes."""

import asyncio
import logging
import time

import httpx

from server.router.fleet import Fleet
from server.router.planner import Demand, next_move

log = logging.getLogger(__name__)
PLAN_EVERY = 10.0  # seconds
ASK_WITHIN = 5.0  # seconds for a worker to take another role


async def keep_planning(fleet: Fleet) -> None:
    """Move workers where they help, one at a time, until cancelled."""
    while True:
        await asyncio.sleep(PLAN_EVERY)
        await move_one(fleet, time.monotonic())


async def move_one(fleet: Fleet, now: float) -> None:
    """Give one worker the other role, if that relieves the busier side; its running requests go on."""
    movable = [w for w in fleet.workers.values() if w.can_move and w.role != "both" and w.state == "ready"]
    learned = fleet.learned
    demand = Demand(learned.prompt_seconds.a_second(now), learned.answer_seconds.a_second(now))
    move = next_move({w.url: w.role for w in movable}, {w.url: w.requests for w in movable}, demand)
    if move is None:
        return
    url, role = move
    try:
        answer = await fleet.client.post(
            url + "/internal/role", json={"role": role}, headers=fleet.own_headers(), timeout=ASK_WITHIN
        )
        answer.raise_for_status()
    except httpx.HTTPError as error:
        log.warning("%s does not become a %s worker: %s", url, role, error)
        return
    log.info("%s is a %s worker now: %s", url, role, demand)
    fleet.metrics.on_move(role)
