"""Rows that experts got: counted in every step, summed on the device, and fetched from there now and then."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.metrics import Metrics
from jaxserve.models.config import ModelConfig
from sharding.mesh import size
from sharding.rules import expert_axes

FETCHED_EVERY = 64  # steps: a fetch waits for a copy from the device


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertLoads:
    """Rows of each mixture layer, of all groups of devices together.

    Sums since the start are modulo 2**32: what was added between two is right, up to so many rows.
    """

    experts: Any  # i32 [mixture layers, E]: that chose each expert
    devices: Any  # i32 [mixture layers, X]: that went to each device with experts, its copies (data) included


def no_loads(config: ModelConfig, mesh: Any = None) -> ExpertLoads | None:
    """Nothing counted yet; None for a model without experts."""
    if config.mixture is None:
        return None
    layers, experts = sum(config.mixture.layers), config.mixture.routing.experts
    devices = size(mesh, expert_axes(mesh, config.mixture.slot_count)) if mesh else 1
    return ExpertLoads(jnp.zeros((layers, experts), jnp.int32), jnp.zeros((layers, devices), jnp.int32))


class ExpertTraffic:
    """Totals since the start, which the metrics hear of every `FETCHED_EVERY` steps."""

    def __init__(self, layers: Sequence[int], metrics: Metrics):
        """`layers`: the numbers in the model of those with a mixture."""
        self.layers, self._metrics = list(layers), metrics
        self.steps = 0  # that were read
        self._latest: ExpertLoads | None = None
        self._seen = self._total = self._told = ExpertLoads(np.int32(0), np.int64(0))

    def on_step(self, loads: ExpertLoads) -> None:
        """A step was read; `loads`, on the device, are the sums after it."""
        self._latest, self.steps = loads, self.steps + 1
        if self.steps % FETCHED_EVERY == 0:
            told, self._told = self._told, self.totals()
            self._metrics.on_expert_loads(
                self.layers, self._told.experts - told.experts, self._told.devices - told.devices
            )

    def totals(self) -> ExpertLoads:
        """int64, after the last step that was read."""
        if self._latest is not None:
            now = jax.tree.map(np.asarray, self._latest)
            self._total = jax.tree.map(
                lambda total, new, old: total + _added(new, old), self._total, now, self._seen
            )
            self._seen, self._latest = now, None
        return self._total


def _added(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    added = (new - old).astype(np.uint32).astype(np.int64)
    # An interrupt may cost the device its sums: they begin again at 0.
    return new.astype(np.int64) if (added >= 2**31).any() else added
