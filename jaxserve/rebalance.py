"""Experts placed anew while requests run: copied by a thread, one layer at a time, and switched between two steps."""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.eplb import EplbConfig
from jaxserve.expert_loads import ExpertTraffic
from jaxserve.metrics import Metrics
from jaxserve.models.sizes import Mixture
from jaxserve.placement import Placement as Shardings
from jaxserve.runner import DeviceRunner
from sharding.balance import Placement, place, settled
from sharding.experts import Copies
from sharding.mesh import size
from sharding.moves import Rows, Slots, dealt, sources
from sharding.rules import expert_axes

log = logging.getLogger(__name__)
WORTH = 0.02  # a layer whose imbalance would shrink by less stays as it is
CLOSING = 10.0  # seconds that what is being copied at the end is waited for


@dataclass(frozen=True)
class Moved:
    """A layer's slots in a new order, made beside those that steps still read."""

    layer: int  # of those with a mixture
    placement: Placement
    rows: Rows
    nbytes: int  # that went from device to device


class Rebalance:
    """One new placement on its way: a thread that makes a layer, and waits until it was taken."""

    def __init__(self, loads: np.ndarray, move: Callable[[int, np.ndarray], Moved | None]):
        """`loads` [mixture layers, E]; `move(layer, its loads)` is called on the thread, None if all stays."""
        self.ready: Moved | None = None
        self.failure: Exception | None = None
        self.layers = self.nbytes = 0  # taken so far
        self._loads, self._move = loads, move
        self._taken, self._stopped = threading.Event(), False
        self._worked, self._since = 0.0, time.monotonic()
        self.thread = threading.Thread(target=self._run, name="rebalance", daemon=True)
        self.thread.start()

    @property
    def seconds(self) -> float:
        """Spent at work; waiting for a step is not."""
        since = self._since
        return self._worked + (time.monotonic() - since if since else 0.0)

    def take(self) -> Moved | None:
        """A layer that is ready, once. The thread waits for `go_on`: it must not read what is being replaced."""
        moved, self.ready = self.ready, None
        if moved:
            self.layers, self.nbytes = self.layers + 1, self.nbytes + moved.nbytes
        return moved

    def go_on(self) -> None:
        self._taken.set()

    def stop(self) -> None:
        """No more layers; what is copied now is forgotten."""
        self._stopped = True
        self._taken.set()

    def _run(self) -> None:
        try:
            for layer, loads in enumerate(self._loads):
                self._since = time.monotonic()
                moved = self._move(layer, loads)
                worked, self._since = self.seconds, 0.0
                self._worked = worked
                if moved and not self._stopped:
                    self.ready, moved = moved, None
                    self._taken.wait()
                    self._taken.clear()
                if self._stopped:
                    return
        except Exception as failure:
            self.failure = failure
        finally:
            self._since = 0.0


class Rebalancer:
    """Watches the traffic and changes the runner's weights. For the engine's thread, `_planned` for that of a job."""

    def __init__(
        self,
        runner: DeviceRunner,
        mixture: Mixture,
        traffic: ExpertTraffic,
        config: EplbConfig,
        metrics: Metrics,
    ):
        placement = runner.step.placement
        assert placement is not None
        self._runner, self._mesh = runner, placement.mesh
        self._mixture, self._traffic, self._config, self._metrics = mixture, traffic, config, metrics
        self._placements = [first_placement(mixture, placement.mesh)] * len(traffic.layers)
        self._places = _places(runner.params["layers"])
        self._slots = {
            entry if row is not None else None: Slots(self._leaves(entry)[0], stacked=row is not None)
            for entry, row in self._places
        }  # of every stack; layers of their own are all alike
        # Steps, and the totals after them.
        self._snapshots: list[tuple[int, np.ndarray]] = [(0, np.zeros((), np.int64))]
        self._at = 0  # steps at the last look
        self._under_way: Rebalance | None = None
        self._given_up: threading.Thread | None = None

    def warm_up(self) -> None:
        """Compile all that a switch needs, by putting a layer of every kind where it is already."""
        kinds = {entry if row is not None else None: i for i, (entry, row) in enumerate(self._places)}
        for layer in kinds.values():
            self._switch(self._moved(layer, self._placements[layer]))

    def between_steps(self) -> None:
        """Take in what is ready, and see whether it is time for a new placement. Never waits."""
        if self._under_way:
            self._go_on(self._under_way)
        steps, interval, window = self._traffic.steps, self._config.step_interval, self._config.window_size
        if steps == self._at:
            return
        self._at = steps
        if steps % interval and (steps + window) % interval:
            return
        totals = self._traffic.totals().experts
        self._snapshots.append((steps, totals))
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= steps - window:
            del self._snapshots[0]
        if steps % interval == 0 and not self._under_way:
            self._start(totals - self._snapshots[0][1])

    def close(self) -> None:
        """Stop moving; what is being copied is waited for."""
        atexit.unregister(self.close)
        if self._under_way:
            self._under_way.stop()
            self._under_way.thread.join(CLOSING)
        self._under_way = None

    def _start(self, loads: np.ndarray) -> None:
        if self._given_up and self._given_up.is_alive():
            log.warning("experts stay where they are: the copying that was given up has not come to its end")
            return
        self._under_way = Rebalance(loads, self._planned)
        atexit.register(self.close)  # an interpreter that ends while a thread copies would crash

    def _go_on(self, job: Rebalance) -> None:
        alive = job.thread.is_alive()
        if moved := job.take():
            self._switch(moved)
            job.go_on()
        elif not alive or job.seconds > self._config.max_seconds:
            self._end(job, alive)

    def _end(self, job: Rebalance, alive: bool) -> None:
        job.stop()
        self._under_way = None
        atexit.unregister(self.close)
        outcome = "failed" if job.failure else "given_up" if alive else "done"
        if alive:
            self._given_up = job.thread
        self._metrics.on_rebalance(outcome, job.seconds, job.nbytes)
        log.log(
            logging.INFO if outcome == "done" else logging.WARNING,
            "placing experts anew: %s after %.1f s; %d of %d layers changed, %.1f MB went to other devices%s",
            outcome.replace("_", " "), job.seconds, job.layers, len(self._placements), job.nbytes / 1e6,
            f" ({job.failure!r})" if job.failure else "",
        )  # fmt: skip

    def _planned(self, layer: int, loads: np.ndarray) -> Moved | None:
        """The layer as it should be for these loads; None if it is good as it is."""
        old = self._placements[layer]
        routing = self._mixture.routing
        new = place(loads, *old.slots.shape, groups=routing.groups)
        if new.imbalance(loads) > old.imbalance(loads) - WORTH:
            return None
        return self._moved(layer, settled(new, old)[0])

    def _moved(self, layer: int, new: Placement) -> Moved:
        """Copies the layer's weights, in their new order, while steps read the old ones."""
        entry, row = self._places[layer]
        come_from = sources(new.slots, self._placements[layer].slots).tolist()
        slots = self._slots[None if row is None else entry]
        rows, nbytes = dealt(slots.apart(self._leaves(entry)[0], row or 0), come_from)
        return Moved(layer, new, jax.block_until_ready(rows), nbytes)

    def _leaves(self, entry: int) -> tuple[list[Any], Any]:
        return jax.tree.flatten(self._runner.params["layers"][entry]["experts"])

    def _switch(self, moved: Moved) -> None:
        """The next step reads the layer's new weights and knows where they are."""
        self._placements[moved.layer] = moved.placement
        entry, row = self._places[moved.layer]
        params = self._runner.params
        layers = list(params["layers"])
        leaves, tree = self._leaves(entry)
        slots = self._slots[None if row is None else entry]
        experts = jax.tree.unflatten(tree, slots.together(leaves, moved.rows, row or 0))
        mine = [p for p, (at, _) in zip(self._placements, self._places, strict=True) if at == entry]
        copies = copies_on(self._mesh, mine, self._mixture, stacked=row is not None)
        layers[entry] = layers[entry] | {"experts": experts, "copies": copies}
        self._runner.params = params | {"layers": layers}


def first_placement(mixture: Mixture, mesh: Mesh) -> Placement:
    """As the weights are loaded."""
    ways = _ways(mixture, mesh)
    return Placement(np.array(mixture.slots).reshape(ways, -1))


def with_first_copies(weights: Any, where: Shardings, mixture: Mixture) -> tuple[Any, Shardings]:
    """Loaded weights and where they are, with "copies" beside "experts" in each layer or stack of layers."""
    first = first_placement(mixture, where.mesh)
    layers, shardings = list(weights["layers"]), list(where.params["layers"])
    for i, layer in enumerate(layers):
        if "experts" in layer:
            rows = _rows(layer)
            copies = copies_on(where.mesh, [first] * (rows or 1), mixture, stacked=rows is not None)
            layers[i] = layer | {"copies": copies}
            shardings[i] = shardings[i] | {"copies": Copies(where.everywhere, where.everywhere)}
    return weights | {"layers": layers}, replace(where, params=where.params | {"layers": shardings})


def copies_on(mesh: Mesh, placements: Sequence[Placement], mixture: Mixture, *, stacked: bool) -> Copies:
    """The slots of every expert, on all devices, for a layer or a stack of them; of one shape for any placement."""
    experts, ways = mixture.routing.experts, _ways(mixture, mesh)
    width = min(mixture.slot_count - experts + 1, ways)
    tables = [placement.table(experts, width) for placement in placements]
    arrays = [np.stack(part) if stacked else part[0] for part in zip(*tables, strict=True)]
    return Copies(*(jax.device_put(array, NamedSharding(mesh, P())) for array in arrays))


def _ways(mixture: Mixture, mesh: Mesh) -> int:
    return size(mesh, expert_axes(mesh, mixture.slot_count))


def _places(layers: Sequence[Any]) -> list[tuple[int, int | None]]:
    """For each layer with a mixture, where it is in `layers`, and in which row of a stack (None: no stack)."""
    found: list[tuple[int, int | None]] = []
    for i, layer in enumerate(layers):
        if "experts" in layer:
            rows = _rows(layer)
            found += [(i, None)] if rows is None else [(i, row) for row in range(rows)]
    return found


def _rows(layer: dict[str, Any]) -> int | None:
    """Of a stack of layers; None for a layer alone."""
    router = layer["router"]  # [E, D], or a stack of such
    return router.shape[0] if router.ndim == 3 else None
