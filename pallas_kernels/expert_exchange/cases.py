"""Named calls of expert_exchange: tiny ones to compare values, real models' to compile and to measure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Case:
    """Tokens with `chosen` experts each on every device; `skew` is the part that all goes to the first device."""

    devices: int
    groups: int  # experts of a device
    tokens: int  # of a device
    chosen: int
    row: tuple[int, ...]
    skew: float = 0.0
    back: bool = False
    fp8: bool = False  # rows of bytes, as fp8_rows.packed makes them
    axis: str = "expert"

    @property
    def max_rows(self) -> int:
        """The most that any device receives."""
        return int(self.counts().sum(axis=(0, 2)).max())

    def counts(self, seed: int = 0) -> np.ndarray:
        """[sources, devices, groups] int32, each source's adding up to its rows."""
        rng = np.random.default_rng(seed)
        experts = self.devices * self.groups
        share = np.full(experts, (1 - self.skew) / experts)
        share[: self.groups] += self.skew / self.groups
        rows = [rng.multinomial(self.tokens * self.chosen, share) for _ in range(self.devices)]
        return np.array(rows, np.int32).reshape(self.devices, self.devices, self.groups)

    def shapes(self, dtype) -> tuple[tuple, dict[str, Any]]:
        """All devices' arguments, one after the other."""
        counts, max_rows = self.counts(), self.max_rows
        dtype = jnp.uint8 if self.fp8 else dtype
        sent = self.tokens * self.chosen
        rows = max_rows if self.back else sent
        if self.back:
            counts = counts.swapaxes(0, 1)
        return (
            jax.ShapeDtypeStruct((self.devices * rows, *self.row), dtype),
            np.ascontiguousarray(counts).reshape(-1, self.groups),
        ), {"axis_name": self.axis, "max_rows": sent if self.back else max_rows, "back": self.back}

    def call(self, dtype, seed: int = 0) -> tuple[tuple, dict[str, Any]]:
        """(positional, keyword) arguments with random values."""
        (rows, counts), options = self.shapes(dtype)
        values = np.random.default_rng(seed).normal(scale=30, size=rows.shape)
        return (jnp.asarray(values).astype(rows.dtype), jnp.asarray(counts)), options

    def over(self, mesh: Mesh | AbstractMesh, fn: Callable) -> Callable:
        """`fn` on every device's part of the arguments."""
        axis = P(self.axis)
        return jax.shard_map(fn, mesh=mesh, in_specs=(axis, axis), out_specs=axis, check_vma=False)

    def defined(self, out) -> np.ndarray:
        """The rows that arrived."""
        rows, received = (np.asarray(x, np.float32).reshape(self.devices, -1, *x.shape[1:]) for x in out)
        return np.concatenate([r[: int(c.sum())].reshape(-1) for r, c in zip(rows, received, strict=True)])


TINY = {
    "there": Case(4, 2, 8, 3, (2, 128), skew=0.3),
    "one device takes all": Case(4, 2, 8, 2, (1, 128), skew=1.0),
    "back": Case(4, 2, 8, 3, (2, 128), skew=0.3, back=True),
    "bytes": Case(4, 1, 5, 2, (3, 128), fp8=True),
}

REAL = {
    "deepseek-v3 decode, 8 chips": Case(8, 32, 128, 8, (56, 128)),
    "deepseek-v3 decode back, 8 chips": Case(8, 32, 128, 8, (56, 128), back=True),
    "deepseek-v3 decode, FP8 rows, 8 chips": Case(8, 32, 128, 8, (57, 128), fp8=True),
    "qwen3-235b prefill 8192, 4 chips": Case(4, 32, 8192, 8, (32, 128)),
    "gpt-oss-120b decode, 4 chips": Case(4, 32, 64, 4, (2944,)),
}
