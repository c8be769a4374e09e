"""A worker whose device is a clock: the real server, engine, scheduler and cache, and steps that take a given time.

    python -m bench.virtual_worker --port 8001

So many workers run on a few cores, and what is measured in front of them is the routing and not the machine. Its words
are letters that follow from the length of the text before them.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxserve import AsyncLLM
from jaxserve.batch import Row
from jaxserve.build import Built
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.metrics import Metrics
from jaxserve.models import ModelConfig
from jaxserve.pace import Pace
from jaxserve.refusals import Limits
from jaxserve.scheduler import Scheduler
from jaxserve.text import load_tokenizer
from kv import KVCache
from kv.events import Events
from server.config import ServerConfig
from server.serve import serve
from tests.tiny import tiny_config, tiny_tokenizer

# About an 8B model on one v5e chip: weights in 8 bits read once a step, half of the peak for prompts.
PACE = Pace(base=0.015, prompt_token=0.0002, sequence=0.0002)


@dataclass
class ClockRunner:
    """Runs one step after the other, each for as long as `pace` says."""

    pace: Pace
    free_at: float = 0.0  # when the step launched last ends

    def launch(self, rows: list[Row]) -> Any:
        decoding = sum(row.samples and len(row.tokens) == 1 for row in rows)
        prompt_tokens = sum(len(row.tokens) for row in rows) - decoding
        seconds = self.pace.seconds(prompt_tokens, decoding)
        ends = self.free_at = max(self.free_at, time.monotonic()) + seconds
        read = np.array([[97 + row.kv_len % 26 for row in rows], [1] * len(rows)], np.int32)

        def result() -> np.ndarray:
            time.sleep(max(ends - time.monotonic(), 0.0))
            return read

        output = SimpleNamespace(sampled=None, expert_drops=None)
        return SimpleNamespace(result=result, output=output, places=None, rows=None)

    def admit(self, slot: int, admission: object, group: int = 0) -> None:
        """Nothing is kept for a slot."""

    def close(self) -> None:
        """Nothing runs."""


def build(config: EngineConfig, metrics: Metrics, events: Events) -> Built:
    """An engine on a clock, with a tokenizer of bytes."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer(folder)
        tokenizer = load_tokenizer(folder)
    assert config.num_gpu_blocks_override and config.max_model_len
    cache = KVCache(config.num_gpu_blocks_override, config.block_size, True, events)
    scheduler = Scheduler(cache, config.max_num_seqs, config.max_num_batched_tokens)
    limits = Limits(config.max_model_len, tokenizer.vocab_size, tokenizer.eos_token_ids)
    engine = Engine(ClockRunner(PACE), scheduler, tokenizer, limits, config, metrics)
    model = ModelConfig.from_hf(tiny_config() | {"max_position_embeddings": config.max_model_len})
    return Built(engine, config, model, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser("bench.virtual_worker", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pages", type=int, default=4096, help="cache pages of 16 tokens (default: 4096)")
    args = parser.parse_args()
    config = EngineConfig(
        "virtual",
        max_model_len=16384,
        max_num_seqs=32,
        block_size=16,
        num_gpu_blocks_override=args.pages + 1,
    )
    server = ServerConfig("127.0.0.1", args.port, ("virtual",), uvicorn_log_level="warning")
    serve(lambda: AsyncLLM(config, build=build), config, server)


if __name__ == "__main__":
    main()
