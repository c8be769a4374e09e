"""Where every array lives: shardings of weights, cache pages, sampler state and batch, from what their axes mean."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.mesh import BATCH, CONTEXT, EXPERT, STAGE, TENSOR, size, whole_experts
from sharding.params import Param

# What an axis of a weight or of a cache page is divided over; whole experts are another matter (`expert_axes`).
OVER = {"heads": TENSOR, "kv_heads": TENSOR[:1], "ffn": TENSOR, "vocab": TENSOR, "layers": (STAGE,)}


def present(mesh: Any, axes: Sequence[str]) -> tuple[str, ...]:
    """Those of `axes` that divide anything in this mesh, concrete or abstract."""
    return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)


def expert_axes(mesh: Any, experts: int) -> tuple[str, ...]:
    """What whole experts are divided over: nothing, or all axes but data, with or without the tensor axes."""
    if EXPERT not in mesh.shape:
        return ()
    groups, tensor = size(mesh, (EXPERT, CONTEXT)), size(mesh, TENSOR)
    ways = whole_experts(experts, groups, tensor)
    return present(mesh, (EXPERT, CONTEXT, *TENSOR) if ways == groups * tensor else (EXPERT, CONTEXT))


def spec(mesh: Any, shape: Sequence[int], axes: Sequence[str | None]) -> P:
    """How an array with these logical axes is divided; a mesh axis divides one dimension at most, experts first."""
    over: list[tuple[str, ...]] = [()] * len(axes)
    for i, axis in enumerate(axes):
        if axis == "experts":
            over[i] = expert_axes(mesh, shape[i])
    used = {name for names in over for name in names}
    for i, axis in enumerate(axes):
        if axis in OVER:
            over[i] = tuple(name for name in present(mesh, OVER[axis]) if name not in used)
    return P(*(names or None for names in over))


def param_shardings(mesh: Mesh, params: Any) -> Any:
    """The tree of `Param` as a tree of shardings."""
    return jax.tree.map(
        lambda p: NamedSharding(mesh, spec(mesh, p.shape, p.axes)),
        params,
        is_leaf=lambda x: isinstance(x, Param),
    )


def only(spec: P, axes: Sequence[str]) -> P:
    """The part of a spec that `shard_map` over `axes` sees; short, as leaves of packed weights have fewer axes."""

    def kept(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name in axes) or None

    entries = [kept(entry) for entry in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def batch_axes(mesh: Any) -> tuple[str, ...]:
    """Over these, devices have sequences of their own, with pages and slots of their own."""
    return present(mesh, BATCH)


def step_axes(mesh: Any) -> tuple[str, ...]:
    """Over these, each part of the devices runs the step on what it has: layers of its own, or sequences."""
    return present(mesh, (STAGE, *BATCH))
