"""Every setting of the engine, once: the Python API takes them as keywords, the command line as flags."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from jaxserve.eplb import EplbConfig
from jaxserve.errors import ConfigError


def setting(default: Any, help: str, **flag: Any) -> Any:
    """A dataclass field with the words that `--help` shows; `flag` holds `choices`, `metavar` or `aliases`."""
    return field(default=default, metadata={"help": help, **flag})


CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4")


@dataclass(frozen=True)
class EngineConfig:
    """How a model is loaded and served; names are vLLM's where the meaning is the same."""

    model: str = setting(
        "", "checkpoint: a folder (safetensors or a converted one), a .gguf file, or a Hugging Face hub name"
    )
    tokenizer: str | None = setting(None, "where the tokenizer is, if not with the model")
    revision: str | None = setting(None, "branch, tag or commit of a hub name")
    dtype: str = setting(
        "auto",
        "data type of weights and activations; auto: the checkpoint's own on an accelerator, float32 on CPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "data type of cached keys and values or latents; auto: that of the activations; fp8 is fp8_e4m3; in 8 and "
        "4 bits every token has a float32 scale for each key and value of a head, or for its latent",
        choices=CACHE_DTYPES,
    )
    max_model_len: int | None = setting(
        None,
        "longest prompt plus output, in tokens; by default what the model allows",
        aliases=("--context-length",),
    )
    max_num_seqs: int = setting(
        32, "most sequences computed in one step", aliases=("--max-running-requests",)
    )
    max_num_batched_tokens: int = setting(
        512,
        "most new tokens computed in one step (longer prompts go in chunks)",
        aliases=("--chunked-prefill-size",),
    )
    tensor_parallel_size: int = setting(
        1,
        "devices that share every layer: heads, feed-forward and vocabulary",
        aliases=("-tp", "--tp-size", "--tp"),
    )
    pipeline_parallel_size: int = setting(
        1,
        "stages: groups of devices that have some of the layers each, and hand on what they computed",
        aliases=("-pp", "--pp-size"),
    )
    data_parallel_size: int = setting(
        1,
        "groups of devices with sequences and cache of their own; limits on sequences and tokens are for each of them",
        aliases=("-dp", "--dp-size"),
    )
    prefill_context_parallel_size: int = setting(
        1,
        "groups that compute prompts longer than max_num_batched_tokens together, besides sequences of their own",
        aliases=("-pcp",),
    )
    first_device: int = setting(
        0, "number of the first device used, for engines that share a machine; the others follow it"
    )
    enable_expert_parallel: bool = setting(
        False,
        "divide experts as wholes over all devices, rather than each of them as tensor_parallel_size says",
    )
    expert_parallel_size: int | None = setting(
        None, "the same over so many devices, of which others hold copies", aliases=("--ep-size",)
    )
    expert_capacity_factor: float | None = setting(
        None,
        "rows of tokens that devices with experts take at most, as a factor of an even share; the rest goes without "
        "those experts and is counted in jaxserve:expert_drops_total (default: nothing is dropped)",
    )
    expert_dispatch_dtype: str = setting(
        "auto", "data type of rows on their way to experts; auto: as they are", choices=("auto", "fp8")
    )
    enable_eplb: bool = setting(
        False, "move experts between devices as the traffic asks for, and give hot ones copies"
    )
    eplb_config: dict | None = setting(
        None,
        "how: window_size, the last steps that count (1000); step_interval, steps from one placement to the next "
        "(3000); num_redundant_experts, places for copies (0); max_seconds of work, then it is given up (300)",
    )
    nnodes: int = setting(
        1, "processes that make up the engine, each with devices of its own, all with these settings"
    )
    node_rank: int = setting(0, "which of them this is; 0 answers requests, the others follow it")
    master_addr: str = setting("127.0.0.1", "where process 0 can be reached by the others")
    master_port: int = setting(29500, "a free port there; the one after it is used too")
    gpu_memory_utilization: float | None = setting(
        None,
        "fraction of the device's memory that weights and cache may fill (default: 0.9, on CPU 0.1)",
        aliases=("--mem-fraction-static",),
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "size of the cache in bytes, instead of a fraction of memory"
    )
    num_gpu_blocks_override: int | None = setting(None, "number of cache pages, instead of a size")
    block_size: int = setting(
        0,
        "tokens a cache page holds (default: 16 on CPU, 128 elsewhere, 256 on TPU for latents in 8 bits)",
        aliases=("--page-size",),
    )
    enable_prefix_caching: bool = setting(True, "share cached pages between equal prompt beginnings")
    scheduling_policy: str = setting(
        "fcfs", "order of waiting requests: arrival, or priority then arrival", choices=("fcfs", "priority")
    )
    async_scheduling: bool = setting(True, "plan and launch a step before the one before it is read")
    max_num_queued_reqs: int = setting(256, "waiting requests beyond which new ones are answered 429")
    max_num_queued_tokens: int | None = setting(
        None, "waiting prompt tokens beyond which new requests are answered 429"
    )
    max_logprobs: int = setting(20, "most alternatives a request may ask for per token (20 at most)")
    seed: int = setting(0, "seed for requests that bring none")
    compilation_cache_dir: str | None = setting(
        "~/.cache/jaxserve/xla", "folder where compiled steps are kept between starts; empty for none"
    )
    load_compiled: str | None = setting(
        None, "folder of steps that `jaxserve plan --save-compiled` made, which need not be compiled here"
    )

    def __post_init__(self):
        for f in fields(self):
            choices = f.metadata.get("choices")
            if choices and getattr(self, f.name) not in choices:
                found = getattr(self, f.name)
                raise ConfigError(f"{f.name}={found!r} is unknown; use one of {', '.join(choices)}")
            _check_number(f.name, f.type, getattr(self, f.name))
        if not self.model:
            raise ConfigError("no model was named; give a folder, a .gguf file or a hub name")
        for name in (
            "max_model_len",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "prefill_context_parallel_size",
            "expert_parallel_size",
            "nnodes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
            "num_gpu_blocks_override",
            "max_num_queued_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        factor = self.expert_capacity_factor
        if factor is not None and not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"expert_capacity_factor={factor} must be above 0")
        EplbConfig.of(self.eplb_config)
        if self.eplb_config and not self.enable_eplb:
            raise ConfigError("eplb_config has no effect without enable_eplb; add it, or leave both out")
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"node_rank={self.node_rank} must be from 0 to nnodes - 1 = {self.nnodes - 1}")
        if not 0 < self.master_port < 65535:
            raise ConfigError(f"master_port={self.master_port} must be from 1 to 65534")
        if self.first_device < 0:
            raise ConfigError(f"first_device={self.first_device} must not be negative")
        for name in ("max_num_queued_reqs", "block_size"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        if not 0 <= self.max_logprobs <= 20:
            raise ConfigError(f"max_logprobs={self.max_logprobs} must be between 0 and 20")
        share = self.gpu_memory_utilization
        if share is not None and not (math.isfinite(share) and 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization={share} must be above 0 and at most 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}, so not every running sequence could get its next token in a step; "
                "raise it or lower max_num_seqs"
            )


def _check_number(name: str, kind: Any, value: Any) -> None:
    """Refuse what is no number (or no switch) where one belongs; an integer will do for a fraction."""
    kinds = get_args(kind) or (kind,)
    for number, word in ((bool, "True or False"), (int, "an integer"), (float, "a number")):
        if number in kinds and type(value) not in kinds and not (number is float and type(value) is int):
            raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; use {word}")
