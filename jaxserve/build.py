"""From settings to a running engine: open the checkpoint, size the cache, load, compile."""

import logging
import sys
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from prometheus_client import CollectorRegistry

from jaxserve.arrays import Arrays
from jaxserve.buckets import every_bucket
from jaxserve.cache_kernels import check_cache_kernels
from jaxserve.compiles import count_compiles
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.eplb import EplbConfig
from jaxserve.errors import ConfigError, EngineError
from jaxserve.expert_loads import ExpertTraffic
from jaxserve.following import LeadingRunner, assemble, follow
from jaxserve.groups import GroupedScheduler
from jaxserve.layer_groups import layer_groups as split_layers
from jaxserve.layered_step import ON_A_CPU, LayeredStep
from jaxserve.memory import device_memory, fitting_length, plan_pages
from jaxserve.metrics import Metrics
from jaxserve.models import ModelConfig, model_for
from jaxserve.placement import Placement, placement
from jaxserve.pool import cache_name
from jaxserve.rebalance import Rebalancer, with_first_copies
from jaxserve.refusals import Limits
from jaxserve.runner import DeviceRunner
from jaxserve.sampling.admission import admission
from jaxserve.sampling.params import SamplingParams
from jaxserve.scheduler import Scheduler
from jaxserve.step import Step
from jaxserve.text import Tokenizer, load_tokenizer
from jaxserve.topology import mesh_for, with_dispatch, with_slots
from jaxserve.weights import load, open_checkpoint
from jaxserve.weights.packing import bytes_saved
from kv import KVCache
from kv.events import Events
from pallas_kernels.op import platform
from pallas_kernels.pages import LOW_BITS
from sharding.hosts import Follower, Leader, Lost, least
from sharding.params import stack_layers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """An engine, and what it was made from."""

    engine: Engine
    config: EngineConfig  # with max_model_len and dtypes as they turned out
    model_config: ModelConfig
    tokenizer: Tokenizer
    crew: Leader | Follower | None = None  # to the engine's other processes


def build(
    config: EngineConfig, metrics: Metrics, events: Events | None = None, *, layer_groups: int = 1
) -> Built:
    """Load a model and compile its steps; seconds for a small model, and nothing compiles afterwards.

    `events` is told which cache pages can be found. Prompts are computed in about `layer_groups` programs, so that
    the pages of some layers are complete before the others are; not in pipeline stages, whose pages cannot leave.
    """
    began = time.monotonic()
    if config.load_compiled and not Path(config.load_compiled).is_dir():
        raise ConfigError(
            f"load_compiled={config.load_compiled!r} is no folder; `jaxserve plan --save-compiled` makes it"
        )
    _keep_compiled(config)
    crew = assemble(config)
    checkpoint = open_checkpoint(config.model, config.revision)
    model_config = ModelConfig.from_hf(checkpoint.config, config.max_model_len)
    tokenizer = load_tokenizer(config.tokenizer or str(checkpoint.path), config.revision)
    config = settled(config, model_config)
    mesh = mesh_for(config, model_config)
    model_config = with_slots(config, with_dispatch(config, model_config, mesh), mesh)
    params = model_for(model_config).params(model_config)
    low_bit = platform() != "cpu"  # where their products are fast, and where scanning a stack copies nothing
    stacked = low_bit or config.pipeline_parallel_size > 1
    if stacked:
        params["layers"] = stack_layers(params["layers"])
    check_cache_kernels(config, model_config, mesh)
    cache = config.kv_cache_dtype
    where = placement(mesh, model_config, params, stacked=stacked, cache_dtype=cache) if mesh else None
    saved = bytes_saved(params, checkpoint, config.dtype, where and where.params) if low_bit else 0
    arrays = Arrays(config, model_config, params, stacked, where, saved)
    other_bytes, longest = arrays.weight_bytes + arrays.state_bytes, model_config.max_model_len
    num_pages = plan_pages(config, arrays.page_bytes, other_bytes, longest, device_memory(arrays.sharing))
    num_pages = least(num_pages) if crew else num_pages
    longest = fitting_length(config, longest, num_pages)
    config = replace(config, max_model_len=longest)

    weights = load(params, checkpoint, config.dtype, where and where.params, low_bit=low_bit, progress=True)
    buckets = every_bucket(config, longest, where.context if where else 1)
    if where and config.enable_eplb:
        assert model_config.mixture is not None
        weights, where = with_first_copies(weights, where, model_config.mixture)
    step = Step(model_config, config.block_size, where)
    # One CPU runs every step in groups of layers, unless it loads saved steps, which are whole.
    one_cpu = not (stacked or where or config.load_compiled)
    pieces = 1 if config.pipeline_parallel_size > 1 else layer_groups
    pieces = ON_A_CPU if one_cpu and pieces == 1 else pieces
    groups = split_layers(weights["layers"], stacked=stacked, pieces=pieces)
    layered = LayeredStep(step, groups, decoding=one_cpu) if pieces > 1 else None
    pool = arrays.pool(num_pages)
    runner = DeviceRunner(step, weights, pool, arrays.state(), buckets, config.load_compiled, layered)
    loaded = time.monotonic()
    traffic, rebalancer = _watching(config, model_config, runner, metrics)
    blank = admission(SamplingParams(), [0], 1, model_config.vocab_size)
    runner.compile(blank, progress=sys.stderr.isatty())
    _count_when_warm(runner, metrics)
    scheduler = _scheduler(config, num_pages, where, events)
    eos = tuple(t for t in tokenizer.eos_token_ids if t < model_config.vocab_size)
    limits = Limits(longest, model_config.vocab_size, eos)
    metrics.set_cache_config(
        block_size=config.block_size,
        num_gpu_blocks=(num_pages - 1) * (where.groups if where else 1),
        cache_dtype=config.kv_cache_dtype,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    log.info(
        "%s ready on %s: %.0f MiB of weights (%s), %d cache tokens, %d steps compiled in %.1f s, %.1f s in all",
        model_config.name,
        mesh.shape_tuple if mesh else "one device",
        arrays.weight_bytes / 2**20,
        config.dtype,
        scheduler.cache.capacity_tokens,
        len(buckets),
        time.monotonic() - loaded,
        time.monotonic() - began,
    )
    leading = LeadingRunner(runner, crew) if isinstance(crew, Leader) else runner
    engine = Engine(leading, scheduler, tokenizer, limits, config, metrics, traffic, rebalancer)
    return Built(engine, config, model_config, tokenizer, crew)


def follow_leader(config: EngineConfig) -> None:
    """Be a process of an engine that another one leads, until it stops; ConfigError when it dies."""
    built = build(config, Metrics(CollectorRegistry(), config.model))
    assert isinstance(built.crew, Follower) and isinstance(built.engine.runner, DeviceRunner)
    blank = admission(SamplingParams(), [0], 1, built.model_config.vocab_size)
    try:
        follow(built.engine.runner, built.crew, blank)
    except Lost as why:
        raise EngineError(str(why)) from why


def _scheduler(
    config: EngineConfig, num_pages: int, where: Placement | None, events: Events | None
) -> Scheduler | GroupedScheduler:
    """One scheduler a group of devices."""
    together = where.context if where else 1
    made = [
        Scheduler(
            KVCache(num_pages, config.block_size, config.enable_prefix_caching, events),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.scheduling_policy,
            together * config.max_num_batched_tokens if together > 1 else 0,
        )
        for _ in range(where.groups if where else 1)
    ]
    if where is None or where.groups == 1:
        return made[0]
    return GroupedScheduler(made, together)


def _watching(
    config: EngineConfig, model: ModelConfig, runner: DeviceRunner, metrics: Metrics
) -> tuple[ExpertTraffic | None, Rebalancer | None]:
    """Who counts what experts get, and who moves them, where there are experts and where they are moved."""
    if model.mixture is None:
        return None, None
    traffic = ExpertTraffic([i for i, mixed in enumerate(model.mixture.layers) if mixed], metrics)
    if not config.enable_eplb:
        return traffic, None
    rebalancer = Rebalancer(runner, model.mixture, traffic, EplbConfig.of(config.eplb_config), metrics)
    rebalancer.warm_up()
    return traffic, rebalancer


def _count_when_warm(runner: DeviceRunner, metrics: Metrics) -> None:
    """Let the metrics say when all steps are compiled, and count compiles after that while the runner is in use."""
    warm = runner.warm
    metrics.watch_warm(warm.is_set)
    stop = count_compiles(lambda seconds: metrics.on_compile(seconds) if warm.is_set() else None)
    weakref.finalize(runner, stop).atexit = False


def settled(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The settings with nothing left to "auto", as the platform of the ambient mesh or of this process has it."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if platform() == "cpu" else model.dtype
    cache = cache_name(config.kv_cache_dtype, dtype)
    page = config.block_size or _page(model, cache)
    return replace(config, dtype=dtype, kv_cache_dtype=cache, block_size=page)


def _page(model: ModelConfig, cache_dtype: str) -> int:
    """Tokens a page holds by default. A TPU moves scales by rows of 128, and two latents share one."""
    if platform() == "cpu":
        return 16
    return 256 if platform() == "tpu" and cache_dtype in LOW_BITS and model.latent is not None else 128


def _keep_compiled(config: EngineConfig) -> None:
    """Let XLA keep compiled steps on disk, also the quick ones: a start has many of them."""
    if config.compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.compilation_cache_dir).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
