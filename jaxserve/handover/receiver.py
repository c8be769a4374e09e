"""The receiving side: a prompt's rows come from another worker into pages reserved for them, or not at all."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from jaxserve.async_llm import AsyncLLM
from jaxserve.errors import EngineError, OverloadedError, RequestError
from jaxserve.handover.handshake import Handshake
from jaxserve.handover.messages import Block, First, Granted, HandoverFailed, Message
from jaxserve.handover.metrics import HandoverMetrics
from jaxserve.handover.pages import EnginePages
from jaxserve.handover.renewals import Renewals
from jaxserve.layer_groups import LayerGroup
from jaxserve.request import Delta, Request
from kv import wire
from kv.transfer import Link, TransferError

FETCHERS = 16  # threads that wait for blocks
ENGINE_TIMEOUT = 60.0  # seconds: a step may compile


class Source(Protocol):
    """A worker that computes prompts for us: another process, or an engine in this one."""

    async def handshake(self) -> Handshake: ...

    def prefill(
        self, request: Request, receiver: Handshake, skip: int, link: str
    ) -> AsyncIterator[Message]: ...

    def renew(self, lease: str, read: int) -> bool:
        """Blocking; called on a thread that does nothing else. False when the lease is no more."""
        ...

    def release(self, lease: str, read: int) -> Any:
        """Blocking, like `renew`."""
        ...


@dataclass
class Arrived:
    """A prompt that has come: its first token, and what it took. Its pages are held until `release`."""

    first: Delta
    tokens: int  # that travelled
    size: int  # bytes
    hidden: int  # of those, fetched before the first token was known
    seconds: float  # since it was asked for
    exposed: float  # of those, after the first token was known
    release: Callable[[], None]


@dataclass
class _Transfer:
    """One prompt on its way."""

    source: Source
    theirs: Handshake
    link: str
    tokens: list[int]
    held: Any  # pages and their group, from `EnginePages.reserve`
    reached: list[int]  # by layer, the tokens that have come, those that were here included
    began: float = field(default_factory=time.monotonic)
    blocks: int = 0
    size: int = 0
    hidden: int = 0
    lease: str | None = None

    @property
    def at(self) -> int:
        """Tokens that have come in all layers."""
        return min(self.reached)


class Receiver:
    """Asks other workers for prompts."""

    def __init__(
        self,
        llm: AsyncLLM,
        pages: EnginePages,
        handshake: Handshake,
        links: dict[str, Link],
        metrics: HandoverMetrics,
        preferred: str,
        timeout: float,
    ):
        """`timeout` is in seconds: of a block on its way, of room for a prompt, of the engine's answer."""
        self._llm, self._pages, self.handshake, self._links = llm, pages, handshake, links
        self._metrics, self._preferred, self._timeout = metrics, preferred, timeout
        self._renewals = Renewals()
        self._fetchers = ThreadPoolExecutor(FETCHERS, "fetch")

    async def fetch(self, request: Request, source: Source, least: int = 0) -> Arrived | None:
        """The prompt from `source`; None if fewer than `least` of its tokens are missing here.

        HandoverFailed if it does not come in order and in time: then nothing is left of it here.
        """
        tokens = request.prompt_token_ids
        held = await self._reserve(tokens, request.cache_salt)
        arrived = False
        transfer: _Transfer | None = None
        try:
            if len(tokens) - held[0].length < max(least, 1):
                return None
            theirs = await source.handshake()
            link = self.handshake.link_to(theirs, self._preferred)
            reached = [held[0].length] * self.handshake.layers
            transfer = _Transfer(source, theirs, link, tokens, held, reached)
            first, computed_at = await self._read(request, transfer)
            await _answer(self._llm.call(lambda engine: self._pages.commit(held, tokens)))
            arrived = True
            return self._report(transfer, first, computed_at)
        except (OverloadedError, RequestError, EngineError) as why:
            raise HandoverFailed("refused", str(why)) from why
        except (TransferError, OSError, RuntimeError, ValueError) as why:
            raise HandoverFailed("transfer", str(why)) from why
        finally:
            if not arrived:
                self._release(held)
            if transfer and transfer.lease:
                self._renewals.end(transfer.source, transfer.lease, transfer.blocks)

    def close(self) -> None:
        self._renewals.close()
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    async def _reserve(self, tokens: list[int], salt: str) -> Any:
        """Pages for the prompt; a cache that is full is waited for, though not for ever."""
        deadline = time.monotonic() + self._timeout
        while True:
            asked = self._llm.call(lambda engine: self._pages.reserve(tokens, salt))
            try:
                held = await _answer(asked)
            except BaseException:
                if not asked.cancel():  # given, or about to be, to one who has gone
                    asked.add_done_callback(self._give_back)
                raise
            if held is not None:
                return held
            if time.monotonic() > deadline:
                raise HandoverFailed("no_room", f"no pages came free for it in {self._timeout:g} s")
            await asyncio.sleep(0.02)

    def _give_back(self, asked: Future) -> None:
        if not asked.cancelled() and not asked.exception() and asked.result() is not None:
            self._release(asked.result())

    async def _read(self, request: Request, transfer: _Transfer) -> tuple[Delta, float]:
        """(the first token, when it was known), with all blocks in their places."""
        messages = transfer.source.prefill(request, self.handshake, transfer.at, transfer.link)
        arrivals: asyncio.Queue[Block | First | Exception] = asyncio.Queue()
        first_at = [float("inf")]
        reading = asyncio.create_task(self._listen(messages, transfer, arrivals, first_at))
        try:
            while True:
                message = await arrivals.get()
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, First):
                    return self._checked(message, transfer), first_at[0]
                await self._store(message, transfer, first_at)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _listen(
        self, messages: Any, transfer: _Transfer, arrivals: asyncio.Queue, first_at: list[float]
    ) -> None:
        """Hear of blocks while others are fetched."""
        try:
            async with aclosing(messages):
                async for message in messages:
                    if isinstance(message, Granted):
                        if message.epoch != transfer.theirs.epoch:
                            raise HandoverFailed("expired", "the worker was started anew since its handshake")
                        transfer.lease = message.id
                        self._renewals.begin(
                            transfer.source, message.id, message.seconds, lambda: transfer.blocks
                        )
                        continue
                    if isinstance(message, First):
                        first_at[0] = time.monotonic()
                    arrivals.put_nowait(message)
            arrivals.put_nowait(HandoverFailed("unreachable", "the worker ended before the first token"))
        except Exception as failure:
            arrivals.put_nowait(failure)

    async def _store(self, block: Block, transfer: _Transfer, first_at: list[float]) -> None:
        if block.pieces < 1 or self.handshake.row[0] % block.pieces:
            raise HandoverFailed("corrupt", f"block {block.number} is in {block.pieces} pieces")
        layers = slice(block.layer, block.layer + block.layers)
        if (
            block.number != transfer.blocks
            or not 0 <= layers.start < layers.stop <= self.handshake.layers
            or any(reached != block.start for reached in transfer.reached[layers])
        ):
            raise HandoverFailed(
                "corrupt",
                f"block {block.number} of layer {block.layer} from token {block.start} is not the next one",
            )
        loop = asyncio.get_running_loop()
        rows, size = await loop.run_in_executor(self._fetchers, self._fetched, block, transfer)
        now = time.monotonic()
        held = transfer.held
        group = LayerGroup(block.layer, block.layers)
        await _answer(
            self._llm.call(
                lambda engine: self._pages.write_block(held, group, block.start, block.count, rows)
            )
        )
        transfer.blocks += 1
        transfer.reached[layers] = [block.start + block.count] * block.layers
        transfer.size += size
        transfer.hidden += size if now < first_at[0] else 0

    def _fetched(self, block: Block, transfer: _Transfer) -> tuple[tuple[jax.Array, ...], int]:
        """(each layer's rows, bytes), their checksums verified on the device."""
        ours = self.handshake
        if block.dtype != wire.wire_dtype(transfer.theirs.dtype, ours.dtype):
            raise HandoverFailed("corrupt", f"block {block.number} has rows of {block.dtype}")
        row = self._pages.row_form(block.dtype)
        heads, *width = row.shape
        shape = (block.rows, heads // block.pieces, *width)
        wanted = [jax.ShapeDtypeStruct(shape, row.dtype)] * (block.layers * block.pieces)
        address = transfer.theirs.transfer[transfer.link]
        arrays = self._links[transfer.link].fetch(address, block.ticket, wanted, self._timeout)
        n = block.pieces
        rows = self._pages.assembled([arrays[i * n : (i + 1) * n] for i in range(block.layers)])
        if np.asarray(wire.checksums(rows)).tolist() != block.checksums:
            raise HandoverFailed("corrupt", f"block {block.number} is not what its checksums say")
        return rows, sum(array.nbytes for array in arrays)

    def _checked(self, first: First, transfer: _Transfer) -> Delta:
        missing = len(transfer.held[0].pages) * self._pages.page_size - transfer.at
        if missing > 0:
            raise HandoverFailed("corrupt", f"the last {missing} tokens of the prompt were not sent")
        if first.delta.finish_reason in ("error", "abort"):
            raise HandoverFailed("refused", first.delta.error or "the worker gave the request up")
        return first.delta

    def _report(self, transfer: _Transfer, first: Delta, computed_at: float) -> Arrived:
        now, travelled = time.monotonic(), transfer.at - transfer.held[0].length
        seconds, exposed = now - transfer.began, max(now - computed_at, 0.0)
        self._metrics.on_received(
            tokens=travelled,
            size=transfer.size,
            hidden=transfer.hidden,
            seconds=seconds,
            exposed=exposed,
        )
        release = partial(self._release, transfer.held)
        return Arrived(first, travelled, transfer.size, transfer.hidden, seconds, exposed, release)

    def _release(self, held: Any) -> None:
        self._llm.call(lambda engine: self._pages.release(held))


async def _answer(asked: Future) -> Any:
    """What the engine says, in bounded time; the question stands when we are cancelled."""
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(asked)), ENGINE_TIMEOUT)
    except TimeoutError:
        raise HandoverFailed("engine", f"the engine did not answer for {ENGINE_TIMEOUT:g} s") from None
