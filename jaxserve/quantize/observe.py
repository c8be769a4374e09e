"""What the weights of a layer are multiplied by: read off the layer's own program, whatever its structure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

SAMPLE = 128  # rows kept as they are


@dataclass(frozen=True)
class Inputs:
    """The inputs X [count, D] of a linear layer, summed up."""

    gram: np.ndarray  # X^T X [D, D]
    largest: np.ndarray  # [D] of absolute values
    sample: np.ndarray  # [SAMPLE, D]
    count: int

    def __add__(self, other: "Inputs") -> "Inputs":
        largest = np.maximum(self.largest, other.largest)
        return Inputs(self.gram + other.gram, largest, self.sample, self.count + other.count)


def observed(
    fn: Callable[..., Any], weights: Any, *args: Any, whole: int | None = None
) -> Callable[..., tuple[Any, dict[int, Any], Any]]:
    """Like `fn(weights, *args)`, and what it gives is followed by {leaf number of `weights`: what its columns meet}.

    That is (Gram matrix, largest, sample) for the leaves [F, D] that rows [T, D] are multiplied by. Last come all rows
    that leaf number `whole` meets, or None. To be jitted; arguments have the shapes of `args`.
    """
    closed, out = jax.make_jaxpr(fn, return_shape=True)(weights, *args)
    tree, leaves = jax.tree.structure(out), len(jax.tree.leaves(weights))

    def run(weights: Any, *args: Any) -> tuple[Any, dict[int, Any], Any]:
        seen: dict[int, Any] = {}
        marks = {var: i for i, var in enumerate(closed.jaxpr.invars[:leaves])}
        outs = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves((weights, *args)), marks, seen)
        rows = None if whole is None else seen.get(whole)
        return jax.tree.unflatten(tree, outs), {i: summed(x) for i, x in seen.items()}, rows

    return run


def inputs(summed: tuple[Any, Any, Any], count: int) -> Inputs:
    """What `observed` gives for a weight, on the host; `count` rows."""
    gram, largest, sample = map(np.asarray, summed)
    return Inputs(gram, largest, sample, count)


def summed(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(Gram matrix, largest of each column, first rows) of rows [T, D]."""
    x = x.astype(jnp.float32)
    return jnp.matmul(x.T, x, precision="highest"), jnp.max(jnp.abs(x), axis=0), x[:SAMPLE]


def _evaluate(jaxpr: Any, consts: Any, args: Any, marks: dict[Any, int], seen: dict[int, Any]) -> list[Any]:
    """The jaxpr's results; `marks` are the variables that are weights, `seen` gets what they are multiplied by."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else values[var]

    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name in ("jit", "pjit", "closed_call") and inner is not None:
            known = [None if isinstance(v, core.Literal) else marks.get(v) for v in eqn.invars]
            within = {v: i for v, i in zip(inner.jaxpr.invars, known, strict=True) if i is not None}
            outs = _evaluate(inner.jaxpr, inner.consts, operands, within, seen)
        else:
            number = _weight_multiplied(eqn, marks)
            if number is not None:
                seen[number] = operands[0]
            bound = eqn.primitive.get_bind_params(eqn.params)
            functions, params = bound if isinstance(bound, tuple) else ((), bound)  # jax 0.11 gives a pair
            outs = eqn.primitive.bind(*functions, *operands, **params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _weight_multiplied(eqn: Any, marks: dict[Any, int]) -> int | None:
    """Which weight [F, D] this equation multiplies rows [T, D] by."""
    if eqn.primitive.name != "dot_general" or isinstance(eqn.invars[1], core.Literal):
        return None
    if eqn.params["dimension_numbers"] != (((1,), (1,)), ((), ())):
        return None
    return marks.get(eqn.invars[1])
