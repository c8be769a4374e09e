"""`jaxserve bench`: load on a running server or on the engine in this process, at one rate or several."""

import asyncio
import dataclasses
import math
import sys
from datetime import UTC, datetime
from typing import Any

from bench.config import LoadConfig
from bench.load import open_loop
from bench.results import goals, plot, save, show, summarize
from bench.serve import ServerTarget
from bench.workloads import Work, arrivals, file_works, random_works
from jaxserve.config import EngineConfig
from jaxserve.demo import resolve_demo
from jaxserve.errors import JaxserveError
from server.flags import Parser, add_flags, config_from

_EPILOG = """examples:
  jaxserve bench --base-url http://localhost:8000 --num-prompts 200 --request-rate 4
  jaxserve bench --base-url http://localhost:8000 --request-rate 1 2 4 8 --plot load.png --output load.json
  jaxserve bench --model demo:smollm2 --max-concurrency 8 --random-input-len 128 --random-output-len 64
  jaxserve bench --base-url http://localhost:8000 --dataset traffic.jsonl --goodput ttft:500 tpot:50

Latencies count from a request's arrival, so a server that falls behind cannot hide it. With --request-rate inf
and --max-concurrency it is a closed loop: a request arrives when a place is free."""
_SERVER_VOCAB_SIZE = 32000  # a server does not tell; most vocabularies are larger


def main() -> int:
    parser = Parser(
        prog="jaxserve bench",
        usage="jaxserve bench (--base-url URL | --model MODEL) [flags]",
        description="Measure latency and throughput under load.",
        epilog=_EPILOG,
    )
    add_flags(parser, LoadConfig, title="load")
    add_flags(
        parser, EngineConfig, title="engine, with --model (its seed is also the load's)", skip=("model",)
    )
    args = parser.parse_args()
    load = config_from(args, LoadConfig)
    goals(load.goodput)
    if load.base_url:
        target: Any = ServerTarget(load.base_url, load.served_model_name, load.api_key, load.extra_body)
    else:
        from bench.engine import EngineTarget

        target = EngineTarget(config_from(args, EngineConfig, model=resolve_demo(load.model or "")))
    runs = asyncio.run(_runs(load, target, args.seed))
    show(runs, load.metric_percentiles)
    if load.output:
        settings = dataclasses.asdict(load) | {"request_rate": [str(rate) for rate in load.request_rate]}
        save(load.output, {name: value for name, value in settings.items() if name != "api_key"}, runs)
    if load.plot:
        plot(load.plot, runs, max(load.metric_percentiles))
    return 1 if any(run["failed"] for run in runs) else 0


async def _runs(load: LoadConfig, target: Any, seed: int) -> list[dict[str, Any]]:
    """One run for each rate; random prompts are new each time, or the prefix cache would be measured."""
    await target.open()
    try:
        for work in _works(load, target, load.num_warmups, seed):
            async for _ in target.send(work):
                pass
        return [await _run(load, target, rate, seed + 1 + i) for i, rate in enumerate(load.request_rate)]
    finally:
        await target.close()


def _works(load: LoadConfig, target: Any, count: int, seed: int) -> list[Work]:
    if load.dataset:
        return file_works(load.dataset, count, load.random_output_len)
    return random_works(
        count,
        load.random_input_len,
        load.random_output_len,
        vocab_size=load.random_vocab_size
        or (target.llm.tokenizer.vocab_size if load.model else _SERVER_VOCAB_SIZE),
        range_ratio=load.random_range_ratio,
        seed=seed,
    )


async def _run(load: LoadConfig, target: Any, rate: float, seed: int) -> dict[str, Any]:
    works = _works(load, target, load.num_prompts, seed)
    times = arrivals(len(works), rate, fixed=load.fixed_arrivals, seed=seed)
    records, duration = await open_loop(works, times, target.send, load.max_concurrency)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model_id": target.name,
        "num_prompts": len(works),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "max_concurrency": load.max_concurrency,
        **summarize(records, duration, percentiles=load.metric_percentiles, goodput=goals(load.goodput)),
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JaxserveError as error:
        print(f"jaxserve bench: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
