"""What long prompts do to running streams: none at all, beside each other, in chunks, and on workers of their own.

    python -m bench.interference MODEL --prompt-len 4096 --streams 4

Starts the servers itself, each process on a core of its own (so the split has two cores and the others one: what is
compared is a stream's latency under prompts with its latency without); the client is on the prefill worker's core. A
new prompt starts as soon as the one before it has its first token. Prints the time to first token of the prompts, the
inter-token latency of the streams, the CPU time of who answers for each of these gaps (which other programs on the
machine disturb less), and whether the streams' tokens are the same in all four.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
VOCABULARY = 1000  # tokens that prompts are drawn from


@dataclass
class Seen:
    """What was seen of one way to serve."""

    way: str
    gaps: list[float] = field(default_factory=list)  # seconds between tokens of the streams
    ttfts: list[float] = field(default_factory=list)  # seconds, of the long prompts
    tokens: list[list[int]] = field(default_factory=list)  # of each stream
    cpu: float = 0.0  # seconds of who answers the streams

    def summary(self) -> dict[str, Any]:
        gaps, ttfts = sorted(self.gaps), sorted(self.ttfts)
        return {
            "way": self.way,
            "gaps": len(gaps),
            "itl_p50_ms": 1000 * _quantile(gaps, 0.5),
            "itl_p99_ms": 1000 * _quantile(gaps, 0.99),
            "itl_max_ms": 1000 * gaps[-1],
            "prompts": len(ttfts),
            "ttft_p50_ms": 1000 * statistics.median(ttfts) if ttfts else None,
            "cpu_ms_per_gap": 1000 * self.cpu * len(self.tokens) / len(gaps),
        }


def main() -> int:
    args = _parser().parse_args()
    # Of who answers, and of who computes prompts for it.
    args.cores = (sorted(os.sched_getaffinity(0)) * 2)[:2]
    os.sched_setaffinity(0, args.cores[1:])
    seen = []
    for way in args.ways:
        with contextlib.ExitStack() as stack:
            url, pid = _served(way, args, stack)
            seen.append(asyncio.run(_measure(way, url, pid, args)))
    same = all(map(_agree, seen, seen[1:]))
    rows = [each.summary() for each in seen]
    _show(rows, same)
    if args.output:
        result = {
            "settings": vars(args),
            "rows": rows,
            "same_tokens": same,
            "seen": [asdict(s) for s in seen],
        }
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if same else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench.interference", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    ways = ["idle", "colocated", "chunked", "split"]
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--prompt-len", type=int, default=4096, metavar="N", help="tokens (default: 4096)")
    parser.add_argument("--streams", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--output-len", type=int, default=256, metavar="N", help="of a stream (default: 256)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="after which a stream is cut (default: 60)"
    )
    parser.add_argument(
        "--chunk", type=int, default=256, metavar="N", help="tokens of a chunk (default: 256)"
    )
    parser.add_argument("--kv-transfer", choices=["jax", "tcp"], default="jax")
    parser.add_argument("--output", metavar="FILE", help="results as JSON")
    return parser


def _served(way: str, args: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[str, int]:
    """Address and process of what serves the streams."""
    budget = args.prompt_len if way == "colocated" else args.chunk
    if way != "split":
        return stack.enter_context(_server(args, budget, core=0))
    role = ["--kv-transfer", args.kv_transfer, "--kv-silence-timeout", "60"]
    prefill, _ = stack.enter_context(_server(args, budget, 1, "--role", "prefill", *role))
    return stack.enter_context(_server(args, budget, 0, "--role", "decode", "--prefill-url", prefill, *role))


@contextlib.contextmanager
def _server(args: argparse.Namespace, budget: int, core: int, *flags: str) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    longest = args.prompt_len + 512
    pages = -(-longest // 16) * 3 + args.streams * 32
    command = [
        sys.executable,
        "-m",
        "server.cli",
        "serve",
        args.model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += [
        "--max-model-len",
        str(longest),
        "--max-num-batched-tokens",
        str(budget),
        "--max-num-seqs",
        "8",
    ]
    command += ["--num-gpu-blocks-override", str(pages), "--served-model-name", "model", *flags]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {args.cores[core]}),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _wait_for(url: str, process: subprocess.Popen) -> None:
    while process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + "/readyz").status_code == 200:
                break
        time.sleep(0.1)
    else:
        raise SystemExit(f"bench.interference: the server ended with status {process.returncode}")
    while not _warm(url):  # steps that fit better are compiled behind the first ones
        time.sleep(0.5)


def _warm(url: str) -> bool:
    metrics = httpx.get(url + "/metrics").text.splitlines()
    return any(line.startswith("jaxserve:warm{") and line.endswith(" 1.0") for line in metrics)


def _cpu(pid: int) -> float:
    """CPU seconds of another process so far (Linux: its clock follows from its number)."""
    return time.clock_gettime((~pid << 3) | 2)


async def _measure(way: str, url: str, pid: int, args: argparse.Namespace) -> Seen:
    seen = Seen(way)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        await _stream(client, _prompt(0, args.prompt_len), 4)  # steps of these shapes, and the link
        prompting = asyncio.create_task(_prompts(client, args, seen)) if way != "idle" else None
        if prompting:
            await asyncio.sleep(0.2)
        until, cpu = time.monotonic() + args.seconds, _cpu(pid)
        streams = [
            _stream(client, _prompt(1000 + i, 16), args.output_len, seen, until) for i in range(args.streams)
        ]
        seen.tokens = await asyncio.gather(*streams)
        seen.cpu = _cpu(pid) - cpu
        if prompting:
            prompting.cancel()
            await asyncio.gather(prompting, return_exceptions=True)
    return seen


async def _prompts(client: httpx.AsyncClient, args: argparse.Namespace, seen: Seen) -> None:
    """Long prompts back to back, each wanted for its first token only."""
    number = 10_000
    while True:
        number += 1
        began = time.monotonic()
        await _stream(client, _prompt(number, args.prompt_len), 1)
        seen.ttfts.append(time.monotonic() - began)


async def _stream(
    client: httpx.AsyncClient,
    prompt: list[int],
    output_len: int,
    seen: Seen | None = None,
    until: float = float("inf"),
) -> list[int]:
    """The tokens of an answer, as many as come until then."""
    body = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    tokens: list[int] = []
    last = None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.monotonic()
            said = json.loads(line[6:])
            if "error" in said:
                raise SystemExit(f"bench.interference: {said['error']['message']}")
            new = said["choices"][0]["token_ids"]
            if seen and last and new:
                seen.gaps.append(now - last)
            last = now if new else last
            tokens += new
            if now > until:
                break
    return tokens


def _prompt(number: int, length: int) -> list[int]:
    return random.Random(number).choices(range(10, VOCABULARY), k=length)


def _agree(one: Seen, other: Seen) -> bool:
    """Whether their streams have the same tokens, as far as both go."""
    pairs = list(zip(one.tokens, other.tokens, strict=True))
    return all(a[: len(b)] == b[: len(a)] for a, b in pairs)


def _quantile(ordered: list[float], part: float) -> float:
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def _show(rows: list[dict], same: bool) -> None:
    table = Table(title="Streams beside long prompts", title_justify="left")
    names = [name for name in rows[0] if name != "way"]
    for name in ("way", *names, "p99 / idle"):
        table.add_column(name, justify="left" if name == "way" else "right")
    idle = next((row["itl_p99_ms"] for row in rows if row["way"] == "idle"), None)
    for row in rows:
        cells = ["-" if row[name] is None else f"{row[name]:.1f}" for name in names]
        table.add_row(row["way"], *cells, f"{row['itl_p99_ms'] / idle:.2f}" if idle else "-")
    Console().print(table)
    Console().print("the streams' tokens are the same" if same else "[red]the streams' tokens differ")


if __name__ == "__main__":
    sys.exit(main())
