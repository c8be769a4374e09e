"""Whether a device has kernels for a cache in low bits: where it is no CPU the definitions would be far too slow."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models import ModelConfig
from jaxserve.pool import layer_pages
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.op import Op, Unfit, platform
from pallas_kernels.page_write import page_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.pages import LOW_BITS, ScaledPages, latent_of
from sharding.mesh import TENSOR, size

FP8_CAPABILITY = 8.9  # of NVIDIA GPUs: those before know no E4M3


def check_cache_kernels(config: EngineConfig, c: ModelConfig, mesh: Mesh | None) -> None:
    """ConfigError if a cache in low bits has no kernel for this model on the ambient platform; `config` is settled."""
    asked = config.kv_cache_dtype
    if asked not in LOW_BITS or platform() == "cpu":
        return
    try:
        _check_gpu(asked)
        _try_kernels(config, c, mesh)
    except Unfit as why:
        raise ConfigError(
            f"kv_cache_dtype={asked} with block_size={config.block_size} cannot be used for {c.name} on this device: "
            f"{why}; or use kv_cache_dtype={config.dtype}"
        ) from why


def _try_kernels(config: EngineConfig, c: ModelConfig, mesh: Mesh | None) -> None:
    """Unfit if the kernels of a layer, on its part of the heads, refuse the shapes of a step."""
    heads, kv_heads = (size(mesh, axes) if mesh else 1 for axes in (TENSOR, TENSOR[:1]))
    seqs, array = config.max_num_seqs, partial(jax.ShapeDtypeStruct, dtype=config.dtype)
    integers = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    batch = integers((seqs, 1)), integers((seqs + 1,)), integers((seqs,))
    pages: ScaledPages = layer_pages(c, config.kv_cache_dtype, config.block_size, (2,))
    if c.latent is not None:
        n, latent, rope = c.heads // heads, latent_of(pages.values), c.latent.rope_dim
        _trace(mla_attention, array((seqs, n, latent)), array((seqs, n, rope)), pages, *batch, scale=1.0)
        _trace(page_write, pages, array((seqs, latent + rope)), integers((seqs,)))
        return
    k, width = c.kv_heads // kv_heads, 2 * c.head_dim
    values, scales = pages
    pages = ScaledPages(
        jax.ShapeDtypeStruct((2, k, *values.shape[2:]), values.dtype),
        jax.ShapeDtypeStruct((2, 2, k, scales.shape[-1]), scales.dtype),
    )
    _trace(paged_attention, array((seqs, c.heads // heads, c.head_dim)), pages, *batch, scale=1.0)
    _trace(page_write, pages, array((seqs, k, width)), integers((seqs,)))


def _trace(op: Op, *args: Any, **options: Any) -> None:
    """Unfit if a kernel of the platform does not take these shapes."""
    for kernel in op.here().values():
        jax.eval_shape(partial(kernel.fn, **options), *args)


def _check_gpu(asked: str) -> None:
    if platform() != "gpu" or asked != "fp8_e4m3":
        return
    capability = float(getattr(jax.devices()[0], "compute_capability", FP8_CAPABILITY))
    if capability < FP8_CAPABILITY:
        raise Unfit(f"GPUs of compute capability {capability} know no E4M3; use int8")
