"""`jaxserve route` against round robin: conversations of several tenants before four workers.

    python -m bench.routing                       four workers whose device is a clock (bench.virtual_worker)
    python -m bench.routing --worker http://...   workers that run already, once for each

Every run is of processes and HTTP. Both policies get the same conversations (`bench.traces`, from a seed), each to
workers with empty caches. A user sends the next turn only after the answer, so what waits shows in the time to first
token alone. Load is prompt tokens computed plus tokens generated; its imbalance is the most of a worker over the mean.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.results import percentile
from bench.traces import Session, sessions
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[1]
POLICIES = ("round-robin", "cost")


@dataclass
class Outcome:
    """What a run came to."""

    ttfts: list[float] = field(default_factory=list)  # seconds
    prompt: int = 0  # tokens
    cached: int = 0
    load: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # tokens computed by each worker
    requests: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: int = 0
    seconds: float = 0.0

    def row(self, policy: str, workers: int) -> dict[str, Any]:
        """The figures of the table."""
        return {
            "policy": policy,
            "requests": len(self.ttfts),
            "failed": self.failed,
            "ttft_p50_ms": 1e3 * percentile(self.ttfts, 50),
            "ttft_p90_ms": 1e3 * percentile(self.ttfts, 90),
            "ttft_p99_ms": 1e3 * percentile(self.ttfts, 99),
            "hit_rate": self.cached / max(self.prompt, 1),
            "imbalance_tokens": _imbalance(self.load, workers),
            "imbalance_requests": _imbalance(self.requests, workers),
            "seconds": self.seconds,
        }


def _imbalance(load: dict[str, int], workers: int) -> float:
    return max(load.values(), default=0) * workers / max(sum(load.values()), 1)


async def talk(client: httpx.AsyncClient, talks: list[Session]) -> Outcome:
    """Hold all conversations."""
    outcome = Outcome()
    start = time.perf_counter()

    async def one(session: Session) -> None:
        await asyncio.sleep(session.start - (time.perf_counter() - start))
        messages = [{"role": "system", "content": session.system}]
        for turn in session.turns:
            messages.append({"role": "user", "content": turn.text})
            answer = await _ask(client, session, messages, turn.output_len, outcome)
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(turn.think)

    await asyncio.gather(*map(one, talks))
    outcome.seconds = time.perf_counter() - start
    return outcome


async def _ask(
    client: httpx.AsyncClient, session: Session, messages: list[dict], output_len: int, outcome: Outcome
) -> str:
    body = {
        "messages": messages, "max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "user": session.name,
    }  # fmt: skip
    sent, text, usage = time.perf_counter(), "", None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        worker = response.headers.get("x-jaxserve-worker", "?")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", ()):
                if choice["delta"].get("content") and not text:
                    outcome.ttfts.append(time.perf_counter() - sent)
                text += choice["delta"].get("content") or ""
            usage = event.get("usage") or usage
    if usage is None:
        outcome.failed += 1
        return text
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    outcome.prompt += usage["prompt_tokens"]
    outcome.cached += cached
    outcome.load[worker] += usage["prompt_tokens"] - cached + usage["completion_tokens"]
    outcome.requests[worker] += 1
    return text


def run(policy: str, urls: list[str], talks: list[Session]) -> tuple[Outcome, str]:
    """The conversations through a router of this policy; also what the router counted."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer(folder)
        command = [sys.executable, "-m", "server.cli", "route", "--workers", *urls, "--port", str(port)]
        command += ["--host", "127.0.0.1", "--routing-policy", policy, "--uvicorn-log-level", "warning"]
        router = subprocess.Popen([*command, "--tokenizer", folder], cwd=ROOT)
        try:
            _until_ready(f"http://127.0.0.1:{port}", len(urls))
            outcome = asyncio.run(_through(port, talks))
            return outcome, httpx.get(f"http://127.0.0.1:{port}/metrics").text
        finally:
            router.terminate()
            router.wait(30)


async def _through(port: int, talks: list[Session]) -> Outcome:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=300, limits=limits, verify=False
    ) as client:
        return await talk(client, talks)


def _until_ready(url: str, workers: int | None = None) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        try:
            ready = httpx.get(url + "/readyz", verify=False)
            if ready.status_code == 200 and (workers is None or f"{workers} of" in ready.text):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"bench.routing: {url} does not become ready")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def compare(given: list[str], talks: list[Session], workers: int) -> list[dict[str, Any]]:
    """A row for each policy; workers of our own are started anew for each."""
    rows = []
    for policy in POLICIES:
        ports = [_free_port() for _ in range(workers)]
        urls = given or [f"http://127.0.0.1:{port}" for port in ports]
        command = [sys.executable, "-m", "bench.virtual_worker", "--port"]
        own = [] if given else [subprocess.Popen([*command, str(port)], cwd=ROOT) for port in ports]
        try:
            for url in urls:
                _until_ready(url)
            outcome, counted = run(policy, urls, talks)
        finally:
            for process in own:
                process.terminate()
            for process in own:
                process.wait(30)
        rows.append(outcome.row(policy, len(urls)) | {"hits": _hits(counted)})
    return rows


def _hits(metrics: str) -> dict[str, float]:
    """What the router expected to find cached, what was found, and the sum of the differences, in tokens."""
    found: dict[str, float] = defaultdict(float)
    for line in metrics.splitlines():
        for name in ("predicted_hit_tokens", "real_hit_tokens", "hit_error_tokens"):
            if line.startswith(f"jaxserve_router:{name}_total"):
                found[name] += float(line.split()[-1])
    return dict(found)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Conversations of several tenants before several workers", title_justify="left")
    for title in ("policy", "requests", "TTFT p50 (ms)", "p90", "p99", "cached", "imbalance", "of requests"):
        table.add_column(title, justify="left" if title == "policy" else "right")
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['requests']} ({row['failed']} failed)",
            *(f"{row[f'ttft_p{p}_ms']:.0f}" for p in (50, 90, 99)),
            f"{row['hit_rate']:.0%}",
            f"{row['imbalance_tokens']:.2f}",
            f"{row['imbalance_requests']:.2f}",
        )
    console = Console()
    console.print(table)
    by_policy = {row["policy"]: row for row in rows}
    gain = by_policy["round-robin"]["ttft_p50_ms"] / by_policy["cost"]["ttft_p50_ms"]
    console.print(f"TTFT p50 is {gain:.2f}x better than round robin's; hits: {by_policy['cost']['hits']}")


def main() -> None:
    parser = argparse.ArgumentParser(
        "bench.routing", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--worker", action="append", default=[], metavar="URL", help="once for each")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="to start (default: 4)")
    parser.add_argument("--sessions", type=int, default=32, metavar="N", help="conversations (default: 32)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--output", metavar="FILE", help="results as JSON")
    args = parser.parse_args()
    rows = compare(args.worker, sessions(args.seed, count=args.sessions), args.workers)
    show(rows)
    if args.output:
        Path(args.output).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
