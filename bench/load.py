"""Open-loop load: requests arrive at their times whether or not earlier ones were answered."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from bench.workloads import Work


@dataclass
class Piece:
    """What came in at once: some new tokens, or only the counts that a server sends at the end."""

    has_output: bool
    output_tokens: int | None = None  # so far, where the sender says
    input_tokens: int | None = None


@dataclass
class Record:
    """How one request went; times are in seconds from the start of the load."""

    arrival: float  # what latencies are counted from
    piece_times: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.piece_times[0] - self.arrival

    @property
    def e2el(self) -> float:
        return self.piece_times[-1] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for a single token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.piece_times)]


Send = Callable[[Work], AsyncIterator[Piece]]


async def open_loop(
    works: list[Work], times: list[float], send: Send, max_concurrency: int | None = None
) -> tuple[list[Record], float]:
    """Send every work at its time; returns the records and the seconds from first arrival to last answer.

    A latency counts from the *arrival*, so that a client that falls behind, or waits for one of
    `max_concurrency` places, does not hide the wait (coordinated omission). When everything arrives at once
    the places make a closed loop, whose clients arrive when a place is free.
    """
    closed = max_concurrency is not None and not any(times)
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    start = time.perf_counter()

    async def one(work: Work, due: float) -> Record:
        await asyncio.sleep(due - (time.perf_counter() - start))
        async with places:
            record = Record(time.perf_counter() - start if closed else due)
            await _receive(record, send(work), start)
        return record

    records = await asyncio.gather(*(one(work, due) for work, due in zip(works, times, strict=True)))
    return records, time.perf_counter() - start


async def _receive(record: Record, pieces: AsyncIterator[Piece], start: float) -> None:
    try:
        async for piece in pieces:
            if piece.has_output:
                record.piece_times.append(time.perf_counter() - start)
            if piece.output_tokens is not None:
                record.output_tokens = piece.output_tokens
            if piece.input_tokens is not None:
                record.input_tokens = piece.input_tokens
        if not record.piece_times:
            record.error = "no output"
    except Exception as error:  # one bad request is a result, not the end of the measurement
        record.error = str(error) or type(error).__name__
    record.output_tokens = record.output_tokens or len(record.piece_times)
