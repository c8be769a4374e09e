"""Requests through a split while its workers are killed, stopped and started anew: every answer right, every page home.

    python -m bench.chaos MODEL --requests 500 --seed 0

One prefill worker and two decode workers, as processes. A client sends each request to one of the decode workers; when
that fails in the middle it goes on at the other one, with the tokens that it has. In between, workers are killed (and
started again), stopped for some seconds, and clients leave. All answers are compared with those that the prefill worker
gave alone before the trouble began, and at the end every worker's pages are counted.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from typing import Any

import httpx

from tests.server.workers import Worker, conserved

GIVE_UP = 120.0  # seconds: an answer or a clear failure by then
EVERY = 20  # requests for each trouble: those after it wait for the next one to begin
FLAGS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 160,
    "served_model_name": "model",
    "kv_lease_seconds": 3.0,
    "kv_silence_timeout": 3.0,
    "split_min_tokens": 16,
}


class Fleet:
    """Workers by name, each started anew on its own port when it was killed."""

    def __init__(self, model: str, cache: str):
        self._model, self._cache = model, cache
        self._roles: dict[str, dict[str, Any]] = {}
        self.workers: dict[str, Worker] = {}

    def begin(self) -> None:
        self.start("prefill", role="prefill")
        for name in ("one", "two"):
            self.start(name, role="decode", prefill_url=self.workers["prefill"].url)
        for worker in self.workers.values():
            worker.ready()

    def start(self, name: str, **role: Any) -> None:
        old = self.workers.get(name)
        port = old.port if old else None
        self._roles.setdefault(name, role)
        self.workers[name] = Worker(self._model, self._cache, port, **FLAGS | self._roles[name])

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()


def main() -> int:
    parser = argparse.ArgumentParser(
        "bench.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--requests", type=int, default=500, metavar="N", help="(default: 500)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as cache:
        fleet = Fleet(args.model, cache)
        try:
            fleet.begin()
            return asyncio.run(_run(fleet, args.requests, rng))
        finally:
            fleet.close()


async def _run(fleet: Fleet, count: int, rng: random.Random) -> int:
    stems = [[rng.randrange(10, 250) for _ in range(120)] for _ in range(6)]
    prompts = [[*rng.choice(stems)[: rng.randrange(20, 120)], i % 250, i // 250] for i in range(count)]
    async with httpx.AsyncClient(timeout=httpx.Timeout(10.0, pool=None), trust_env=False) as client:
        places = asyncio.Semaphore(6)

        async def whole(prompt: list[int]) -> list[int]:
            async with places:
                return await _whole(client, fleet.workers["prefill"].url, prompt)

        expected = await asyncio.gather(*map(whole, prompts))
        troubles: Counter[str] = Counter()
        troubling = asyncio.create_task(_trouble(fleet, rng, troubles))

        async def one(number: int, prompt: list[int], right: list[int]) -> str:
            async with places:
                while troubles.total() < number // EVERY:
                    await asyncio.sleep(0.05)
                return await _outcome(client, fleet, prompt, right, rng)

        began = time.monotonic()
        outcomes = Counter(await asyncio.gather(*map(one, range(count), prompts, expected)))
        troubling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await troubling
    for worker in fleet.workers.values():
        await asyncio.to_thread(worker.ready)
        await asyncio.to_thread(conserved, worker)
    said = {"seconds": round(time.monotonic() - began, 1), **outcomes, **troubles}
    sys.stdout.write(json.dumps(said) + "\n")
    return 1 if outcomes["wrong"] or outcomes["late"] else 0


async def _outcome(
    client: httpx.AsyncClient, fleet: Fleet, prompt: list[int], right: list[int], rng: random.Random
) -> str:
    """right, wrong, left (the client went), failed (a clear failure), late."""
    leaves = rng.random() < 0.15
    got: list[int] = []
    try:
        async with asyncio.timeout(GIVE_UP):
            for attempt in range(6):
                name = rng.choice(["one", "two"])
                try:
                    await _go_on(client, fleet.workers[name].url, prompt, got, 4 if leaves else None)
                except (httpx.HTTPError, httpx.StreamError, ConnectionError):
                    await asyncio.sleep(0.5 * (attempt + 1))
                    continue
                if leaves:
                    return "left" if got == right[: len(got)] else "wrong"
                return "right" if got == right else "wrong"
            return "failed"
    except TimeoutError:
        return "late"


async def _go_on(
    client: httpx.AsyncClient, url: str, prompt: list[int], got: list[int], leave_after: int | None
) -> None:
    """Lengthen `got` until the answer is complete, or the client has had enough of it."""
    body = _body(prompt) | {"stream": True} | ({"generated_token_ids": got} if got else {})
    async with client.stream("POST", url + "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: {"):
                said = json.loads(line[6:])
                if "error" in said:
                    raise ConnectionError(said["error"]["message"])
                got += said["choices"][0]["token_ids"]
                if said["choices"][0]["finish_reason"]:
                    return
            if leave_after is not None and len(got) >= leave_after:
                return
    raise ConnectionError("the answer ended early")


async def _whole(client: httpx.AsyncClient, url: str, prompt: list[int]) -> list[int]:
    answer = await client.post(url + "/v1/completions", json=_body(prompt), timeout=100)
    return answer.json()["choices"][0]["token_ids"]


def _body(prompt: list[int]) -> dict[str, Any]:
    chosen = {"max_tokens": 24, "temperature": 0.7, "seed": prompt[-1], "ignore_eos": True}
    return {"prompt": prompt, "return_token_ids": True, **chosen}


async def _trouble(fleet: Fleet, rng: random.Random, troubles: Counter[str]) -> None:
    """One thing after the other goes wrong, is counted, and put right."""
    while True:
        await asyncio.sleep(rng.uniform(0.5, 3))
        name = rng.choice(list(fleet.workers))
        worker = fleet.workers[name]
        if rng.random() < 0.4:
            troubles["killed"] += 1
            worker.kill()
            fleet.start(name)
            await asyncio.to_thread(fleet.workers[name].ready)
        else:
            troubles["stopped"] += 1
            worker.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(rng.uniform(0.5, 6))
            finally:
                worker.signal(signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main())
