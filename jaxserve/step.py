"""The step: new tokens of all sequences in, one sampled token a sequence out, in one jitted program.

Pure and public: `Step` is all that a loop of your own needs (docs/api.md has one).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxserve.batch import Reads, flat_size, unpack
from jaxserve.buckets import Bucket
from jaxserve.expert_loads import ExpertLoads
from jaxserve.models import model_for
from jaxserve.models.config import ModelConfig
from jaxserve.placement import Placement
from jaxserve.sampling.knobs import Knobs
from jaxserve.sampling.logprobs import score
from jaxserve.sampling.params import MAX_LOGPROBS
from jaxserve.sampling.sample import Sampled, sample
from jaxserve.sampling.state import SlotState
from jaxserve.spread import spread_size, unpack_spread
from pallas_kernels.op import platform
from sharding.context import from_whoever_has
from sharding.kernels import mapped, whole
from sharding.rules import batch_axes, step_axes

COMPILER_OPTIONS = {
    # On TPU7x XLA otherwise wants weights in tiles of 16 x 128, and copies all of them into such in every step.
    "tpu": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"},
}
SCORED_AT_ONCE = 64  # rows whose logits are in memory together when a prompt's log-probabilities are due


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the tokens that follow each row in a prompt; set where `targets` asked."""

    logprob: Array  # f32 [T]
    rank: Array  # i32 [T]
    top_ids: Array  # i32 [T, MAX_LOGPROBS]
    top_logprobs: Array  # f32 [T, MAX_LOGPROBS]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What a step hands back to the host."""

    read: Array  # i32 [2, B]: the sampled tokens, and 1 where the row's logits were finite
    sampled: Sampled
    scores: Scores
    hidden: Array  # [T, D]: after the model's last norm
    expert_loads: ExpertLoads | None  # of this step, or with those of the state since the start
    expert_drops: Array | None  # i32 [mixture layers]: choices that found no room; None without a capacity


class Step:
    """One model's step for any bucket. Call it like a function, or `compile` it ahead for a bucket.

    `pool` and `state` are donated: use the returned ones. With a `placement` the step runs on its mesh, and each of
    its groups of devices runs the whole step on a batch, pages and slots of its own: `flat` is their batches one after
    the other, all of the same bucket, and so are all rows of the output.
    """

    def __init__(self, config: ModelConfig, page_size: int, placement: Placement | None = None):
        self.config, self.page_size, self.placement = config, page_size, placement
        self.jitted = jax.jit(
            partial(_step if placement is None else partial(_on_mesh, placement), config, page_size),
            static_argnames="bucket",
            donate_argnames=("pool", "state"),
            out_shardings=None if placement is None else shardings_out(placement),
            compiler_options=COMPILER_OPTIONS.get(platform()),
        )

    def __call__(self, params, pool, state: SlotState, flat: Array | np.ndarray, bucket: Bucket):
        """(StepOutput, pool, state) after the packed step `flat` (see `jaxserve.batch.pack`)."""
        with self.within():
            return self.jitted(params, pool, state, flat, bucket=bucket)

    def lower(self, params, pool, state, bucket: Bucket):
        """Traced and lowered for one bucket; arguments may be arrays or their shapes."""
        groups = self.placement.groups if self.placement else 1
        sharding = self.placement.flat if self.placement else None
        each = spread_size(bucket) if bucket.spread > 1 else flat_size(bucket)
        flat = jax.ShapeDtypeStruct((groups * each,), jnp.int32, sharding=sharding)
        with self.within():
            return self.jitted.lower(params, pool, state, flat, bucket=bucket)

    def within(self) -> AbstractContextManager[Any]:
        """The mesh that the step is traced for, ambient."""
        if self.placement is None:
            return nullcontext()
        return jax.sharding.use_abstract_mesh(self.placement.mesh.abstract_mesh)


def _on_mesh(placement: Placement, config: ModelConfig, page_size: int, params, pool, state, flat, *, bucket):
    """Every group's step, on its part of all arguments but the weights; only experts hear of other groups."""
    groups, axes = batch_axes(placement.mesh), step_axes(placement.mesh)
    step = partial(_step, config, page_size, bucket=bucket, groups=groups)
    if not axes:
        return step(params, pool, state, flat)
    rows = P(groups or None)
    in_specs = tuple(
        placement.inside(s) for s in (placement.params, placement.pool, placement.state, placement.flat)
    )
    output: Any = StepOutput(P(None, *rows), rows, rows, rows, P(), P())  # type: ignore[arg-type]
    out_specs = (output, *in_specs[1:3])
    return mapped(step, axes, in_specs, out_specs)(params, pool, state, flat)


def shardings_out(placement: Placement):
    """Pages and slots stay where they are; what the host reads is on every process, where there are several."""
    everywhere = placement.everywhere if placement.spans_processes else None
    output: Any = StepOutput(everywhere, everywhere, everywhere, None, everywhere, everywhere)  # type: ignore[arg-type]
    return output, placement.pool, placement.state


def _step(
    config: ModelConfig,
    page_size: int,
    params,
    pool,
    state,
    flat,
    *,
    bucket: Bucket,
    groups: tuple[str, ...] = (),
):
    batch, reads, knobs, last_here = unpacked(flat, bucket, page_size, state.last_token)
    hidden_TD, pool, inside = model_for(config).forward(config, params, batch, pool)
    inside = jax.lax.psum(inside, groups) if groups and inside else inside
    last_BD, scores = read_rows(config, params, hidden_TD, reads, last_here)
    chosen, state = sampled_rows(config, params, state, last_BD, knobs, reads.slots, reads.valid, inside)
    return StepOutput(scores=scores, hidden=hidden_TD, **chosen), pool, state


def unpacked(flat: Array, bucket: Bucket, page_size: int, last_token: Array):
    """(Batch, Reads, Knobs, whether the prompt's last row is here or None) inside jit."""
    if bucket.spread > 1:
        return unpack_spread(flat, bucket, page_size)
    return *unpack(flat, bucket, page_size, last_token), None


def read_rows(
    config: ModelConfig, params: Any, hidden_TD: Array, reads: Reads, last_here: Array | None
) -> tuple[Array, Scores]:
    """(the hidden state that each sequence's next token follows from [B, D], scores of what was asked for)."""
    last_BD = hidden_TD[reads.rows]
    if last_here is not None:
        last_BD = from_whoever_has(last_BD, last_here)
    return last_BD, _score(partial(_logits, config, params), hidden_TD, reads.targets)


def sampled_rows(
    config: ModelConfig,
    params: Any,
    state: SlotState,
    last_BD: Array,
    knobs: Knobs,
    slots: Array,
    valid: Array,
    inside: dict[str, Array],
) -> tuple[dict[str, Any], SlotState]:
    """(the rest of `StepOutput`, by name, and the slots' state after the step).

    `inside` is what the model's mixtures counted (see `decoder.forward`), of all groups of devices together.
    """
    sampled, state = sample(_logits(config, params, last_BD), knobs, state, slots, valid)
    read = jnp.stack([sampled.tokens, sampled.finite.astype(jnp.int32)])
    loads, before = None, state.expert_loads
    if "expert_loads" in inside:
        loads = ExpertLoads(inside["expert_loads"], inside["device_loads"])
        loads = jax.tree.map(jnp.add, before, loads) if before else loads
    state = replace(state, expert_loads=loads if before else None)
    drops = inside.get("expert_drops")
    return {"read": read, "sampled": sampled, "expert_loads": loads, "expert_drops": drops}, state


def _logits(config: ModelConfig, params: Any, hidden: Array) -> Array:
    # One exchange, not one for every question that sampling asks of the vocabulary.
    return whole(model_for(config).logits(config, params, hidden))


def _score(logits, hidden_TD: Array, targets: Array) -> Scores:
    """Scores of `targets`, a few rows at a time, so that [T, V] logits never exist; free if there are none."""
    t, rows = len(targets), min(len(targets), SCORED_AT_ONCE)
    pad = -t % rows

    def block(part):
        hidden, target = part
        return score(logits(hidden), jnp.maximum(target, 0))

    def every_row(hidden, targets):
        blocks = (
            jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, rows, hidden.shape[1]),
            jnp.pad(targets, (0, pad)).reshape(-1, rows),
        )
        return Scores(*(x.reshape(-1, *x.shape[2:])[:t] for x in jax.lax.map(block, blocks)))

    def none(hidden, targets):
        return Scores(
            jnp.zeros(t, jnp.float32),
            jnp.zeros(t, jnp.int32),
            jnp.zeros((t, MAX_LOGPROBS), jnp.int32),
            jnp.zeros((t, MAX_LOGPROBS), jnp.float32),
        )

    return jax.lax.cond(jnp.any(targets >= 0), every_row, none, hidden_TD, targets)
