"""How much of a handover is hidden behind the prompt's computing: layers leaving together, and in groups.

    python -m bench.streaming demo:smollm2 --prompt-len 512 --chunks 512 128 --layer-groups 1 4 --link 20

A prefill worker is a process of its own, on the last core; this process, on the first one, takes its prompts over a
byte stream that is throttled to so many megabytes a second. Every prompt is new. Hidden is what had been fetched when
the first token was known; exposed is the time from then until the rest was here, by which the transfer delays it.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxserve import AsyncLLM
from jaxserve.build import build
from jaxserve.demo import resolve_demo
from jaxserve.request import Request
from jaxserve.sampling.params import SamplingParams
from kv.transfer import ByteLink
from server.clients.start import connected
from server.clients.worker import HttpWorker
from server.roles import RoleConfig
from tests.server.workers import Worker

SILENCE = 120.0  # seconds that a block may take: the link is slow on purpose
VOCABULARY = 1000  # tokens that prompts are drawn from


class ThrottledLink(ByteLink):
    """A byte stream over which a block takes its bytes divided by a rate."""

    def __init__(self, rate: float):
        """`rate` is in bytes a second."""
        super().__init__("127.0.0.1")
        self._rate = rate

    def fetch(
        self, address: str, ticket: int, shapes: Sequence[jax.ShapeDtypeStruct], timeout: float
    ) -> list[Any]:
        began = time.monotonic()
        arrays = super().fetch(address, ticket, shapes, timeout)
        due = began + sum(array.nbytes for array in arrays) / self._rate
        time.sleep(max(due - time.monotonic(), 0.0))
        return arrays


def main() -> int:
    args = _parser().parse_args()
    args.model = resolve_demo(args.model)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    with tempfile.TemporaryDirectory() as cache:
        rows = [
            _measure(args, chunk, groups, cores[-1], cache)
            for chunk in args.chunks
            for groups in args.layer_groups
        ]
    firsts = [row.pop("firsts") for row in rows]
    same = all(tokens == firsts[0] for tokens in firsts)
    _show(rows, same)
    if args.output:
        Path(args.output).write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if same else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench.streaming", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--prompt-len", type=int, default=512, metavar="N", help="tokens (default: 512)")
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[512, 128], metavar="N", help="tokens of each"
    )
    parser.add_argument("--layer-groups", type=int, nargs="+", default=[1, 4], metavar="N")
    parser.add_argument("--link", type=float, default=20.0, metavar="MB/S", help="(default: 20)")
    parser.add_argument("--prompts", type=int, default=5, metavar="N", help="measured (default: 5)")
    parser.add_argument("--output", metavar="FILE", help="results as JSON")
    return parser


def _measure(args: argparse.Namespace, chunk: int, groups: int, core: int, cache: str) -> dict[str, Any]:
    settings = {
        "max_model_len": args.prompt_len + 64,
        "max_num_seqs": 1,
        "max_num_batched_tokens": chunk,
        "num_gpu_blocks_override": 4 * (args.prompt_len // 16 + 8),
    }
    offered = {
        "role": "prefill",
        "kv_transfer": "tcp",
        "kv_layer_groups": groups,
        "kv_lease_seconds": SILENCE,
    }
    worker = Worker(args.model, cache, **settings, **offered)
    os.sched_setaffinity(worker.popen.pid, {core})
    try:
        llm = AsyncLLM(
            args.model,
            compilation_cache_dir=cache,
            build=partial(build, layer_groups=groups),
            **settings,
        )
        roles = RoleConfig("decode", kv_transfer="tcp", kv_silence_timeout=SILENCE)
        source = HttpWorker(worker.url, None, SILENCE)
        with closing(connected(llm, roles, "model", {"tcp": ThrottledLink(args.link * 1e6)}, [])) as split:
            worker.ready()
            while not (worker.metric("jaxserve:warm") and _warm(llm)):
                time.sleep(0.2)
            return asyncio.run(_handed_over(split.receiver, source, args)) | {
                "chunk": chunk,
                "groups": groups,
            }
    finally:
        worker.kill()


def _warm(llm: AsyncLLM) -> float | None:
    return llm.registry.get_sample_value("jaxserve:warm", {"model_name": llm.config.model})


async def _handed_over(receiver: Any, source: HttpWorker, args: argparse.Namespace) -> dict[str, Any]:
    arrivals = []
    for number in range(args.prompts + 1):  # the first warms up
        prompt = random.Random(number).choices(range(10, VOCABULARY), k=args.prompt_len)
        request = Request(f"prompt {number}", prompt, SamplingParams(temperature=0, max_tokens=8))
        arrived = await receiver.fetch(request, source)
        arrived.release()
        arrivals.append(arrived)
    measured = arrivals[1:]
    return {
        "firsts": [arrived.first.token_ids for arrived in arrivals],
        "megabytes": measured[0].size / 1e6,
        "hidden_percent": 100 * sum(a.hidden for a in measured) / sum(a.size for a in measured),
        "exposed_ms": 1000 * statistics.median(a.exposed for a in measured),
        "ttft_ms": 1000 * statistics.median(a.seconds for a in measured),
    }


def _show(rows: list[dict[str, Any]], same: bool) -> None:
    table = Table(title="Prompts handed over", title_justify="left")
    for name in ("chunk", "layer groups", "MB", "hidden", "exposed (ms)", "all here after (ms)"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["chunk"]),
            str(row["groups"]),
            f"{row['megabytes']:.1f}",
            f"{row['hidden_percent']:.0f} %",
            f"{row['exposed_ms']:.0f}",
            f"{row['ttft_ms']:.0f}",
        )
    Console().print(table)
    Console().print("the first tokens are the same" if same else "[red]the first tokens differ")


if __name__ == "__main__":
    sys.exit(main())
