"""Another worker, over HTTP, as a source of prompts."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx

from jaxserve.handover.handshake import Handshake
from jaxserve.handover.messages import HandoverFailed, Incompatible, Message
from jaxserve.request import Request
from server.clients.messages import message_from, request_json

KNOWN = 5.0  # seconds that a handshake is taken as it was
LEASE_TIMEOUT = 2.0  # seconds that a message about a lease may take


class HttpWorker:
    """A `jaxserve serve` process with a role; everything it fails in is a HandoverFailed, in bounded time."""

    def __init__(self, url: str, api_key: str | None, silence: float):
        """`silence` is how many seconds it may say nothing."""
        self.url, self._silence = url.rstrip("/"), silence
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(silence, pool=None)
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=self._headers,
            timeout=timeout,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )
        self._blocking = httpx.Client(
            base_url=self.url, headers=self._headers, timeout=LEASE_TIMEOUT, trust_env=False
        )
        self._shaken: tuple[float, Handshake] | None = None

    async def handshake(self) -> Handshake:
        """What it says of itself, a few seconds old at most."""
        if self._shaken and time.monotonic() - self._shaken[0] < KNOWN:
            return self._shaken[1]
        try:
            answer = await self._client.get("/internal/handshake")
        except httpx.HTTPError as why:
            raise self._lost(why) from why
        if answer.status_code != 200:
            raise HandoverFailed("unreachable", f"{self.url} answers {answer.status_code} to a handshake")
        handshake = Handshake.read(answer.json())
        self._shaken = time.monotonic(), handshake
        return handshake

    async def prefill(
        self, request: Request, receiver: Handshake, skip: int, link: str
    ) -> AsyncIterator[Message]:
        """See `jaxserve.handover.sender.Sender.prefill`."""
        body = {"request": request_json(request), "receiver": receiver.written(), "skip": skip, "link": link}
        try:
            async with self._client.stream("POST", "/internal/prefill", json=body) as answer:
                if answer.status_code != 200:
                    raise self._refused(answer.status_code, json.loads(await answer.aread()))
                async with aclosing(answer.aiter_lines()) as lines:  # type: ignore[type-var]
                    async for line in lines:
                        said = json.loads(line)
                        if "error" in said:
                            raise self._refused(200, said)
                        if "beat" not in said:
                            yield message_from(said)
        except (httpx.HTTPError, httpx.StreamError) as why:
            self._shaken = None
            raise self._lost(why) from why
        except (ValueError, KeyError, TypeError) as why:
            raise HandoverFailed("corrupt", f"{self.url} says what nobody understands: {why}") from why

    def renew(self, lease: str, read: int) -> bool:
        return self._blocking.post(f"/internal/leases/{lease}/renew?read={read}").status_code == 200

    def release(self, lease: str, read: int) -> bool:
        return self._blocking.delete(f"/internal/leases/{lease}?read={read}").status_code == 200

    def _refused(self, status: int, said: dict[str, Any]) -> HandoverFailed:
        error = said.get("error", {})
        message = f"{self.url}: {error.get('message', status)}"
        return (
            Incompatible(message)
            if error.get("code") == "incompatible"
            else HandoverFailed("refused", message)
        )

    def _lost(self, why: Exception) -> HandoverFailed:
        if isinstance(why, httpx.ReadTimeout):
            return HandoverFailed("silent", f"{self.url} has said nothing for {self._silence:g} s")
        return HandoverFailed("unreachable", f"{self.url}: {why or type(why).__name__}")
