"""A client of two engines: prompts are computed by one, or as far as that fails by the other, which goes on alone."""

import itertools
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from jaxserve.async_llm import AsyncLLM
from jaxserve.errors import OverloadedError
from jaxserve.handover.handshake import Handshake
from jaxserve.handover.messages import HandoverFailed
from jaxserve.handover.metrics import HandoverMetrics
from jaxserve.handover.pages import EnginePages
from jaxserve.handover.receiver import Receiver, Source
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
    ):
        """Prompts of which `least` tokens are missing here are asked for of `sources`, one after the other."""
        self.llm, self.pages, self.receiver, self.sender = llm, pages, receiver, sender
        self._handovers = metrics
        self.role, self._least = role, least
        self._turns = itertools.cycle(sources) if sources else None
        self._key, self._silence = api_key, silence
        self._workers: dict[str, HttpWorker] = {}  # that requests have named
        self._coming = 0  # prompts on their way

    @property
    def handshake(self) -> Handshake:
        """What this worker says of itself."""
        return replace(self.receiver.handshake, role=self.role)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """See `AsyncLLM.submit`."""
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

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
        self.llm.close()

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
        self._coming += 1
        try:
            asked = request if alone else replace(request, params=replace(request.params, n=1, best_of=None))
            arrived = await self.receiver.fetch(asked, source, self._least)
        except HandoverFailed as why:
            log.warning("request %s: its prompt is computed here: %s", request.request_id, why)
            self._handovers.on_failure(why.reason)
            arrived = None
        finally:
            self._coming -= 1
        if arrived is None:
            async with aclosing(self.llm.submit(request)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        cached = arrived.first.num_cached_tokens
        try:
            if alone:
                yield arrived.first
                if arrived.first.finish_reason:
                    return
                request = replace(request, generated=arrived.first.token_ids)
            stream = self.llm.submit(request)
        finally:
            arrived.release()  # after the request has taken hold of them
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                yield replace(delta, num_cached_tokens=min(delta.num_cached_tokens, cached))
