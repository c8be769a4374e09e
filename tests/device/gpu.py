"""Every GPU kernel on a real GPU: its values against the definition, and its speed against this card's own rates.

    python -m tests.device.gpu

Prints a table in markdown and fails if a value is wrong. Cases of all ops take turns; after seven minutes no other is
begun, and those left are named. Rates of the card are measured first: a copy of 2 GiB, a BF16 product of 8192^3.
"""

import datetime
import importlib
import pkgutil
import sys
import time
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import pallas_kernels
from pallas_kernels.formats import QTensor, quantise
from pallas_kernels.op import Unfit, platform

SECONDS = 420  # within which cases are begun
REPEATS = 16  # calls of one timed program
WRONG = 0.02  # of the largest value: several roundings to BF16


def main() -> None:
    if platform() != "gpu":
        raise SystemExit(
            f"There is no GPU here: JAX's default device is {jax.devices()[0]}. Nothing was checked."
        )
    began, bad, left = time.monotonic(), [], []
    copy, product = copy_rate(), product_rate()
    print(f"{datetime.date.today()}, {jax.devices()[0].device_kind}, JAX {jax.__version__}: ", end="")
    print(f"copy {copy / 1e9:.0f} GB/s, BF16 product {product / 1e12:.0f} TFLOP/s\n")
    print(
        "| op | case | error | us | GB/s | TFLOP/s | times the floor |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    for op, name, case in cases():
        if time.monotonic() - began > SECONDS:
            left.append(f"{op.name} {name}")
            continue
        try:
            line, error = checked(op, name, case, copy, product)
            print(line, flush=True)
            bad += [f"{op.name} {name}: error {error:.3g}"] * (not error <= WRONG)
        except Unfit as why:
            print(f"| {op.name} | {name} | refused: {why} | | | | |", flush=True)
        except Exception as why:  # one kernel that a compiler refuses must not hide what the others do
            bad.append(f"{op.name} {name}: {type(why).__name__}: {str(why)[:300]}")
    print(f"\n{time.monotonic() - began:.0f} s. Not run for want of time: {', '.join(left) or 'none'}.")
    if bad:
        sys.exit("WRONG:\n" + "\n".join(bad))


def cases() -> Iterator[tuple[Any, str, Any]]:
    """(op, name, case) of all ops in turn, so that each has some if time is short."""
    columns = []
    for info in pkgutil.iter_modules(pallas_kernels.__path__):
        if info.ispkg:
            op = getattr(importlib.import_module(f"pallas_kernels.{info.name}"), info.name)
            known = importlib.import_module(f"pallas_kernels.{info.name}.cases").REAL.items()
            if "gpu" in op.kernels:
                columns.append([(op, name, case) for name, case in known if not hasattr(case, "over")])
    for row in zip_longest(*columns):
        yield from (case for case in row if case is not None)


def checked(op, name: str, case, copy: float, product: float) -> tuple[str, float]:
    """The table's line of one case, and the largest error over the largest value."""
    shapes, options = case.shapes(jnp.bfloat16)
    args, options = made(op.name, shapes), {key: made(key, value) for key, value in options.items()}
    flops, nbytes = importlib.import_module(f"pallas_kernels.{op.name}.reference").cost(*args, **options)
    kernel, layers = op.using("gpu"), case.layers or 1
    fixed = {key: value for key, value in options.items() if isinstance(value, float | int | None)}
    arrays = {key: value for key, value in options.items() if key not in fixed and key != "layer"}
    at = {"layer": jnp.int32(layers - 1)} if case.layers else {}
    got = jax.jit(lambda *a, **k: kernel(*a, **k, **fixed))(*args, **arrays, **at)
    want = jax.jit(lambda *a, **k: op.reference(*a, **k, **fixed))(*args, **arrays, **at)
    error = max(error_of(*pair) for pair in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    del got, want

    def once(i, state):
        args, total = state
        out = kernel(*args, **arrays, **fixed, **({"layer": i % layers} if case.layers else {}))
        if op.name == "page_write":
            return (out, *args[1:]), total
        # Nothing of the next call depends on this one but the order, as in a model's layers.
        first = jax.tree.leaves(out)[0]
        return args, total + first[(0,) * first.ndim].astype(jnp.float32)

    many = jax.jit(lambda *args: lax.fori_loop(0, REPEATS, once, (args, jnp.float32(0)))[1])
    seconds = timed(many, *args) / REPEATS
    floor = max(flops / product, nbytes / copy)
    rates = f"{nbytes / seconds / 1e9:.0f} | {flops / seconds / 1e12:.1f}"
    line = f"| {op.name} | {name} | {error:.1e} | {seconds * 1e6:.1f} | {rates} | {seconds / floor:.2f} |"
    return line, error


def made(key: str, tree: Any) -> Any:
    """Random arrays on the device for shapes; numbers as they are."""
    leaves = lambda x: isinstance(x, QTensor)  # noqa: E731
    keys = iter(jax.random.split(jax.random.key(len(key)), 16))
    return jax.tree.map(lambda x: _one(next(keys), x), tree, is_leaf=leaves)


def _one(key: Array, x: Any) -> Any:
    if isinstance(x, QTensor):
        return jax.jit(lambda key: quantise(jax.random.normal(key, x.shape) * x.shape[-1] ** -0.5, x.format))(
            key
        )
    if not isinstance(x, jax.ShapeDtypeStruct):
        return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x
    if x.dtype == jnp.int32:
        return jax.random.randint(key, x.shape, 0, 1 << 30)
    if x.dtype == jnp.int8:
        return jax.random.randint(key, x.shape, -127, 128, jnp.int8)
    if x.dtype == jnp.float32 and len(x.shape) > 2:  # scales of pages
        return jax.random.uniform(key, x.shape, minval=0.01, maxval=0.1)
    return jax.random.normal(key, x.shape, jnp.bfloat16).astype(x.dtype)


def error_of(got: Array, want: Array) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.max(jnp.abs(got - want)) / jnp.maximum(jnp.max(jnp.abs(want)), 1e-9))


def copy_rate() -> float:
    """Bytes a second, read and written, of the fastest of some copies of 2 GiB."""
    x = jnp.zeros(1 << 29, jnp.float32)
    return 2 * x.nbytes / timed(jax.jit(lambda x: x + 1), x)


def product_rate() -> float:
    """Floating-point operations a second of XLA's own BF16 product."""
    x = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    return 2 * 8192**3 / timed(jax.jit(lambda x: x @ x.T), x)


def timed(call, *args) -> float:
    """Seconds of the fastest of some runs."""
    jax.block_until_ready(call(*args))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(call(*args))
        best = min(best, time.perf_counter() - begin)
    return best


if __name__ == "__main__":
    main()
