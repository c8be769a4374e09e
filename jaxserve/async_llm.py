"""AsyncLLM: the engine on a thread of its own, its deltas as asynchronous streams."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, fields
from queue import Empty, SimpleQueue
from typing import Any, Literal, Self

from prometheus_client import CollectorRegistry

from jaxserve.build import Built, build
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError, EngineError, OverloadedError, RequestError
from jaxserve.metrics import Metrics
from jaxserve.pace import StepTimes
from jaxserve.request import Delta, Request
from jaxserve.trace import Trace
from kv.events import Events
from sharding.hosts import HEARTBEAT, Leader

log = logging.getLogger(__name__)
STALLED_AFTER = 60.0  # seconds without a step although there is work
IDLE_WAIT = 1.0  # seconds the thread sleeps at most when there is nothing to do
SHUTTING_DOWN = "the server is shutting down; send the request again to another one"


@dataclass(frozen=True)
class Load:
    """How much there is to do."""

    running: int  # requests
    waiting: int  # requests
    waiting_tokens: int  # of their prompts
    kv_usage: float  # part of the cache pages in use


@dataclass(frozen=True)
class Health:
    """Whether requests are served, and if not why."""

    state: Literal["starting", "ready", "draining", "stalled", "dead"]
    detail: str = ""


class Deltas:
    """One request's deltas as an asynchronous iterator; `aclose` before the end aborts the request."""

    def __init__(self, request: Request, abandon: Callable[["Deltas"], None]):
        """`abandon` is told when nobody wants the rest."""
        self.loop = asyncio.get_running_loop()
        self.request_id, self.choices = request.request_id, request.params.n
        self._abandon = abandon
        self._open = set(range(self.choices))  # choices that have not ended
        self._arrived: asyncio.Queue[Delta | Exception] = asyncio.Queue()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while self._open:
            arrived = await self._arrived.get()
            if isinstance(arrived, Exception) and self._open:
                self._open.clear()
                raise arrived
            if isinstance(arrived, Delta) and arrived.index in self._open:
                if arrived.finish_reason:
                    self._open.remove(arrived.index)
                return arrived
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._open:
            self._open.clear()
            self._abandon(self)

    def put(self, arrived: Delta | Exception) -> None:
        """On the consumer's loop."""
        self._arrived.put_nowait(arrived)


class AsyncLLM:
    """A model being served: `submit` from any event loop, as many at a time as the settings allow.

    The constructor returns when the model is loaded and compiled. `close` it at the end.
    """

    def __init__(
        self,
        model: str | EngineConfig,
        *,
        served_model_name: str | None = None,
        build: Callable[[EngineConfig, Metrics, Events], Built] = build,
        trace: Trace | None = None,
        **settings: Any,
    ):
        """`served_model_name` is what the metrics call the model; `build` makes the engine; `trace` is handed the
        timeline of each request that ends."""
        config = engine_config(model, settings)
        refuse_to_follow(config)
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry, served_model_name or config.model)
        self.cache_events = Events()
        self.step_times = StepTimes()
        built = build(config, self.metrics, self.cache_events)
        self.config, self.model_config, self.tokenizer = built.config, built.model_config, built.tokenizer
        self._engine = built.engine
        self._engine.trace = trace
        self._lost = threading.Event()  # set when another process of the engine has gone
        self._leads = isinstance(built.crew, Leader)
        if isinstance(built.crew, Leader):
            built.crew.on_lost = self._lose
        self._streams: dict[str, Deltas] = {}  # of requests that were submitted and have not ended
        self._served: dict[str, Deltas] = {}  # of those in the engine; only its thread looks here
        self._queued: dict[str, int] = {}  # submitted and not started: request id to prompt tokens
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[tuple[str, Any, Any]] = SimpleQueue()
        self._wake = threading.Event()
        self._draining = self._closing = False
        self._failure: str | None = None
        self._beat = time.monotonic()
        self._pace = 1000.0  # prompt tokens started a second, lately
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Deltas:
        """The request's deltas as they come; closing the iterator aborts the request.

        Refusals raise here, before anything runs: RequestError for a request that can never be served,
        OverloadedError when there is no room now.
        """
        request = self._engine.prepare(request)
        stream = Deltas(request, self._abandon)
        with self._lock:
            self._check_room(request)
            self._streams[request.request_id] = stream
            self._queued[request.request_id] = len(request.prompt_token_ids)
            self._inbox.put(("add", request, stream))
        self._wake.set()
        return stream

    def check(self, request: Request) -> Request:
        """The request as `submit` would run it; the same refusals, and nothing runs."""
        request = self._engine.prepare(request)
        with self._lock:
            self._check_room(request)
        return request

    def abort(self, request_id: str) -> None:
        """Stop a request and give its pages back; one that has ended already is no mistake.

        What is left of its choices ends with the finish_reason "abort".
        """
        stream = self._streams.get(request_id)
        if stream is not None:
            self._abandon(stream)

    def call[T](self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function` on the engine's thread, between two steps; what it launches comes after the steps before."""
        future: Future[T] = Future()
        with self._lock:
            if self._failure or self._closing:
                future.set_exception(EngineError(self._failure or SHUTTING_DOWN))
                return future
            self._inbox.put(("call", function, future))
        self._wake.set()
        return future

    def load(self) -> Load:
        """How much there is to do, now."""
        with self._lock:
            waiting, tokens = len(self._queued), sum(self._queued.values())
            running = len(self._streams) - waiting
        return Load(running, waiting, tokens, self._engine.scheduler.cache.usage)

    def health(self) -> Health:
        """`stalled` when there is work and no step was finished for long, `dead` when the engine has failed."""
        if self._failure:
            return Health("dead", self._failure)
        silent = time.monotonic() - self._beat
        if silent > STALLED_AFTER:
            return Health("stalled", f"no step was finished for {silent:.0f} s")
        return Health("draining") if self._draining else Health("ready")

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, let running ones finish for up to `timeout` seconds, then end them."""
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._streams and not self._failure and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._inbox.put(("end", SHUTTING_DOWN, None))
        self._wake.set()

    def close(self) -> None:
        """End everything and stop the thread. Twice does no harm."""
        self._draining = self._closing = True
        self._wake.set()
        if not self._failure:  # whatever it waits for then may never come
            self._thread.join()
        self._engine.close()

    def _abandon(self, stream: Deltas) -> None:
        with self._lock:
            if self._streams.get(stream.request_id) is not stream:
                return
            del self._streams[stream.request_id]
            self._queued.pop(stream.request_id, None)
            self._inbox.put(("abort", None, stream))
        self._wake.set()
        _hand_over([(stream, Delta(i, finish_reason="abort")) for i in range(stream.choices)])

    def _check_room(self, request: Request) -> None:
        if self._failure:
            raise EngineError(f"the engine has failed: {self._failure}")
        if self._draining:
            raise OverloadedError(SHUTTING_DOWN, retry_after=5, draining=True)
        if request.request_id in self._streams:
            raise RequestError(
                f"request_id {request.request_id!r} is running already; ids must be unique",
                param="request_id",
            )
        waiting, tokens = len(self._queued), sum(self._queued.values())
        free = max(self._engine.scheduler.max_num_seqs - (len(self._streams) - waiting), 0)
        most = self.config.max_num_queued_tokens
        full = waiting - free >= self.config.max_num_queued_reqs
        if full or (most is not None and waiting and tokens + len(request.prompt_token_ids) > most):
            self.metrics.on_rejected("queue_full" if full else "queued_tokens")
            raise OverloadedError(
                f"{waiting} requests with {tokens} prompt tokens are waiting, as many as this server queues; try again",
                retry_after=min(max(tokens / self._pace, 1.0), 60.0),
            )

    # The engine's thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_mail()
                if not self._engine.busy:
                    self._wait()
                    continue
                self._deliver(self._engine.step())
                self._note_started()
                self._note_step()
            self._end_all(SHUTTING_DOWN)
        except Exception as failure:
            log.exception("the engine has failed")
            if self._leads:  # a step fails, too, when a process has gone: the message is to say which
                self._lost.wait(2 * HEARTBEAT)
            self._failure = self._failure or f"{type(failure).__name__}: {failure}"
            self._fail_all()

    def _wait(self) -> None:
        self._beat = time.monotonic()
        self._wake.wait(IDLE_WAIT)
        self._wake.clear()
        self._beat = time.monotonic()

    def _take_mail(self) -> None:
        while True:
            try:
                kind, what, stream = self._inbox.get_nowait()
            except Empty:
                return
            if kind == "add":
                self._engine.add(what)
                self._served[what.request_id] = stream
            elif kind == "end":
                self._end_all(what)
            elif kind == "call":
                _run(what, stream, self._engine)
            elif self._served.get(stream.request_id) is stream:
                self._engine.abort(stream.request_id)
                del self._served[stream.request_id]

    def _note_started(self) -> None:
        """Requests that were given their first tokens no longer wait."""
        if self._engine.started:
            with self._lock:
                tokens = sum(self._queued.pop(request_id, 0) for request_id in self._engine.started)
            elapsed = max(time.monotonic() - self._beat, 1e-3)
            self._pace += 0.1 * (tokens / elapsed - self._pace)

    def _note_step(self) -> None:
        """What was computed since the last step, and in which time."""
        now = time.monotonic()
        if self._engine.read:
            decoding = sum(chunk.samples and chunk.count == 1 for chunk in self._engine.read.chunks)
            tokens = sum(chunk.count for chunk in self._engine.read.chunks)
            self.step_times.observe(tokens - decoding, decoding, now - self._beat)
        self._beat = now

    def _deliver(self, deltas: list[tuple[str, Delta]]) -> None:
        arrived = [(self._served[request_id], delta) for request_id, delta in deltas]
        for request_id in {request_id for request_id, delta in deltas if delta.finish_reason}:
            if request_id not in self._engine.ongoing:
                stream = self._served.pop(request_id)
                with self._lock:
                    if self._streams.get(request_id) is stream:
                        del self._streams[request_id]
        for stream in _hand_over(arrived):  # last: who sees the end of a request can use its id again
            self._abandon(stream)

    def _end_all(self, why: str) -> None:
        """Every request ends here, those that have not reached the engine too."""
        with self._lock:
            self._drop_mail(why)
            streams, self._streams, self._queued = self._streams, {}, {}
        for request_id in list(self._engine.ongoing):
            self._engine.abort(request_id)
        self._served.clear()
        _hand_over([(s, OverloadedError(why, retry_after=5, draining=True)) for s in streams.values()])

    def _lose(self, why: str) -> None:
        """A process of the engine has gone; our own thread may wait for it and never wake."""
        log.critical("the engine has failed: %s", why)
        self._failure = why
        self._lost.set()
        self._fail_all()

    def _drop_mail(self, why: str) -> None:
        while not self._inbox.empty():
            kind, _, sender = self._inbox.get_nowait()
            if kind == "call" and sender.set_running_or_notify_cancel():
                sender.set_exception(EngineError(why))

    def _fail_all(self) -> None:
        with self._lock:
            self._drop_mail(f"the engine has failed: {self._failure}")
            streams, self._streams, self._queued = self._streams, {}, {}
        _hand_over([(s, EngineError(f"the engine has failed: {self._failure}")) for s in streams.values()])


def refuse_to_follow(config: EngineConfig) -> None:
    """ConfigError for a process that is not its engine's first: requests are for that one."""
    if config.node_rank:
        raise ConfigError(
            f"node_rank={config.node_rank} follows the process of rank 0 and takes no requests; run it as "
            f"jaxserve serve {config.model} --nnodes {config.nnodes} --node-rank {config.node_rank} with the same "
            "settings"
        )


def engine_config(model: str | EngineConfig, settings: dict[str, Any]) -> EngineConfig:
    """The settings of a model given by name, or as they are; an unknown setting is refused by name."""
    if isinstance(model, EngineConfig):
        if settings:
            raise TypeError(
                f"give settings either in the EngineConfig or as keywords, not both: {sorted(settings)}"
            )
        return model
    unknown = settings.keys() - {f.name for f in fields(EngineConfig)}
    if unknown:
        raise TypeError(f"no such setting: {', '.join(sorted(unknown))}; see jaxserve.EngineConfig")
    return EngineConfig(model, **settings)


def _run(function: Callable[[Engine], Any], future: Future, engine: Engine) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function(engine))
        except Exception as failure:
            future.set_exception(failure)


def _hand_over(arrived: Iterable[tuple[Deltas, Delta | Exception]]) -> list[Deltas]:
    """Put each item into its stream, on the stream's own event loop, in one call a loop.

    Returns the streams whose loop is closed: nobody can ever read them.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Deltas, Delta | Exception]]] = {}
    for stream, item in arrived:
        by_loop.setdefault(stream.loop, []).append((stream, item))

    def put(batch: list[tuple[Deltas, Delta | Exception]]) -> None:
        for stream, item in batch:
            stream.put(item)

    lost: list[Deltas] = []
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(put, batch)
        except RuntimeError:
            lost += [stream for stream, _ in batch]
    return lost
