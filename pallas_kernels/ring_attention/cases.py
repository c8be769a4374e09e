"""Named calls of ring_attention: tiny ones to compare values, real models' to compile and to measure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.ring_attention.layout import NOWHERE, zigzag


@dataclass(frozen=True)
class Case:
    """Sequences of `new` tokens, after `context` tokens that the devices hold already, over a ring."""

    devices: int
    heads: tuple[int, int, int]  # query heads, kv heads, head size
    new: tuple[int, ...]
    context: tuple[int, ...] | None = None
    latent: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    multiple: int = 128
    axis: str = "ring"

    def shapes(self, dtype) -> tuple[tuple, dict[str, Any]]:
        """All devices' arguments, one after the other; places as numbers, the rest as shapes."""
        n, k, h = self.heads
        mine = zigzag(self.new, self.devices, first=self.context, multiple=self.multiple)
        kv_places = mine.places
        if self.context:
            before = zigzag(self.context, self.devices, multiple=self.multiple)
            kv_places = np.concatenate([before.places, kv_places], axis=1)
        return (
            jax.ShapeDtypeStruct((mine.places.size, n, h), dtype),
            jax.ShapeDtypeStruct((kv_places.size, k, h if self.latent else 2 * h), dtype),
            mine.places.reshape(-1),
            kv_places.reshape(-1),
            mine.starts.reshape(-1),
        ), {
            "scale": h**-0.5, "axis_name": self.axis, "latent": self.latent, "window": self.window,
            "soft_cap": self.soft_cap, "sinks": jnp.linspace(-1, 1, n) if self.sinks else None,
        }  # fmt: skip

    def call(self, dtype, seed: int = 0) -> tuple[tuple, dict[str, Any]]:
        """(positional, keyword) arguments with random values."""
        rng = np.random.default_rng(seed)
        (q, kv, *places), options = self.shapes(dtype)
        q, kv = (jnp.asarray(rng.normal(size=x.shape), dtype) for x in (q, kv))
        return (q, kv, *map(jnp.asarray, places)), options

    def over(self, mesh: Mesh | AbstractMesh, fn: Callable) -> Callable:
        """`fn` on every device's part of the arguments."""
        axis = P(self.axis)
        return jax.shard_map(fn, mesh=mesh, in_specs=(axis,) * 5, out_specs=axis, check_vma=False)

    def defined(self, out) -> np.ndarray:
        """Results and log-sum-exps, side by side, of the rows that are some token's."""
        real = self.shapes(jnp.bfloat16)[0][2] != NOWHERE
        out, lse = (np.asarray(x, np.float32)[real] for x in out)
        return np.concatenate([out, lse[..., None]], axis=-1)


TINY = {
    "heads of 64, two sequences": Case(4, (2, 1, 64), new=(300, 700)),
    "heads of 128": Case(2, (4, 2, 128), new=(400,)),
    "window, soft cap, sinks": Case(2, (2, 1, 128), new=(700,), window=90, soft_cap=5.0, sinks=True),
    "latent on a context": Case(2, (4, 1, 192), new=(300,), context=(250,), latent=128),
}

REAL = {
    "llama-70b, 8 x 8192": Case(8, (64, 8, 128), new=(65536,)),
    "gpt-oss, window of 128, 8 x 8192": Case(8, (64, 8, 64), new=(65536,), window=128, sinks=True),
    "gemma2-9b, window of 4096, 8 x 8192": Case(8, (16, 8, 256), new=(65536,), window=4096, soft_cap=50.0),
    "deepseek-v3 latents, 8 x 8192": Case(8, (128, 1, 576), new=(65536,), latent=512),
    "deepseek-v3 latents, chunk of 16384 on 114688, 8 chips": Case(
        8, (128, 1, 576), new=(16384,), context=(114688,), latent=512
    ),
}
