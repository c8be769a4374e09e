"""Workers and users in virtual time around the real router's choice: no sockets, no device, the same every time.

Each worker is the real engine, scheduler and cache before a runner that only says how long a step takes, and tells the
router what `/internal/events` would. What is not simulated is the network and the time that choosing takes.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from bench.traces import Session
from jaxserve.batch import Row
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.metrics import Metrics
from jaxserve.pace import Pace, StepTimes
from jaxserve.refusals import Limits
from jaxserve.request import Delta, Request
from jaxserve.sampling.params import SamplingParams
from jaxserve.scheduler import Scheduler
from jaxserve.text import Tokenizer
from kv import KVCache
from kv.events import Events
from server.feed import LOOK, Reader
from server.router.fleet import Asked, Fleet
from server.router.follow import take
from server.router.worker import Ticket
from server.router.worker import Worker as Known

# About an 8B model on one v5e chip: weights in 8 bits read once a step, half of the peak for prompts.
PACE = Pace(base=0.015, prompt_token=0.0002, sequence=0.0002)
CONFIG = EngineConfig(
    "simulated",
    max_model_len=16384,
    max_num_seqs=32,
    max_num_batched_tokens=512,
    block_size=16,
    num_gpu_blocks_override=4097,
    async_scheduling=False,
)


class Clock:
    """Virtual seconds, and what is to happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), call))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()


class PacedRunner:
    """A device that says how long each step would have taken; its words follow from the length before them."""

    def __init__(self, pace: Pace):
        self._pace = pace
        self.decoding = self.prompt_tokens = 0  # of the latest step
        self.seconds = 0.0

    def launch(self, rows: list[Row], told: Any = None) -> Any:
        self.decoding = sum(row.samples and len(row.tokens) == 1 for row in rows)
        self.prompt_tokens = sum(len(row.tokens) for row in rows) - self.decoding
        self.seconds = self._pace.seconds(self.prompt_tokens, self.decoding)
        read = np.array([[97 + row.kv_len % 26 for row in rows], [1] * len(rows)], np.int32)
        output = SimpleNamespace(sampled=None, expert_drops=None)
        return SimpleNamespace(result=lambda: read, output=output, places=None, rows=None)

    def admit(self, slot: int, admission: object, group: int = 0) -> None:
        """Nothing is kept for a slot."""

    def close(self) -> None:
        """Nothing runs."""


class Worker:
    """One simulated worker, and what the router knows of it."""

    def __init__(self, url: str, clock: Clock, tokenizer: Tokenizer):
        self._clock, self._runner = clock, PacedRunner(PACE)
        self._events, self._times, self._reader = Events(), StepTimes(), Reader("", 0)
        assert CONFIG.num_gpu_blocks_override and CONFIG.max_model_len
        cache = KVCache(CONFIG.num_gpu_blocks_override, CONFIG.block_size, True, self._events)
        scheduler = Scheduler(cache, CONFIG.max_num_seqs, CONFIG.max_num_batched_tokens)
        limits = Limits(CONFIG.max_model_len, tokenizer.vocab_size, tokenizer.eos_token_ids)
        metrics = Metrics(CollectorRegistry(), url)
        self._engine = Engine(self._runner, scheduler, tokenizer, limits, CONFIG, metrics)
        self._listeners: dict[str, Callable[[Delta], None]] = {}
        self._arrived: list[Request] = []
        self._stepping = False
        self.busy = 0.0  # seconds
        self.known = Known(url)
        self.known.about = {
            "models": ["simulated"],
            "max_num_seqs": CONFIG.max_num_seqs,
            "max_num_batched_tokens": CONFIG.max_num_batched_tokens,
            "page_size": CONFIG.block_size,
        }
        self._tell()

    def submit(self, request: Request, listener: Callable[[Delta], None]) -> None:
        """`listener` hears each delta when the step that made it ends."""
        self._listeners[request.request_id] = listener
        self._arrived.append(self._engine.prepare(request))
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        for request in self._arrived:
            self._engine.add(request)
        self._arrived.clear()
        self._stepping = self._engine.busy
        if self._stepping:
            deltas = self._engine.step()
            self.busy += self._runner.seconds
            self._clock.after(self._runner.seconds, partial(self._end, deltas))

    def _end(self, deltas: list[tuple[str, Delta]]) -> None:
        self._times.observe(self._runner.prompt_tokens, self._runner.decoding, self._runner.seconds)
        self._clock.after(LOOK, self._tell)
        for request_id, delta in deltas:
            self._listeners[request_id](delta)
        self._step()

    def _tell(self) -> None:
        if news := self._reader.news(self._events):
            take(self.known, news)
        waiting = len(self._arrived) + len(self._engine.scheduler.waiting)
        load = {"running": len(self._engine.ongoing) + len(self._arrived) - waiting, "waiting": waiting}
        take(self.known, {"load": {"state": "ready", "pace": self._times.pace(), **load}})


@dataclass
class Talk:
    """One conversation: the next turn is sent some time after the answer to the one before."""

    session: Session
    clock: Clock
    tokenizer: Tokenizer
    fleet: Fleet
    workers: dict[str, Worker]
    ttfts: list[float]  # seconds, of all conversations
    usage: list[tuple[int, int]]  # (prompt tokens, of those cached) of all requests
    messages: list[dict[str, str]] = field(default_factory=list)
    turn: int = 0

    def begin(self) -> None:
        self.messages.append({"role": "system", "content": self.session.system})
        self.clock.after(self.session.start, self._ask)

    def _ask(self) -> None:
        turn = self.session.turns[self.turn]
        self.messages.append({"role": "user", "content": turn.text})
        tokens, _ = self.tokenizer.encode_chat(self.messages)
        asked = Asked("simulated", tokens, 0, "", self.session.name, turn.output_len)
        known, ticket = self.fleet.pick(asked)
        params = SamplingParams(temperature=0.0, max_tokens=turn.output_len, ignore_eos=True)
        request = Request(f"{self.session.name}.{self.turn}", tokens, params)
        self.workers[known.url].submit(request, _Answer(self, known, ticket, len(tokens)))

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})
        think = self.session.turns[self.turn].think
        self.turn += 1
        if self.turn < len(self.session.turns):
            self.clock.after(think, self._ask)


class _Answer:
    """Hears an answer, and lets the router learn from it what its relay would."""

    def __init__(self, talk: Talk, known: Known, ticket: Ticket, prompt_tokens: int):
        self._talk, self._known, self._ticket, self._prompt_tokens = talk, known, ticket, prompt_tokens
        self._text, self._tokens, self._cached = "", 0, 0

    def __call__(self, delta: Delta) -> None:
        talk, ticket = self._talk, self._ticket
        if not ticket.answering:
            self._cached = delta.num_cached_tokens
            talk.ttfts.append(talk.clock.now - ticket.sent_at)
        talk.fleet.on_first_token(self._known, ticket)
        self._text += delta.text
        self._tokens += len(delta.token_ids)
        if delta.finish_reason:
            assert delta.finish_reason == "length", delta
            usage = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._tokens,
                "prompt_tokens_details": {"cached_tokens": self._cached},
            }
            talk.fleet.on_answered(self._known, ticket, usage)
            self._known.take_back(ticket)
            talk.usage.append((self._prompt_tokens, self._cached))
            talk.answered(self._text)
