"""A worker as the router knows it: what it said of itself, what it was given, and whether it can be trusted."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.pace import Pace
from kv.events import Mirror
from server.router.breaker import Breaker
from server.router.cost import Prediction, Standing

MEMORY = 60.0  # seconds in which work given to a worker fades to a third, when workers are compared


@dataclass(eq=False)
class Ticket:
    """A request that a worker was given and has not finished."""

    pages: Sequence[bytes]  # names of the prompt's full pages
    prompt_tokens: int
    prediction: Prediction
    sent_at: float
    prefill_url: str | None = None  # of the worker that computes the prompt, if that is another
    answering: bool = False  # its first token has come

    @property
    def to_compute(self) -> int:
        """Prompt tokens that it adds to the worker's backlog."""
        if self.answering or self.prefill_url:
            return 0
        return max(self.prompt_tokens - self.prediction.hit, 1)


class Worker:
    """One `jaxserve serve` process."""

    def __init__(self, url: str):
        self.url = url
        self.state = "unreachable"  # or a state of `jaxserve.async_llm.Health`
        self.why = "not asked yet"  # with the state unreachable
        self.about: dict[str, Any] = {}
        self.load: dict[str, Any] = {}
        self.mirror = Mirror()
        self.breaker = Breaker()
        self.resyncs = 0
        self.drained = False  # by hand: it gets no new requests
        self.gone = False  # no longer among the addresses: it gets none either
        self.tickets: set[Ticket] = set()
        self._on_the_way: Counter[bytes] = Counter()  # pages of prompts in `tickets`
        self.limits: set[asyncio.Timeout] = set()
        self._work, self._worked_at = 0.0, 0.0

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self.about.get("models", ()))

    @property
    def leaving(self) -> bool:
        return self.drained or self.gone

    @property
    def role(self) -> str:
        """prefill, decode or both."""
        return self.load.get("role") or "both"

    @property
    def can_move(self) -> bool:
        """Whether it hands prompts over and takes them, so that its role can be another."""
        return self.load.get("role") is not None

    @property
    def page_size(self) -> int | None:
        """Tokens of a cache page; None if it caches no prefixes."""
        return self.about.get("page_size")

    @property
    def pace(self) -> Pace | None:
        """How long its steps take, if they were measured."""
        pace = self.load.get("pace")
        return Pace(*pace) if pace else None

    @property
    def requests(self) -> int:
        """That it has: ours and, if it says so, those of others."""
        return max(len(self.tickets), self.load.get("running", 0) + self.load.get("waiting", 0))

    def takes_requests(self, now: float) -> bool:
        return self.state == "ready" and not self.leaving and self.breaker.allows(now)

    def hit(self, pages: Sequence[bytes], prompt_tokens: int) -> int:
        """Prompt tokens that it has, or will have when requests on their way there are served."""
        if not self.page_size:
            return 0
        found = self.mirror.match(pages)
        while found < len(pages) and (pages[found] in self._on_the_way or pages[found] in self.mirror.pages):
            found += 1
        return min(found * self.page_size, prompt_tokens - 1)

    def standing(self, pace: Pace, usual_compute: float) -> Standing:
        """As a newcomer finds it; a prompt of others counts with `usual_compute` tokens."""
        ours = sum(ticket.to_compute for ticket in self.tickets)
        others = self.requests - len(self.tickets)
        answering = sum(ticket.answering for ticket in self.tickets)
        return Standing(
            pace,
            ours + others * usual_compute,
            answering + others,
            self.requests,
            self.about.get("max_num_seqs", 1),
            self.about.get("max_num_batched_tokens", 1),
        )

    def recent_work(self, now: float) -> float:
        """Seconds of work that it was given, older ones counting less."""
        self._work *= math.exp(-(now - self._worked_at) / MEMORY)
        self._worked_at = now
        return self._work

    def give(self, ticket: Ticket) -> None:
        """The request is sent there."""
        self.tickets.add(ticket)
        self._on_the_way.update(ticket.pages)
        self.breaker.sent(ticket.sent_at)
        self.recent_work(ticket.sent_at)
        self._work += ticket.prediction.work

    def take_back(self, ticket: Ticket) -> None:
        """The request has ended, or goes elsewhere."""
        if ticket in self.tickets:
            self.tickets.remove(ticket)
            self._on_the_way.subtract(ticket.pages)
            for page in ticket.pages:
                if self._on_the_way[page] <= 0:
                    del self._on_the_way[page]

    def watched(self) -> "Watched":
        """A context that ends with TimeoutError as soon as the worker is lost."""
        return Watched(self)

    def lose(self, why: str) -> None:
        """Nothing is heard of it: what waits for it stops waiting."""
        self.state, self.why, self.load = "unreachable", why, {}
        for limit in list(self.limits):
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())


@dataclass
class Watched:
    """While it is entered, losing the worker interrupts what is inside."""

    worker: "Worker"
    _limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self.worker.limits.add(self._limit)
        if self.worker.state == "unreachable":
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def __aexit__(self, *error: Any) -> bool | None:
        self.worker.limits.discard(self._limit)
        return await self._limit.__aexit__(*error)
