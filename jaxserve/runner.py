"""The device's side of the engine: launches steps, and hands over their results when asked.

A runner is anything with `launch(rows) -> pending`, `pending.result()` and `admit(slot, admission)`; tests put
a scripted one in its place.
"""

import atexit
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxserve.batch import Row, pack
from jaxserve.buckets import Bucket, choose, first_needed
from jaxserve.compiles import give_back_memory
from jaxserve.layer_groups import LayerGroup
from jaxserve.layered_step import LayeredPrograms, LayeredStep
from jaxserve.sampling.admission import Admission
from jaxserve.sampling.state import SlotState, admit
from jaxserve.saved_steps import load_step
from jaxserve.spread import pack_spread, spread_rows
from jaxserve.step import Step, StepOutput

log = logging.getLogger(__name__)

Told = Callable[[LayerGroup], None]


@dataclass(frozen=True)
class Pending:
    """A launched step; the device may still be at it."""

    output: StepOutput
    places: np.ndarray | None = None  # where each launched sequence is in the output, unless in order
    rows: np.ndarray | None = None  # the same for each new token

    def result(self) -> np.ndarray:
        """Wait, then int32 [2, B]: the sampled tokens, and 1 where the logits were finite."""
        read = np.asarray(self.output.read)
        return read if self.places is None else read[:, self.places]


class DeviceRunner:
    """Holds the weights, the cache pages and the slots' state on the device, and the compiled steps."""

    def __init__(
        self,
        step: Step,
        params,
        pool,
        state: SlotState,
        buckets: list[Bucket],
        saved: str | None = None,
        layered: LayeredStep | None = None,
    ):
        """`saved` is a folder of compiled steps (see `jaxserve.saved_steps`); steps that `layered` takes run so."""
        self.step, self.params, self.pool, self.state = step, params, pool, state
        self.warm = threading.Event()  # set when every bucket is compiled
        self._groups = step.placement.groups if step.placement else 1
        self._buckets = buckets
        self._longest = max((b.tokens for b in buckets if b.spread == 1), default=0)  # chunk of a sequence
        self._ready: list[Bucket] = []  # compiled ones, smallest first; replaced, never changed
        self._compiled: dict[Bucket, Callable] = {}
        self._layered = layered
        stacked = type(pool) is not tuple
        layers = jax.tree.leaves(pool)[0].shape[0] if stacked else len(pool)
        # Layers whose pages are complete together.
        self.layer_groups = layered.groups if layered else [LayerGroup(0, layers, stacked=stacked)]
        self._saved = saved
        self._closing = False
        self._lock = threading.Lock()

    def compile(self, blank: Admission, *, progress: bool) -> None:
        """Compile what any batch can run on, and return; the better fitting steps follow on a thread of their own."""
        placement = self.step.placement
        # Processes must have the same steps at the same time, so several compile everything first.
        first = self._buckets if placement and placement.spans_processes else first_needed(self._buckets)
        bar = Progress(
            TextColumn("compiling steps"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not progress,
        )
        with bar, ThreadPoolExecutor(2) as compilers:
            task = bar.add_task("", total=len(first))
            for _ in compilers.map(self._compile, first):
                bar.advance(task)
        shapes = jax.tree.map(_shape, (self.state, np.int32(0), blank))
        stays = placement.state if placement else None
        self._admit = jax.jit(admit, donate_argnums=0, out_shardings=stays).lower(*shapes).compile()
        self.admit(0, blank)
        self.launch([]).result()
        rest = [bucket for bucket in self._buckets if bucket not in self._compiled]
        self._thread = threading.Thread(target=self._compile_all, args=(rest,), name="compile", daemon=True)
        atexit.register(self.close)  # an interpreter that ends in the middle of a compile would crash
        self._thread.start()

    def close(self) -> None:
        """Stop compiling; the compile that has begun is waited for."""
        self._closing = True
        self._thread.join()
        atexit.unregister(self.close)  # which else would keep the weights and the programs

    def _compile_all(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            if self._closing:
                return
            try:
                self._compile(bucket)
            except Exception:
                log.exception("%s does not compile; the larger steps that are ready do its work", bucket)
        atexit.unregister(self.close)
        self.warm.set()
        log.info("all %d steps are compiled", len(self._buckets))

    def _compile(self, bucket: Bucket, options: dict[str, Any] | None = None) -> None:
        params, pages, state = jax.tree.map(_shape, (self.params, self.pool, self.state))
        if self._layered and self._layered.takes(bucket):
            self._compiled[bucket] = self._layered.compile(params, pages, state, bucket, options)
        else:
            lowered = self.step.lower(params, pages, state, bucket)
            self._compiled[bucket] = self._load(bucket, lowered) or lowered.compile(options)
        give_back_memory()
        with self._lock:
            self._ready = sorted([*self._ready, bucket])

    def _load(self, bucket: Bucket, lowered: jax.stages.Lowered) -> jax.stages.Compiled | None:
        if self._saved is None:
            return None
        placement = self.step.placement
        devices = list(placement.mesh.devices.flat) if placement else jax.devices()[:1]
        try:
            found = load_step(Path(self._saved), lowered, devices)
        except Exception as why:  # a file of machine code can be wrong in any way
            log.warning("%s of %s cannot be loaded (%s): it is compiled", bucket, self._saved, why)
            return None
        if found is None:
            log.warning("%s has no %s of these settings and versions: it is compiled", self._saved, bucket)
        return found

    def launch(self, rows: Sequence[Row], told: Told = lambda group: None) -> Pending:
        """Start a step of these sequences; without any, the smallest step, of padding only.

        `told` hears of each group of layers when what completes their pages was launched, and not yet what follows.
        """
        bucket, flat = self.packed(rows)
        return self.pending(rows, bucket, self.run(bucket, flat, told))

    def packed(self, rows: Sequence[Row]) -> tuple[Bucket, np.ndarray]:
        """The smallest step for these sequences, and what it needs to know of them."""
        if any(len(row.tokens) > self._longest for row in rows):
            return self._spread(rows)
        by_group = [[row for row in rows if row.group == group] for group in range(self._groups)]
        counts = [[len(row.tokens) for row in group] or [1] for group in by_group]
        bucket = choose(self._ready, counts, max((len(row.pages) for row in rows), default=0))
        return bucket, np.concatenate([pack(group, bucket) for group in by_group])

    def _spread(self, rows: Sequence[Row]) -> tuple[Bucket, np.ndarray]:
        """The step of whole prompts, one for each set of devices along the context axis."""
        bucket = next(b for b in self._buckets if b.spread > 1)
        by_set = {row.group // bucket.spread: row for row in rows}
        assert len(by_set) == len(rows), "one prompt at a time"
        sets = range(self._groups // bucket.spread)
        return bucket, np.concatenate([pack_spread(by_set.get(number), bucket) for number in sets])

    def run(self, bucket: Bucket, flat: np.ndarray, told: Told = lambda group: None) -> StepOutput:
        """Start a packed step; see `launch` for `told`."""

        def complete(pool: Any, group: LayerGroup) -> None:
            self.pool = pool
            told(group)

        compiled = self._compiled[bucket]
        with self._donating():
            arguments = self.params, self.pool, self.state, self._everywhere(flat)
            if isinstance(compiled, LayeredPrograms):
                output, self.pool, self.state = compiled(*arguments, complete)
                return output
            output, self.pool, self.state = compiled(*arguments)
        for group in self.layer_groups:
            told(group)
        return output

    def pending(self, rows: Sequence[Row], bucket: Bucket, output: StepOutput) -> Pending:
        """What these sequences get of a step's output."""
        if bucket.spread > 1:
            tokens = np.concatenate([spread_rows(row, bucket) for row in rows])
            return Pending(output, np.array([row.group for row in rows], np.int32), tokens)
        return Pending(output, *(places(rows, bucket) if self._groups > 1 else ()))

    def admit(self, slot: int, admission: Admission, group: int = 0) -> None:
        """Fill a slot's state for a request whose sampling needs it, before its first step."""
        self.fill(self.slot(slot, group), admission)

    def slot(self, slot: int, group: int) -> int:
        """A group's slot, counted over all groups."""
        return slot + group * (len(self.state.last_token) // self._groups)

    def fill(self, slot: int, admission: Admission) -> None:
        """`admit` for a slot counted over all groups."""
        with self._donating():
            self.state = self._admit(self.state, np.int32(slot), admission)

    def _everywhere(self, flat: np.ndarray) -> np.ndarray | jax.Array:
        """The packed step on all devices of this process."""
        placement = self.step.placement
        if placement is None:
            return flat
        return jax.make_array_from_callback(flat.shape, placement.flat, lambda part: flat[part])

    @contextmanager
    def _donating(self) -> Iterator[None]:
        """Around a call that takes pages and slots and gives them back: if an interrupt loses them, make new ones."""
        try:
            yield
        except BaseException:
            self.pool, self.state = jax.tree.map(_blank_if_lost, (self.pool, self.state))
            raise


def _blank_if_lost(array: jax.Array) -> jax.Array:
    return jax.device_put(np.zeros(array.shape, array.dtype), array.sharding) if array.is_deleted() else array


def places(rows: Sequence[Row], bucket: Bucket) -> tuple[np.ndarray, np.ndarray]:
    """Where each of `rows`, and each of their tokens, is in the output of a step that all groups ran."""
    groups = max((row.group for row in rows), default=0) + 1
    seqs, tokens = [0] * groups, [0] * groups  # placed so far
    at: list[int] = []
    token_rows: list[int] = []
    for row in rows:
        g, count = row.group, len(row.tokens)
        at.append(g * bucket.seqs + seqs[g])
        first = g * bucket.tokens + tokens[g]
        token_rows += range(first, first + count)
        seqs[g], tokens[g] = seqs[g] + 1, tokens[g] + count
    return np.array(at, np.int32), np.array(token_rows, np.int32)


def _shape(array: jax.Array | np.ndarray) -> jax.ShapeDtypeStruct:
    """With its sharding, if it is on a mesh of several devices."""
    sharding = array.sharding if isinstance(array, jax.Array) else None
    on_mesh = isinstance(sharding, jax.sharding.NamedSharding)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding if on_mesh else None)
