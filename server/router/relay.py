"""One request through the router: a worker's answer passed on as it comes, and others asked when that one fails."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.errors import OverloadedError
from server.connection import ClientGone, while_connected
from server.errors import as_api_error, error_body, error_response
from server.prefill_url import HEADER as PREFILL
from server.router.fleet import Asked, Fleet
from server.router.passage import Passage, WorkerError
from server.router.prompt_tokens import CHAT, COMPLETIONS
from server.router.timeline import Timeline
from server.router.worker import Ticket, Worker
from server.stream import event

log = logging.getLogger(__name__)
WORKER = "X-Jaxserve-Worker"
_PASSED = ("content-type", "cache-control", "x-accel-buffering", "retry-after", "www-authenticate", "allow")
_COUNTED = (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize", "/detokenize")
_BROKEN = (httpx.HTTPError, httpx.StreamError, TimeoutError)


class Broken(Exception):
    """A worker failed a request in a way in which another one may not."""


@dataclass(frozen=True)
class Opened:
    """A worker's answer that has begun."""

    worker: Worker
    ticket: Ticket
    response: httpx.Response
    closing: contextlib.AsyncExitStack

    @property
    def streams(self) -> bool:
        return self.response.headers.get("content-type", "").startswith("text/event-stream")


class Relay(Response):
    """The answer to one request, whoever gives it in the end."""

    def __init__(
        self,
        fleet: Fleet,
        request: Request,
        content: bytes,
        body: dict[str, Any],
        asked: Asked,
        timeline: Timeline,
    ):
        """`body` is what `content` says, or nothing if that is no JSON object."""
        self.background = None
        self._fleet, self._request, self._content, self._body = fleet, request, content, body
        self._asked, self._timeline = asked, timeline
        self._path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        self._passage = Passage(self._path, body)
        self._tried: list[Worker] = []
        self._started = False
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            await while_connected(receive, self._run())
        except ClientGone:
            self.status_code = 499
        except Exception as error:
            failure = as_api_error(error)
            self.status_code = failure.status_code
            if self._started:
                await self._write(event(error_body(failure)))
                await self._write(b"", more=False)
            else:
                await error_response(failure)(scope, receive, send)
        finally:
            path = self._path if self._path in _COUNTED else "other"
            self._fleet.metrics.requests.labels(path, str(self.status_code)).inc()
            self._timeline.end(self.status_code, self._passage.usage)

    async def _run(self) -> None:
        """Give the request to one worker after the other until one has answered it all."""
        self._fleet.retry_budget.earn()
        self._fleet.hedge_budget.earn()
        while True:
            last = len(self._tried) >= self._fleet.config.retries
            opened = None
            try:
                opened = await self._open(last)
                async with opened.closing:
                    await (self._stream(opened) if opened.streams else self._whole(opened))
                return
            except Broken as why:
                if opened:
                    self._fleet.on_failed(opened.worker, str(why))
                if last or not self._passage.resumable or not self._fleet.retry_budget.spend():
                    raise OverloadedError(
                        f"the worker failed and no other one could go on: {why}",
                        retry_after=1.0,
                        draining=True,
                    ) from why
                self._fleet.metrics.on_again("continued" if self._started else "retry")
                self._timeline.mark("given to another worker", reason=str(why))

    # Beginning

    async def _open(self, last: bool) -> Opened:
        """The first answer that begins: from the best worker or, when that takes long, from one more."""
        after = self._fleet.config.hedge_after
        first = asyncio.ensure_future(self._attempt(last))
        try:
            if after is not None and not self._started:
                await asyncio.wait({first}, timeout=after)
                others = self._fleet.candidates(self._asked.model, self._tried)
                if not first.done() and others and self._fleet.hedge_budget.spend():
                    return await self._race(first)
            return await first
        except BaseException:
            await _dropped(first)
            raise

    async def _race(self, first: asyncio.Future[Opened]) -> Opened:
        """Give the request to a second worker; the first answer wins, the other is broken off."""
        self._fleet.metrics.on_again("hedge")
        self._timeline.mark("also given to another worker")
        second = asyncio.ensure_future(self._attempt(last=True))
        waiting = {first, second}
        won: asyncio.Future[Opened] | None = None
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                won = next((each for each in done if not each.cancelled() and not each.exception()), None)
                if won:
                    return won.result()
            return first.result()
        finally:
            for each in (first, second):
                if each is not won:
                    await _dropped(each)

    async def _attempt(self, last: bool) -> Opened:
        """Send the request to the best worker left; Broken if it does not answer, or not as a working one does."""
        worker, ticket = self._fleet.pick(self._asked, self._tried)
        self._tried.append(worker)
        self._timeline.mark(
            "given", worker=worker.url, hit=ticket.prediction.hit, ttft=ticket.prediction.ttft
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(worker.take_back, ticket)
            if not self._streamed:  # when its first token comes cannot be seen
                loop = asyncio.get_running_loop()
                timer = loop.call_later(ticket.prediction.ttft, setattr, ticket, "answering", True)
                stack.callback(timer.cancel)
            try:
                async with worker.watched():
                    stream = self._fleet.client.stream(
                        "POST",
                        worker.url + self._path,
                        params=self._request.query_params,
                        content=self._outgoing(),
                        headers=self._headers(ticket),
                    )
                    response = await stack.enter_async_context(stream)
                    if response.status_code >= 500:
                        await response.aread()
            except _BROKEN as error:
                why = f"{worker.url}: {str(error) or worker.why or type(error).__name__}"
                self._fleet.on_failed(worker, why)
                raise Broken(why) from error
            if response.status_code >= 500:
                why = f"{worker.url} answered {response.status_code}"
                if not (response.status_code == 503 and "retry-after" in response.headers):
                    self._fleet.on_failed(worker, why)
                others = self._fleet.candidates(self._asked.model, self._tried)
                if others and not last and not self._started:
                    raise Broken(why)
            return Opened(worker, ticket, response, stack.pop_all())
        raise AssertionError("the stack swallows nothing")

    @property
    def _streamed(self) -> bool:
        return self._body.get("stream") is True

    def _outgoing(self) -> bytes:
        return json.dumps(self._passage.request()).encode() if self._streamed else self._content

    def _headers(self, ticket: Ticket) -> dict[str, str]:
        kept = {
            name: value
            for name, value in self._request.headers.items()
            if name in ("authorization", "x-api-key", "accept", "traceparent", "tracestate")
        }
        if self._fleet.config.worker_api_key:
            kept.pop("x-api-key", None)
            kept["authorization"] = f"Bearer {self._fleet.config.worker_api_key}"
        if ticket.prefill_url:
            kept[PREFILL] = ticket.prefill_url
        return kept | {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "x-request-id": self._request.state.request_id,
        }

    # Passing on

    async def _whole(self, opened: Opened) -> None:
        """An answer that is not streamed; nothing is sent before it is complete."""
        response, worker = opened.response, opened.worker
        try:
            async with worker.watched():
                content = await response.aread()
        except _BROKEN as error:
            raise Broken(f"{worker.url}: {str(error) or worker.why}") from error
        if self._started:  # a stream cannot go on with another status
            raise Broken(
                f"{worker.url} answered {response.status_code} instead of going on: {content[:200]!r}"
            )
        if response.status_code == 200 and response.headers.get("content-type") == "application/json":
            self._passage.usage = json.loads(content).get("usage")
        if response.status_code < 500:
            self._fleet.on_answered(worker, opened.ticket, self._passage.usage)
        await self._start(opened)
        await self._write(content, more=False)

    async def _stream(self, opened: Opened) -> None:
        """Server-sent events, each as it comes."""
        worker = opened.worker
        if not self._started:
            await self._start(opened)
        try:
            async with worker.watched(), contextlib.aclosing(_events(opened.response)) as parts:
                async for part in parts:
                    if part == b"data: [DONE]":
                        self._fleet.on_answered(worker, opened.ticket, self._passage.usage)
                        await self._write(part + b"\n\n")
                        await self._write(b"", more=False)
                        return
                    passed = self._passage.passed_on(part)
                    if passed is None:
                        continue
                    if not part.startswith(b":"):
                        if not opened.ticket.answering:
                            self._timeline.mark("first token", worker=worker.url)
                        self._fleet.on_first_token(worker, opened.ticket)
                        self._timeline.token()
                    await self._write(passed)
        except WorkerError as error:
            if error.body["error"].get("type") == "invalid_request_error" or not self._passage.resumable:
                await self._write(event(error.body))
                await self._write(b"", more=False)
                return
            raise Broken(f"{worker.url}: {error}") from error
        except _BROKEN as error:
            raise Broken(f"{worker.url}: {str(error) or worker.why}") from error
        if self._passage.finished:  # only the end of the stream is missing, and nothing is left to generate
            await self._write(b"data: [DONE]\n\n")
            await self._write(b"", more=False)
            return
        raise Broken(f"{worker.url} ended the stream in the middle")

    async def _start(self, opened: Opened) -> None:
        response = opened.response
        self._started, self.status_code = True, response.status_code
        headers = [(n.encode(), response.headers[n].encode()) for n in _PASSED if n in response.headers]
        headers.append((WORKER.lower().encode(), opened.worker.url.encode()))
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})

    async def _write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def _events(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Whole events, without the empty line that ends each."""
    rest = b""
    async for part in response.aiter_raw():
        *whole, rest = (rest + part).split(b"\n\n")
        for each in whole:
            yield each


async def _dropped(attempt: asyncio.Future[Opened]) -> None:
    """Break off an attempt whose answer nobody wants."""
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)
    if not attempt.cancelled() and not attempt.exception():
        await attempt.result().closing.aclose()
