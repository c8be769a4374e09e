"""The least time that a step can take: what must be read, multiplied and sent, over what the chip can do."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.memory import elements
from jaxserve.models import ModelConfig
from jaxserve.plan.collectives import Traffic
from jaxserve.plan.cost import hot_experts
from pallas_kernels.chip import Chip
from sharding.params import Param


@dataclass(frozen=True)
class Roofline:
    """Of one step on one device, in seconds; the step is at least the longest of the three."""

    memory: float  # weights that are hit, and the cache
    compute: float
    network: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.compute, self.network)

    @property
    def limit(self) -> str:
        return max(("memory", "compute", "network"), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Load:
    """What a step computes, on each group of devices and on all of them."""

    tokens: int  # new tokens of a group
    seqs: int
    context: int  # tokens that a sequence's newest token attends to
    groups: int
    stages: int = 1
    microbatches: int = 1  # in which the tokens pass the stages

    @property
    def turns(self) -> int:
        """Each as long as one microbatch takes in one stage."""
        return self.microbatches + self.stages - 1


def roofline(
    c: ModelConfig, chip: Chip, weights: list["Weight"], cache_bytes: float, load: Load, sent: list[Traffic]
) -> Roofline:
    """`weights` as they lie on a device, `cache_bytes` of one token in all layers on a device."""
    waited = load.turns / load.microbatches  # how often a stage could have computed all rows
    read = sum(weight.nbytes * _hit(c, weight.param, load) * _reads(weight.param, load) for weight in weights)
    seen = sum(min(load.context, window or load.context) for window in c.windows) / c.num_layers
    read += load.seqs * seen * cache_bytes * waited
    flops = sum(
        2 * weight.elements * _rows(c, weight.param, load) * (waited if _staged(weight.param) else 1)
        for weight in weights
        if weight.multiplies
    )
    flops += load.tokens * attention_flops(c, load.context) * _heads_here(weights) * waited
    return Roofline(
        read / chip.hbm_bandwidth, flops / chip.bf16, sum(t.nbytes for t in sent) / chip.ici_bandwidth
    )


@dataclass(frozen=True)
class Weight:
    """An array of the model on one device."""

    param: Param
    elements: int
    nbytes: int
    share: float  # of the whole array

    @property
    def multiplies(self) -> bool:
        """Whether rows are multiplied with it: the embedding is only looked up, norms and biases are vectors."""
        source = self.param.source if isinstance(self.param.source, str) else self.param.source[0]
        return is_matrix(self.param) and not source.endswith("embed_tokens.weight")


def is_matrix(param: Param) -> bool:
    """Whether a weight is a matrix, or one for each expert: not a vector for each."""
    axes = param.axes[param.axes.index("experts") + 1 :] if "experts" in param.axes else param.part_shape
    return len(axes) >= 2


def weights_of(params: Any, arrays: Any, shardings: Any) -> list[Weight]:
    """One for each `Param`; `arrays` are the same tree of shapes, a QTensor's for what is kept in low bits."""

    def weight(param: Param, array: Any, where: Any) -> Weight:
        count = elements(param.shape, where)
        share = count / math.prod(param.shape)
        nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(array))
        return Weight(param, count, round(nbytes * share), share)

    found = jax.tree.map(weight, params, arrays, shardings, is_leaf=lambda x: isinstance(x, Param))
    return jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, Weight))


def attention_flops(c: ModelConfig, context: int) -> float:
    """Of one token, scores and sums of all heads in all layers."""
    if c.latent is not None:
        return 2 * c.heads * context * (2 * c.latent.rank + c.latent.rope_dim) * c.num_layers
    seen = sum(min(context, window or context) for window in c.windows)
    return 4 * c.heads * c.head_dim * seen


def _hit(c: ModelConfig, param: Param, load: Load) -> float:
    """The share of a weight that a step reads."""
    if "experts" not in param.axes or c.mixture is None:
        return 1.0
    routing = c.mixture.routing
    tokens = load.tokens * load.groups / (load.microbatches if _staged(param) else 1)
    return hot_experts(tokens, routing.experts, routing.top) / routing.experts


def _staged(param: Param) -> bool:
    return "layers" in param.axes


def _reads(param: Param, load: Load) -> int:
    """How often a step reads a weight."""
    return load.turns if _staged(param) else 1


def _rows(c: ModelConfig, param: Param, load: Load) -> float:
    """How many rows a weight's elements are multiplied with; experts see the tokens of all groups, shared fairly."""
    if "experts" in param.axes and c.mixture is not None:
        return load.tokens * load.groups * c.mixture.routing.top / c.mixture.routing.experts
    return load.seqs if "vocab" in param.axes else load.tokens


def _heads_here(weights: list[Weight]) -> float:
    """The share of all heads of all layers that a device has."""
    return min((w.share for w in weights if "heads" in w.param.axes), default=1.0)
