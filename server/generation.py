"""The engine's work for one HTTP request: all its prompts' deltas as one stream, counted; closing it aborts them."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any, Self

from jaxserve.errors import EngineError, OverloadedError, RequestError
from jaxserve.request import Delta, Request
from server.served import Served


class Generation:
    """The running requests of one HTTP request; use it as an async context, whose end aborts what still runs."""

    def __init__(self, streams: list[AsyncIterator[Delta]], requests: list[Request]):
        self._streams = streams
        self._pumps: list[asyncio.Task] = []
        self._offsets = list(itertools.accumulate((request.params.n for request in requests), initial=0))
        self.requests = requests
        self.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.completion_tokens = sum(len(request.generated) for request in requests)
        self._cached = [0] * len(requests)

    @classmethod
    async def start(cls, served: Served, requests: list[Request]) -> Self:
        """Submit `requests`: all of them, or none if one is refused."""
        _check_number(served, requests)
        streams: list[AsyncIterator[Delta]] = []
        try:
            for request in requests:
                streams.append(served.engine.submit(request))
        except BaseException:
            await cls(streams, requests)._close()
            raise
        return cls(streams, requests)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Deltas as they come, numbered over all prompts: prompt i's choices start at i * n.

        Raises EngineError, or OverloadedError, when the engine gave up on a request.
        """
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                yield self._counted(0, delta)
            return
        arrivals: asyncio.Queue = asyncio.Queue()
        self._pumps = [asyncio.create_task(_pump(i, s, arrivals)) for i, s in enumerate(self._streams)]
        left = len(self._pumps)
        while left:
            i, arrived = await arrivals.get()
            if isinstance(arrived, Delta):
                yield self._counted(i, arrived)
            elif arrived is not None:
                raise arrived
            else:
                left -= 1

    async def choices(self, deltas: AsyncIterator[Delta]) -> list[Delta]:
        """Every choice as one delta, in order."""
        parts: dict[int, list[Delta]] = {}
        async for delta in deltas:
            parts.setdefault(delta.index, []).append(delta)
        return [joined(parts[index]) for index in sorted(parts)]

    def usage(self) -> dict[str, Any]:
        """What was used so far, in OpenAI's words."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def _counted(self, i: int, delta: Delta) -> Delta:
        if delta.finish_reason == "error":
            raise EngineError(delta.error or "the engine failed on this request")
        if delta.finish_reason == "abort":
            raise OverloadedError(delta.error or "the request was aborted", retry_after=1.0, draining=True)
        self.completion_tokens += len(delta.token_ids)
        self._cached[i] = max(self._cached[i], delta.num_cached_tokens)
        return replace(delta, index=self._offsets[i] + delta.index) if i else delta

    async def _close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()  # type: ignore[attr-defined]


def joined(deltas: Iterable[Delta]) -> Delta:
    """One choice's deltas as a single one."""
    first, *rest = deltas
    last = rest[-1] if rest else first
    every = [first, *rest]
    logprobs = [entry for delta in every for entry in delta.logprobs or ()]
    return replace(
        first,
        text="".join(delta.text for delta in every),
        token_ids=[token for delta in every for token in delta.token_ids],
        logprobs=logprobs if any(delta.logprobs is not None for delta in every) else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


def _check_number(served: Served, requests: list[Request]) -> None:
    config = served.engine.config
    room = config.max_num_seqs + config.max_num_queued_reqs
    if len(requests) > room:
        raise RequestError(
            f"prompt holds {len(requests)} prompts, more than this server ever takes at once ({room}); send fewer",
            param="prompt",
        )


async def _pump(i: int, stream: AsyncIterator[Delta], arrivals: asyncio.Queue) -> None:
    try:
        async for delta in stream:
            arrivals.put_nowait((i, delta))
        arrivals.put_nowait((i, None))
    except Exception as error:
        arrivals.put_nowait((i, error))
