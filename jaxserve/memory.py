"""How many cache pages fit: what is free on the device, less the weights and the sampler's state."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import psutil
from jax.sharding import NamedSharding

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from pallas_kernels.op import platform
from sharding.params import Param

log = logging.getLogger(__name__)
# Beside an accelerator's memory nobody else wants it; a computer's own is shared with everything that runs.
DEFAULT_UTILIZATION = {"cpu": 0.1}
ACCELERATOR_UTILIZATION = 0.9
FREE_SHARE = 0.9


@dataclass(frozen=True)
class Memory:
    """A device's memory, in bytes."""

    total: int
    free: int

    def within(self, share: float) -> int:
        """What `share` of it is, or nearly all that is free if that is less."""
        return int(min(self.total * share, self.free * FREE_SHARE))


def device_memory(sharing: int = 1) -> Memory:
    """What a device of this process has, and what of it nothing uses yet.

    `sharing` is how many devices of a mesh are here; simulated ones share the computer's memory.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return Memory(stats["bytes_limit"], stats["bytes_limit"] - stats["bytes_in_use"])
    memory = psutil.virtual_memory()
    return Memory(memory.total // sharing, memory.available // sharing)


def params_bytes(params: Any, dtype: Any, shardings: Any = None) -> int:
    """Bytes of a tree of `Param` once loaded; with `shardings` those on one device."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Param))
    wheres = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    return sum(
        elements(leaf.shape, where) * np.dtype(leaf.dtype or dtype).itemsize
        for leaf, where in zip(leaves, wheres, strict=True)
    )


def elements(shape: tuple[int, ...], where: NamedSharding | None) -> int:
    """Elements of an array on one device."""
    return math.prod(where.shard_shape(shape) if where else shape)


def plan_pages(
    config: EngineConfig, page_bytes: int, other_bytes: int, max_model_len: int, memory: Memory
) -> int:
    """Number of cache pages, the unused page 0 included.

    `other_bytes` is what weights and state need. No more pages than all sequences at their longest could
    fill. ConfigError if not even a page of tokens fits.
    """
    most = config.max_num_seqs * -(-max_model_len // config.block_size) + 1
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override + 1
    if config.kv_cache_memory_bytes is not None:
        room, asked = config.kv_cache_memory_bytes, f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
    else:
        share = config.gpu_memory_utilization
        if share is None:
            share = DEFAULT_UTILIZATION.get(platform(), ACCELERATOR_UTILIZATION)
        room = memory.within(share) - other_bytes
        asked = (
            f"gpu_memory_utilization={share} of {memory.total / 2**20:.0f} MiB ({memory.free / 2**20:.0f} MiB free), "
            f"less {other_bytes / 2**20:.0f} MiB for weights and state,"
        )
    pages = room // page_bytes
    if pages < 2:
        raise ConfigError(
            f"{asked} leaves {max(room, 0) / 2**20:.1f} MiB for the cache, and a page of {config.block_size} tokens "
            f"takes {page_bytes / 2**20:.2f} MiB; raise it, use a smaller dtype, or free memory"
        )
    return most if pages >= most else _coarse(pages)


def _coarse(pages: int) -> int:
    """Rounded down to five binary digits: the steps compiled at the last start fit again though memory differs."""
    unit = 2 ** max(pages.bit_length() - 5, 0)
    return pages // unit * unit


def fitting_length(config: EngineConfig, max_model_len: int, num_pages: int) -> int:
    """The longest sequence served: the model's, or what the cache holds; ConfigError if more was asked for."""
    capacity = (num_pages - 1) * config.block_size
    if max_model_len <= capacity:
        return max_model_len
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len={max_model_len} does not fit the cache, which holds {capacity} tokens; lower it, or raise "
            "num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization, whichever was given"
        )
    log.warning(
        "the cache holds %d tokens: max_model_len is that, not the model's %d", capacity, max_model_len
    )
    return capacity
