"""Engines around one compiled tiny model: other pages, budgets and policies need no new compile."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from prometheus_client import CollectorRegistry

from jaxserve.build import Built
from jaxserve.engine import Engine
from jaxserve.groups import Caches
from jaxserve.metrics import Metrics
from jaxserve.outputs import Collected
from jaxserve.request import Request, RequestOutput
from jaxserve.runner import DeviceRunner
from jaxserve.sampling.params import SamplingParams
from jaxserve.scheduler import Scheduler
from kv import KVCache

SIZES = {
    "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 24, "block_size": 4,
    "num_gpu_blocks_override": 160, "dtype": "float32",
}  # fmt: skip


def around(built: Built, runner: Any = None, pages: int = 160, **settings: Any) -> Engine:
    """A new engine on the model's runner, with `pages` of its cache pages and other settings."""
    config = replace(built.config, **settings)
    cache = KVCache(pages + 1, config.block_size, config.enable_prefix_caching)
    limits = replace(
        built.engine.limits, max_model_len=min(built.engine.limits.max_model_len, cache.capacity_tokens)
    )
    scheduler = Scheduler(cache, config.max_num_seqs, config.max_num_batched_tokens, config.scheduling_policy)
    metrics = Metrics(CollectorRegistry(), "tiny")
    return Engine(runner or built.engine.runner, scheduler, built.tokenizer, limits, config, metrics)


def with_weights(built: Built, params: Any) -> DeviceRunner:
    """The model's compiled steps over other weights, with pages and slots of its own."""
    runner = copy.copy(built.engine.runner)
    assert isinstance(runner, DeviceRunner)
    runner.params = params
    runner.pool, runner.state = jax.tree.map(jnp.copy, (runner.pool, runner.state))
    return runner


def counted(metrics: Metrics, name: str, **labels: str) -> float:
    """The value of a sample."""
    return metrics.registry.get_sample_value(name, {"model_name": "tiny"} | labels) or 0.0


@dataclass
class Traffic:
    """Requests on their way through an engine, started and aborted between steps as told."""

    engine: Engine
    collected: dict[str, Collected] = field(default_factory=dict)
    done: dict[str, RequestOutput] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        self.collected[request.request_id] = Collected(request)
        self.engine.add(self.engine.prepare(request))

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self.collected.pop(request_id, None)

    def step(self) -> None:
        for request_id, delta in self.engine.step():
            collected = self.collected[request_id]
            if delta.error:
                self.errors[request_id] = delta.error
            if collected.add(delta):
                self.done[request_id] = self.collected.pop(request_id).output()

    def finish(self) -> dict[str, RequestOutput]:
        for _ in range(5000):
            if not self.engine.busy:
                assert not self.collected, f"never ended: {sorted(self.collected)}"
                check_idle(self.engine)
                return self.done
            self.step()
        raise AssertionError("no end")


def check_idle(engine: Engine) -> None:
    """Nothing is left of the requests that there were."""
    cache, scheduler = engine.scheduler.cache, engine.scheduler
    assert not engine.ongoing and not scheduler.running and not scheduler.waiting
    for one in cache.each if isinstance(cache, Caches) else [cache]:
        assert one.used == 0 and one.free + one.cached == one.num_pages - 1


def complete(
    engine: Engine, prompt: Iterable[int] | str, params: SamplingParams | None = None, **fields: Any
) -> RequestOutput:
    """One request run to its end."""
    ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    traffic = Traffic(engine)
    traffic.add(Request("one", ids, params or greedy(), **fields))
    return traffic.finish()["one"]


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | fields)
