"""Search for a kernel's block sizes, priced by the compiler's schedule, or by the clock where there is a chip."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.kernels import cases_of, kernel_of, known_case, run
from pallas_kernels import tuning
from pallas_kernels.chip import CHIPS

Blocks = Mapping[str, int]
SPACES: dict[str, dict[str, tuple[int, ...]]] = {
    "matmul": {
        "rows": (64, 128, 256, 512),
        "outputs": (256, 512, 1024, 2048),
        "columns": (1024, 2048, 4096, 8192),
    },
    "paged_attention": {"rows": (32, 64, 128, 256), "keys": (256, 512, 1024, 2048)},
    "mla_attention": {
        "rows": (4, 8, 16),
        "tokens": (1, 2, 4, 8),
        "keys": (512, 1024, 2048, 4096),
        "piece": (256, 512, 1024),
    },
    "ring_attention": {"rows": (512, 1024, 2048), "keys": (256, 512, 1024, 2048), "at_once": (128, 256, 512)},
}
SPACES["grouped_matmul"] = SPACES["matmul"]
WORTH = 0.99  # a find must take at most so much of the time that is taken now
REPEATS = 20  # of one call, by the clock


def search(space: Mapping[str, tuple[int, ...]], price: Callable[[Blocks], float]) -> tuple[Blocks, float]:
    """The blocks from which no step to a neighbouring size of one kind is cheaper, and their price.

    Starts in the middle. Sizes that a kernel refuses or that do not fit cost `inf`. Nothing is priced twice.
    """
    known: dict[tuple[int, ...], float] = {}

    def at(blocks: Blocks) -> float:
        key = tuple(blocks.values())
        if key not in known:
            known[key] = price(blocks)
        return known[key]

    best = {name: sizes[len(sizes) // 2] for name, sizes in space.items()}
    while True:
        near = [best]
        for name, sizes in space.items():
            i = sizes.index(best[name])
            near += [best | {name: sizes[j]} for j in (i - 1, i + 1) if 0 <= j < len(sizes)]
        cheapest = min(near, key=at)
        if at(cheapest) >= at(best):
            return best, at(best)
        best = cheapest


def keys_of(op: str, case: str) -> list[dict[str, int]]:
    """What the kernel looks blocks up by when it is called like this case."""
    asked: list[dict[str, int]] = []

    def nearest(name, _, key):
        if name == op and key not in asked:
            asked.append(dict(key))

    known = known_case(op, case)
    args, kwargs = known.shapes(jnp.bfloat16)
    arrays = {name: x for name, x in kwargs.items() if isinstance(x, jax.ShapeDtypeStruct)}
    call = partial(kernel_of(op), **{name: x for name, x in kwargs.items() if name not in arrays})
    if hasattr(known, "over"):
        mesh = jax.sharding.AbstractMesh((known.devices,), (known.axis,), (jax.sharding.AxisType.Auto,))
        call = known.over(mesh, call)
    with mock.patch.object(tuning, "nearest", nearest):
        jax.eval_shape(call, *args, **arrays)
    return asked


def clock(op: str, case: str, blocks: Blocks | None) -> float:
    """Microseconds of one call on the device that is here: the median of some."""
    args, kwargs = known_case(op, case).call(jnp.bfloat16)
    options = kwargs if blocks is None else kwargs | {"blocks": blocks}
    call = jax.jit(partial(kernel_of(op), **options))
    jax.block_until_ready(call(*args))
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(call(*args))
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def tune(op: str, case: str, chip: str, console: Console) -> None:
    """Search, with progress; the find is written to `tuned/<chip>.json` if it beats the blocks that are used now."""
    here = jax.devices()[0].device_kind in CHIPS[chip].device_kinds
    several = hasattr(known_case(op, case), "over")

    def price(blocks: Blocks | None) -> float:
        if here and not several:
            return clock(op, case, blocks)
        row = run(op, case, chip, dict(blocks) if blocks else None)
        return row.get("simulated_us", float("inf"))

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{op}, {case}, {chip}", total=None)
        now = price(None)

        def told(blocks: Blocks) -> float:
            cost = price(blocks)
            words = " ".join(f"{name}={size}" for name, size in blocks.items())
            progress.console.print(f"{words}: {cost:.1f} us (now {now:.1f})")
            progress.advance(task)
            return cost

        blocks, cost = search(SPACES[op], told)
    if cost > now * WORTH:
        console.print(f"{op}, {case}, {chip}: what is used now takes {now:.1f} us and stays")
        return
    for key in keys_of(op, case):
        write(op, chip, key, blocks)
    console.print(f"{op}, {case}, {chip}: {dict(blocks)} takes {cost:.1f} us instead of {now:.1f}; written")


def tune_all(ops: Sequence[str], words: str, chips: Sequence[str]) -> None:
    """Every case with these words in its name, on every chip."""
    console = Console(stderr=True)
    for op in ops:
        if op not in SPACES:
            console.print(f"{op} has no block sizes to search; those that have: {', '.join(sorted(SPACES))}")
            continue
        for case in (name for name in cases_of(op) if words in name):
            for chip in chips:
                tune(op, case, chip, console)


def write(op: str, chip: str, key: Mapping[str, int], blocks: Blocks, folder: Path = tuning.FOLDER) -> None:
    """Put one find into the chip's table, in place of one with the same key."""
    path = folder / f"{chip}.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    others = [entry for entry in table.get(op, []) if entry["key"] != dict(key)]
    table[op] = [*others, {"key": dict(key), "blocks": dict(blocks)}]
    lines = [
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n ]"
        for name, entries in sorted(table.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
