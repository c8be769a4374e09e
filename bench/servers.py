"""Running servers beside each other: the same prompts to each in turn, round by round, at several concurrencies.

    python -m bench.servers --server jaxserve=http://localhost:8000 --server transformers=http://localhost:8001

Every server must serve the same model on the same machine and speak OpenAI's /v1/completions; one that is not asked
idles. Each round has new prompts, so that no prefix cache is measured. A stock `transformers serve` is such a server:

    peer/bin/transformers serve MODEL --dtype float32 --device cpu --continuous-batching --port 8001
"""

import argparse
import asyncio
import json
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.load import open_loop
from bench.results import summarize
from bench.serve import ServerTarget
from bench.workloads import Work
from jaxserve.errors import JaxserveError

ROOT = Path(__file__).parents[1]
NOT_OPENAI = {"ignore_eos": None}  # what other servers refuse
SHOWN = {
    "output_throughput": "tokens/s",
    "median_ttft_ms": "TTFT p50 (ms)",
    "p99_ttft_ms": "TTFT p99",
    "median_itl_ms": "ITL p50 (ms)",
    "p99_itl_ms": "ITL p99",
}


def main() -> int:
    args = _parser().parse_args()
    servers = dict(server.split("=", 1) for server in args.server)
    result = asyncio.run(_compare(servers, args))
    show(result)
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(row["failed"] for row in result["rows"]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench.servers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--server", action="append", required=True, metavar="NAME=URL", help="once for each server"
    )
    parser.add_argument("--max-concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--words", type=int, default=90, metavar="N", help="of a prompt (default: 90)")
    parser.add_argument("--output-len", type=int, default=64, metavar="N", help="tokens (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measured rounds (default: 3)")
    parser.add_argument("--output", metavar="FILE", help="results as JSON")
    return parser


async def _compare(servers: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    targets = {name: ServerTarget(url, None, None, NOT_OPENAI) for name, url in servers.items()}
    rows = []
    for target in targets.values():
        await target.open()
    for places in args.max_concurrency:
        for number in range(args.rounds + 1):  # the first warms up
            works = prompts(2 * places, args.words, args.output_len, number)
            for name in targets if number % 2 else reversed(targets):
                records, seconds = await open_loop(works, [0.0] * len(works), targets[name].send, places)
                summary = summarize(records, seconds, percentiles=[99], goodput={})
                if number:
                    rows.append({"server": name, "max_concurrency": places, "round": number, **summary})
    for target in targets.values():
        await target.close()
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "servers": list(servers), "rows": rows}


def prompts(count: int, words: int, output_len: int, number: int) -> list[Work]:
    """Windows of the licence's text, all different within a round and between rounds."""
    text = (ROOT / "LICENSE").read_text().split()
    span = len(text) - words
    starts = [(number * 7 + i * span // count) % span for i in range(count)]
    return [Work(" ".join(text[start : start + words]), output_len) for start in starts]


def show(result: dict[str, Any]) -> None:
    """Medians over the rounds, a line for each server and concurrency."""
    table = Table(title="Medians over the rounds", title_justify="left")
    for title in ("streams", "server", *SHOWN.values(), "answered"):
        table.add_column(title, justify="left" if title == "server" else "right")
    for places in dict.fromkeys(row["max_concurrency"] for row in result["rows"]):
        for name in result["servers"]:
            rows = [r for r in result["rows"] if (r["server"], r["max_concurrency"]) == (name, places)]
            cells = [f"{statistics.median(row[key] for row in rows):.1f}" for key in SHOWN]
            done, failed = (sum(row[key] for row in rows) for key in ("completed", "failed"))
            table.add_row(str(places), name, *cells, f"{done}/{done + failed}")
    Console().print(table)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JaxserveError as error:
        sys.exit(f"bench.servers: {error}")
