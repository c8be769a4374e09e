"""A topology: how many ways a model is divided over devices, whether it fits, and the mesh that it becomes."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import product
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

# Outermost first: what may cross the slow network between hosts or slices, down to what talks in every layer.
STAGE, DATA, EXPERT, CONTEXT = "stage", "data", "expert", "context"
TENSOR = ("tensor", "copy")  # devices along "copy" have the same kv heads, and different query heads
BATCH = (DATA, EXPERT, CONTEXT)  # every device along these has sequences of its own
AXES = (STAGE, DATA, EXPERT, CONTEXT, *TENSOR)
CROSSING = (STAGE, DATA, EXPERT)  # axes that may be laid over the slow network


class Misfit(Exception):
    """A topology that the devices or the model do not fit; the message says which ones do."""


@dataclass(frozen=True)
class ModelSizes:
    """What can be divided of a model, and into how many parts at most."""

    name: str
    heads: int
    kv_heads: int
    ffn: int  # of dense layers, and of each expert when experts are divided inside
    vocab: int
    experts: int = 0
    latent: bool = False  # one key for all heads (MLA): it is never divided
    layers: int = 1  # the last ones that are alike: these are divided over stages


@dataclass(frozen=True)
class Topology:
    """How the devices are divided; every number counts devices, and their product is all of them.

    With `expert` None every expert is divided as a dense layer is. Any number, 1 too, divides experts as wholes over
    the `expert`, `context` and `tensor` devices together, or not over `tensor` if there are fewer experts than that.
    """

    data: int = 1  # copies of the model, each with sequences of its own
    expert: int | None = None  # sequences of its own for each, and a share of the experts
    tensor: int = 1  # over heads, feed-forward and vocabulary
    context: int = 1  # sequences of its own for each, but a long prompt is computed by all of them
    stage: int = 1  # parts of the layers, which rows of a step pass one after the other

    def __post_init__(self):
        wrong = [
            f"{f.name}={n}"
            for f, n in zip(fields(self), astuple(self), strict=True)
            if n is not None and n < 1
        ]
        if wrong:
            raise Misfit(f"{', '.join(wrong)} of a topology must be at least 1")

    @property
    def devices(self) -> int:
        return math.prod(n or 1 for n in astuple(self))

    @property
    def groups(self) -> int:
        """How many parts of a step's batch are computed apart from each other."""
        return self.data * (self.expert or 1) * self.context

    def __str__(self) -> str:
        shown = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) not in (1, None)
        ]
        return " ".join(shown) or "one device"

    def mesh(self, model: ModelSizes, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh, in the order in which the chips are wired; the first ones of `devices` if there are more.

        Axes of one device are left out, but "expert" where it says that experts are divided as wholes.
        """
        self.check(model)
        devices = list(jax.devices() if devices is None else devices)
        if len(devices) < self.devices:
            raise Misfit(self._too_few(len(devices), model))
        heads = math.gcd(self.tensor, 1 if model.latent else model.kv_heads)
        numbers = (self.stage, self.data, self.expert or 1, self.context, heads, self.tensor // heads)
        sizes: dict[str, int] = dict(zip(AXES, numbers, strict=True))
        grid = placed(sizes, devices[: self.devices])
        names = [n for n in AXES if sizes[n] > 1 or (n == EXPERT and self.expert is not None)]
        grid = grid.reshape([sizes[name] for name in names])
        return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))

    def check(self, model: ModelSizes) -> None:
        """Misfit unless every part of the model can be divided as this says; it names the nearest topologies."""
        problems = list(self._problems(model))
        if problems:
            near = ", ".join(f"({topology})" for topology in self.nearest(model))
            raise Misfit(f"{self} does not fit {model.name}: {'; '.join(problems)}. Nearest that fit: {near}")

    def nearest(self, model: ModelSizes, most: int = 3) -> list["Topology"]:
        """The topologies that fit and are closest to this one: as many devices if possible, then the same divisions."""

        def distance(other: Topology) -> tuple[float, int]:
            pairs = [(self.devices, other.devices), *zip(astuple(self), astuple(other), strict=True)]
            return math.fsum(abs(math.log2((a or 1) / (b or 1))) for a, b in pairs), -other.tensor

        fitting = (t for t in self._neighbours(model) if not any(t._problems(model)))
        return sorted(fitting, key=distance)[:most]

    def _neighbours(self, model: ModelSizes) -> Iterator["Topology"]:
        stages = [n for n in range(1, 2 * self.stage) if model.layers % n == 0]
        tensors = [n for n in range(1, 2 * max(self.tensor, model.kv_heads) + 1) if model.heads % n == 0]
        for stage, tensor in product(stages, tensors):
            spread = max(self.devices // (stage * tensor * self.context), 1)
            changed = replace(self, stage=stage, tensor=tensor)
            if self.expert is None or not model.experts:
                for data in {self.data * (self.expert or 1), spread}:
                    yield replace(changed, data=data, expert=None)
                continue
            for expert in range(1, 2 * self.expert * self.tensor + 1):
                for data in {self.data, max(spread // expert, 1)}:
                    yield replace(changed, data=data, expert=expert)

    def _problems(self, model: ModelSizes) -> Iterator[str]:
        t, kv = self.tensor, model.kv_heads
        if model.heads % t:
            yield f"tensor={t} does not divide its {model.heads} heads"
        elif not model.latent and kv % t and t % kv:
            yield f"tensor={t} neither divides its {kv} kv heads nor is a multiple of them"
        if model.vocab % t:
            yield f"tensor={t} does not divide its vocabulary of {model.vocab}"
        whole = self.expert is not None
        if whole and not model.experts:
            yield f"it has no experts to divide by expert={self.expert}"
        elif whole and not self.expert_devices(model):
            yield (
                f"neither expert={self.expert} nor expert times tensor ({(self.expert or 1) * t}) divides its "
                f"{model.experts} experts"
            )
        if model.ffn % t:
            yield f"tensor={t} does not divide its feed-forward size of {model.ffn}"
        if model.layers % self.stage:
            able = [str(n) for n in range(2, model.layers + 1) if model.layers % n == 0]
            yield (
                f"stage={self.stage} does not divide its {model.layers} layers that are alike; "
                f"{' or '.join(able) or 'nothing'} does"
            )

    def expert_devices(self, model: ModelSizes) -> int:
        """Over how many devices whole experts are divided; 0 if they cannot be."""
        if self.expert is None:
            return 1
        return whole_experts(model.experts, self.expert * self.context, self.tensor)

    def _too_few(self, found: int, model: ModelSizes) -> str:
        smaller = [t for t in _within(self, found) if not any(t._problems(model))]
        near = sorted(smaller, key=lambda t: (-t.devices, -t.tensor))[:3]
        hint = ", ".join(f"({t})" for t in near)
        return f"{self} needs {self.devices} devices, and there are {found}. Nearest that fit: {hint}"


def whole_experts(experts: int, expert: int, tensor: int) -> int:
    """How many ways `experts` are divided as wholes by so many `expert` and `tensor` devices; 0 if by none."""
    if experts % (expert * tensor) == 0:
        return expert * tensor
    return expert if experts % expert == 0 and expert > 1 else 0


def size(mesh: Any, axes: Iterable[str]) -> int:
    """Number of devices along these axes, of which a mesh may lack some."""
    return math.prod(mesh.shape.get(axis, 1) for axis in axes)


def _within(topology: Topology, devices: int) -> Iterator[Topology]:
    """What is left of a topology when one of its numbers shrinks to what the devices allow."""
    for f in fields(topology):
        asked = getattr(topology, f.name) or 1
        rest = topology.devices // asked
        for number in range(min(asked, devices // rest), 0, -1):
            yield replace(topology, **{f.name: number})
    yield Topology()


def placed(sizes: dict[str, int], devices: list[Any]) -> np.ndarray:
    """Devices by their place on every axis: neighbours on the fast network inside, hosts or slices outside.

    `sizes` has all of `AXES`.
    """
    granule = _granule(devices)
    count = len({granule(device) for device in devices})
    shape = tuple(sizes.values())
    if count == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    outside, left = dict.fromkeys(sizes, 1), count
    for axis in CROSSING:
        outside[axis] = math.gcd(left, sizes[axis])
        left //= outside[axis]
    if left > 1 or len(devices) % count:
        asked = " ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1)
        raise Misfit(
            f"{asked} does not fit {count} hosts or slices with {len(devices) // count} devices each: the slow network "
            f"between them carries {', '.join(CROSSING)}, whose product must be a multiple of {count}"
        )
    inside = tuple(n // outside[axis] for axis, n in sizes.items())
    return mesh_utils.create_hybrid_device_mesh(
        inside,
        tuple(outside.values()),
        sorted(devices, key=granule),
        process_is_granule=not _is_wired(devices[0]),
        allow_split_physical_axes=True,
    )


def _granule(devices: list[Any]) -> Any:
    """What a device shares a fast network with: its slice where chips are wired across hosts, else its host."""
    wired = _is_wired(devices[0])
    return lambda device: getattr(device, "slice_index", 0) if wired else device.process_index


def _is_wired(device: Any) -> bool:
    return hasattr(device, "coords")
