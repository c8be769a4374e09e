"""Pairs of engines in this process, joined by real links, and links that fail as told."""

import asyncio
import threading
import time
from contextlib import aclosing
from typing import Any

from jaxserve import AsyncLLM
from jaxserve.request import Delta, Request
from jaxserve.sampling.params import SamplingParams
from kv.transfer import ByteLink, TransferError
from server.clients.split import Split
from server.clients.start import connected
from server.roles import RoleConfig

SIZES = {
    "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 4,
    "num_gpu_blocks_override": 96, "dtype": "float32",
}  # fmt: skip


class FaultyLink(ByteLink):
    """A byte stream that does `fault` to the block of that number."""

    fault, at, fetched = "", 0, 0

    def __init__(self, host: str):
        super().__init__(host)
        self.go_on = threading.Event()  # a block that is "late" waits for it
        self.came = threading.Event()  # a block is here

    def fetch(self, address, ticket, shapes, timeout) -> list[Any]:
        self.fetched += 1
        if self.fetched - 1 != self.at:
            arrays = super().fetch(address, ticket, shapes, timeout)
            self.came.set()
            return arrays
        if self.fault == "late":
            assert self.go_on.wait(60)
        if self.fault == "cut":
            raise TransferError("the link is cut")
        if self.fault == "stalled":
            time.sleep(timeout)
            raise TransferError("the link is too slow")
        arrays = super().fetch(address, ticket, shapes, timeout)
        if self.fault == "corrupt":
            arrays[-1].view("uint8").reshape(-1)[17] ^= 4
        if self.fault == "another":  # what another prompt left
            arrays = [array * 0 + 1 for array in arrays]
        return arrays

    def fail(self, fault: str, at: int) -> None:
        self.fault, self.at, self.fetched = fault, at, 0
        self.go_on.clear()


def pair(prefill: AsyncLLM, decode: AsyncLLM, link: ByteLink | Any, **settings: Any) -> tuple[Split, Split]:
    """(what computes prompts, what goes on with them)."""
    roles = RoleConfig("both", **{"split_min_tokens": 8, "kv_silence_timeout": 5.0} | settings)
    links = {"tcp": link}
    first = connected(prefill, roles, "tiny", links, [])
    return first, connected(decode, roles, "tiny", links, [first.sender])


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 10, "ignore_eos": True} | fields)


_names = iter(range(10**9))


async def run(
    engine: Any, prompt: list[int], params: SamplingParams | None = None, **fields: Any
) -> list[Delta]:
    request = Request(f"r{next(_names)}", prompt, params or greedy(), **fields)
    async with aclosing(engine.submit(request)) as deltas:
        return [delta async for delta in deltas]


async def tokens(engine: Any, prompt: list[int], params: SamplingParams | None = None) -> list[int]:
    return [token for delta in await run(engine, prompt, params) for token in delta.token_ids]


def forget(split: Split) -> None:
    """Its cache finds nothing any more."""
    split.llm.call(lambda engine: engine.scheduler.cache.reset()).result()  # pyright: ignore[reportAttributeAccessIssue]


def findable(split: Split, prompt: list[int]) -> int:
    """Tokens of a prompt that its cache can find."""

    def look(engine: Any) -> int:
        lease = engine.scheduler.cache.match(prompt)
        engine.scheduler.cache.release(lease)
        return lease.length

    return split.llm.call(look).result()


async def settled(*splits: Split) -> None:
    """Soon every page is free or cached and no lease is held."""
    for split in splits:
        for _ in range(2000):
            pages = split.pages.counts()
            assert pages["free"] + pages["used"] + pages["cached"] == pages["total"]
            if pages["used"] == 0 and len(split.sender.leases) == 0:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError(f"never settled: {pages}, {len(split.sender.leases)} leases")


def failures(split: Split, reason: str) -> float:
    return (
        split.llm.registry.get_sample_value(
            "jaxserve:kv_transfer_failures_total", {"model_name": "tiny", "reason": reason}
        )
        or 0.0
    )


def counted(split: Split, name: str) -> float:
    return split.llm.registry.get_sample_value(f"jaxserve:kv_transfer_{name}", {"model_name": "tiny"}) or 0.0
