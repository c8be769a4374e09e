"""A client of two engines: prompts are computed by one, or as far as that fails by the other, which goes on alone."""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from jaxserve.async_llm import SHUTTING_DOWN, AsyncLLM, Health
from jaxserve.errors import OverloadedError
from jaxserve.handover.handshake import Handshake
from jaxserve.handover.messages import HandoverFailed
from jaxserve.handover.metrics import HandoverMetrics
from jaxserve.handover.pages import EnginePages
from jaxserve.handover.receiver import Arrived, Receiver, Source
from jaxserve.handover.sender import Sender
from jaxserve.request import Delta, Request
from server.clients.worker import HttpWorker

log = logging.getLogger("uvicorn.error")


class Split:
    """An AsyncLLM that takes long prompts from elsewhere. What is not defined here is the engine's own."""

    def __init__(
        self,
        llm: AsyncLLM,
        pages: EnginePages,
        receiver: Receiver,
        sender: Sender,
        metrics: HandoverMetrics,
        sources: list[Source],
        *,
        role: str,
        least: int,
        api_key: str | None = None,
        silence: float = 5.0,
        beside: "Split | None" = None,
    ):
        """Prompts of which `least` tokens are missing here are asked for of `sources`, one after the other.

        `beside` is one of them in this process, which is closed with this one.
        """
        self.llm, self.pages, self.receiver, self.sender = llm, pages, receiver, sender
        self._handovers = metrics
        self.role, self._least = role, least
        self._turns: Iterator[Source] | None = itertools.cycle(sources) if sources else None
        self._key, self._silence = api_key, silence
        self._workers: dict[str, HttpWorker] = {}  # that requests have named
        self._beside = beside
        self._draining = False
        self._coming = 0  # prompts on their way

    @property
    def handshake(self) -> Handshake:
        """What this worker says of itself."""
        return replace(self.receiver.handshake, role=self.role)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """See `AsyncLLM.submit`."""
        if self._draining:
            raise OverloadedError(SHUTTING_DOWN, retry_after=5, draining=True)
        source = self._source(request)
        if source is None:
            return self.llm.submit(request)
        request = self.llm.check(request)
        most = self.llm.config.max_num_seqs + self.llm.config.max_num_queued_reqs
        if self._coming >= most:
            raise OverloadedError(f"{self._coming} prompts are on their way here; try again", retry_after=1.0)
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=secrets.randbits(63)))
        return self._deltas(request, source)

    async def drain(self, timeout: float) -> None:
        """See `AsyncLLM.drain`; prompts on their way are waited for first."""
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._coming and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.llm.drain(max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        self.llm.close()
        self.receiver.close()
        self.sender.close()
        if self._beside:
            self._beside.close()

    def health(self) -> Health:
        """The engine's; or that of the one beside it, if that is no longer at work."""
        ours = self.llm.health()
        if self._draining and ours.state == "ready":
            return Health("draining")
        other = self._beside.health() if self._beside and ours.state == "ready" else ours
        return ours if other.state == "draining" else other

    def _source(self, request: Request) -> Source | None:
        """Who is to compute the prompt; None if it is ours to do."""
        params = request.params
        if len(request.prompt_token_ids) < self._least or request.generated:
            return None
        if params.prompt_logprobs is not None or request.hidden_states or params.max_tokens == 0:
            return None  # what is asked for is known only to who computes the prompt
        if request.prefill_url:
            return self.worker(request.prefill_url)
        return next(self._turns) if self._turns else None

    def worker(self, url: str) -> HttpWorker:
        """The worker at an address."""
        if url not in self._workers:
            self._workers[url] = HttpWorker(url, self._key, self._silence)
        return self._workers[url]

    async def _deltas(self, request: Request, source: Source) -> AsyncIterator[Delta]:
        alone = (request.params.best_of or request.params.n) == 1
        cached = None  # prompt tokens that the source did not compute
        self._coming += 1
        try:
            arrived = await self._fetched(request, source, alone)
            try:
                if arrived:
                    cached = arrived.first.num_cached_tokens
                if arrived and alone:
                    yield arrived.first
                    if arrived.first.finish_reason:
                        return
                    request = replace(request, generated=arrived.first.token_ids)
                stream = self.llm.submit(request)
            finally:
                if arrived:
                    arrived.release()  # after the request has taken hold of the pages
        finally:
            self._coming -= 1
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                found = delta.num_cached_tokens
                yield delta if cached is None else replace(delta, num_cached_tokens=min(found, cached))

    async def _fetched(self, request: Request, source: Source, alone: bool) -> Arrived | None:
        """The prompt from `source`; None if it is computed here."""
        if not alone:
            request = replace(request, params=replace(request.params, n=1, best_of=None))
        try:
            return await self.receiver.fetch(request, source, self._least)
        except HandoverFailed as why:
            log.warning("request %s: its prompt is computed here: %s", request.request_id, why)
            self._handovers.on_failure(why.reason)
            return None
