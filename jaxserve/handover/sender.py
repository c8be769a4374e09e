"""The sending side: a prompt is computed as any other, and its rows leave while later layers and chunks compute."""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.async_llm import AsyncLLM, Deltas
from jaxserve.errors import EngineError
from jaxserve.handover.handshake import Handshake
from jaxserve.handover.messages import Block, First, Granted, Message
from jaxserve.handover.metrics import HandoverMetrics
from jaxserve.handover.pages import EnginePages
from jaxserve.layer_groups import LayerGroup
from jaxserve.request import Request
from jaxserve.sequence import Sequence
from kv import wire
from kv.leases import Leases
from kv.transfer import Link

log = logging.getLogger(__name__)


class Sender:
    """Computes prompts for other workers. What they may still fetch is under leases."""

    def __init__(
        self,
        llm: AsyncLLM,
        pages: EnginePages,
        handshake: Handshake,
        links: dict[str, Link],
        metrics: HandoverMetrics,
        lease_seconds: float,
    ):
        self._llm, self._pages, self._handshake, self._links = llm, pages, handshake, links
        self._metrics = metrics
        self.leases = Leases(lease_seconds, metrics.on_expiry)
        self._announcer = ThreadPoolExecutor(1, "announce")

    async def handshake(self) -> Handshake:
        return self._handshake

    async def prefill(
        self, request: Request, receiver: Handshake, skip: int, link: str
    ) -> AsyncIterator[Message]:
        """The lease, the blocks of all tokens from `skip` on that fill the receiver's pages, the first token.

        Closing the iterator before the end aborts the request and ends the lease. Incompatible if the two workers
        cannot be paired; otherwise refusals are those of `AsyncLLM.submit`.
        """
        receiver.link_to(self._handshake, link)
        dtype = wire.wire_dtype(self._handshake.dtype, receiver.dtype)
        end = len(request.prompt_token_ids) // receiver.page_size * receiver.page_size
        export = _Export(self, link, dtype, skip, end)
        stream = self._llm.submit(replace(request, watch=export.watch))
        lease = self.leases.grant(export.end)
        reading = asyncio.create_task(export.read(stream))
        finished = False
        try:
            yield Granted(lease, self._handshake.epoch, self.leases.seconds)
            while not finished:
                message = await export.messages.get()
                if isinstance(message, Exception):
                    raise message
                finished = isinstance(message, First)
                yield message
        finally:
            reading.cancel()
            await stream.aclose()  # before the end it aborts: what the request would go on to say is not ours
            if not finished:
                self.leases.release(lease)

    def renew(self, lease: str, read: int) -> bool:
        return self.leases.renew(lease, read)

    def release(self, lease: str, read: int) -> bool:
        return self.leases.release(lease, read)

    def close(self) -> None:
        self.leases.close()
        self._announcer.shutdown()


class _Export:
    """One prompt's blocks. `watch` is called on the engine's thread, `announce` on one that may wait for the device."""

    def __init__(self, sender: Sender, link: str, dtype: str, start: int, end: int):
        self._sender, self._link, self._dtype = sender, sender._links[link], dtype
        self._start, self._end = start, end
        self._next: dict[int, int] = {}  # token whose rows leave next, by the first layer of their group
        self._launched = self._announced = 0  # blocks
        self._first: First | None = None
        self._tickets: list[int] = []
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self.messages: asyncio.Queue[Message | Exception] = asyncio.Queue()

    def watch(self, seq: Sequence, group: LayerGroup) -> None:
        """Launch copies of what the step whose programs are being launched has computed in these layers."""
        pages, begun = self._sender._pages, self._next.get(group.first, self._start)
        computed = min(seq.computed, self._end)
        if self._ended or computed <= begun:
            return
        try:
            for start, count, rows in pages.blocks(group, begun, computed):
                pieces, sums = pages.take(seq, group, start, count, rows, self._dtype)
                block = self._launched, group.first, group.count, start, count, rows
                self._sender._announcer.submit(self._announce, block, pieces, sums)
                self._launched += 1
            self._next[group.first] = computed
        except Exception as failure:  # of this prompt only: the engine goes on
            self._fail(failure)

    def _announce(self, block: tuple[int, int, int, int, int, int], pieces: list[Any], sums: Any) -> None:
        """Offer a block as soon as the device has it."""
        try:
            checksums = np.asarray(sums).tolist()
            arrays = [piece for layer in pieces for piece in layer]
            ticket = self._link.offer(arrays)
            self._tickets.append(ticket)
            if self._ended:  # while we were at it
                self._link.withdraw(ticket)
            self._sender._metrics.on_sent(sum(array.nbytes for array in arrays))
            parts = len(pieces[0])
            message = Block(*block, self._dtype, parts, checksums, ticket)
            self._say(self._announced_one, message)
        except Exception as failure:
            self._fail(failure)

    def _fail(self, failure: Exception) -> None:
        log.error("a block could not be offered", exc_info=failure)
        self._ended = True
        self._say(self.messages.put_nowait, EngineError(f"a block could not be offered: {failure}"))

    def _say(self, put: Any, message: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(put, message)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._ended = True

    def _announced_one(self, block: Block) -> None:
        self._announced += 1
        self.messages.put_nowait(block)
        self._finish()

    async def read(self, stream: Deltas) -> None:
        """Wait for the first token."""
        try:
            async for delta in stream:
                if delta.token_ids or delta.finish_reason:
                    self._first = First(delta)
                    self._finish()
                    return
        except Exception as failure:
            self.messages.put_nowait(failure)

    def _finish(self) -> None:
        """The first token is said after all blocks; when it is read, none is launched any more."""
        if self._first and self._announced == self._launched:
            self.messages.put_nowait(self._first)

    def end(self, read: int) -> None:
        """Nobody wants the blocks any more, of which the first `read` were fetched."""
        self._ended = True
        for i, ticket in enumerate(list(self._tickets)):
            (self._link.forget if i < read else self._link.withdraw)(ticket)
