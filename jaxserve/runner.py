"""The device's side of the engine: launches steps, and hands over their results when asked.

A runner is anything with `launch(rows) -> pending`, `pending.result()` and `admit(slot, admission)`; tests put
a scripted one in its place.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxserve.batch import Row, pack
from jaxserve.buckets import Bucket, choose
from jaxserve.sampling.admission import Admission
from jaxserve.sampling.state import SlotState, admit
from jaxserve.step import Step, StepOutput

log = logging.getLogger(__name__)
COMPILERS = 2  # steps compiled at the same time: XLA holds no lock, and one step leaves cores idle


@dataclass(frozen=True)
class Pending:
    """A launched step; the device may still be at it."""

    output: StepOutput

    def result(self) -> np.ndarray:
        """Wait, then int32 [2, B]: the sampled tokens, and 1 where the logits were finite."""
        return np.asarray(self.output.read)


class DeviceRunner:
    """Holds the weights, the cache pages and the slots' state on the device, and the compiled steps."""

    def __init__(self, step: Step, params, pool, state: SlotState, buckets: list[Bucket]):
        self.step, self.params, self.pool, self.state = step, params, pool, state
        self.buckets = buckets
        self._compiled: dict[Bucket, Callable] = {}
        self._admit = jax.jit(admit, donate_argnums=0)

    def compile(self, blank: Admission, *, progress: bool) -> None:
        """Compile every bucket, two at a time; afterwards nothing compiles."""
        shapes = jax.tree.map(_shape, (self.params, self.pool, self.state))

        def one(bucket: Bucket) -> Callable:
            return self.step.lower(*shapes, bucket).compile()

        columns = (TextColumn("compiling steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, disable=not progress) as bar, ThreadPoolExecutor(COMPILERS) as pool:
            task = bar.add_task("", total=len(self.buckets))
            for bucket, compiled in zip(self.buckets, pool.map(one, self.buckets), strict=True):
                self._compiled[bucket] = compiled
                bar.advance(task)
        self.admit(0, blank)
        self.launch([]).result()

    def launch(self, rows: Sequence[Row]) -> Pending:
        """Start a step of these sequences; without any, the smallest step, of padding only."""
        counts = [len(row.tokens) for row in rows] or [1]
        bucket = choose(self.buckets, counts, max((len(row.pages) for row in rows), default=0))
        flat = pack(rows, bucket)
        output, self.pool, self.state = self._compiled[bucket](self.params, self.pool, self.state, flat)
        return Pending(output)

    def admit(self, slot: int, admission: Admission) -> None:
        """Fill a slot's state for a request whose sampling needs it, before its first step."""
        self.state = self._admit(self.state, np.int32(slot), admission)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
