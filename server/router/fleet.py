"""All workers, and the choice among them for each request."""

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import httpx

from jaxserve.errors import OverloadedError, RequestError
from jaxserve.pace import Pace
from server.router.breaker import Budget
from server.router.config import RouterConfig
from server.router.cost import Prediction, choose, predict
from server.router.discovery import Addresses, keep_looking
from server.router.follow import follow
from server.router.learned import Learned
from server.router.metrics import RouterMetrics
from server.router.prompt_tokens import page_names
from server.router.split import reason_to_split
from server.router.worker import Ticket, Worker

log = logging.getLogger(__name__)
CONVERSATIONS = 65536  # remembered, the latest ones
UNMEASURED = Pace(0.01, 0.001, 0.0)  # until a step was measured anywhere: only the proportions matter
RETRY_PART = 0.2  # of all requests, beyond a burst: lest a failing fleet is given several times its load


@dataclass
class Asked:
    """A request, as far as the choice depends on it."""

    model: str | None
    tokens: list[int] | None  # of its prompt, if they could be told
    size: int  # bytes of its body, for a guess where they could not
    salt: str
    session: str | None
    max_tokens: int | None
    pages: dict[int, list[bytes]] = field(default_factory=dict)  # by page size

    @property
    def prompt_tokens(self) -> int:
        return max(len(self.tokens) if self.tokens else self.size // 4, 1)

    def pages_of(self, page_size: int | None) -> list[bytes]:
        if not self.tokens or not page_size:
            return []
        if page_size not in self.pages:
            self.pages[page_size] = page_names(self.tokens, page_size, self.salt)
        return self.pages[page_size]


class Fleet:
    """Follows the workers, gives requests to them and learns from the answers."""

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`clock` is in seconds, and never goes back."""
        self.config, self.metrics, self._clock = config, metrics, clock
        self.workers: dict[str, Worker] = {}
        self.learned = Learned()
        self.retry_budget, self.hedge_budget = Budget(RETRY_PART), Budget(config.hedge_limit, 2.0)
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=config.lost_after),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._rng = rng or random.Random()
        # To the address of who served it last.
        self._conversations: OrderedDict[str | bytes, str] = OrderedDict()
        self._turn = 0
        self._tasks: dict[str, asyncio.Task] = {}
        self._always: list[asyncio.Task] = []

    async def start(self) -> None:
        """Begin to follow; ConfigError if the file of addresses cannot be read."""
        addresses = Addresses(self.config)
        addresses.read_file()
        self._always = [asyncio.create_task(keep_looking(addresses, self.set_addresses))]

    @property
    def under_way(self) -> int:
        """Requests that workers were given and have not finished."""
        return sum(len(worker.tickets) for worker in self.workers.values())

    async def close(self) -> None:
        tasks = [*self._always, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.aclose()

    def set_addresses(self, urls: list[str]) -> None:
        """These are the workers now. One that left is given nothing more, and forgotten when it is idle."""
        for url in urls:
            if url in self.workers:
                self.workers[url].gone = False
            else:
                self.workers[url] = worker = Worker(url)
                self._tasks[url] = asyncio.create_task(
                    follow(worker, self.client, self.own_headers(), self.config.lost_after)
                )
                log.info("worker %s is followed", url)
        for url in self.workers.keys() - urls:
            if not self.workers[url].gone:
                log.info("worker %s is no longer among the addresses", url)
                self.workers[url].gone = True
                self._forget_if_idle(self.workers[url])

    def _forget_if_idle(self, worker: Worker) -> None:
        if not worker.gone:  # it is back
            return
        if worker.tickets:
            asyncio.get_running_loop().call_later(1.0, self._forget_if_idle, worker)
            return
        self._tasks.pop(worker.url).cancel()
        del self.workers[worker.url]

    def own_headers(self) -> dict[str, str]:
        """For the router's own questions."""
        key = self.config.worker_api_key
        return {"Authorization": f"Bearer {key}"} if key else {}

    # Choosing

    def candidates(self, model: str | None, tried: Iterable[Worker] = ()) -> list[Worker]:
        """Workers that can be given a request for `model` now; RequestError if nobody serves that model."""
        known = [worker for worker in self.workers.values() if worker.about]
        names = sorted({name for worker in known for name in worker.models})
        if model is not None and names and model not in names:
            raise RequestError(
                f"the model {model[:256]!r} does not exist here; there is {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        now = self._clock()
        able = [
            worker
            for worker in known
            if worker.takes_requests(now)
            and worker not in tried
            and (model is None or model in worker.models)
        ]
        # A role says what a worker is for, not what it can do.
        return [worker for worker in able if worker.role != "prefill"] or able

    def pick(self, asked: Asked, tried: Iterable[Worker] = ()) -> tuple[Worker, Ticket]:
        """The worker for a request, which is counted as given to it; OverloadedError if there is none."""
        open_to = self.candidates(asked.model, tried)
        if not open_to:
            raise OverloadedError(self._why_nobody(), retry_after=1.0, draining=True)
        predictions = {worker: self._predict(worker, asked) for worker in open_to}
        if self.config.routing_policy == "round-robin":
            self._turn += 1
            worker = open_to[self._turn % len(open_to)]
        else:
            now = self._clock()
            worker = choose(
                predictions,
                {each: each.recent_work(now) for each in open_to},
                self.learned.ttft_error.or_else(0.0),
                self._before(asked),
                self._rng,
            )
        ticket = Ticket(
            asked.pages_of(worker.page_size),
            asked.prompt_tokens,
            predictions[worker],
            self._clock(),
            self._prefill_url(worker, asked, predictions[worker]),
        )
        worker.give(ticket)
        self._remember(asked, worker)
        self.metrics.on_given(worker.url)
        return worker, ticket

    def _prefill_url(self, worker: Worker, asked: Asked, prediction: Prediction) -> str | None:
        """The worker that is to compute the prompt for `worker`; None if that does it itself."""
        now = self._clock()
        others = [
            other
            for other in self.workers.values()
            if other is not worker
            and other.can_move
            and other.role != "decode"
            and other.takes_requests(now)
            and set(other.models) & set(worker.models)
        ]
        if not worker.can_move or not others:
            return None
        prompt = asked.prompt_tokens
        standing = worker.standing(self._pace(worker), self.learned.computed_tokens.or_else(prompt))
        split, why = reason_to_split(
            standing, prompt - prediction.hit, self.config.tpot_target, worker.load.get("transfer_per_token")
        )
        self.metrics.on_split(why)
        return min(others, key=lambda other: self._predict(other, asked).ttft).url if split else None

    def _predict(self, worker: Worker, asked: Asked) -> Prediction:
        prompt, pages = asked.prompt_tokens, asked.pages_of(worker.page_size)
        hit = worker.hit(pages, prompt)
        if not asked.tokens and asked.session and self._conversations.get(asked.session) == worker.url:
            # Its tokens are not known; of the worker that served the session before, expect what is usual.
            usual = self.learned.prompt_tokens.or_else(1) or 1
            hit = int(prompt * max(1 - self.learned.computed_tokens.or_else(usual) / usual, 0.0))
        standing = worker.standing(self._pace(worker), self.learned.computed_tokens.or_else(prompt))
        return predict(standing, prompt, hit, self.learned.expected_output(asked.max_tokens))

    def _pace(self, worker: Worker) -> Pace:
        """The worker's own; of one that has not measured it, the mean of the others."""
        if worker.pace:
            return worker.pace
        known = [other.pace for other in self.workers.values() if other.pace]
        if not known:
            return UNMEASURED
        return Pace(*(sum(part) / len(known) for part in zip(*known, strict=True)))

    def _before(self, asked: Asked) -> Worker | None:
        """Who served the conversation before: by its name, or else because this prompt goes on after one of its own."""
        if asked.session:
            return self.workers.get(self._conversations.get(asked.session, ""))
        for page_size in {worker.page_size for worker in self.workers.values()}:
            for page in reversed(asked.pages_of(page_size)):
                if page in self._conversations:
                    return self.workers.get(self._conversations[page])
        return None

    def _remember(self, asked: Asked, worker: Worker) -> None:
        """A conversation without a name goes by the last full page of its latest prompt."""
        name = asked.session or next(iter(asked.pages_of(worker.page_size)[-1:]), None)
        if name is None:
            return
        self._conversations[name] = worker.url
        self._conversations.move_to_end(name)
        if len(self._conversations) > CONVERSATIONS:
            self._conversations.popitem(last=False)

    def _why_nobody(self) -> str:
        if not self.workers:
            return "the router knows no worker yet; try again soon"
        now = self._clock()

        def state(worker: Worker) -> str:
            if worker.leaving:
                return "leaving"
            return worker.state if worker.breaker.allows(now) else "failing"

        states = ", ".join(f"{worker.url} is {state(worker)}" for worker in self.workers.values())
        return f"no worker can take this request now: {states}"

    # Learning

    def on_first_token(self, worker: Worker, ticket: Ticket) -> None:
        """The answer has begun."""
        if not ticket.answering:
            ticket.answering = True
            seconds = self._clock() - ticket.sent_at
            self.learned.ttft_error.add(abs(seconds - ticket.prediction.ttft))
            self.metrics.on_first_token(worker.url, ticket.prediction.ttft, seconds)

    def on_answered(self, worker: Worker, ticket: Ticket, usage: dict | None) -> None:
        """The answer is complete; `usage` is in OpenAI's words."""
        worker.breaker.succeeded()
        if not usage:
            return
        prompt, output = usage["prompt_tokens"], usage.get("completion_tokens", 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self.learned.output_tokens.add(output)
        self.learned.prompt_tokens.add(prompt)
        self.learned.computed_tokens.add(prompt - cached)
        self.metrics.on_answered(worker.url, prompt, ticket.prediction.hit, cached)
        now, pace = self._clock(), self._pace(worker)
        together = max(sum(other.answering for other in worker.tickets), 1)
        self.learned.prompt_seconds.add((prompt - cached) * pace.prompt_token, now)
        self.learned.answer_seconds.add(output * pace.seconds(0, together) / together, now)

    def on_failed(self, worker: Worker, why: str) -> None:
        """The worker failed a request."""
        worker.breaker.failed(self._clock())
        self.metrics.on_failed(worker.url)
        log.warning("%s failed a request: %s", worker.url, why)
