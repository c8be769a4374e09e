"""A step as several programs: the embedding, groups of layers one after the other, the last rows, and the sampler.

The cache pages of a group of layers are complete when its program is done, so they can leave while the programs of
later layers compute. Programs are launched back to back; the pool goes from one to the next and is never copied.

On a CPU, where a loop over stacked weights would copy each layer's, a step with all layers in it takes long to compile
and much memory. One program that groups of layers run in turn takes its share of both, and a few launches more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.batch import Batch, Reads, flat_size
from jaxserve.buckets import Bucket
from jaxserve.compiles import give_back_memory
from jaxserve.layer_groups import LayerGroup
from jaxserve.models import ModelConfig, model_for
from jaxserve.sampling.knobs import Knobs
from jaxserve.sampling.state import SlotState
from jaxserve.step import (
    COMPILER_OPTIONS,
    Step,
    StepOutput,
    read_rows,
    sampled_rows,
    shardings_out,
    unpacked,
)
from pallas_kernels.op import platform
from sharding.kernels import mapped
from sharding.rules import batch_axes

BEGIN, LAST, SAMPLE = "begin", "last", "sample"  # programs; those of layers are named by `LayerGroup.program`
Told = Callable[[Any, LayerGroup], None]
ON_A_CPU = 3  # groups: with as many as SmolLM2 has layers, 30, a token of a single stream took a fifth longer


class LayeredStep:
    """`Step` in `groups` of layers, for buckets in which a device computes its own sequences.

    Those of one token a sequence it takes only with `decoding`.
    """

    def __init__(self, step: Step, groups: list[LayerGroup], *, decoding: bool = False):
        self.groups, self._step, self._decoding = groups, step, decoding
        self._samplers: dict[int, jax.stages.Compiled] = {}  # by the number of sequences

    def takes(self, bucket: Bucket) -> bool:
        """Whether steps of this size should run so."""
        return bucket.spread == 1 and (self._decoding or bucket.tokens > bucket.seqs)

    def lower(
        self, params, pool, state: SlotState, bucket: Bucket, *, sampler: bool = True
    ) -> dict[Any, jax.stages.Lowered]:
        """The programs of one bucket, lowered; arguments may be arrays or their shapes.

        The sampler can be left out: it is the same for all buckets of as many sequences.
        """
        step, where = self._step, self._step.placement
        rows = NamedSharding(where.mesh, P(batch_axes(where.mesh) or None)) if where else None
        flat = jax.ShapeDtypeStruct(
            ((where.groups if where else 1) * flat_size(bucket),), jnp.int32, sharding=where and where.flat
        )
        first = jax.ShapeDtypeStruct((), jnp.int32, sharding=where and where.everywhere)
        outer = _outer(params)
        with step.within():
            begin = self._begin(rows, bucket)
            found: dict[Any, jax.stages.Lowered] = {BEGIN: begin.lower(outer, state.last_token, flat)}
            x, batch, reads, knobs = _like(rows, jax.eval_shape(begin, outer, state.last_token, flat))
            insides: dict[Any, Any] = {}  # what each program counts
            for group in self.groups:
                if group.program not in found:
                    middle = self._middle(rows, group)
                    args = group.of_params(params["layers"]), group.of_pool(pool), x, batch, first
                    found[group.program] = middle.lower(*args)
                    insides[group.program] = _like(first.sharding, jax.eval_shape(middle, *args)[2])
            last = self._last(rows)
            found[LAST] = last.lower(outer, x, reads)
            if sampler:
                last_BD = _like(rows, jax.eval_shape(last, outer, x, reads)[1])
                inside = tuple(insides[group.program] for group in self.groups)
                args = outer, state, last_BD, knobs, reads.slots, reads.valid, inside
                found[SAMPLE] = self._sample(rows).lower(*args)
        return found

    def compile(
        self, params, pool, state: SlotState, bucket: Bucket, options: dict[str, Any] | None = None
    ) -> "LayeredPrograms":
        """Ready to run."""
        known = self._samplers.get(bucket.seqs)
        programs: dict[Any, jax.stages.Compiled] = {SAMPLE: known} if known else {}
        for name, lowered in self.lower(params, pool, state, bucket, sampler=not known).items():
            programs[name] = lowered.compile(options)
            give_back_memory()
        self._samplers[bucket.seqs] = programs[SAMPLE]
        where = self._step.placement
        firsts = [jax.device_put(np.int32(group.first), where and where.everywhere) for group in self.groups]
        return LayeredPrograms(self.groups, programs, firsts)

    def _begin(self, rows: NamedSharding | None, bucket: Bucket) -> Any:
        fn = partial(_begin, self._step.config, self._step.page_size, bucket)
        where = self._step.placement
        if where:
            sources = _outer(where.params), where.state.last_token, where.flat
            fn = self._on_mesh(fn, sources, (rows, rows, rows, rows))
        return self._jitted(fn, (), where and (rows, rows, rows, rows))

    def _middle(self, rows: NamedSharding | None, group: LayerGroup) -> Any:
        where = self._step.placement
        fn = partial(_middle, self._step.config, group.count, group.begins, where and batch_axes(where.mesh))
        if not where:
            return self._jitted(fn, (1, 2), None)
        pool, everywhere = group.of_pool(where.pool), where.everywhere
        sources = group.of_params(where.params["layers"]), pool, rows, rows, everywhere
        results = rows, pool, everywhere
        return self._jitted(self._on_mesh(fn, sources, results), (1, 2), results)

    def _last(self, rows: NamedSharding | None) -> Any:
        fn = partial(_last, self._step.config)
        where = self._step.placement
        if not where:
            return self._jitted(fn, (), None)
        said = shardings_out(where)[0]
        fn = self._on_mesh(fn, (_outer(where.params), rows, rows), (rows, rows, rows))
        return self._jitted(fn, (), (said.hidden, rows, said.scores))

    def _sample(self, rows: NamedSharding | None) -> Any:
        fn = partial(_sample, self._step.config)
        where = self._step.placement
        if not where:
            return self._jitted(fn, (1,), None)
        everywhere = where.everywhere
        sources = _outer(where.params), where.state, rows, rows, rows, rows, everywhere
        read = NamedSharding(where.mesh, P(None, *rows.spec)) if rows else None
        chosen = {"read": read, "sampled": rows, "expert_loads": everywhere, "expert_drops": everywhere}
        said, _, state = shardings_out(where)
        results = {name: getattr(said, name) for name in chosen}, state
        return self._jitted(self._on_mesh(fn, sources, (chosen, where.state)), (1,), results)

    def _on_mesh(self, fn: Callable[..., Any], sources: Any, results: Any) -> Callable[..., Any]:
        """Every group of devices on its part of all arguments but the weights."""
        where = self._step.placement
        assert where
        axes = batch_axes(where.mesh)
        return mapped(fn, axes, where.inside(sources), where.inside(results)) if axes else fn

    def _jitted(self, fn: Callable[..., Any], donated: tuple[int, ...], results: Any) -> Any:
        options = COMPILER_OPTIONS.get(platform())
        return jax.jit(fn, donate_argnums=donated, out_shardings=results, compiler_options=options)


class LayeredPrograms:
    """The programs of one bucket. Like a compiled step it is called with (params, pool, state, flat)."""

    def __init__(
        self, groups: list[LayerGroup], programs: dict[Any, jax.stages.Compiled], firsts: list[Array]
    ):
        """`firsts` are the groups' first layers, on the devices."""
        self._groups, self._programs, self._firsts = groups, programs, firsts

    def __call__(
        self, params, pool, state: SlotState, flat: Array | np.ndarray, told: Told
    ) -> tuple[StepOutput, Any, SlotState]:
        """(output, pool, state); after each group's launch `told` hears of the pool and the group."""
        outer = _outer(params)
        x, batch, reads, knobs = self._programs[BEGIN](outer, state.last_token, flat)
        insides = []
        for group, first in zip(self._groups, self._firsts, strict=True):
            program, layers = self._programs[group.program], group.of_params(params["layers"])
            x, pages, inside = program(layers, group.of_pool(pool), x, batch, first)
            pool = group.joined(pool, pages)
            insides.append(inside)
            told(pool, group)
        hidden, last, scores = self._programs[LAST](outer, x, reads)
        sample = self._programs[SAMPLE]
        chosen, state = sample(outer, state, last, knobs, reads.slots, reads.valid, tuple(insides))
        return StepOutput(scores=scores, hidden=hidden, **chosen), pool, state


def _like(sharding: Any, shapes: Any) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)


def _outer(params: Any) -> Any:
    """The weights, or their shardings, that are of no layer."""
    return {name: weight for name, weight in params.items() if name != "layers"}


def _begin(config: ModelConfig, page_size: int, bucket: Bucket, outer, last_token, flat):
    batch, reads, knobs, _ = unpacked(flat, bucket, page_size, last_token)
    return model_for(config).embedded(config, outer, batch), batch, reads, knobs


def _middle(
    config: ModelConfig, count: int, begins: int, over: Any, layers, pool, x, batch: Batch, first: Array
):
    forward = model_for(config).forward_group
    x, pool, inside = forward(config, layers, batch, pool, x, first, count=count, begins=begins)
    return x, pool, jax.lax.psum(inside, over) if over and inside else inside


def _last(config: ModelConfig, outer, x, reads: Reads):
    hidden = model_for(config).normed(config, outer, x)
    return hidden, *read_rows(config, outer, hidden, reads, None)


def _sample(config: ModelConfig, outer, state: SlotState, last, knobs: Knobs, slots, valid, insides):
    names = dict.fromkeys(name for inside in insides for name in inside)
    inside = {n: jnp.concatenate([each[n] for each in insides if n in each]) for n in names}
    return sampled_rows(config, outer, state, last, knobs, slots, valid, inside)
