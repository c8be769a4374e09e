"""Experts on this machine: `grouped_matmul` beside one matrix product of as many operations.

    python -m bench.experts [--rounds 30] [--output experts.json]

Eight experts with the sizes of SmolLM2-135M's feed-forward layer, every row sent to one of them at random. The dense
product has one expert's matrix: with few rows, where reading weights is what takes the time, compare the ratio with the
number of experts hit.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from pallas_kernels.grouped_matmul import grouped_matmul

EXPERTS, HIDDEN, FFN = 8, 576, 1536
ROWS = (1, 8, 64, 512, 2048)


def main() -> int:
    parser = argparse.ArgumentParser(
        "bench.experts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="timings of each (default: 30)")
    parser.add_argument("--output", metavar="FILE", help="results as JSON")
    args = parser.parse_args()
    rows = [measure(count, args.rounds) for count in ROWS]
    table = Table(title="Milliseconds, medians of interleaved rounds", title_justify="left")
    for title in ("rows", "experts hit", "dense product", "grouped_matmul", "ratio"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            str(row["rows"]), str(row["hit"]), f"{row['dense_ms']:.2f}", f"{row['grouped_ms']:.2f}",
            f"{row['ratio']:.2f}x",
        )  # fmt: skip
    Console().print(table)
    if args.output:
        Path(args.output).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def measure(count: int, rounds: int) -> dict[str, Any]:
    """Both products with `count` rows, timed in turn."""
    rng = np.random.default_rng(count)
    w = jnp.asarray(rng.standard_normal((EXPERTS, FFN, HIDDEN)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((count, HIDDEN)), jnp.float32)
    sizes = np.bincount(rng.integers(0, EXPERTS, count), minlength=EXPERTS)
    hit = int((sizes > 0).sum())
    products = {
        "dense": (jax.jit(lambda x, w: jnp.einsum("td,fd->tf", x, w)), (x, w[0])),
        "grouped": (jax.jit(grouped_matmul), (x, w, jnp.asarray(sizes, jnp.int32))),
    }
    seconds: dict[str, list[float]] = {name: [] for name in products}
    for number in range(rounds + 1):
        for name, (product, args) in products.items():
            began = time.perf_counter()
            product(*args).block_until_ready()
            if number:
                seconds[name].append(time.perf_counter() - began)
    dense, grouped = (1e3 * statistics.median(seconds[name]) for name in products)
    return {
        "rows": count, "hit": hit, "dense_ms": dense, "grouped_ms": grouped, "ratio": grouped / dense,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
