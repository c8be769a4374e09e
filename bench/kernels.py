"""Every TPU kernel x real case x generation: static time against the floor, without a TPU.

    python -m bench.kernels [--op NAME] [--case WORDS] [--chip NAME ...] [--output FILE] [--set rows=128 ...] [--tune]

The floor is max(flops / BF16 peak, bytes / bandwidth) of the op's own `cost`; `static` is max(cycles of the compiler's
schedule / clock, HBM bytes / bandwidth); `simulated` adds the waits for copies. Only the kernels
are timed, not what XLA does before and after them. See bench/tpu_static.
"""

import argparse
import importlib
import json
import pkgutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import pallas_kernels
from bench import collectives
from bench.tpu_static.measure import measure
from pallas_kernels.chip import CHIPS

EIGHT = {
    "v5e": "v5e:2x4",
    "v5p": "v5p:2x2x2",
    "v6e": "v6e:2x4",
    "tpu7x": "tpu7x:2x2x1",
}  # for ops over devices


def operations() -> Iterator[str]:
    """Names of the ops that have a TPU kernel."""
    for info in pkgutil.iter_modules(pallas_kernels.__path__):
        if info.ispkg and "tpu" in _op(info.name).kernels:
            yield info.name


def _op(name: str):
    return getattr(importlib.import_module(f"pallas_kernels.{name}"), name)


def kernel_of(op: str) -> Callable:
    """The op's TPU kernel."""
    return _op(op).using("tpu")


def target(op: str, case: str, blocks: dict[str, int] | None = None) -> dict[str, Any]:
    """One call for bench.tpu_static, which runs this in a child process: numbers are known, the rest is abstract."""
    if hasattr(known_case(op, case), "over"):
        return collectives.target(op, known_case(op, case), blocks)
    args, kwargs = known_case(op, case).shapes(jnp.bfloat16)
    arrays = {
        name: x for name, x in kwargs.items() if isinstance(x, np.generic | np.ndarray | jax.ShapeDtypeStruct)
    }
    options = {name: x for name, x in kwargs.items() if name not in arrays} | (
        {"blocks": blocks} if blocks else {}
    )
    arrays = {name: np.asarray(x) if isinstance(x, np.generic) else x for name, x in arrays.items()}

    def call(args, arrays):
        return kernel_of(op)(*args, **arrays, **options)

    return {"fn": call, "args": (args, arrays), "jit": {"donate_argnums": ()}}


def cases_of(op: str) -> dict[str, Any]:
    """The op's real cases."""
    return importlib.import_module(f"pallas_kernels.{op}.cases").REAL


def known_case(op: str, case: str) -> Any:
    """One of them."""
    return cases_of(op)[case]


def cost(op: str, case: str) -> tuple[int, int]:
    """(floating-point operations, bytes to and from HBM) that the case cannot do without."""
    if hasattr(known_case(op, case), "over"):
        return collectives.cost(op, known_case(op, case))
    args, kwargs = known_case(op, case).shapes(jnp.bfloat16)
    args = [_Sized(x) if isinstance(x, jax.ShapeDtypeStruct) else x for x in args]
    return importlib.import_module(f"pallas_kernels.{op}.reference").cost(*args, **kwargs)


class _Sized:
    """A shape that knows its bytes, as arrays do."""

    def __init__(self, struct: jax.ShapeDtypeStruct):
        self.shape, self.dtype, self.size = struct.shape, struct.dtype, struct.size
        self.nbytes = struct.size * struct.dtype.itemsize


def run(op: str, case: str, chip: str, blocks: dict[str, int] | None = None) -> dict[str, Any]:
    """One row of the table; all kernels that the call launches are added up. Times in microseconds."""
    flops, nbytes = cost(op, case)
    floor = CHIPS[chip].floor(flops, nbytes) * 1e6
    started = time.perf_counter()
    several = hasattr(known_case(op, case), "over")
    result = measure(
        "bench.kernels:target",
        EIGHT[chip] if several else CHIPS[chip].topology,
        {"op": op, "case": case, "blocks": blocks},
        everything=False,
    )
    row = {"op": op, "case": case, "chip": chip, "floor_us": round(floor, 2), "flops": flops, "bytes": nbytes}
    kernels = [kernel for kernel in result["kernels"] if "trace" in kernel]
    if not kernels:
        return row | {"error": result["compile"].get("error", "no kernel in the dump")[-400:]}
    total = {
        key: sum(k["time_us"][key] for k in kernels) for key in ("compute", "hbm", "roofline", "simulated")
    }
    # What other devices signal is never seen here, so waits for it stay open.
    unsure = any(
        k["trace"]["unknown_branches"] or (k["trace"]["unsatisfied_waits"] and not several) for k in kernels
    )
    return row | {
        "static_us": round(total["roofline"], 2),
        "compute_us": round(total["compute"], 2),
        "hbm_us": round(total["hbm"], 2),
        "simulated_us": round(total["simulated"], 2),
        "ratio": round(total["roofline"] / floor, 3),
        "simulated_ratio": round(total["simulated"] / floor, 3),
        "vmem_mib": round(max(k["vmem_bytes"] for k in kernels) / 2**20, 1),
        "spills": sum(k["spills"]["vector_spill"] for k in kernels),
        "trusted": not unsure,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", help="only this op")
    parser.add_argument("--case", default="", help="only cases with these words in their name")
    parser.add_argument("--chip", nargs="+", choices=list(CHIPS), default=list(CHIPS))
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="block sizes to try")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="search for better block sizes and keep them in pallas_kernels/tuned",
    )
    args = parser.parse_args()
    if args.tune:
        from bench.tune import tune_all  # which prices with this module's `run`

        tune_all([args.op] if args.op else list(operations()), args.case, args.chip)
        return
    blocks = {name: int(number) for name, number in (pair.split("=") for pair in args.set)} or None
    columns = (
        "op",
        "case",
        "chip",
        "floor_us",
        "static_us",
        "ratio",
        "simulated_us",
        "simulated_ratio",
        "spills",
    )
    table, rows = Table(*columns), []
    for op in [args.op] if args.op else operations():
        for case in (name for name in cases_of(op) if args.case in name):
            for chip in args.chip:
                row = run(op, case, chip, blocks)
                rows.append(row)
                table.add_row(*(str(row.get(name, "failed")) for name in columns))
                if args.output:
                    args.output.write_text(json.dumps(rows, indent=1) + "\n")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
