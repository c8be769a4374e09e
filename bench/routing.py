"""`jaxserve route` against round robin: conversations of several tenants before four workers, in virtual time.

    python -m bench.routing

The router's own code chooses; the workers are the real engine, scheduler and cache on a clock
(`bench.routing_simulation`), so the same settings give the same figures on every machine. Both policies get the same
conversations (`bench.traces`, from a seed) and empty caches. A user sends the next turn only after the answer, so what
waits shows in the time to first token alone. The imbalance is the busy seconds of the busiest worker over the mean.
"""

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from bench.results import percentile
from bench.routing_simulation import Clock, Talk, Worker
from bench.traces import Session, sessions
from jaxserve.text import load_tokenizer
from server.router.config import RouterConfig
from server.router.fleet import Fleet
from server.router.metrics import RouterMetrics
from tests.tiny import tiny_tokenizer

POLICIES = ("round-robin", "cost")


def run(policy: str, talks: list[Session], workers: int, seed: int) -> dict[str, Any]:
    """What comes of the conversations with this policy; `seed` is for the router's own draws."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer(folder)
        tokenizer = load_tokenizer(folder)
    clock = Clock()
    urls = tuple(f"http://worker-{i}" for i in range(workers))
    config = RouterConfig(urls, routing_policy=policy)
    fleet = Fleet(config, RouterMetrics(CollectorRegistry()), random.Random(seed), clock)
    simulated = {url: Worker(url, clock, tokenizer) for url in urls}
    fleet.workers = {url: worker.known for url, worker in simulated.items()}
    ttfts: list[float] = []
    usage: list[tuple[int, int]] = []
    for session in talks:
        Talk(session, clock, tokenizer, fleet, simulated, ttfts, usage).begin()
    clock.run()
    asyncio.run(fleet.close())
    busy = [worker.busy for worker in simulated.values()]
    return {
        "policy": policy,
        "requests": len(ttfts),
        **{f"ttft_p{p}_ms": 1e3 * percentile(ttfts, p) for p in (50, 90, 99)},
        "hit_rate": sum(cached for _, cached in usage) / sum(prompt for prompt, _ in usage),
        "busy_seconds": busy,
        "imbalance": max(busy) * workers / sum(busy),
        "seconds": clock.now,
    }


def compare(talks: list[Session], workers: int = 4, seed: int = 0) -> dict[str, dict[str, Any]]:
    """The figures of each policy."""
    return {policy: run(policy, talks, workers, seed) for policy in POLICIES}


def gain(rows: dict[str, dict[str, Any]]) -> float:
    """How many times sooner the median first token comes than with round robin."""
    return rows["round-robin"]["ttft_p50_ms"] / rows["cost"]["ttft_p50_ms"]


def show(rows: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Conversations of several tenants before several workers", title_justify="left")
    for title in ("policy", "requests", "TTFT p50 (ms)", "p90", "p99", "cached", "busy (s)", "imbalance"):
        table.add_column(title, justify="left" if title == "policy" else "right")
    for row in rows.values():
        table.add_row(
            row["policy"],
            f"{row['requests']}",
            *(f"{row[f'ttft_p{p}_ms']:.0f}" for p in (50, 90, 99)),
            f"{row['hit_rate']:.0%}",
            f"{sum(row['busy_seconds']):.0f} of {len(row['busy_seconds']) * row['seconds']:.0f}",
            f"{row['imbalance']:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(f"TTFT p50 is {gain(rows):.2f}x better than round robin's")


def main() -> None:
    parser = argparse.ArgumentParser(
        "bench.routing", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--sessions", type=int, default=32, metavar="N", help="conversations (default: 32)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--output", metavar="FILE", help="results as JSON")
    args = parser.parse_args()
    rows = compare(sessions(args.seed, count=args.sessions), args.workers, args.seed)
    show(rows)
    if args.output:
        Path(args.output).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
