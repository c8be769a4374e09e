"""Server-sent events: chunks as they come, comments in silence, an error as the last event, [DONE] on success."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.connection import ClientGone, while_connected
from server.errors import as_api_error, error_body, error_response
from server.generation import Generation

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends `chunks` as events; when the client leaves or the stream ends, `generation` is closed.

    The status waits for the first chunk (or the first comment), so what fails before it is a plain error answer.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, chunks: AsyncIterator[dict[str, Any]], keep_alive: float):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation, self._chunks, self._keep_alive = generation, chunks, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(send, self.raw_headers)
        async with self._generation:
            try:
                await while_connected(receive, self._send_all(writer))
            except ClientGone:
                return
            except Exception as error:
                if not writer.started:
                    await error_response(error)(scope, receive, send)
                    return
                await writer.write(event(error_body(as_api_error(error))))
            await writer.end()

    async def _send_all(self, writer: "_Writer") -> None:
        comments = asyncio.create_task(writer.comment_in_silence(self._keep_alive))
        try:
            async with contextlib.aclosing(self._chunks) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    await writer.write(event(chunk))
            await writer.write(DONE)
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)


class _Writer:
    """Writes whole events, one at a time, and the status before the first."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]):
        self.started = False
        self._send, self._headers = send, headers
        self._lock = asyncio.Lock()
        self._last = asyncio.get_running_loop().time()

    async def write(self, data: bytes) -> None:
        async with self._lock:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._last = asyncio.get_running_loop().time()

    async def comment_in_silence(self, interval: float) -> None:
        """A comment whenever nothing was written for `interval` seconds; never, if that is 0."""
        now = asyncio.get_running_loop().time
        while interval:
            left = self._last + interval - now()
            if left <= 0:
                await self.write(KEEP_ALIVE)
                left = interval
            await asyncio.sleep(left)

    async def end(self) -> None:
        async with self._lock:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


EVENTS = {  # OpenAPI: what a request with stream: true is answered
    "description": "the answer; with stream: true, server-sent events that each hold a chunk of it",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
